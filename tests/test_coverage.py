"""Arithmetic on extents against dictionaries of positions."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import IntegrityError
from spool.model.fields import FieldSpec
from spool.model.refs import Extent
from spool.rollout.coverage import (
    EMPTY,
    Range,
    arrays,
    cover,
    cut,
    cut_ranges,
    gaps,
    moved,
    normalized,
    overlay,
    subtract,
    subtract_ranges,
)

PLAIN = FieldSpec(name="f", dtype="uint8", align="forward")
RAGGED = FieldSpec(name="f", dtype="uint8", align="forward", ragged=True)
quick = settings(max_examples=100, deadline=None)

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=8).map(
    lambda pairs: normalized(itertools.starmap(Range, pairs))
)


@st.composite
def covers(draw, spec=RAGGED, stream="a"):
    """A cover of extents with random gaps; rows and values tell where they came from."""
    own, values, at = [], [], draw(st.integers(0, 9))
    for i in range(draw(st.integers(0, 6))):
        n = draw(st.integers(1, 5))
        own.append(Extent(stream, 1000 * i, n, at, i, draw(st.integers(0, 2)), draw(st.integers(0, 2))))
        values.append(Extent(stream, 5000 + i, 7, 0, 99))
        at += n + draw(st.sampled_from([0, 0, 1, 3]))
    found = {"f.offsets": tuple(own), "f.values": tuple(values)} if spec.ragged else {"f": tuple(own)}
    return cover(spec, found)


def rows(what):
    """Return {position: (stream, row, partner's row)}, after checking that the cover is well made."""
    out = {}
    partners = what.partners or [None] * len(what.extents)
    for extent, partner in zip(what.extents, partners, strict=True):
        assert extent.n > 0 and extent.before >= 0 and extent.after >= 0
        for i in range(extent.n):
            assert extent.position + i not in out
            out[extent.position + i] = (
                extent.stream,
                extent.row + i,
                partner and (partner.stream, partner.row, partner.n),
            )
    assert list(out) == sorted(out)
    assert positions(what.ranges) == set(out)
    assert what.ranges == normalized(what.ranges)
    return out


def positions(some):
    return {p for r in some for p in range(r.position, r.stop)}


def origins(what):
    """Return the whole extents, before any cut, by crc: cutting must not change them."""
    return {(e.stream, e.crc, e.row - e.before, e.before + e.n + e.after) for e in what.extents}


@quick
@given(base=covers(), top=covers(stream="b"))
def test_overlay_is_a_dictionary_update(base, top):
    laid = overlay(base, top)
    assert rows(laid) == {**rows(base), **rows(top)}
    assert origins(laid) <= origins(base) | origins(top)


@quick
@given(what=covers(), start=st.integers(-3, 50), stop=st.integers(-3, 50))
def test_cut_and_gaps(what, start, stop):
    part = cut(what, start, stop)
    assert rows(part) == {p: row for p, row in rows(what).items() if start <= p < stop}
    assert origins(part) <= origins(what)
    assert positions(gaps(what, start, stop)) == set(range(start, stop)) - set(rows(what))


@quick
@given(what=covers(), taken=ranges)
def test_subtract(what, taken):
    left = subtract(what, taken)
    assert rows(left) == {p: row for p, row in rows(what).items() if p not in positions(taken)}
    assert origins(left) <= origins(what)


@quick
@given(some=ranges, taken=ranges, start=st.integers(-2, 50), stop=st.integers(-2, 50))
def test_ranges(some, taken, start, stop):
    assert positions(subtract_ranges(some, taken)) == positions(some) - positions(taken)
    assert positions(cut_ranges(some, start, stop)) == positions(some) & set(range(start, stop))


@quick
@given(pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6))))
def test_normalized_ranges_are_ascending_and_apart(pairs):
    merged = normalized(itertools.starmap(Range, pairs))
    assert positions(merged) == {p for position, n in pairs for p in range(position, position + n)}
    assert all(a.stop < b.position for a, b in itertools.pairwise(merged))
    assert all(r.n > 0 for r in merged)


def test_values_of_a_ragged_field_stay_whole_and_paired():
    offsets = (Extent("a", 10, 5, 0, 1), Extent("a", 30, 5, 5, 2))
    values = (Extent("a", 100, 50, 0, 3), Extent("a", 200, 60, 0, 4))
    whole = cover(RAGGED, {"f.offsets": offsets, "f.values": values})
    part = cut(whole, 3, 6)
    assert arrays(RAGGED, part) == {
        "f.offsets": (Extent("a", 13, 2, 3, 1, 3, 0), Extent("a", 30, 1, 5, 2, 0, 4)),
        "f.values": values,
    }
    top = cover(RAGGED, {"f.offsets": (Extent("b", 0, 1, 2, 5),), "f.values": (Extent("b", 9, 3, 0, 6),)})
    assert [v.row for v in overlay(whole, top).partners] == [100, 9, 100, 200]


def test_moved_rows_stand_elsewhere():
    what = cover(PLAIN, {"f": (Extent("a", 4, 2, 0, 1), Extent("a", 9, 1, 2, 1))})
    assert [(e.row, e.position) for e in moved(what, 7).extents] == [(4, 7), (9, 9)]
    assert moved(what, 7).ranges == (Range(7, 3),)
    assert moved(EMPTY, 3) == EMPTY
    assert arrays(PLAIN, EMPTY) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"f": (Extent("a", 0, 2, 0, 1), Extent("a", 9, 2, 1, 1))},
        {"f": (Extent("a", 0, 2, 5, 1), Extent("a", 9, 2, 0, 1))},
        {"f": (Extent("a", 0, 0, 0, 1),)},
    ],
)
def test_extents_that_overlap_or_are_empty_are_refused(wrong):
    with pytest.raises(IntegrityError, match="'f'"):
        cover(PLAIN, wrong)
    with pytest.raises(IntegrityError, match="pairs"):
        cover(RAGGED, {"f.offsets": wrong["f"], "f.values": ()})


def test_appending_to_thousands_of_extents_costs_a_copy():
    many = cover(PLAIN, {"f": tuple(Extent("a", 10 * i, 10, 10 * i, i) for i in range(5000))})
    next_one = cover(PLAIN, {"f": (Extent("a", 0, 10, 50_000, 1),)})
    copy = best(lambda: (*many.extents, *next_one.extents))
    assert best(lambda: overlay(many, next_one)) < 8 * copy
    assert best(lambda: cut(many, 0, 49_995)) < 8 * copy
    assert best(lambda: gaps(many, 0, 50_001)) < 8 * copy
    assert gaps(many, 0, 50_001) == (Range(50_000, 1),)


def best(call, n=20):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
