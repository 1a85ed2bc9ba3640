"""Megatron's own functions as oracles: the split over context-parallel ranks, and its router replay."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from kit import SHAPE, add, counting, session
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.utils import get_batch_on_this_cp_rank

from spool import train
from spool.train import Mesh, Place, plan


class Group:
    """What Megatron asks of a process group here."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


@pytest.fixture
def recorded(open_spool):
    sp = open_spool()
    refs = []
    for n in (9, 16, 2, 23):
        s = session(sp, None)
        add(s, counting(n - 1), [7], weight_version="1")
        refs += s.finalize()
    return sp, refs


def delivered(sp, planned, refs, place, **options):
    """Return the micro-batches of one rank, which reads for itself."""
    with train.connect(sp.config.uri, planned.mesh, place, **options) as feed:
        feed.submit(planned, refs)
        feed.finish()
        return [(micro.share, {name: value.clone() for name, value in micro.items()}) for micro in feed]


@pytest.mark.parametrize("cp", [2, 3])
def test_the_split_is_megatrons(recorded, cp, monkeypatch):
    for name in ("size", "rank"):  # asked of a group only where torch.distributed runs
        monkeypatch.setattr(f"megatron.core.utils.get_pg_{name}", operator.methodcaller(name))
    sp, refs = recorded
    planned = plan(refs, Mesh(cp=cp), n_micro=1, layout="padded")
    width = planned.batches[0][0].padded[0]
    whole = train.restore(sp, refs, "nested", fields=["token_ids", "routed_experts"], framework="torch")
    for rank in range(cp):
        ((share, arrays),) = delivered(sp, planned, refs, Place(cp=rank), fields=["token_ids", "routed_experts"])
        tokens = torch.zeros(len(refs), width, dtype=torch.int64)
        experts = torch.zeros(len(refs), width, 3, 2, dtype=torch.int64)
        for row, item in enumerate(share.items):
            tokens[row, : refs[item].n_tokens] = whole["token_ids"][item]
            experts[row, : refs[item].n_tokens - 1] = whole["routed_experts"][item]
        theirs = get_batch_on_this_cp_rank({"tokens": tokens, "experts": experts}, cp_group=Group(rank, cp))
        assert torch.equal(arrays["token_ids"].reshape(len(refs), -1).long(), theirs["tokens"])
        real = np.zeros(share.n_rows, bool)
        for piece in share.pieces:
            real[piece.to : piece.to + piece.n_forward] = True
        assert torch.equal(arrays["routed_experts"].long()[real], theirs["experts"].reshape(-1, 3, 2)[real])


def test_packed_sequences_are_as_megatron_names_them(recorded):
    sp, refs = recorded
    planned = plan(refs, Mesh(cp=2), n_micro=1)
    ((share, arrays),) = delivered(sp, planned, refs, Place(cp=1), fields=["token_ids"])
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=arrays["cu_seqlens"],
        cu_seqlens_kv=arrays["cu_seqlens"],
        cu_seqlens_q_padded=arrays["cu_seqlens_padded"],
        cu_seqlens_kv_padded=arrays["cu_seqlens_padded"],
    )
    assert params.cu_seqlens_q.dtype == torch.int32
    assert int(params.cu_seqlens_q_padded[-1]) == 2 * share.n_rows == 2 * len(arrays["token_ids"])
    assert params.cu_seqlens_q.diff().tolist()[:4] == [refs[item].n_tokens for item in share.items]


@pytest.mark.parametrize("tp", [0, 1])
def test_megatrons_router_replay_takes_a_layer_of_a_micro_batch(recorded, tp):
    sp, refs = recorded
    mesh = Mesh(tp=2)
    whole = sp.read(refs, fields=["routed_experts"])
    feeds = [train.connect(sp.config.uri, mesh, Place(tp=rank), fields=["routed_experts"]) for rank in range(2)]
    feeds[0].submit(plan(refs, mesh, n_micro=1), refs)
    router = RouterReplay()
    try:
        micro = next(iter(feeds[tp]))
        rows = micro.plan.router_rows(micro.share)
        for layer in (1, 2):
            router.set_target_indices(micro.layer(layer).materialize_for_routing_replay("forward").long())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            scores = torch.rand(rows.stop - rows.start, SHAPE.num_experts)
            probabilities, chosen = router.get_replay_topk(scores, SHAPE.topk)
            assert torch.equal(probabilities, scores.gather(1, chosen))
            compared = 0
            for piece in micro.share.pieces:
                first, last = max(piece.to, rows.start), min(piece.to + piece.n_forward, rows.stop)
                if first < last:
                    shift = piece.row - piece.to
                    want = whole[piece.item]["routed_experts"][first + shift : last + shift, layer]
                    assert chosen[first - rows.start : last - rows.start].tolist() == want.tolist()
                    compared += last - first
            assert compared > 10
    finally:
        RouterReplay.clear_global_router_replay_instances()
        for feed in feeds:
            feed.close()
