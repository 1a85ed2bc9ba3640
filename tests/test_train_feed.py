"""Delivery: what a rank gets is what was recorded, in its place; read once, mapped by all ranks of a place, ahead."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import add, counting, session
from training import N_EXPERTS, N_LAYERS, TOPK, plain_ids, with_gap, with_unit

import spool
from spool import observe, train
from spool.errors import CapacityError, ConfigError, GapError, InputError, NotFoundError, RankError
from spool.model.fields import FieldSpec
from spool.train import Item, Mesh, Place, plan
from spool.train.delivery import memory
from spool.train.delivery.arriving import Arriving, Staged
from spool.train.delivery.filling import fill, prepare
from spool.train.delivery.group import Group, Rank
from spool.train.delivery.join import digest_of
from spool.train.delivery.link import SocketLink, SocketListener
from spool.train.delivery.messages import End, Planned, Pulse, Ready, Released
from spool.train.delivery.reorganiser import Reorganiser
from spool.train.delivery.work import Settings, work_of

ALL = ("token_ids", "loss_mask", "logprobs", "routed_experts", "weight_versions", "staleness")


def record(sp, lengths=(9, 14, 3, 21, 30, 12), version="7"):
    """Return the references of sessions with so many tokens, a third of them generated."""
    refs = []
    for number, n in enumerate(lengths):
        s = session(sp, None)
        generated = max(n // 3, 1)
        add(s, counting(n - generated, 100 * number), counting(generated, 5000 + 100 * number), weight_version=version)
        refs += s.finalize()
    return refs


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A spool, and references of all kinds: units, a gap, several versions, lengths from 1 on."""
    sp = spool.open(f"file://{tmp_path_factory.mktemp('feed')}/s")
    refs = record(sp)
    refs += [with_unit(sp)[0], with_gap(sp, weight_version="9")]
    refs += [refs[3].head(1), refs[3].head(2), refs[0].head(0), refs[4].head(25)]
    yield sp, refs
    sp.close()


# -- what a share holds ------------------------------------------------------------------------------------------------


def filled(sp, planned, refs, place, version="10", **options):
    """Return the arrays of each share of a rank, read without a feed."""
    wanted = Settings(uri="", n_ranks=1, **options)
    prepared = prepare(sp, work_of(planned, place, 0, refs, version), wanted)
    found = []
    for number, arrangement in enumerate(prepared.arrangements):
        memory_of_it = bytearray(b"\xaa" * arrangement.n_bytes)
        fill(sp, prepared, number, wanted, memory_of_it)
        found.append({array.name: array.view(memory_of_it) for array in arrangement.arrays})
    return found


def token_at(ref, row):
    """Return which token a row of a sequence belongs to."""
    for unit in ref.units:
        if row >= unit.position + unit.n_rows:
            row -= unit.n_rows - 1
        elif row >= unit.position:
            return unit.position
    return row


def plain(name, whole, ref, row, behind):
    """Return what a row holds, by the rules of the guide; ``row`` is None for padding."""
    if name == "routed_experts":
        if row is not None and row < ref.n_rows - 1:
            return whole[row].tolist()
        return [[plain_ids(behind, layer, k) for k in range(TOPK)] for layer in range(N_LAYERS)]
    if row is None:
        return -1 if name == "weight_versions" else 0
    token = token_at(ref, row)
    if name == "logprobs":
        return whole[token - ref.response_start] if token >= ref.response_start else 0
    return whole[token]


def check(share, arrays, refs, samples):
    at = 0
    for (start, stop), number in zip(share.positions, share.sequences, strict=True):
        item = share.items[number] if number < len(share.items) else None
        for position in range(start, stop):
            ref = None if item is None else refs[item]
            real = ref is not None and position < ref.n_rows
            behind = 0 if real else position - (0 if ref is None else ref.n_rows)
            for name in ALL:
                whole = samples[item][name] if ref is not None else None
                want = plain(name, whole, ref, position if real else None, behind)
                assert arrays[name][at].tolist() == want, (name, at, position)
            assert arrays["position_ids"][at] == position
            at += 1
    assert at == share.n_rows
    assert arrays["cu_seqlens"].tolist() == share.cu_seqlens.tolist()
    assert arrays["cu_seqlens_padded"].tolist() == share.cu_seqlens_padded.tolist()


def whole_samples(sp, refs, missing):
    """Return every field of each sequence, as `restore` gives them."""
    found = train.restore(sp, refs, "nested", version="10", missing=missing, fields=list(ALL))
    return [{name: found[name][number] for name in ALL} for number in range(len(refs))]


@st.composite
def cases(draw):
    mesh = Mesh(dp=draw(st.integers(1, 2)), cp=draw(st.integers(1, 3)), tp=draw(st.integers(1, 2)))
    layout, split = draw(st.sampled_from(["packed", "padded"])), draw(st.sampled_from(["zigzag", "contiguous"]))
    if layout == "packed" and draw(st.booleans()):
        split = "micro_batch"
    chosen = draw(st.lists(st.integers(0, 11), min_size=1, max_size=8))
    return mesh, layout, split, chosen, draw(st.sampled_from([{"n_micro": 2}, {"max_tokens": 72}]))


@given(cases(), st.sampled_from(["mask", "arange"]))
@settings(max_examples=60, deadline=None)
def test_every_row_of_every_rank_is_what_was_recorded(recorded, case, missing):
    sp, refs = recorded
    mesh, layout, split, chosen, limit = case
    own = [refs[number] for number in [*chosen, 4] if missing == "mask" or number != 7]
    planned = plan(own, mesh, layout=layout, split=split, **limit)
    samples = whole_samples(sp, own, missing)
    for dp, cp in product(range(mesh.dp), range(mesh.cp)):
        place = Place(dp=dp, cp=cp)
        found = filled(sp, planned, own, place, fields=ALL, missing=missing)
        shares = planned.rank(place).shares
        assert len(found) == len(shares)
        for share, arrays in zip(shares, found, strict=True):
            check(share, arrays, own, samples)


def test_a_stage_gets_its_layers_narrow_or_wide(recorded):
    sp, refs = recorded
    mesh = Mesh(cp=2, pp=2, stages=(1, 2))
    planned = plan(refs[:4], mesh, n_micro=2)
    whole = sp.read(refs[:4], fields=["routed_experts"])
    for dtype, kind in [("stored", np.uint8), ("train", np.int32)]:
        for pp, layers in [(0, slice(0, 1)), (1, slice(1, 3))]:
            place = Place(cp=1, pp=pp)
            found = filled(sp, planned, refs[:4], place, fields=("routed_experts",), dtype=dtype)
            for share, arrays in zip(planned.rank(place).shares, found, strict=True):
                got = arrays["routed_experts"]
                assert got.dtype == kind and got.shape == (share.n_rows, layers.stop - layers.start, TOPK)
                for piece in share.pieces:
                    want = whole[piece.item]["routed_experts"][piece.row : piece.row + piece.n_forward, layers]
                    assert (got[piece.to : piece.to + piece.n_forward] == want).all()


def test_routing_is_that_of_the_lazy_form(recorded):
    sp, refs = recorded
    own, mesh = refs[:6], Mesh(cp=2, tp=2)
    planned = plan(own, mesh, n_micro=1, sequence_multiple=4, micro_multiple=8)
    for cp, tp in product(range(2), range(2)):
        (arrays,) = filled(sp, planned, own, Place(cp=cp), fields=("routed_experts",))
        mine = planned.rank(Place(cp=cp, tp=tp))
        (share,) = mine.shares
        lazy = train.LazyRouting(
            sp, [own[item] for item in share.items], framework="numpy", tp_rank=tp, tp_size=2, pad_to=2,
            rank_slice=train.RankSlice(cp_rank=cp, cp_size=2),
        )  # fmt: skip
        rows = mine.router_rows(share)
        real = [row - rows.start for piece in share.pieces for row in range(piece.to, piece.to + piece.n_forward)]
        real = [row for row in real if 0 <= row < rows.stop - rows.start]
        for layer in lazy.layers:
            assert (lazy.read(layer)[real] == arrays["routed_experts"][rows, layer][real]).all()


def test_old_weights_and_missing_rows_do_not_train(recorded):
    sp, refs = recorded
    s = session(sp, None)
    s.append(prompt_token_ids=[1], response_token_ids=[2, 3, 4], weight_version=[("9", 0, 2), ("7", 2, 3)])
    own, mesh = [refs[0], refs[7], *s.finalize()], Mesh()
    planned = plan(own, mesh, n_micro=1)
    (share,) = planned.rank(0).shares
    for rule, version in product(("all", "last", 0, 1), ("10", ["9", "7"], ["7", "9"])):
        (arrays,) = filled(sp, planned, own, Place(), version, fields=ALL, missing="mask", mask_versions=rule)
        want = train.restore(
            sp, own, "nested", version=version, missing="mask", mask_versions=rule, fields=list(ALL)
        )["loss_mask"]  # fmt: skip
        for number, item in enumerate(share.items):
            begin = int(share.cu_seqlens_padded[number])
            assert arrays["loss_mask"][begin : begin + own[item].n_tokens].tolist() == want[item].tolist()


def test_positions_count_from_the_beginning_of_the_share(open_spool):
    sp = open_spool(fields=[FieldSpec(name="parent", dtype="int32", align="token", positions=True)])
    refs = []
    for n in (3, 5):
        s = session(sp, None)
        add(s, counting(n), [7, 8], fields={"parent": np.arange(n + 2, dtype=np.int32) - 1})
        refs += s.finalize()
    planned = plan(refs, Mesh(tp=4), n_micro=1)
    (arrays,) = filled(sp, planned, refs, Place(), fields=("parent",))
    (share,) = planned.rank(0).shares
    for piece in share.pieces:
        got = arrays["parent"][piece.to : piece.to + piece.n_rows]
        assert got.tolist() == [-1, *range(piece.to, piece.to + piece.n_rows - 1)]
    with pytest.raises(InputError, match="parts of the sequence"):
        filled(sp, plan(refs, Mesh(cp=2), n_micro=1), refs, Place(), fields=("parent",))


def test_a_field_that_is_positions_in_some_references_only_is_refused_on_all_that_have_both(open_spool):
    sp, refs = open_spool(), []
    for rebased in (True, False):
        s = sp.session(None, fields=[FieldSpec(name="links", dtype="int32", align="token", positions=rebased)])
        s.append(prompt_token_ids=[1], response_token_ids=[2], fields={"links": np.arange(2, dtype=np.int32)})
        refs += s.finalize()
    for chosen in (refs, refs[::-1]):
        with pytest.raises(InputError, match=r"links has positions .* in batches of their own"):
            filled(sp, plan(chosen, Mesh(), n_micro=1), chosen, Place(), fields=("links",))


@pytest.mark.parametrize(("n_experts", "stored"), [(100, np.int16), (512, np.int32)])
def test_narrow_routing_with_entries_of_minus_one_beside_others(open_spool, n_experts, stored):
    sp, refs, sent = open_spool(), [], []
    for shape, signed in ((spool.MoEShape(2, 100, 2), True), (spool.MoEShape(2, n_experts, 2), False)):
        sent.append(np.array([[[3, shape.num_experts - 1], [-1 if signed else 5, 4]]] * 2, np.int32))
        s = sp.session(None, fields=[spool.expert_field(shape, signed=signed)])
        s.append(prompt_token_ids=[1], response_token_ids=[2, 3], routed_experts=sent[-1])
        refs += s.finalize()
    for chosen in (refs, refs[::-1]):
        for dtype, kind in (("stored", stored), ("train", np.int32)):
            (arrays,) = filled(sp, plan(chosen, Mesh(), n_micro=1), chosen, Place(), dtype=dtype)
            got = arrays["routed_experts"]
            assert got.dtype == kind and got.min() == -1
            assert sorted(got[:2].tolist() + got[3:5].tolist()) == sorted(sent[0].tolist() + sent[1].tolist())


def test_a_failed_sample_is_padding(recorded):
    sp, refs = recorded
    own, lengths = [refs[0], None], [refs[0], 12]
    planned = plan(lengths, Mesh(cp=2), n_micro=1)
    for cp in range(2):
        (arrays,) = filled(sp, planned, own, Place(cp=cp), fields=ALL)
        (share,) = planned.rank(Place(cp=cp)).shares
        real = [row for piece in share.pieces if piece.item == 0 for row in range(piece.to, piece.to + piece.n_rows)]
        others = [row for row in range(share.n_rows) if row not in real]
        assert not arrays["loss_mask"][others].any() and (arrays["weight_versions"][others] == -1).all()
        assert (arrays["routed_experts"][others] < N_EXPERTS).all()
        assert len({tuple(row.ravel()) for row in arrays["routed_experts"][others]}) > 1


def test_fields_that_have_no_row_for_each_position_are_refused(open_spool):
    ragged = FieldSpec(name="kept_ids", dtype="int32", align="token", ragged=True)
    a_step = FieldSpec(name="score", dtype="float32", align="step")
    sp = open_spool(fields=[ragged, a_step])
    s = session(sp, None)
    add(s, counting(3), [7], fields={"kept_ids": [[1], [2, 3], [], [4]], "score": 1.0})
    refs = s.finalize()
    planned = plan(refs, Mesh(), n_micro=1)
    for name in ("kept_ids", "score"):
        with pytest.raises(InputError, match=f"{name} has .*leave it out"):
            filled(sp, planned, refs, Place(), fields=(name,))


def test_segments_are_chosen_before_they_are_planned(open_spool):
    sp = open_spool()
    fresh, old = record(sp, lengths=(9,), version="9")[0], record(sp, lengths=(9,), version="4")[0]
    s = session(sp, None)
    add(s, counting(3), [7], weight_version="9")
    (aborted,) = s.finalize(outcome="aborted")
    refs = [fresh, old, aborted]
    assert train.select(refs) == refs
    assert train.select(refs, drop=["aborted"]) == [fresh, old]
    assert train.select(refs, max_staleness=2, version="10") == [fresh, aborted]
    with pytest.raises(InputError, match="version="):
        train.select(refs, max_staleness=2)
    with pytest.raises(InputError, match="drop='late' is none of"):
        train.select(refs, drop=["late"])


def wait_for(what, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- a feed ------------------------------------------------------------------------------------------------------------


def ranks(uri, mesh, consume, places=None, **options):
    """Let each rank consume a feed in a thread of its own; return what ``consume`` returned, or what it raised."""
    found: dict = {}

    def run(rank):
        try:
            with train.connect(uri, mesh, rank, framework="numpy", **options) as feed:
                found[rank] = consume(feed, rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in places or range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [found[rank] for rank in sorted(found)]


def test_all_ranks_of_a_place_get_the_same_micro_batches_and_together_the_whole(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(dp=1, cp=2, tp=2)
    planned = plan(refs, mesh, max_tokens=48)

    def consume(feed, rank):
        feed.submit(planned, refs, version="8")
        feed.finish()
        return [(micro.number, micro.share, {name: micro[name].copy() for name in micro}) for micro in feed]

    found = ranks(sp.config.uri, mesh, consume)
    whole = {number: sp.read(ref) for number, ref in enumerate(refs)}
    for rank, micros in enumerate(found):
        assert [number for number, _, _ in micros] == list(range(planned.n_micro))
        assert {name: value.tolist() for name, value in micros[0][2].items()} == {
            name: value.tolist() for name, value in found[rank ^ 1][0][2].items()
        }
    seen = {number: np.zeros(ref.n_tokens, int) for number, ref in enumerate(refs)}
    for micros in found[::2]:
        for _, share, arrays in micros:
            for piece in share.pieces:
                rows = slice(piece.to, piece.to + piece.n_rows)
                assert (arrays["token_ids"][rows] == whole[piece.item]["token_ids"][piece.tokens]).all()
                assert arrays["staleness"][rows].max() <= 1
                seen[piece.item][piece.tokens] += 1
    assert all((counts == 1).all() for counts in seen.values())


def test_lengths_of_0_to_3_tokens_and_ranks_that_hold_padding_only(open_spool):
    sp = open_spool()
    base = record(sp, lengths=(8,))[0]
    refs, mesh = [base.head(n) for n in (0, 1, 2, 3)], Mesh(cp=2, tp=2)
    planned = plan(refs, mesh, n_micro=1)
    assert planned.batches[0][0].n_rows == 4 * 8

    def consume(feed, rank):
        feed.submit(planned, refs)
        feed.finish()
        (micro,) = [(micro.share, {name: micro[name].copy() for name in micro}) for micro in feed]
        return micro

    found = ranks(sp.config.uri, mesh, consume)
    back = {item: {} for item in range(4)}
    for share, arrays in found[::2]:
        assert arrays["token_ids"].shape == (16,) and arrays["routed_experts"].shape == (16, N_LAYERS, TOPK)
        for piece in share.pieces:
            for row in range(piece.n_rows):
                back[piece.item][piece.row + row] = int(arrays["token_ids"][piece.to + row])
    tokens = sp.read(base)["token_ids"].tolist()
    for item, rows in back.items():
        assert [rows[row] for row in sorted(rows)] == tokens[: refs[item].n_tokens]


def test_each_slice_is_read_once_whatever_the_number_of_ranks(open_spool):
    shape = spool.MoEShape(num_layers=47, num_experts=64, topk=4)
    sp = open_spool()
    refs, rng = [], np.random.default_rng(1)
    for _ in range(4):
        s = sp.session(session_id=None, experts=shape)
        experts = np.argsort(rng.random((4095, 47, 64), np.float32), axis=-1)[..., :4].astype(np.int32)
        s.append(prompt_token_ids=range(4000), response_token_ids=range(96), routed_experts=experts)
        refs += s.finalize()
    sp.flush()
    mesh = Mesh(cp=2, tp=4)
    planned = plan(refs, mesh, n_micro=4)

    def consume(feed, rank):
        feed.submit(planned, refs)
        feed.finish()
        for _ in feed:
            pass
        return feed.stats

    found = ranks(sp.config.uri, mesh, consume, fields=["routed_experts"])
    total = sum(ref.n_rows - 1 for ref in refs) * 47 * 4
    for stats in found:
        assert stats.n_micro == 4 and stats.fetched_bytes <= total / 2 * 1.02
    per_place = [found[0].fetched_bytes, found[4].fetched_bytes]
    assert total <= sum(per_place) <= total * 1.02


def test_ranks_map_the_same_pages_and_cannot_change_each_others(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    planned = plan(refs, mesh, n_micro=1)
    turn = threading.Barrier(2)
    inodes = {}

    def consume(feed, rank):
        feed.submit(planned, refs)
        feed.finish()
        for micro in feed:
            before = micro["token_ids"].copy()
            turn.wait(20)
            with open("/proc/self/maps", encoding="ascii") as maps:
                inodes[rank] = {line.split()[4] for line in maps if "memfd:spool-micro-batch" in line}
            turn.wait(20)
            if rank == 0:
                micro["token_ids"][:] = -5
                micro["loss_mask"].fill(0)
            turn.wait(20)
            if rank == 1:
                assert (micro["token_ids"] == before).all() and micro["loss_mask"].any()
            assert micro["token_ids"].flags.writeable
            turn.wait(20)
        return before

    found = ranks(sp.config.uri, mesh, consume)
    assert (found[0] == found[1]).all() and len(inodes[0]) == 1 and inodes[0] == inodes[1]


def test_memory_is_bounded_by_depth_and_free_when_arrays_are_gone(open_spool):
    sp = open_spool()
    refs = record(sp, lengths=(40,) * 12)
    mesh = Mesh()
    planned = plan(refs, mesh, n_micro=6)

    def mappings():
        with open("/proc/self/maps", encoding="ascii") as maps:
            return sum("memfd:spool-micro-batch" in line for line in maps)

    def consume(feed, rank):
        feed.submit(planned, refs)
        feed.finish()
        counts, kept = [], []
        for micro in feed:
            time.sleep(0.05)
            counts.append(mappings())
            kept = [micro["token_ids"][3:5]]
        del micro
        assert feed.stats.held_bytes > 0
        kept.clear()
        gc.collect()
        assert feed.stats.held_bytes == 0 and mappings() == 0
        return counts

    (counts,) = ranks(sp.config.uri, mesh, consume, depth=3)
    assert len(counts) == 6 and max(counts) == 3


def test_who_holds_everything_and_asks_for_more_is_told(open_spool):
    sp = open_spool()
    refs = record(sp)

    def consume(feed, rank):
        feed.submit(plan(refs, Mesh(), n_micro=3), refs)
        feed.finish()
        return list(feed)

    (error,) = ranks(sp.config.uri, Mesh(), consume)
    assert isinstance(error, InputError) and "holds arrays of 2 micro-batches" in str(error)


def test_mini_batches_arrive_while_earlier_ones_train(open_spool):
    sp = open_spool()
    refs, mesh = record(sp, lengths=(9,) * 8), Mesh(tp=2)
    plans = [plan(refs[at : at + 2], mesh, n_micro=2, mini_batch=at // 2) for at in range(0, 8, 2)]

    def consume(feed, rank):
        seen = []
        feed.submit(plans[0], refs[:2])
        for number in range(4):
            if number < 3 and rank == 0:  # one rank may say it for all
                feed.submit(plans[number + 1], refs[2 * number + 2 : 2 * number + 4])
            seen += [(micro.plan.mini_batch, micro.number, micro.refs) for micro in feed.mini_batch()]
        if rank == 0:
            feed.finish()
        assert list(feed.mini_batch()) == [] and list(feed) == []
        return seen

    found = ranks(sp.config.uri, mesh, consume)
    assert found[0] == found[1]
    assert [(mini, number) for mini, number, _ in found[0]] == [(at // 2, at % 2) for at in range(8)]
    assert {ref.session_id for _, _, own in found[0] for ref in own} == {ref.session_id for ref in refs}


@given(
    sizes=st.lists(st.integers(0, 3), max_size=8),
    ahead=st.lists(st.integers(0, 3), min_size=30, max_size=30),
)
def test_mini_batches_of_nothing_have_their_turn_whenever_they_are_planned(sizes, ahead):
    arriving, come, told = Arriving(), [], 0
    works = [SimpleNamespace(shares=(None,) * n) for n in sizes]
    lookahead = iter(ahead)
    for number, n in enumerate(sizes):
        while told < min(number + 1 + next(lookahead), len(works)) or told <= number:
            come += arriving.planned(told, works[told])
            told += 1
        for micro in range(n):
            ready = SimpleNamespace(mini_batch=number, number=micro)
            come += arriving.came(Staged(ready, arriving.work(number), dict))
    each = [each.ready.number if isinstance(each, Staged) else None for each in come]
    assert each == [at for n in sizes for at in (range(n) if n else [None])]


@pytest.mark.parametrize("fields", [["token_ids", "loss_mask"], ["token_ids", "routed_experts"]])
def test_a_mini_batch_of_no_micro_batches_ends_at_once_on_all_ranks(open_spool, fields):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    sizes = [0, 2, 0, 0, 3, 0]
    plans = [plan(refs[:n], mesh, max_tokens=32, mini_batch=number) for number, n in enumerate(sizes)]
    assert [each.n_micro > 0 for each in plans] == [n > 0 for n in sizes]

    def submit(feed, number):
        feed.submit(plans[number], refs[: sizes[number]], version=["7"])

    def one_by_one(feed, rank):
        found = []
        for number in range(len(sizes)):
            if rank == 0:
                submit(feed, number)
            found.append([(micro.plan.mini_batch, micro.number) for micro in feed.mini_batch()])
        if rank == 0:
            feed.finish()
        return found, list(feed.mini_batch())

    def ahead(feed, rank):
        for number in range(len(sizes)):
            submit(feed, number)
        feed.finish()
        found = [[(micro.plan.mini_batch, micro.number) for micro in feed.mini_batch()] for _ in sizes]
        return found, list(feed.mini_batch())

    def in_a_row(feed, rank):
        for number in range(len(sizes)):
            submit(feed, number)
        feed.finish()
        return [(micro.plan.mini_batch, micro.number) for micro in feed]

    want = [[(number, micro) for micro in range(each.n_micro)] for number, each in enumerate(plans)]
    for consume in (one_by_one, ahead):
        assert ranks(sp.config.uri, mesh, consume, fields=fields, timeout_s=20) == [(want, [])] * 2
    row = [each for mini in want for each in mini]
    assert ranks(sp.config.uri, mesh, in_a_row, fields=fields, timeout_s=20) == [row] * 2


def test_a_mini_batch_with_nothing_in_it(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(cp=2)
    planned = [plan([], mesh, n_micro=2), plan(refs, mesh, n_micro=1)]

    def consume(feed, rank):
        feed.submit(planned[0], [])
        feed.submit(planned[1], refs)
        feed.finish()
        return [(micro["token_ids"].tolist(), micro["loss_mask"].any()) for micro in feed]

    for found in ranks(sp.config.uri, mesh, consume, fields=["token_ids", "loss_mask"]):
        assert len(found) == 3 and not found[0][1] and set(found[0][0]) == {0}


@pytest.mark.parametrize("names", [["token_ids", "loss_mask", "routed_experts"]])
def test_as_tensors_with_the_routing_of_a_layer(open_spool, names):
    torch = pytest.importorskip("torch")
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    planned = plan(refs, mesh, n_micro=1)
    for tp in range(2):
        with (
            train.connect(sp.config.uri, mesh, Place(tp=tp), fields=names, n_ranks=1, name=str(tp))
            if tp == 0
            else (train.connect(sp.config.uri, Mesh(), 0, fields=names)) as feed
        ):
            own = plan(refs, feed_mesh := (mesh if tp == 0 else Mesh()), n_micro=1)
            feed.submit(own, refs)
            feed.finish()
            for micro in feed:
                assert all(isinstance(value, torch.Tensor) for value in micro.values())
                assert micro["routed_experts"].dtype == torch.uint8
                rows = micro.plan.router_rows(micro.share)
                assert rows == slice(0, micro.share.n_rows // feed_mesh.tp)
                for layer in micro.layers:
                    got = micro.layer(layer).materialize_for_routing_replay("forward")
                    assert got.dtype == torch.int32
                    assert torch.equal(got, micro["routed_experts"][rows, layer].int())
                with pytest.raises(InputError, match="layer must be one of 0 to 2"):
                    micro.layer(3)
    assert planned.n_micro == 1


@pytest.mark.parametrize("dtype", ["stored", "train"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_an_entry_that_is_missing_inside_a_row_is_not_handed_to_slimes_replay(open_spool, dtype, framework):
    sp = open_spool()
    s = sp.session(None, fields=[spool.expert_field(spool.MoEShape(2, 100, 2), signed=True)])
    rows = np.array([[[1, 2], [3, 4]], [[5, 6], [7, -1]]], np.int32)
    s.append(prompt_token_ids=[1, 2], response_token_ids=[3], routed_experts=rows)
    refs = s.finalize()
    with train.connect(sp.config.uri, Mesh(), 0, dtype=dtype, framework=framework) as feed:
        feed.submit(plan(refs, Mesh(), n_micro=1), refs)
        feed.finish()
        for micro in feed:
            assert micro.layer(0).materialize_for_routing_replay("forward")[:2].tolist() == rows[:, 0].tolist()
            with pytest.raises(InputError, match="entries of -1 inside rows, which slime does not take; take them by"):
                micro.layer(1).materialize_for_routing_replay("backward")
            assert micro.read(1)[:2].tolist() == rows[:, 1].tolist()


def test_from_a_cold_root_over_many_micro_batches(open_spool, tmp_path):
    sp = open_spool(options=f"spill=file://{tmp_path}/cold&publish_interval_s=0.1")
    refs = record(sp, lengths=(40,) * 60)
    sp.publish(refs, timeout_s=60)
    whole = [sample["routed_experts"] for sample in sp.read(refs)]

    def consume(feed, rank):
        feed.submit(plan(refs, Mesh(), n_micro=60), refs)
        feed.finish()
        n = 0
        for micro in feed:
            n += 1
            for piece in micro.share.pieces:
                got = micro["routed_experts"][piece.to : piece.to + piece.n_forward]
                assert (got == whole[piece.item][piece.row : piece.row + piece.n_forward]).all()
        return n

    assert ranks(f"file://{tmp_path}/cold", Mesh(), consume) == [60]


def test_ranks_of_a_place_on_two_nodes(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=4)

    def consume(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=1), refs)
        feed.finish()
        return [(micro.plan.place.tp, micro["token_ids"].tolist()) for micro in feed]

    first = ranks(sp.config.uri, mesh, consume, places=(0, 1), n_ranks=2)
    second = ranks(sp.config.uri, mesh, consume, places=(2, 3), n_ranks=2)
    assert [found[0][0] for found in (*first, *second)] == [0, 1, 2, 3]
    assert len({tuple(found[0][1]) for found in (*first, *second)}) == 1


def test_a_mini_batch_keeps_nothing_of_what_it_yielded(open_spool):
    sp = open_spool()
    refs = record(sp)

    def consume(feed, rank):
        feed.submit(plan(refs, Mesh(), n_micro=3), refs)
        held = []
        for micro in feed.mini_batch():
            del micro
            gc.collect()
            held.append(feed.stats.held_bytes)
        return held

    assert ranks(sp.config.uri, Mesh(), consume) == [[0, 0, 0]]


def test_all_ranks_have_the_fields_of_the_whole_mini_batch(open_spool):
    sp = open_spool(fields=[FieldSpec(name=name, dtype="int32", align="token") for name in ("x", "y")])
    refs = []
    for name in ("x", "y"):
        s = session(sp, None)
        add(s, counting(4), [7], fields={name: np.arange(1, 6, dtype=np.int32)})
        refs += s.finalize()
    for mesh in (Mesh(), Mesh(dp=2)):
        planned = plan(refs, mesh, n_micro=2 // mesh.dp)
        found = [
            (share, arrays)
            for dp in range(mesh.dp)
            for share, arrays in zip(
                planned.rank(Place(dp=dp)).shares, filled(sp, planned, refs, Place(dp=dp), missing="mask"), strict=True
            )
        ]
        assert {frozenset(arrays) for _, arrays in found} == {frozenset(found[0][1])} and {"x", "y"} <= set(found[0][1])
        for share, arrays in found:
            own = "xy"[share.items[0]]
            assert arrays[own][:5].tolist() == [1, 2, 3, 4, 5]
            assert not arrays["yx"["xy".index(own)]].any() and not arrays["loss_mask"].any()


def test_positions_behind_a_unit_are_rows(open_spool):
    sp = open_spool(fields=[FieldSpec(name="parent", dtype="int32", align="token", positions=True)])
    s = session(sp, None)
    s.append(
        prompt_token_ids=[1, 2, 99, 3], response_token_ids=[7, 8], units=[("image", 2, 5)],
        fields={"parent": np.array([-1, 0, 1, 2, 3, 4], np.int32)},
    )  # fmt: skip
    refs = s.finalize() * 2
    (arrays,) = filled(sp, plan(refs, Mesh(), n_micro=1), refs, Place(), fields=("parent", "token_ids"))
    assert arrays["parent"].tolist()[:10] == [-1, 0, *[1] * 5, 2, 7, 8]
    assert arrays["parent"].tolist()[10:20] == [-1, 10, *[11] * 5, 12, 17, 18]


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_arguments_are_checked_where_they_come_in(open_spool):
    sp = open_spool()
    uri = sp.config.uri
    for options, words in [
        ({"depth": 1}, "depth must be at least 2"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"missing": 0}, "missing must be one of"),
        ({"mask_versions": -1}, "mask_versions must be"),
        ({"framework": "jax"}, "framework must be one of"),
        ({"memory_bytes": "much"}, "much"),
        ({"n_ranks": 0}, "n_ranks must be at least 1, and at most tp=1"),
        ({"n_ranks": 2}, "n_ranks must be at least 1, and at most tp=1"),
        ({"join_timeout_s": float("inf")}, "join_timeout_s must be"),
        ({"timeout_s": 0}, "timeout_s must be seconds, more than 0"),
        ({"pad_token_id": 1 << 40}, "pad_token_id must be"),
        ({"framework": "torch", "device": "cuda:0"}, "device must be one that this torch can use"),
        ({"fields": "token_ids"}, "list of names"),
        ({"mask_versions": 10**30}, "mask_versions must be"),
        ({"memory_bytes": 10**30}, "memory_bytes must be a size, .*less than 8 EiB"),
        ({"memory_bytes": "100000EiB"}, "is not a size|less than 8 EiB"),
        ({"chunk": -1}, r"chunk must be in \[0, 1\)"),
        ({"chunk": None}, "chunk must be an integer"),
    ]:
        with pytest.raises((InputError, ConfigError), match=words):
            train.connect(uri, Mesh(), 0, **{"framework": "numpy", **options})
    with pytest.raises(InputError, match="rank must be in"):
        train.connect(uri, Mesh(), 1, framework="numpy")
    with pytest.raises(InputError, match="mesh must be a Mesh"):
        train.connect(uri, None, 0, framework="numpy")
    for place, words in [(Place(dp=5, cp=5), "is not on this mesh: dp is 1"), (Place(tp="a"), "tp must be an integer")]:
        with pytest.raises(InputError, match=words):
            train.connect(uri, Mesh(), place, framework="numpy")


def test_a_plan_that_does_not_fit_is_refused_where_it_is_submitted(open_spool):
    sp = open_spool()
    refs = record(sp)
    with train.connect(sp.config.uri, Mesh(), 0, framework="numpy") as feed:
        with pytest.raises(InputError, match="another mesh"):
            feed.submit(plan(refs, Mesh(cp=2), n_micro=1), refs)
        planned = plan(refs, Mesh(), n_micro=1)
        with pytest.raises(InputError, match="the plan is of 6 sequences, and refs= has 5"):
            feed.submit(planned, refs[:5])
        with pytest.raises(InputError, match=r"entry 0 of refs, .* has 14 rows of 14 tokens, and was planned with 9"):
            feed.submit(planned, [refs[1], refs[0], *refs[2:]])
        for version, words in [
            (["7", "8", "7"], "names '7' 2 times"),
            ([], "version must be"),
            (True, "version must be"),
        ]:
            with pytest.raises(InputError, match=words):
                feed.submit(planned, refs, version=version)
        feed.submit(planned, refs)
        feed.finish()
        with pytest.raises(InputError, match="no more mini-batches"):
            feed.submit(planned, refs)
        assert len([micro.number for micro in feed]) == 1
    with pytest.raises(InputError, match="closed"):
        feed.submit(planned, refs)


def test_references_whose_units_are_not_the_planned_ones_are_refused_on_every_rank(open_spool):
    sp = open_spool()
    refs = [with_unit(sp, at=2)[0], with_unit(sp, at=4)[0]]
    assert refs[0].n_rows == refs[1].n_rows and refs[0].n_tokens == refs[1].n_tokens
    mesh = Mesh(cp=2)
    planned = plan(refs, mesh, n_micro=1)
    of_lengths = plan([ref.n_rows for ref in refs], mesh, n_micro=1)
    fewer = plan([Item(8, ((2, 3), (3, 2))), refs[1]], mesh, n_micro=1)
    for rank in range(mesh.size):
        with train.connect(sp.config.uri, mesh, rank, framework="numpy") as feed:
            for wrong, given, words in [
                (planned, refs[::-1], "unit 0 being 4 rows at token 4, .* unit 0 being 4 rows at token 2: pass"),
                (planned, [refs[0], refs[0]], "entry 1 of refs, .* at token 2, and was planned with .* at token 4"),
                (of_lengths, refs, "11 rows of 8 tokens, unit 0 .*, and was planned with 11 rows of 11 tokens and 0"),
                (fewer, refs, "unit 0 being 4 rows at token 2, and was planned with .* unit 0 being 3 rows at token 2"),
            ]:
                with pytest.raises(InputError, match=words) as caught:
                    feed.submit(wrong, given)
                assert "at token" in caught.value.details["got"]
            feed.submit(planned, [None, refs[1]])


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"fields": ["tokens"]}, NotFoundError, "tokens"),
        ({"fields": ["routed_experts"]}, GapError, "was never sent"),
        ({"fields": ["token_ids"], "memory_bytes": 4096}, CapacityError, "memory_bytes= has 4 KiB"),
    ],
)
def test_what_is_wrong_with_reading_reaches_every_rank(open_spool, options, kind, words):
    sp = open_spool()
    refs, mesh = [*record(sp), with_gap(sp)], Mesh(tp=2)

    def consume(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=2), refs)
        feed.finish()
        return list(feed)

    for error in ranks(sp.config.uri, mesh, consume, **options):
        assert type(error) is kind and words in str(error)
        assert "missing=<number>" not in str(error)  # which no feed takes


def test_memory_that_is_not_there_is_said_before_it_is_used(recorded, monkeypatch):
    sp, refs = recorded
    planned = plan(refs[:2], Mesh(), n_micro=1)
    monkeypatch.setattr(memory, "room", lambda: memory.Room(100, "control group /job"))
    with pytest.raises(CapacityError, match=r"needs .* of memory, and control group /job has 100 B free") as caught:
        filled(sp, planned, refs[:2], Place(), fields=ALL)
    assert caught.value.details["free"] == 100 and caught.value.details["place"] == "control group /job"
    monkeypatch.undo()
    found = memory.room()
    assert 0 < found.n_bytes < 1 << 50 and found.place
    with pytest.raises(CapacityError, match="a micro-batch needs 1 PiB of memory"):
        memory.create(1 << 50)


def test_sealed_memory_cannot_be_cut_or_changed():
    fd = memory.create(8192)
    into = memory.writing(fd, 8192)
    into[:3] = b"abc"
    into.close()
    memory.seal(fd)
    mapped = memory.reading(fd, 8192)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(fd, 8192, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    mapped[:1] = b"x"
    assert os.pread(fd, 3, 0) == b"abc"
    os.close(fd)


def in_child(body):
    """Return what ``body`` says in a forked child."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write, str(body()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        return said.read().decode()


def test_memory_that_a_limit_of_the_process_forbids_says_what_there_is_and_what_to_do():
    def body():
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20),) * 2)
        fd = memory.create(256 << 20)
        for attempt in (lambda: memory.private(256 << 20), lambda: memory.writing(fd, 256 << 20)):
            try:
                attempt()
            except CapacityError as error:
                assert 0 < error.details["free"] <= 64 << 20 and error.details["need"] == 256 << 20
                said = str(error)
        return said

    assert "needs 256 MiB of memory, and this process (Cannot allocate memory; its limits, ulimit -v" in in_child(body)
    for error in (
        MemoryError("no room"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ):
        found = memory.ran_out(error)
        assert isinstance(found, CapacityError) and "plan smaller micro-batches" in str(found) and found.details["free"]
    assert memory.ran_out(OSError(5, "EIO")) is None and memory.ran_out(RuntimeError("x")) is None


def test_what_cannot_be_said_is_an_error_of_who_says_it():
    link, other = (SocketLink(each) for each in socket.socketpair())
    with pytest.raises(OverflowError):
        link.send(Released(1 << 70))
    link.send(Released(5))
    assert other.receive()[0] == Released(5)
    for each in (link, other):
        each.close()


class Ends:
    """A link that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message, memory=None):
        self.sent.append(message)


class Free:
    """Memory of which so much is free."""

    def room(self, need_bytes):
        return memory.Room(100, "here")


def test_memory_of_earlier_micro_batches_does_not_lack_for_the_next_mini_batch():
    serving = Reorganiser(None, Free(), Settings(uri="", n_ranks=1))
    serving._group.join(rank := Rank(0, 1, Ends()))
    assert serving._room(120).n_bytes == 100
    serving._group.hand_out(Ready(0, 0, 0, (), 60, 0), None)
    assert serving._room(120) == memory.Room(160, "here")
    serving._group.released(rank, 0)
    assert serving._room(120).n_bytes == 100


def test_the_reader_says_that_it_lives_and_what_it_waits_for():
    group = Group(2, 2)
    first, second = (Rank(tp, 50 + tp, Ends()) for tp in range(2))
    group.join(first)
    group.pulse()
    assert first.link.sent[-1] == Pulse("")
    making = threading.Thread(target=lambda: [group.hand_out(Ready(n, 0, n, (), 10, 0), None) for n in range(2)])
    making.start()
    wait_for(lambda: group._waits_for() is not None)
    group.pulse()
    assert first.link.sent[-1] == Pulse("the 2 ranks of this feed, of which only tp=[0] came")
    group.join(second)
    making.join(10)
    group.released(first, 0)
    waiting = threading.Thread(target=group.wait_for_room)
    waiting.start()
    wait_for(lambda: group._waits_for() is not None)
    group.pulse()
    words = (
        "ranks to let go of micro-batches of this feed: rank tp=0 (process 50), of 1; rank tp=1 (process 51), of 0, 1"
    )
    assert first.link.sent[-1] == second.link.sent[-1] == Pulse(words)
    group.released(second, 0)
    waiting.join(10)
    group.pulse()
    assert first.link.sent[-1] == Pulse("")
    group.leave(second)
    n_sent = len(second.link.sent)
    group.pulse()
    assert len(second.link.sent) == n_sent


def test_who_comes_back_to_a_feed_that_is_about_to_end_is_told_that_it_left():
    group = Group(1, 2)
    group.join(first := Rank(0, 50, Ends()))
    with pytest.raises(RankError, match=r"process 50.* takes part .* give each job a name"):
        group.join(Rank(0, 51, Ends()))
    group.leave(first)
    with pytest.raises(RankError, match=r"process 50.* has left this feed, .*: connect anew"):
        group.join(Rank(0, 50, Ends()))


def test_requests_that_fail_are_in_the_pulse_until_a_read_succeeds():
    reader = Reorganiser(None, None, Settings(uri="", n_ranks=1))
    rank = Rank(0, 7, Ends())
    reader._group.join(rank)
    for event, trouble in (
        (observe.Retried("streams/s/token_ids/c/0"), "requests to the cold root fail .* streams/s/token_ids/c/0"),
        (observe.Read(1, {"cold": 1}, 0.1), "^$"),
    ):
        reader._observe(event)
        reader._group.pulse(reader._trouble)
        assert re.search(trouble, rank.link.sent[-1].trouble)


def test_mini_batches_that_were_read_are_forgotten_but_not_what_they_were(open_spool):
    group = Group(2, 2)
    first, second = (Rank(tp, tp, Ends()) for tp in range(2))
    group.join(first)
    group.submit(first, 0, b"zero")
    assert group.work(0) == b"zero"
    group.join(second)
    assert second.link.sent[1:] == [Planned(0, b"zero")]
    for number in range(1, 50):
        group.submit(first, number, b"%d" % number)
        assert group.work(number) == b"%d" % number and len(group._works) == 1
    group.submit(second, 0, b"zero")
    with pytest.raises(RankError, match="submitted different plans"):
        group.submit(second, 1, b"one")

    sp = open_spool()
    refs = record(sp)

    def consume(feed, rank):
        for _ in range(3):
            feed.submit(plan(refs, Mesh(), n_micro=2), refs)
        feed.finish()
        for _ in feed:
            pass
        return len(feed._arriving._works)

    assert ranks(sp.config.uri, Mesh(), consume) == [0]


def test_a_feed_that_is_closed_early_holds_nothing(open_spool):
    sp = open_spool()
    refs = record(sp)
    feed = train.connect(sp.config.uri, Mesh(), 0, framework="torch", device="cpu", depth=4)
    feed.submit(plan(refs, Mesh(), n_micro=6), refs)
    wait_for(lambda: len(feed._mapped) == 2)  # one is staged, one waits for that; more are in the socket
    time.sleep(0.2)
    feed.close()
    wait_for(lambda: not feed._mapped and not any(each.name == "spool-feed-receive" for each in threading.enumerate()))
    assert not any("spool-micro-batch" in path for path in open_files())


def open_files():
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def test_memory_that_cannot_be_sent_is_not_kept():
    ours, theirs = socket.socketpair()
    link = SocketLink(ours)
    theirs.close()
    fd = memory.create(8192)
    link.send(End())
    wait_for(lambda: not link._sender.is_alive())
    link.send(End(), fd)
    link.close()
    os.close(fd)
    assert not any("spool-micro-batch" in path for path in open_files())


def test_a_rank_that_may_open_no_more_files_says_so():
    ours, theirs = (SocketLink(each) for each in socket.socketpair())
    fd = memory.create(8192)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    theirs.send(End(), fd)
    wait_for(lambda: theirs._out.empty())
    time.sleep(0.2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    try:
        with pytest.raises(RankError, match=r"may open no more files.*ulimit -n"):
            ours.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    for link in (ours, theirs):
        link.close()
    os.close(fd)


def test_a_rank_that_may_start_no_more_threads_says_so(spool_uri):
    def joined(digest, wanted):
        raise RuntimeError("can't start new thread")

    with pytest.raises(CapacityError, match=r"this rank ran out of memory: can't start new thread.*ulimit -v, -u"):
        train.connect(spool_uri, Mesh(), 0, framework="numpy", joined=joined)


def test_nothing_has_a_name_in_shared_memory(open_spool):
    sp = open_spool()
    refs = record(sp)
    with train.connect(sp.config.uri, Mesh(), 0, framework="numpy") as feed:
        feed.submit(plan(refs, Mesh(), n_micro=2), refs)
        feed.finish()
        for _ in feed:
            assert not [name for name in os.listdir("/dev/shm") if "spool" in name]
            with open(f"/proc/{feed.reader_pid}/maps", encoding="ascii") as maps:
                assert "/dev/shm" not in maps.read()


# -- who fails ---------------------------------------------------------------------------------------------------------

RANK = """
import sys, time
from spool import observe, train
from spool.train import Mesh
import pickle
uri, path, rank, how = sys.argv[1:]
mesh, planned, refs = pickle.load(open(path, "rb"))
feed = train.connect(uri, mesh, int(rank), framework="numpy")
try:
    feed.submit(planned, refs)
    for number, micro in enumerate(feed):
        print("got", number, flush=True)
        if how == "raise":
            with feed:
                raise ValueError("loss is NaN")
        if how == "stall":
            time.sleep(600)
        time.sleep(0.2)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


class Process:
    """A rank in a process of its own."""

    def __init__(self, uri, path, rank, how=""):
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, uri, str(path), str(rank), how], stdout=subprocess.PIPE, text=True
        )

    def until(self, words):
        """Return the line that begins with ``words``; what was printed before is passed over."""
        for line in self.process.stdout:
            if line.startswith(words):
                return line
        raise AssertionError(f"the process ended, and never said {words!r}")

    def last(self):
        return self.process.communicate(timeout=30)[0].splitlines()[-1]


@pytest.fixture
def started(open_spool, tmp_path):
    """Start ranks of one place in processes of their own."""
    import pickle

    sp = open_spool()
    refs, mesh = record(sp, lengths=(30,) * 60), Mesh(tp=3)
    planned = plan(refs, mesh, n_micro=60)
    path = tmp_path / "plan"
    path.write_bytes(pickle.dumps((mesh, planned, refs)))
    processes = []

    def start(*hows):
        for rank, how in enumerate(hows):
            processes.append(Process(sp.config.uri, path, rank, how))
        return processes

    yield start
    for each in processes:
        each.process.kill()
        each.process.wait()


def reorganisers(uri):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            continue
        if b"spool.train.delivery" in line and uri.encode() in line:
            found.append(int(pid))
    return found


def test_a_killed_rank_is_named_to_the_others_within_seconds(started):
    first, second, third = started("", "stall", "")
    for each in (first, second, third):
        each.until("got 0")
    began = time.monotonic()
    second.process.kill()
    for each in (first, third):
        line = each.until("RankError")
        assert f"rank tp=1 (process {second.process.pid}) of this feed died" in line
    assert time.monotonic() - began < 5


def test_a_rank_that_fails_says_why_to_the_others(started):
    first, second, third = started("", "raise", "")
    for each in (first, third):
        line = each.until("RankError")
        assert f"rank tp=1 (process {second.process.pid}) of this feed failed: ValueError: loss is NaN" in line


def test_a_killed_reader_is_said_to_all(started, spool_uri):
    processes = started("", "", "")
    for each in processes:
        each.until("got 0")
    (pid,) = reorganisers(spool_uri)
    began = time.monotonic()
    os.kill(pid, 9)
    lines = [each.until("RankError") for each in processes]
    assert all("died" in line and "the process that reads" in line for line in lines)
    assert sum("by signal 9" in line for line in lines) == 1 and time.monotonic() - began < 5


def test_the_reader_ends_with_its_ranks(started, spool_uri):
    processes = started("", "", "")
    for each in processes:
        each.until("got 0")
    assert len(reorganisers(spool_uri)) == 1
    for each in processes:
        each.process.kill()
    deadline = time.monotonic() + 10
    while reorganisers(spool_uri):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_reader_that_ended_is_no_zombie(open_spool):
    sp = open_spool()
    with train.connect(sp.config.uri, Mesh(), 0, framework="numpy") as feed:
        wait_for(lambda: feed.reader_pid is not None)
    wait_for(lambda: not os.path.exists(f"/proc/{feed.reader_pid}"))


def test_lost_data_is_the_same_error_on_all_ranks(open_spool, tmp_path):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    sp.flush()
    for folder, _, files in os.walk(tmp_path):
        for name in files:
            if "/token_ids/c" in folder:
                os.remove(os.path.join(folder, name))

    def consume(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=2), refs)
        feed.finish()
        return [micro.number for micro in feed]

    for error in ranks(sp.config.uri, mesh, consume, fields=["token_ids"]):
        assert error.kind == "integrity" and "token_ids" in str(error)


def test_a_rank_that_does_not_come_is_named(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=3)

    def consume(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=2), refs)
        return list(feed)

    found = ranks(sp.config.uri, mesh, consume, places=(0, 2), join_timeout_s=1.5)
    for error in found:
        assert isinstance(error, RankError) and "of the 3 ranks that share this feed only tp=[0, 2] came" in str(error)


def test_a_rank_that_came_and_left_is_named_to_those_that_wait(open_spool):
    sp = open_spool()
    mesh = Mesh(tp=3)
    other = train.connect(sp.config.uri, mesh, 2, framework="numpy", join_timeout_s=4.0)
    wait_for(lambda: other.reader_pid is not None)
    with train.connect(sp.config.uri, mesh, 0, framework="numpy", join_timeout_s=4.0) as feed:
        wait_for(lambda: feed.reader_pid is not None)
    with other, pytest.raises(RankError, match=r"only tp=\[2\] came within 4 s, and tp=\[0\] came and left: "):
        next(iter(other))


def test_a_rank_that_left_before_the_others_came_may_come_again(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)

    def consume(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=2), refs)
        feed.finish()
        return len([micro.number for micro in feed])

    for ended in (False, True):  # while the process that reads is there, and when it is not
        with train.connect(sp.config.uri, mesh, 0, framework="numpy") as feed:
            wait_for(lambda feed=feed: feed.reader_pid is not None)
        time.sleep(0.1)
        if ended:
            wait_for(lambda: not reorganisers(sp.config.uri))
        assert ranks(sp.config.uri, mesh, consume) == [2, 2]
    wait_for(lambda: not reorganisers(sp.config.uri))


def test_ranks_that_disagree_are_told(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)

    def other_plan(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=1 + rank), refs)
        return [micro.number for micro in feed]

    for error in ranks(sp.config.uri, mesh, other_plan):
        assert isinstance(error, RankError) and "submitted different plans" in str(error)
    with train.connect(sp.config.uri, mesh, 0, framework="numpy") as feed:
        another = train.connect(sp.config.uri, mesh, 0, framework="numpy")
        with pytest.raises(RankError, match="takes part"):
            next(iter(another))
        another.close()
        feed.submit(plan(refs, mesh, n_micro=1), refs)  # which the other job's rank did not end


def test_ranks_that_connect_with_other_arguments_are_told_both(open_spool):
    sp = open_spool()
    mesh = Mesh(tp=2)
    with train.connect(sp.config.uri, mesh, 0, framework="numpy") as feed:
        other = train.connect(sp.config.uri, mesh, 1, framework="numpy", depth=3)
        for each in (feed, other):
            with pytest.raises(RankError, match="wants depth=3, the first one 2"):
                next(iter(each))
        other.close()


def test_ranks_of_another_mesh_are_told_though_they_only_iterate(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    with train.connect(sp.config.uri, mesh, 0, framework="numpy") as feed:
        feed.submit(plan(refs, mesh, n_micro=2), refs)
        with train.connect(sp.config.uri, Mesh(tp=2, cp=2), Place(tp=1), framework="numpy") as other:
            for each in (feed, other):
                with pytest.raises(RankError, match=r"wants mesh=Mesh\(dp=1, cp=2.*, the first one Mesh\(dp=1, cp=1"):
                    list(each)


def test_a_rank_that_comes_after_the_failure_is_told(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    with train.connect(sp.config.uri, mesh, 0, framework="numpy", fields=["nothing"]) as feed:
        feed.submit(plan(refs, mesh, n_micro=1), refs)
        with pytest.raises(NotFoundError, match="nothing"):
            next(iter(feed))
    feed = train.connect(sp.config.uri, mesh, 0, framework="numpy", fields=["nothing"])
    with suppress(NotFoundError):  # what failed before may be told already
        feed.submit(plan(refs, mesh, n_micro=1), refs)
    wait_for(lambda: feed._failure is not None)
    with train.connect(sp.config.uri, mesh, 1, framework="numpy", fields=["nothing"]) as late:
        with pytest.raises((NotFoundError, RankError)) as caught:
            next(iter(late))
        assert "nothing" in str(caught.value) or "tp=[1]" in str(caught.value)
    feed.close()


def test_a_spool_that_is_not_there_is_said_to_all(tmp_path):
    def consume(feed, rank):
        return next(iter(feed))

    for error in ranks(f"file://{tmp_path}/nowhere", Mesh(tp=2), consume, join_timeout_s=20.0):
        assert isinstance(error, NotFoundError) and "nowhere" in str(error)


def test_who_connects_and_says_nothing_holds_nobody_up(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    digest = digest_of("", sp.config.uri, (0, 0, 0, 0))

    def consume(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=1), refs)
        feed.finish()
        return len([micro.number for micro in feed])

    with train.connect(sp.config.uri, mesh, 0, framework="numpy") as feed:
        wait_for(lambda: feed.reader_pid is not None)
        for said in (b"", b"\x05\x00\x00\x00hello", b"\xff\xff\xff\xff{"):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(f"\0spool-feed-{os.getuid()}-{digest}")
            peer.sendall(said)
        with train.connect(sp.config.uri, mesh, 1, framework="numpy") as other:
            feed.submit(plan(refs, mesh, n_micro=1), refs)
            feed.finish()
            assert [micro.number for micro in other] == [micro.number for micro in feed] == [0]
    peer.close()


def test_who_comes_in_with_more_than_a_rank_says_first_is_shown_out_and_takes_no_memory():
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name := f"\0spool-test-{os.getpid()}")
    listener.listen()
    with closing(SocketListener(listener)) as door, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(name)
        peer.sendall(b"\xff\xff\xff\xff")
        link, began = door.accept(5), time.monotonic()
        with pytest.raises(EOFError):
            link.receive()
        assert time.monotonic() - began < 4  # it does not wait for the rest
        link.close()


def test_a_forked_child_cannot_use_its_parents_feed(open_spool):
    sp = open_spool()
    with train.connect(sp.config.uri, Mesh(), 0, framework="numpy") as feed:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                next(iter(feed))
            except InputError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert b"connect in every process" in os.read(read, 1000)


def test_memory_is_checked_over_mini_batches(open_spool):
    sp = open_spool()
    refs = record(sp, lengths=(40, 40))
    plans = [plan([ref], Mesh(), n_micro=1) for ref in refs]

    def consume(feed, rank):
        for planned, ref in zip(plans, refs, strict=True):
            feed.submit(planned, [ref])
        feed.finish()
        return [micro.n_bytes for micro in feed]

    ((size, _),) = ranks(sp.config.uri, Mesh(), consume)
    (error,) = ranks(sp.config.uri, Mesh(), consume, memory_bytes=size + 100)
    assert isinstance(error, CapacityError) and error.details["need"] == 2 * size


def test_a_planned_micro_batch_that_does_not_come_ends_the_wait(open_spool, spool_uri):
    sp = open_spool()
    refs = record(sp)
    with train.connect(sp.config.uri, Mesh(), 0, framework="numpy", timeout_s=2.0) as feed:
        feed.submit(plan(refs, Mesh(), n_micro=6), refs)
        deadline = time.monotonic() + 30
        while not feed._incoming.qsize():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (pid,) = reorganisers(spool_uri)
        os.kill(pid, 19)
        try:
            with pytest.raises(RankError, match="no micro-batch came for 2 s"):
                for _ in feed:
                    pass
        finally:
            os.kill(pid, 18)


@pytest.mark.parametrize("when", ["before_submit", "before_finish", "only_iterates"])
def test_a_reader_that_stands_still_is_named_whatever_it_had_said(open_spool, when):
    sp = open_spool()
    refs = record(sp)
    planned = plan(refs, Mesh(), n_micro=2)
    with train.connect(sp.config.uri, Mesh(), 0, framework="numpy", timeout_s=2.0) as feed:
        if when == "before_finish":
            feed.submit(planned, refs)
            assert len([micro.number for micro in feed.mini_batch()]) == 2
        wait_for(lambda: feed.reader_pid is not None)
        pid = feed.reader_pid
        os.kill(pid, 19)
        try:
            if when == "before_submit":
                feed.submit(planned, refs)
            if when != "only_iterates":
                feed.finish()
            with pytest.raises(RankError, match=f"process that reads for this feed, {pid}, says nothing since"):
                list(feed)
        finally:
            os.kill(pid, 18)


def test_a_rank_that_comes_to_a_reader_that_stands_still_does_not_wait_for_ever(open_spool, monkeypatch):
    monkeypatch.setattr("spool.train.delivery.waiting.START_S", 1.0)
    sp = open_spool()
    mesh = Mesh(tp=2)
    with train.connect(sp.config.uri, mesh, 0, framework="numpy", join_timeout_s=2.0) as feed:
        wait_for(lambda: feed.reader_pid is not None)
        os.kill(feed.reader_pid, 19)
        try:
            other = train.connect(sp.config.uri, mesh, 1, framework="numpy", join_timeout_s=2.0)
            with pytest.raises(RankError, match="did not let this rank in for 3 s"):
                next(iter(other))
        finally:
            os.kill(feed.reader_pid, 18)
        other.close()


def test_a_rank_that_stands_still_is_named_to_those_that_wait(open_spool):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    ended = threading.Event()

    def consume(feed, rank):
        feed.submit(plan(refs, mesh, n_micro=6), refs)
        if rank == 1:
            micro = next(iter(feed))
            ended.wait(40)
            return micro.number
        try:
            for micro in feed:
                del micro
        finally:
            ended.set()

    error, _ = ranks(sp.config.uri, mesh, consume, timeout_s=3.0)
    assert isinstance(error, RankError) and "no micro-batch came for 3 s" in str(error)
    assert (
        f"waits for ranks to let go of micro-batches of this feed: rank tp=1 (process {os.getpid()}), of 0, 1"
        in str(error)
    )


def test_a_forked_child_does_not_keep_a_rank_alive(open_spool, spool_uri):
    sp = open_spool()
    refs, mesh = record(sp), Mesh(tp=2)
    errors = []

    def other():
        with train.connect(spool_uri, mesh, 0, framework="numpy") as feed:
            feed.submit(plan(refs, mesh, n_micro=6), refs)
            try:
                for _ in feed:
                    pass
            except RankError as error:
                errors.append(error)

    def rank():
        feed = train.connect(spool_uri, mesh, 1, framework="numpy")
        next(iter(feed))
        if os.fork() == 0:
            time.sleep(20)
        os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join(15)
    assert not thread.is_alive() and "died" in str(errors[0])
    process.join()
