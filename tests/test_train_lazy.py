"""Routing a layer at a time: against whole arrays, what is held, what is read ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import SHAPE, add, counting, routing, session
from numpy.testing import assert_array_equal
from training import N_EXPERTS, N_LAYERS, TOPK, plain_rows, with_gap, with_unit

import spool
from spool.train import LazyRouting, RankSlice, restore
from spool.train.restoring.lazy import replay_rows


def plain_replay(experts, cp_rank, cp_size, tp_rank, tp_size, pad_to):
    """Return the rows that Megatron trainers replay, from whole arrays: pad, split, join, pad, share."""

    def padding(n):
        return np.arange(n * N_LAYERS * TOPK).reshape(n, N_LAYERS, TOPK) % N_EXPERTS

    joined = []
    for rows in experts:
        rows = np.concatenate([rows, padding(1)])
        if cp_size > 1:
            width = -(-len(rows) // (2 * cp_size))
            rows = np.concatenate([rows, padding(2 * cp_size * width - len(rows))])
            other = 2 * cp_size - 1 - cp_rank
            rows = np.concatenate([rows[cp_rank * width :][:width], rows[other * width :][:width]])
        joined.append(rows)
    rows = np.concatenate(joined)
    rows = np.concatenate([rows, padding(-len(rows) % (tp_size * pad_to))])
    share = len(rows) // tp_size
    return rows[tp_rank * share : (tp_rank + 1) * share]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    mesh=st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3])),
    budget=st.sampled_from([0, 300, 1 << 20]),
    ahead=st.booleans(),
)
def test_a_layer_at_a_time_is_what_the_whole_array_would_give(shared_sp, lengths, mesh, budget, ahead):
    refs = []
    for n in lengths:
        s = session(shared_sp, None)
        add(s, counting(n)[:-1], counting(n)[-1:])
        refs += s.finalize()
    cp_size, tp_size, pad_to = mesh
    experts = [routing(counting(n)) for n in lengths]
    for cp_rank in range(cp_size):
        rank = RankSlice(cp_rank=cp_rank, cp_size=cp_size)
        for tp_rank in range(tp_size):
            lazy = LazyRouting(
                shared_sp, refs, rank_slice=rank, tp_rank=tp_rank, tp_size=tp_size, pad_to=pad_to,
                budget_bytes=budget, ahead=ahead,
            )  # fmt: skip
            wanted = plain_replay(experts, cp_rank, cp_size, tp_rank, tp_size, pad_to)
            assert lazy.n_rows == len(wanted)
            for stage, layers in (("forward", (1, 2)), ("backward", (2, 1))):
                for layer in layers:
                    got = lazy.layer(layer).materialize_for_routing_replay(stage)
                    assert got.dtype == torch.int32
                    assert_array_equal(got.numpy(), wanted[:, layer])


def test_a_layer_at_a_time_through_slimes_replay(sp):
    """The trainer's list of top-k choices takes these objects, and asks each for its tensor in either pass."""

    class Replay:
        def __init__(self):
            self.recorded, self.forward = [], 0

        def record(self, chosen):
            assert hasattr(chosen, "materialize_for_routing_replay")
            self.recorded.append(chosen)

        def pop_forward(self):
            self.forward += 1
            return self.recorded[self.forward - 1].materialize_for_routing_replay("forward")

        def pop_backward(self):
            return self.recorded.pop().materialize_for_routing_replay("backward")

    s = session(sp)
    add(s, counting(50), counting(30, 100))
    (ref,) = s.finalize()
    replays = {layer: Replay() for layer in (1, 2)}
    for micro_batch in ([ref], [ref.head(20), ref.head(3)]):
        lazy = restore(sp, micro_batch, framework="torch", lazy=True)["rollout_routed_experts"]
        for layer, replay in replays.items():
            replay.record(lazy.layer(layer))
    rows = routing(counting(50) + counting(30, 100))
    for n in (79, 19):
        assert_array_equal(replays[1].pop_forward()[:n].numpy(), rows[:n, 1])
        assert_array_equal(replays[2].pop_forward()[:n].numpy(), rows[:n, 2])
    for n in (19, 79):
        assert_array_equal(replays[2].pop_backward()[:n].numpy(), rows[:n, 2])
        assert_array_equal(replays[1].pop_backward()[:n].numpy(), rows[:n, 1])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("n_others", [0, 1])
def test_an_entry_that_is_missing_inside_a_row_is_not_handed_to_slimes_replay(sp, framework, n_others):
    s = sp.session("signed", fields=[spool.expert_field(spool.MoEShape(2, 100, 2), signed=True)])
    rows = np.array([[[1, 2], [3, 4]], [[5, 6], [7, -1]]], np.int32)
    s.append(prompt_token_ids=[1, 2], response_token_ids=[3], routed_experts=rows)
    refs = s.finalize()
    for number in range(n_others):
        s = sp.session(f"{number}", experts=spool.MoEShape(2, 200, 2))
        s.append(prompt_token_ids=[1], response_token_ids=[2], routed_experts=np.array([[[199, 0], [198, 0]]]))
        refs += s.finalize()
    lazy = restore(sp, refs, "slime", lazy=True, framework=framework)["rollout_routed_experts"]
    assert_array_equal(lazy.layer(0).materialize_for_routing_replay("forward")[:2], rows[:, 0])
    for stage in ("forward", "backward"):
        said = (
            r"entries of -1 inside rows, which slime does not take; take them by read\(1\), or leave such segments out"
        )
        with pytest.raises(spool.InputError, match=said):
            lazy.layer(1).materialize_for_routing_replay(stage)
        assert_array_equal(lazy.read(1, stage)[:2], rows[:, 1])


def test_what_a_lazy_micro_batch_holds(sp):
    shape = spool.MoEShape(num_layers=16, num_experts=256, topk=8)
    rng = np.random.default_rng(0)
    n, experts = 20_000, rng.integers(0, 256, (19_999, 16, 8))
    s = sp.session("long", experts=shape)
    s.append(prompt_token_ids=np.arange(n - 5), response_token_ids=np.arange(5), routed_experts=experts)
    (ref,) = s.finalize()
    layer_bytes = n * 8
    lazy = LazyRouting(sp, [ref], framework="numpy", budget_bytes=4 * layer_bytes, ahead=False)
    for layer in range(15):
        assert_array_equal(lazy.read(layer)[:-1], experts[:, layer])
        (held,) = lazy._held.values()
        assert sum(part.nbytes for part in held.result()) <= 2 * layer_bytes
    lazy.read(15)
    assert not lazy._held


def test_a_lazy_micro_batch_reads_ahead_in_the_direction_of_the_pass(sp, monkeypatch):
    s = session(sp)
    add(s, counting(50), counting(30, 100))
    (ref,) = s.finalize()
    lazy, read = LazyRouting(sp, [ref], budget_bytes=0), []
    fetch = lazy._fetch
    monkeypatch.setattr(lazy, "_fetch", lambda number: read.append(number) or fetch(number))
    for stage, layers in (("forward", (1, 2)), ("backward", (2, 1))):
        for layer in layers:
            lazy.read(layer, stage)
        assert not lazy._held
    assert sorted(read) == [1, 1, 2, 2]
    lazy._ahead = False
    for stage, layer in (("forward", 1), ("backward", 2)):
        del read[:]
        lazy.begin(stage)
        lazy.begin(stage)
        lazy.read(layer, stage)
        assert read == [layer]
        lazy.release()
    assert not lazy.read(0).any()
    lazy.release()


def test_lazy_routing_with_gaps_failures_units_and_stages(sp):
    gap, (unit, experts) = with_gap(sp), with_unit(sp)
    with pytest.raises(spool.GapError, match=r"routed_experts was never sent for positions \[4, 7\)"):
        LazyRouting(sp, [gap])
    rank = RankSlice(layers=slice(1, 3))
    lazy = LazyRouting(sp, [gap, None, unit], lengths=[None, (3, 1), None], rank_slice=rank, missing="arange")
    assert (lazy.layers, lazy.n_rows) == (range(1, 3), 8 + 3 + 11)
    got = lazy.read(2).numpy()
    assert_array_equal(got[4:7], [plain_rows(row)[2] for row in range(4, 7)])
    assert_array_equal(got[8:10], np.zeros((2, TOPK)))
    assert_array_equal(got[11:-1], experts[:, 2])
    for refused in (0, 3, "1"):
        with pytest.raises(spool.InputError, match="layer must be"):
            lazy.layer(refused)
    shares = [
        LazyRouting(sp, [unit], rank_slice=RankSlice(cp_rank=rank, cp_size=3, split="contiguous")).read(1).numpy()
        for rank in range(3)
    ]
    assert_array_equal(np.concatenate(shares)[:10], experts[:, 1])
    batch = restore(sp, [gap], missing="mask", lazy=True, framework="torch")
    assert batch["loss_masks"][0].tolist() == [1, 1, 0, 0, 0]
    assert_array_equal(batch["rollout_routed_experts"].read(1)[4:7], [plain_rows(row)[1] for row in range(4, 7)])
    s = session(sp)
    add(s, counting(5), counting(4, 20), routed_experts=None)
    bare = LazyRouting(sp, s.finalize(), experts=SHAPE, missing="arange").read(2).numpy()
    assert_array_equal(bare[:8], [plain_rows(row)[2] for row in range(8)])
    with pytest.raises(spool.InputError, match="says what the routing looks like"):
        LazyRouting(sp, [None], lengths=[(3, 1)])
    assert LazyRouting(sp, [None], lengths=[(3, 1)], experts=SHAPE).read(1).shape == (3, TOPK)


def test_rows_to_replay_of_tiny_sequences_and_many_ranks():
    for n in range(4):
        counts = set()
        for cp_rank in range(2):
            for tp_rank in range(2):
                pieces = replay_rows([n], RankSlice(cp_rank=cp_rank, cp_size=2), tp_rank=tp_rank, tp_size=2, pad_to=2)
                counts.add(sum(piece.stop - piece.start for piece in pieces))
        assert len(counts) == 1


def test_wrong_arguments_of_lazy_routing_are_named(sp):
    s = session(sp)
    add(s, counting(5), counting(4, 20))
    refs = s.finalize()
    for options, message in (
        ({"verify": "sometimes"}, "verify must be one of whole, always, never"),
        ({"rank_slice": 2}, "rank_slice must be a RankSlice"),
        ({"tp_rank": 1}, "tp_rank must be one of 0"), ({"pad_to": 0}, "pad_to and budget_bytes must be"),
        ({"pad_to": 1 << 40}, "pad_to and tp_size must be such that this rank has fewer than 2147483648 rows"),
        ({"missing": "mask"}, "missing must be one of error, arange"), ({"budget_bytes": -1}, "pad_to and budget"),
        ({"rank_slice": RankSlice(layers=slice(0, 9))}, "no range of its layers"),
    ):  # fmt: skip
        with pytest.raises(spool.InputError, match=message):
            LazyRouting(sp, refs, **options)
    with pytest.raises(spool.InputError, match="stage must be one of forward, backward"):
        LazyRouting(sp, refs).read(1, "sideways")
