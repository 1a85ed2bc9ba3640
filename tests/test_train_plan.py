"""The planner: whatever the mesh and the lengths, the ranks together hold the whole batch, each row once."""

from __future__ import annotations

import heapq
import inspect
import pickle
import re
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import spool
from spool.errors import ConfigError, InputError
from spool.importers import read_runs
from spool.importers.base import ImportedRun
from spool.model.refs import SegmentRef, Unit
from spool.observe import Read
from spool.read.select import positions
from spool.train.planning import balance
from spool.train.planning.carried import plan_from_json
from spool.train.planning.planner import Item, Mesh, Place, plan, plans


def thirds(n_rows, cp):
    """A split function: each rank has every cp-th of 3 * cp unequal parts; the last one what is left."""
    share = n_rows // cp
    cuts = sorted({0, share // 3, share // 2, share})  # no range is empty
    return [[(rank * share + a, rank * share + b) for a, b in pairwise(cuts)][::-1] for rank in range(cp)]


@st.composite
def sequences(draw, longest=40):
    """Lengths and Items with units, among them empty ones."""
    found = []
    for _ in range(draw(st.integers(0, 14))):
        n_tokens = draw(st.integers(0, longest))
        at = sorted(draw(st.sets(st.integers(0, n_tokens - 1), max_size=2))) if n_tokens else []
        found.append(Item(n_tokens, tuple((position, draw(st.integers(1, 9))) for position in at)))
    return found


@st.composite
def meshes(draw):
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    layers = draw(st.lists(st.integers(0, 3), min_size=pp * vpp, max_size=pp * vpp))
    return Mesh(
        dp=draw(st.integers(1, 4)), cp=draw(st.integers(1, 4)), tp=draw(st.integers(1, 3)), pp=pp, vpp=vpp,
        stages=tuple(layers), first_dense=draw(st.integers(0, sum(layers))), sequence_parallel=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def planned(draw):
    mesh, items = draw(meshes()), draw(sequences())
    layout, split = draw(st.sampled_from(["packed", "padded"])), draw(st.sampled_from(["zigzag", "contiguous", thirds]))
    if layout == "packed" and draw(st.booleans()):
        split = "micro_batch"
    limit = {"n_micro": draw(st.integers(1, 3)) * mesh.pp} if draw(st.booleans()) else {}
    limit = limit or {"max_tokens": draw(st.integers(24, 200))}
    return plan(items, mesh, split=split, layout=layout, **limit)


def ranks_of(found):
    sizes = (range(n) for n in (found.mesh.dp, found.mesh.cp, found.mesh.pp))
    return [Place(dp=dp, cp=cp, pp=pp) for dp, cp, pp in product(*sizes)]


# -- the whole ---------------------------------------------------------------------------------------------------------


@given(planned())
@settings(max_examples=100)
def test_each_row_and_layer_is_on_exactly_one_rank(found):
    mesh = found.mesh
    n_layers = sum(mesh.stages)
    seen = [np.zeros((item.n_rows, n_layers), int) for item in found.items]
    forward = [np.zeros(max(item.n_rows - 1, 0), int) for item in found.items]
    for place, chunk in product(ranks_of(found), range(mesh.vpp)):
        rank = found.rank(place, chunk=chunk)
        for share in rank.shares:
            for piece in share.pieces:
                seen[piece.item][piece.row : piece.row + piece.n_rows, rank.layers] += 1
                if not (place.pp or chunk):
                    forward[piece.item][piece.row : piece.row + piece.n_forward] += 1
    assert all((counts == 1).all() for counts in seen)
    assert all((counts == 1).all() for counts in forward)


@given(planned())
@settings(max_examples=100)
def test_tensor_ranks_get_the_same_and_all_data_ranks_as_many_micro_batches(found):
    mesh = found.mesh
    for rank in range(mesh.size):
        place = mesh.place(rank)
        assert found.rank(rank).shares == found.rank(place._replace(tp=0)).shares
    assert {len(batches) for batches in found.batches} == {found.n_micro}
    assert sorted(item for batches in found.batches for batch in batches for item in batch.items) == list(
        range(len(found.items))
    )


@given(planned())
@settings(max_examples=100)
def test_shares_are_equal_and_rows_are_where_their_positions_say(found):
    mesh = found.mesh
    for place in ranks_of(found):
        for share, batch in zip(found.rank(place).shares, found.batches[place.dp], strict=True):
            assert share.n_rows * mesh.cp == batch.n_rows > 0
            assert not mesh.sequence_parallel or share.n_rows % mesh.tp == 0
            ids = share.position_ids()
            assert len(ids) == share.n_rows
            taken = np.zeros(share.n_rows, int)
            for piece in share.pieces:
                here = slice(piece.to, piece.to + piece.n_rows)
                assert (ids[here] == np.arange(piece.row, piece.row + piece.n_rows)).all()
                taken[here] += 1
            assert taken.max(initial=0) <= 1
            if found.layout == "padded" and mesh.sequence_parallel:
                continue
            parts = [found.rank(place._replace(tp=tp)).router_rows(share) for tp in range(mesh.tp)]
            seen = [
                row for part in (parts if mesh.sequence_parallel else parts[:1]) for row in range(share.n_rows)[part]
            ]
            assert seen == list(range(share.n_rows))


# -- rows are placed as a plain reference does -------------------------------------------------------------------------


def reference_of(item):
    units = tuple(Unit("k", position, n) for position, n in item.units)
    return SegmentRef(
        spool_id="x", session_id="s", view="lineage", n_tokens=item.n_tokens, n_rows=item.n_rows, units=units,
        response_start=item.n_tokens // 2,
    )  # fmt: skip


def whole_field(ref, align, number):
    """What reading all of a reference gives: values that no two rows of any two references share."""
    ((start, stop),) = positions(align, ref, [(0, ref.n_tokens)])
    return 1 + number * 1000 + np.arange(start, stop), start


def read(ref, align, number, tokens):
    """What reading some tokens of it gives."""
    values, first = whole_field(ref, align, number)
    ((start, stop),) = positions(align, ref, [(tokens.start, tokens.stop)])
    return values[start - first : stop - first]


def expanded(ref, align, number):
    """A row for each row of the sequence: 0 where the field has none."""
    values, first = whole_field(ref, align, number)
    if align == "forward":
        return np.concatenate([values, np.zeros(ref.n_rows - len(values), int)])
    counts = np.ones(ref.n_tokens, int)
    for unit in ref.units:
        counts[unit.position] = unit.n_rows
    return np.repeat(np.concatenate([np.zeros(first, int), values]), counts)


def zigzag_reference(sequence, n_rows, cp, rank):
    padded = np.pad(sequence, (0, n_rows - len(sequence)))
    if cp == 1:
        return padded
    chunks = np.split(padded, 2 * cp)
    return np.concatenate([chunks[rank], chunks[2 * cp - 1 - rank]])


def contiguous_reference(sequence, n_rows, cp, rank):
    return np.split(np.pad(sequence, (0, n_rows - len(sequence))), cp)[rank]


REFERENCES = {"zigzag": zigzag_reference, "contiguous": contiguous_reference}


@given(
    sequences(),
    meshes(),
    st.sampled_from(["zigzag", "contiguous", "micro_batch"]),
    st.sampled_from(["packed", "padded"]),
)
@settings(max_examples=75)
def test_place_equals_padding_then_splitting_whole_arrays(items, mesh, split, layout):
    refs = [reference_of(item) for item in items]
    layout = "packed" if split == "micro_batch" else layout
    found = plan(refs, mesh, n_micro=2 * mesh.pp, split=split, layout=layout)
    assert found.items == tuple(items)
    for place, align in product(ranks_of(found), ("token", "forward", "response")):
        for share, batch in zip(found.rank(place).shares, found.batches[place.dp], strict=True):
            values = [read(refs[piece.item], align, piece.item, piece.tokens) for piece in share.pieces]
            got = share.place(values, np.zeros(share.n_rows, int), align=align)
            rows = [expanded(refs[item], align, item) for item in batch.items]
            rows.append(np.zeros(0, int))
            parts = list(zip(rows, (*batch.padded, batch.tail), strict=True))
            if split == "micro_batch":
                whole = np.concatenate([np.pad(row, (0, n - len(row))) for row, n in parts])
                want = np.split(whole, mesh.cp)[place.cp]
            else:
                want = np.concatenate([REFERENCES[split](row, n, mesh.cp, place.cp) for row, n in parts])
            assert got.tolist() == want.tolist()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_layout_of_slime(cp):
    """Each sequence to 2 * cp parts, two of them a rank; then what a rank has is padded to a multiple of 128 * tp."""
    lengths, tp = [700, 3, 41, 128], 2
    multiples = {"sequence_multiple": 2 * cp if cp > 1 else 1, "micro_multiple": 128 * tp * cp}
    found = plan(lengths, Mesh(cp=cp, tp=tp), n_micro=1, **multiples)
    for rank in range(cp):
        parts = []
        for length in lengths:
            part = -(-length // (2 * cp))
            padded = np.pad(np.arange(1, length + 1), (0, 2 * cp * part - length))
            both = padded[rank * part :][:part], padded[(2 * cp - 1 - rank) * part :][:part]
            parts.append(np.concatenate(both) if cp > 1 else np.arange(1, length + 1))
        want = np.concatenate(parts)
        want = np.pad(want, (0, -len(want) % (128 * tp)))
        (share,) = found.rank(Place(cp=rank)).shares
        tokens = [np.arange(piece.start, piece.stop) + 1 for piece in share.pieces]
        assert share.place(tokens, np.zeros(share.n_rows, int)).tolist() == want.tolist()


def test_zigzag_of_one_sequence():
    shares = [plan([13], Mesh(cp=2), n_micro=1).rank(Place(cp=cp)).shares[0] for cp in range(2)]
    assert [[(piece.start, piece.stop, piece.to) for piece in share.pieces] for share in shares] == [
        [(0, 4, 0), (12, 13, 4)],
        [(4, 12, 0)],
    ]
    assert [share.pieces[-1].n_forward for share in shares] == [0, 8]
    assert [share.n_rows for share in shares] == [8, 8]


def test_a_unit_may_be_cut_between_ranks():
    item = Item(6, ((2, 11),))
    assert item.n_rows == 16
    left, right = (
        plan([item], Mesh(cp=2), n_micro=1, split="contiguous").rank(Place(cp=cp)).shares[0] for cp in range(2)
    )
    (head,), (tail,) = left.pieces, right.pieces
    assert (head.tokens, head.units, head.skip, head.n_forward) == (slice(0, 3), ((2, 6),), 0, 8)
    assert (tail.tokens, tail.units, tail.skip, tail.n_forward) == (slice(2, 6), ((0, 5),), 6, 7)
    assert tail.repeats().tolist() == [5, 1, 1, 1]


# -- limits and padding ------------------------------------------------------------------------------------------------


@given(sequences(longest=60), meshes(), st.integers(24, 160), st.sampled_from(["packed", "padded"]))
@settings(max_examples=75)
def test_no_micro_batch_exceeds_the_limit_but_those_of_one_long_sequence(items, mesh, limit, layout):
    found = plan(items, mesh, max_tokens=limit, layout=layout)
    for batch in (batch for batches in found.batches for batch in batches):
        assert batch.n_rows <= limit or len(batch.items) == 1
    if mesh.vpp > 1:
        assert found.n_micro % mesh.pp == 0


def test_there_are_no_more_micro_batches_than_the_fullest_rank_needs():
    found = plan([60, 60, 60, 60, 10, 10, 10, 10], Mesh(dp=2), max_tokens=100)
    assert found.n_micro == 2
    assert found.imbalance == 1.0
    assert plan([], Mesh(dp=2), max_tokens=100).n_micro == 0


def test_a_long_sequence_is_alone_or_refused():
    found = plan([8, 300, 8, 8], Mesh(dp=2), max_tokens=100)
    assert [[batch.items for batch in batches] for batches in found.batches] == [[(1,)], [(0, 2, 3)]]
    with pytest.raises(
        InputError, match=r"item 1 takes 300 rows padded and a micro-batch holds 100.*oversize='alone'"
    ) as caught:
        plan([8, 300, 8, 8], Mesh(dp=2), max_tokens=100, oversize="error")
    assert caught.value.details["items"] == [1]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_capacity_that_an_even_cost_would_break_is_kept(layout):
    lengths = [90, 80, 10, 10, 5, 5]
    found = plan(lengths, Mesh(), max_tokens=100, layout=layout, cost=lambda rows: 1.0 / rows)
    assert all(batch.n_rows <= 100 for batch in found.batches[0])
    assert all(batch.items for batch in found.batches[0])


def test_the_fewest_micro_batches_are_found_where_an_even_cost_does_not_fit():
    found = plan([5, 5, 4, 3, 3], Mesh(), max_tokens=10)
    assert [batch.rows for batch in found.batches[0]] == [(5, 5), (4, 3, 3)]


def test_padding_is_decided_once():
    found = plan([5, 12, 3], Mesh(cp=2, tp=3), n_micro=1, sequence_multiple=4, micro_multiple=36)
    (batch,) = found.batches[0]
    assert (batch.rows, batch.padded, batch.n_rows, batch.tail) == ((5, 12, 3), (8, 12, 4), 36, 12)
    share = found.rank(0).shares[0]
    assert share.cu_seqlens_padded.tolist() == [0, 8, 20, 24, 36]
    assert share.cu_seqlens.tolist() == [0, 5, 17, 20, 20]
    assert share.cu_seqlens.dtype == share.cu_seqlens_padded.dtype == np.int32
    assert found.padding == pytest.approx(1 - 20 / 36)
    default = plan([5, 12, 3], Mesh(cp=2, tp=3), n_micro=1).batches[0][0]
    assert default.padded == (12, 12, 12)
    empty = plan([5], Mesh(dp=2, cp=2), n_micro=1, sequence_multiple=12, split=thirds).batches[1][0]
    assert (empty.items, empty.n_rows, empty.tail) == ((), 12, 12)
    padded = plan([5, 12, 3], Mesh(cp=2), n_micro=1, layout="padded").batches[0][0]
    assert (padded.padded, padded.tail) == ((12, 12, 12), 0)


def test_rows_count_where_units_expand_tokens():
    found = plan([Item(10, ((3, 91),)), 100, Item(5)], Mesh(dp=2), max_tokens=128)
    assert [item.n_rows for item in found.items] == [100, 100, 5]
    assert sorted(found.costs) == [100, 105]


# -- balance -----------------------------------------------------------------------------------------------------------


def longest_first(costs, n_bins):
    """The greedy as it is in textbooks: loads of the bins."""
    loads = [0.0] * n_bins
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return loads


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200), st.integers(1, 16))
@settings(max_examples=75)
def test_never_less_even_than_the_greedy(lengths, dp):
    found = plan(lengths, Mesh(dp=dp), n_micro=1)
    assert max(found.costs) <= max(longest_first(lengths, dp))
    assert sum(found.costs) == sum(lengths)


def test_largest_differencing_beats_the_greedy_on_its_textbook_case():
    assert max(longest_first([8, 7, 6, 5, 4], 2)) == 17
    assert plan([8, 7, 6, 5, 4], Mesh(dp=2), n_micro=1).costs == [16, 14]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=60), st.integers(1, 12))
@example([0, 0, 0, 0], 3)
def test_no_bin_is_empty_while_another_has_two(costs, n_bins):
    bins = balance.partition(np.array(costs, float), n_bins)
    assert sorted(item for found in bins for item in found) == list(range(len(costs)))
    assert min(map(len, bins)) > 0 or max(map(len, bins)) == 1


@given(st.lists(st.integers(0, 99), max_size=12), st.integers(1, 5))
def test_equal_counts(costs, n_bins):
    costs = np.tile(np.array(costs, float), n_bins)
    bins = balance.partition(costs, n_bins, equal_counts=True)
    assert {len(found) for found in bins} == {len(costs) // n_bins}
    assert sorted(item for found in bins for item in found) == list(range(len(costs)))


def test_recorded_runs_are_shared_out_evenly(shared_data):
    runs = [run for run in read_runs(shared_data / "trajectories") if isinstance(run, ImportedRun)]
    lengths = [sum(len(str(message)) for message in run.steps[-1].messages) // 4 for run in runs]
    assert len(lengths) > 40
    batch = [length + shift for shift in range(8) for length in lengths]  # eight rollouts of each prompt
    for dp in (2, 4, 8, 16):
        found = plan(batch, Mesh(dp=dp, cp=2), max_tokens=65536)
        assert found.imbalance < 1.001
        assert found.micro_imbalance < 1.05
    assert plan(lengths, Mesh(dp=4), n_micro=2).imbalance < 1.01


def test_many_items_and_few_bins_too_many_for_memory(monkeypatch):
    monkeypatch.setattr(balance, "_MAX_CELLS", 10)
    assert plan([8, 7, 6, 5, 4], Mesh(dp=2), n_micro=1).costs == [16, 14]
    assert plan([8, 7, 6, 5, 4, 1], Mesh(dp=2), n_micro=1).costs == [17, 14]


def test_costs():
    assert plan([10, 20], Mesh(dp=2), n_micro=1, cost=lambda rows: rows * rows).costs == [400, 100]
    assert plan([10, 20], Mesh(dp=2), n_micro=1, cost=[7, 3]).costs == [7, 3]
    assert plan([Item(10, cost=5.0), 20], Mesh(dp=2), n_micro=1, cost=[7, 3]).costs == [5, 3]
    free = plan([10, 20], Mesh(dp=2), n_micro=1, cost=lambda _: 0)
    assert (free.imbalance, free.micro_imbalance) == (1.0, 1.0)
    uneven = plan([40, 10, 30, 20], Mesh(dp=2), n_micro=2)
    assert uneven.imbalance == 1.0
    assert uneven.micro_imbalance == pytest.approx((40 + 20) / 50)


# -- layers and ranks --------------------------------------------------------------------------------------------------


def test_layers_over_stages():
    mesh = Mesh(pp=4, stages=(11, 12, 12, 11), num_layers=46, first_dense=1)
    ranks = [plan([9], mesh, n_micro=1).rank(Place(pp=pp)) for pp in range(4)]
    assert [rank.layers for rank in ranks] == [slice(0, 11), slice(11, 23), slice(23, 35), slice(35, 46)]
    assert [rank.moe_layers for rank in ranks][:2] == [slice(1, 11), slice(11, 23)]
    chunked = Mesh(pp=2, num_layers=8, vpp=2)
    assert [chunked.layers(pp, chunk) for pp, chunk in product(range(2), range(2))] == [(0, 2), (4, 6), (2, 4), (6, 8)]
    assert Mesh(pp=2, stages=[3, 5]) == Mesh(pp=2, stages=(3, 5))
    dense = plan([9], Mesh(pp=2, stages=(2, 4), first_dense=3), n_micro=1)
    assert [dense.rank(Place(pp=pp)).moe_layers for pp in range(2)] == [slice(2, 2), slice(3, 6)]
    alone = plan([9], Mesh(first_dense=1), n_micro=1).rank(0)
    assert (alone.layers, alone.moe_layers) == (slice(None), slice(1, None))


def test_global_ranks_are_numbered_as_megatron_does():
    mesh = Mesh(dp=2, cp=2, tp=4, pp=2, num_layers=4)
    assert mesh.size == 32
    assert [mesh.place(rank) for rank in (0, 3, 4, 8, 16, 31)] == [
        Place(), Place(tp=3), Place(cp=1), Place(dp=1), Place(pp=1), Place(1, 1, 3, 1),
    ]  # fmt: skip
    assert Mesh(dp=2, tp=2, order="dp-tp-cp-pp").place(1) == Place(dp=1)


# -- plans travel ------------------------------------------------------------------------------------------------------


@given(planned())
def test_a_plan_travels_and_is_the_same_again(found):
    for copy in (plan_from_json(found.to_json()), pickle.loads(pickle.dumps(found))):
        assert copy == found
        assert copy.rank(0) == found.rank(0)


@given(sequences(), meshes())
def test_planning_is_deterministic(items, mesh):
    assert plan(items, mesh, max_tokens=64) == plan(list(items), mesh, max_tokens=64)


def test_mini_batches_are_planned_as_they_arrive():
    arrived = []

    def mini_batches():
        for lengths in ([5, 6], [7], []):
            arrived.append(lengths)
            yield lengths

    feed = plans(mini_batches(), Mesh(dp=2), n_micro=1)
    first = next(feed)
    assert (first.mini_batch, len(arrived)) == (0, 1)
    assert [found.mini_batch for found in feed] == [1, 2]


# -- cases from elsewhere ----------------------------------------------------------------------------------------------


def test_ranks_without_real_tokens_get_a_padded_slice():
    mesh = Mesh(cp=2, tp=2)
    lengths = [0, 1, 2, 3]
    found = plan(lengths, mesh, n_micro=4)
    whole = [np.full((4, 8), -1) for _ in range(2)]
    for place in (mesh.place(rank) for rank in range(mesh.size)):
        shares = found.rank(place).shares
        assert [share.n_rows for share in shares] == [4] * 4
        for number, share in enumerate(shares):
            tokens = [np.arange(piece.start, piece.stop) for piece in share.pieces]
            rows = share.place(tokens, np.full(4, -1))
            mask = share.place([np.ones_like(part) for part in tokens], np.zeros(4, int))
            assert ((rows >= 0) == (mask == 1)).all()
            whole[place.tp][number][share.position_ids()] = rows
    assert (whole[0] == whole[1]).all()
    for batch, row in zip(found.batches[0], whole[0], strict=True):
        (item,) = batch.items
        assert row.tolist() == [*range(lengths[item]), *[-1] * (8 - lengths[item])]
    assert plan([5], Mesh(dp=2, cp=2, tp=2), n_micro=1).rank(Place(dp=1)).shares[0].n_rows == 4


def test_planning_needs_no_framework_and_no_store():
    code = (
        "import sys\nfrom spool.train.planning.planner import Mesh, plan\nplan([5], Mesh(), n_micro=1).rank(0)\n"
        "print(sorted({'torch', 'apsw', 'pyarrow', 'fsspec'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_each_context_rank_reads_its_own_rows_only(spool_uri):
    shape, n_tokens = spool.MoEShape(num_layers=47, num_experts=64, topk=4), 4096
    rng, fetched, refs, sent = np.random.default_rng(0), [], [], []
    with spool.open(spool_uri, observer=fetched.append) as sp:
        for number in range(4):
            routing = rng.integers(0, 64, (n_tokens - 1, 47, 4), dtype=np.uint8)
            session = sp.session(f"s{number}", experts=shape)
            session.append(prompt_token_ids=range(n_tokens - 9), response_token_ids=range(9), routed_experts=routing)
            refs += session.finalize()
            sent.append(routing)
        sp.flush()
        found = plan(refs, Mesh(cp=2, tp=4), max_tokens=8192)
        got = [np.full((n_tokens, 47, 4), 255, np.uint8) for _ in refs]
        for cp in range(2):
            del fetched[:]
            for share in found.rank(Place(cp=cp)).shares:
                rows = np.full((share.n_rows, 47, 4), 255, np.uint8)
                sp.read(
                    [refs[piece.item] for piece in share.pieces], fields=["routed_experts"], dtype="stored",
                    tokens=[piece.tokens for piece in share.pieces],
                    out=[{"routed_experts": rows[piece.to : piece.to + piece.n_forward]} for piece in share.pieces],
                )  # fmt: skip
                assert rows.nbytes == 8192 // 2 * 47 * 4
                for piece in share.pieces:
                    got[piece.item][piece.row : piece.row + piece.n_rows] = rows[piece.to : piece.to + piece.n_rows]
            n_bytes = sum(sum(event.fetched_bytes.values()) for event in fetched if isinstance(event, Read))
            assert 0 < n_bytes <= sum(routing.nbytes for routing in sent) / 2 * 1.02
    for rows, routing in zip(got, sent, strict=True):
        assert (rows[:-1] == routing).all()
        assert (rows[-1] == 255).all()


def test_the_options_in_the_guide_are_those_of_the_code():
    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    table = guide.split("| option of `plan` | default | meaning |\n")[1].split("\n\n")[0]
    documented = {name for line in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert documented == inspect.signature(plan).parameters.keys() - {"items", "mesh", "mini_batch"}


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dp": 0}, "dp must be at least 1"),
        ({"cp": "2"}, "cp must be an integer"),
        ({"pp": 2}, "pass num_layers= or stages="),
        ({"pp": 4, "num_layers": 46}, "46 layers do not go evenly into pp . vpp = 4: pass stages="),
        ({"pp": 2, "stages": (1, 2, 3)}, "stages must be pp . vpp = 2 numbers"),
        ({"pp": 2, "stages": (1, 2), "num_layers": 4}, "have 3 layers, but num_layers is 4"),
        ({"first_dense": -1}, "first_dense must be in"),
        ({"first_dense": 5, "num_layers": 4}, r"first_dense must be in \[0, 4\]"),
        ({"num_layers": 0}, "0 layers do not go evenly"),
        ({"pp": 2, "stages": (1, 2.5)}, "stages must be numbers of layers.*entry 1 is float"),
        ({"stages": 4}, "stages must be numbers of layers"),
        ({"order": 4}, "order must be text"),
        ({"order": "tp-dp-pp"}, "order must name tp, cp, dp and pp once each"),
    ],
)
def test_meshes_that_are_none(sizes, says):
    with pytest.raises(InputError, match=says):
        Mesh(**sizes)
    assert issubclass(ConfigError, InputError)


@pytest.mark.parametrize(
    ("items", "options", "says"),
    [
        ([5], {}, "pass max_tokens=.* or n_micro="),
        ([5], {"max_tokens": 5, "n_micro": 5}, "one of them"),
        ([5, -1], {"n_micro": 1}, "items must be .*; entry 1 is int -1"),
        ([5, 2.5], {"n_micro": 1}, "items must be .*; entry 1 is float 2.5"),
        ([True], {"n_micro": 1}, "entry 0 is bool True"),
        (5, {"n_micro": 1}, "items must be references, lengths or Items"),
        ([Item(5, ((5, 2),))], {"n_micro": 1}, "entry 0 of items has 5 tokens and units"),
        ([Item(5, ((1, 0),))], {"n_micro": 1}, "at least one row each"),
        ([Item(5, ((2, 2), (1, 2)))], {"n_micro": 1}, "ascending positions"),
        ([Item(-5)], {"n_micro": 1}, "entry 0 of items has -5 tokens"),
        ([Item(2.5)], {"n_micro": 1}, "n_tokens must be an integer"),
        ([SegmentRef(spool_id="x", session_id="s", view="lineage", n_tokens=5)], {"n_micro": 1}, "says n_rows=0"),
        ([5], {"n_micro": 0}, "n_micro must be at least 1"),
        ([5], {"max_tokens": 7}, "max_tokens=7 holds nothing: a micro-batch takes at least 8 rows"),
        ([5], {"n_micro": 1, "split": "zig"}, "split must be one of zigzag, contiguous, micro_batch"),
        ([5], {"n_micro": 1, "layout": "x"}, "layout must be one of packed, padded"),
        ([5], {"n_micro": 1, "oversize": "x"}, "oversize must be one of alone, error"),
        ([5], {"n_micro": 1, "sequence_multiple": 6}, "sequence_multiple must be a multiple of 4"),
        ([5], {"n_micro": 1, "micro_multiple": 12}, "micro_multiple must be a multiple of 8"),
        ([5], {"n_micro": 1, "layout": "padded", "micro_multiple": 8}, "leave out micro_multiple="),
        ([5], {"n_micro": 1, "cost": [1, 2]}, "cost has 2 numbers for 1 items"),
        ([5, 6], {"n_micro": 1, "cost": [1, float("nan")]}, "entry 1 of items costs nan"),
        ([5, 6], {"n_micro": 1, "cost": [1, 10**400]}, "entry 1 of items costs more than a float holds"),
        ([5, 6], {"n_micro": 1, "cost": lambda n_rows: 10**5000}, "entry 0 of items costs more than a float holds"),
        ([5, 6], {"n_micro": 1, "cost": [1.7e308] * 2}, "the costs of items are more than a float holds, added up"),
        ([Item(5, cost=1.7e308)] * 2, {"n_micro": 1}, "the costs of items are more than a float holds, added up"),
        ([5, 6], {"n_micro": 1, "cost": lambda n_rows: "x"}, "entry 0 of items costs 'x'"),
        ([5], {"n_micro": 1, "cost": lambda _: -1}, "entry 0 of items costs -1"),
        ([5, 6, 7], {"n_micro": 1, "equal_counts": True}, "3 items do not go evenly into 2 ranks; leave out 1"),
        ([5], {"n_micro": 1, "split": lambda n, cp: [[(0, n)], []]}, r"split\(4, 2\) must return"),
        ([5], {"n_micro": 1, "split": lambda n, cp: [[(0, 4)], [(3, 7)]]}, "2 rows a rank"),
        ([5], {"n_micro": 1, "split": lambda n, cp: None}, "got None"),
        ([5, 6], {"n_micro": 1, "equal_counts": "False"}, "equal_counts must be True or False"),
        ([5, 10**30], {"n_micro": 1}, "entry 1 is int 10000"),
        ([2**62, 2**62], {"n_micro": 1}, f"items must be of fewer than {2**31} rows each; entry 0 is int"),
        ([Item(3, ((1, 2**31),))], {"n_micro": 1}, "entry 0 is int 2147483650"),
        ([2**30] * 6, {"n_micro": 1}, "a micro-batch would have 3221225472 rows"),
        ([5], {"n_micro": 1, "sequence_multiple": 2**62}, "sequence_multiple must be a multiple of 4, below"),
    ],
)  # fmt: skip
def test_misuse_is_named(items, options, says):
    with pytest.raises(InputError, match=says):
        plan(items, Mesh(dp=2, cp=2, tp=2), **({"split": "zigzag"} | options))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"dp":2', '"dp":5', "2 data-parallel ranks, its mesh 5"),
        ('"items":[[5', '"items":[[4', "other rows than their items"),
        ('"items":[[5', '"items":[[1],[5', "3 items, and not each in one micro-batch"),
        ('"items":[[5', '"items":[[-5', "entry 0 of items has -5 tokens"),
        ('"split":"zigzag"', '"split":"zagzig"', "split='zagzig'"),
        ('"split":"zigzag"', '"split":"custom"', "for each of 2 ranks"),
        ('"layout":"packed"', '"layout":"thrown"', "layout='thrown'"),
        ('"cp":2', '"cp":3', "rank 0 of 3 has"),
    ],
)
def test_a_plan_that_was_damaged_on_its_way_is_refused(old, new, says):
    text = plan([5, 6], Mesh(dp=2, cp=2), n_micro=1).to_json()
    assert old in text
    with pytest.raises(InputError, match=re.escape(says)):
        plan_from_json(text.replace(old, new)).rank(0)


@pytest.mark.parametrize("odd", ["x", [], float("nan"), 1, None])
def test_sequence_parallel_is_true_or_false(odd):
    with pytest.raises(InputError, match="sequence_parallel must be True or False"):
        Mesh(sequence_parallel=odd)


def test_misuse_of_a_plan_is_named():
    with pytest.raises(InputError, match="mesh must be a Mesh"):
        plan([5], 8, n_micro=1)
    with pytest.raises(InputError, match=r"n_micro must be a multiple of pp=2.*pass 4"):
        plan([5], Mesh(pp=2, vpp=2, num_layers=8), n_micro=3)
    found = plan([5], Mesh(dp=2, cp=2), n_micro=1)
    alike = plan([5, 6], Mesh(tp=2), n_micro=1, layout="padded").rank(0)
    for call, says in [
        (lambda: alike.router_rows(alike.shares[0]), "part of every sequence"),
        (lambda: found.rank(4), r"rank must be in \[0, 4\)"),
        (lambda: found.rank(Place(cp=2)), "cp is 2"),
        (lambda: found.rank(0, chunk=1), r"chunk must be in \[0, 1\)"),
        (lambda: found.rank(Place("a")), "dp must be an integer"),
        (lambda: found.rank(Place(0.5)), "dp must be an integer"),
        (lambda: found.rank(0, chunk=None), "chunk must be an integer"),
        (lambda: plan_from_json("{}"), "this is not a plan"),
        (lambda: found.rank(0).shares[0].place([], np.zeros(4)), "an array for each of the 1 pieces"),
        (lambda: found.rank(0).shares[0].place([np.zeros(2)], np.zeros(4), align="step"), "align must be one of"),
        (lambda: found.rank(0).shares[0].place([np.zeros(2, int)], np.zeros(4, np.uint8)), "does not hold every int64"),
        (
            lambda: found.rank(0).shares[0].place([np.zeros(1)], np.zeros(4)),
            r"tokens \[0, 2\) of item 0 have 2 rows",
        ),
    ]:
        with pytest.raises(InputError, match=says):
            call()
