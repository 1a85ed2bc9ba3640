"""The pure parts of reading: slices, positions, runs of rows, byte ranges, checksums of parts."""

from __future__ import annotations

import gc
import time
from itertools import pairwise

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import InputError
from spool.model.refs import Extent, SegmentRef, Span, StepRef, Unit
from spool.read.checks import Part, combine, total
from spool.read.plan import Piece, plan
from spool.read.select import cover, inside_spans, plain_range, positions, token_ranges


def step_ref(**facts):
    return StepRef(spool_id="x", session_id="s", step_id="0", index=0, **facts)


# -- byte ranges -----------------------------------------------------------------------------------------------------

KEYS = {"a": 1, "b": 12, "c": 40}


@st.composite
def wanted(draw):
    pieces, rows = [], {}
    for _ in range(draw(st.integers(0, 24))):
        key = draw(st.sampled_from(sorted(KEYS)))
        width, target = KEYS[key], draw(st.integers(0, 3))
        first, n = draw(st.integers(0, 60)), draw(st.integers(0, 20))
        to = rows.get(target, 0)
        rows[target] = to + n
        pieces.append(Piece(key, first * width, n * width, width, target, to, draw(st.integers(-1, 4))))
    return pieces


def row_by_row(pieces):
    return sorted(
        (piece.target, piece.row + i, piece.check, piece.key, piece.offset + i * piece.row_bytes)
        for piece in pieces
        for i in range(piece.length // piece.row_bytes)
    )


@given(wanted(), st.integers(0, 200), st.sampled_from([1, 7, 64, 300, 1 << 20]))
def test_every_wanted_row_is_read_once_and_goes_where_it_belongs(pieces, gap, limit):
    fetches = plan(pieces, gap=gap, limit=limit)
    assert row_by_row(piece for fetch in fetches for piece in fetch.pieces) == row_by_row(pieces)
    needed = {(piece.key, byte) for piece in pieces for byte in range(piece.offset, piece.offset + piece.length)}
    read = [(fetch.key, byte) for fetch in fetches for byte in range(fetch.offset, fetch.offset + fetch.length)]
    assert len(read) == len(set(read)), "a byte is read twice"
    assert needed <= set(read)
    for fetch in fetches:
        assert 0 < fetch.length <= max(limit, KEYS[fetch.key])
        assert fetch.pieces == sorted(fetch.pieces, key=lambda piece: piece.offset)
        assert all(piece.length for piece in fetch.pieces)
        at = fetch.offset
        for piece in fetch.pieces:
            assert piece.offset - at <= gap
            at = max(at, piece.offset + piece.length)
        assert at == fetch.offset + fetch.length, "bytes behind the last piece are read"
    assert [fetch[:2] for fetch in fetches] == sorted(fetch[:2] for fetch in fetches)


@given(wanted(), st.integers(0, 50))
def test_neighbours_are_merged(pieces, gap):
    fetches = plan(pieces, gap=gap, limit=1 << 30)
    for one, other in pairwise(fetches):
        assert one.key != other.key or other.offset - (one.offset + one.length) > gap


def test_a_range_that_many_want_is_read_once():
    pieces = [Piece("k", 100, 50, 10, target, 0) for target in range(9)]
    (fetch,) = plan(pieces, gap=0, limit=1 << 20)
    assert (fetch.offset, fetch.length, len(fetch.pieces)) == (100, 50, 9)


def test_pieces_as_far_apart_as_the_gap_are_merged():
    two = [Piece("k", 0, 10, 10, 0, 0), Piece("k", 50, 10, 10, 1, 0)]
    assert [fetch[1:3] for fetch in plan(two, gap=40, limit=1000)] == [(0, 60)]
    assert [fetch[1:3] for fetch in plan(two, gap=39, limit=1000)] == [(0, 10), (50, 10)]
    assert len(plan([two[0], two[1]._replace(offset=10)], gap=0, limit=1000)) == 1


def test_empty_pieces_ask_for_nothing():
    assert plan([Piece("k", 20, 0, 10, 0, 0)], gap=4096, limit=10) == []
    two = [Piece("k", 100, 100, 10, 0, 0), Piece("k", 0, 10, 10, 1, 0), Piece("k", 50, 0, 10, 2, 0)]
    assert [fetch[1:3] for fetch in plan(two, gap=0, limit=1000)] == [(0, 10), (100, 100)]


def test_cuts_lie_between_rows():
    (first, second, third) = plan([Piece("k", 30, 90, 30, 5, 7, 2)], gap=0, limit=50)
    assert [fetch.offset for fetch in (first, second, third)] == [30, 60, 90]
    assert [fetch.pieces[0].row for fetch in (first, second, third)] == [7, 8, 9]
    assert {fetch.pieces[0].check for fetch in (first, second, third)} == {2}


def test_planning_cost_grows_with_the_sort():
    def seconds(n_refs):
        pieces = [
            Piece(f"k{number % 40}", (ref * 30 + number) * 640, 640, 64, ref, number)
            for ref in range(n_refs)
            for number in range(30)
        ]
        best = []
        for _ in range(3):
            start = time.process_time()
            plan(pieces, gap=4096, limit=1 << 20)
            best.append(time.process_time() - start)
        return min(best)

    gc.disable()  # its passes over all live tuples are no part of planning
    try:
        few, many = seconds(256), seconds(4096)
    finally:
        gc.enable()
    assert many < 16 * 5 * few  # 16 times the pieces; a quadratic plan takes 256 times as long


# -- positions -------------------------------------------------------------------------------------------------------


def test_slices_mean_what_they_mean_in_python():
    assert token_ranges(None, 7) == [(0, 7)]
    assert token_ranges(slice(-3, None), 7) == [(4, 7)]
    assert token_ranges([slice(5, 99), slice(None, 2, 1), slice(4, 2)], 7) == [(5, 7), (0, 2), (4, 4)]
    assert token_ranges(slice(np.int64(1), np.int32(3)), 7) == [(1, 3)]
    assert token_ranges([], 7) == []
    for wrong in (slice(0, 4, 2), slice(None, None, -1), 3):
        with pytest.raises(InputError, match="without a step"):
            plain_range(wrong, 7, what="tokens")


def test_positions_by_alignment():
    ref = step_ref(n_tokens=10, n_rows=10, response_start=6)
    ranges = [(0, 10), (4, 8), (7, 7), (0, 3)]
    assert positions("token", ref, ranges) == ranges
    assert positions("response", ref, ranges) == [(6, 10), (6, 8), (7, 7), (6, 6)]
    assert positions("forward", ref, ranges) == [(0, 9), (4, 8), (7, 7), (0, 3)]
    assert positions("step", ref, ranges) == [(0, 1)]
    segment = SegmentRef(spool_id="x", session_id="s", view="lineage", steps=(0, 3, 4), n_tokens=10, n_rows=10)
    assert positions("step", segment, [(2, 3)]) == [(0, 3)]
    nothing = step_ref()
    assert positions("forward", nothing, [(0, 0)]) == [(0, 0)]


@given(st.data())
def test_multimodal_tokens_take_the_rows_they_expand_to(data):
    n_tokens = data.draw(st.integers(0, 12))
    widths = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=n_tokens, max_size=n_tokens))
    units = tuple(Unit(f"u{i}", i, width) for i, width in enumerate(widths) if width > 1)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, n_tokens), st.integers(0, n_tokens))))
    ref = step_ref(n_tokens=n_tokens, n_rows=sum(widths), units=units)
    ((first, last),) = positions("forward", ref, [(start, stop)])
    rows = [token for token, width in enumerate(widths) for _ in range(width)][:-1]  # the last row is no forward
    assert rows[first:last] == [token for token in rows if start <= token < stop]


@st.composite
def extents_and_ranges(draw):
    extents, position = [], draw(st.integers(0, 5))
    for _ in range(draw(st.integers(0, 6))):
        n = draw(st.integers(0, 6))
        extents.append(Extent("s", draw(st.integers(0, 99)), n, position, 0))
        position += n + draw(st.sampled_from([0, 0, 3]))
    pairs = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=5))
    return extents, pairs


@given(extents_and_ranges())
def test_runs_and_gaps_are_the_rows_one_by_one(case):
    extents, ranges = case
    rows = {}
    for number, extent in enumerate(extents):
        rows |= {extent.position + i: (number, extent.row + i) for i in range(extent.n)}
    wanted_positions = [position for start, stop in ranges for position in range(start, stop)]
    runs, gaps, n = cover(extents, ranges)
    assert n == len(wanted_positions)
    found = {}
    for run in runs:
        assert run.n > 0
        assert extents[run.number] is run.extent
        found |= {run.to + i: (run.number, run.row + i) for i in range(run.n)}
    assert found == {i: rows[position] for i, position in enumerate(wanted_positions) if position in rows}
    missing = [(gap.to + i, gap.start + i) for gap in gaps for i in range(gap.stop - gap.start)]
    assert missing == [(i, position) for i, position in enumerate(wanted_positions) if position not in rows]


@given(extents_and_ranges(), st.lists(st.integers(1, 5), max_size=8))
def test_gaps_of_response_fields_are_generated_tokens_only(case, lengths):
    spans, at = [], 0
    for step, length in enumerate(lengths):
        if step % 2 == 0:
            spans.append(Span(step, at, at + length))
        at += length
    _, gaps, _ = cover(*case)
    parts = inside_spans(gaps, step_ref(spans=tuple(spans)))
    generated = {token for span in spans for token in range(span.start, span.stop)}
    naive = [(gap.to + i, gap.start + i) for gap in gaps for i in range(gap.stop - gap.start)]
    assert [(part.to + i, part.start + i) for part in parts for i in range(part.stop - part.start)] == [
        pair for pair in naive if pair[1] in generated
    ]


# -- checksums -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=600), min_size=1, max_size=6), st.randoms())
def test_checksums_of_parts_make_that_of_the_whole(parts, random):
    found, offset = [], 40
    for part in parts:
        found.append(Part(offset, len(part), crc32c(part)))
        offset += len(part)
    random.shuffle(found)
    assert total([part for part in found if part.length]) == crc32c(b"".join(parts))


def test_combining_long_runs():
    one, other = bytes(range(256)) * 4096, b"\xff" * (3 << 20)
    assert combine(crc32c(one), crc32c(other), len(other)) == crc32c(one + other)
