"""Whether a reference can be one: what is refused before anything is looked up, read or made room for.

All of it follows from the reference alone and costs a look at each of its parts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from spool.errors import IntegrityError
from spool.model.refs import SegmentRef, StepRef
from spool.model.rows import MOST, row_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.model.refs import Extent, Ref, Span, VersionSpan


def check_reference(ref: Ref) -> None:
    """Refuse a reference whose lengths, units or spans no session has.

    Raises:
        IntegrityError: it is damaged; names what does not fit.
    """
    if not 0 <= ref.response_start <= ref.n_tokens < MOST or not 0 <= ref.n_rows < MOST:
        raise _damaged(ref, f"it says {ref.n_tokens} tokens, {ref.n_rows} rows, response from {ref.response_start}")
    if any(unit.n_rows < 1 or not 0 <= unit.position < ref.n_tokens for unit in ref.units):
        raise _damaged(ref, f"it has units outside of its {ref.n_tokens} tokens, or of no rows")
    expanded = row_at(ref.units, ref.n_tokens)
    if ref.n_rows != expanded:
        raise _damaged(ref, f"its {ref.n_tokens} tokens expand to {expanded} rows, and it says {ref.n_rows}")
    _check_spans(ref, "spans", ref.spans)
    _check_spans(ref, "versions", ref.versions)


def _check_spans(ref: Ref, what: str, spans: Sequence[Span] | Sequence[VersionSpan]) -> None:
    end = ref.response_start
    for span in spans:
        start, stop = span.start, span.stop
        if not end <= start <= stop:
            raise _damaged(ref, f"its {what} have [{start}, {stop}) behind {end}")
        end = stop
    if end > ref.n_tokens:
        raise _damaged(ref, f"its {what} end at {end}, behind its {ref.n_tokens} tokens")


def check_extents(ref: Ref, field: str, extents: Sequence[Extent], most: int) -> None:
    """Refuse extents that stand for a position twice, take a row twice, or stand for positions that no field has.

    Args:
        ref: the reference.
        field: the field.
        extents: of its rows, or of the end offsets of a ragged field; at least one.
        most: positions are below.

    Raises:
        IntegrityError: the reference is damaged; names the field and the extent.
    """
    end, row, stream, ascending = 0, 0, extents[0].stream, True
    for extent in extents:
        position, n, first = extent.position, extent.n, extent.row
        if position < end or n < 0:
            raise _odd(ref, field, extent, f"where what is in front of it ends at {end}")
        if first < row or extent.stream != stream:
            ascending = False
        end, row = position + n, first + n
    if end > most:
        raise _odd(ref, field, extents[-1], f"and there are {most} at most")
    if not ascending:
        _check_rows(ref, field, extents)


def _check_rows(ref: Ref, field: str, extents: Sequence[Extent]) -> None:
    """Refuse extents that take a row twice."""
    by_row = sorted((extent for extent in extents if extent.n), key=lambda extent: (extent.stream, extent.row))
    for one, other in pairwise(by_row):
        if one.stream == other.stream and other.row < one.row + one.n:
            raise _odd(ref, field, other, f"and rows up to {one.row + one.n} stand for those from {one.position} on")


def _odd(ref: Ref, field: str, extent: Extent, why: str) -> IntegrityError:
    rows = [extent.row, extent.row + extent.n]
    return _damaged(
        ref,
        f"rows [{rows[0]}, {rows[1]}) of {field} in stream {extent.stream} stand for positions "
        f"[{extent.position}, {extent.position + extent.n}), {why}",
        field=field, stream=extent.stream, rows=rows,
    )  # fmt: skip


def _damaged(ref: Ref, why: str, **details: object) -> IntegrityError:
    name = name_of(ref)
    return IntegrityError(
        f"the reference {name} is damaged: {why}; take it from the catalog again",
        ref=name, session_id=ref.session_id, **details,
    )  # fmt: skip


def name_of(ref: Ref) -> str:
    """Return how errors call a reference."""
    return ref.id if isinstance(ref, SegmentRef | StepRef) else ref.session_id
