"""What is known of one reference beyond its lengths: its fields, what of them is missing, and where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, structs

from spool.errors import SpoolError
from spool.look.places import fetched_bytes, place_of
from spool.model.fields import LOSS_MASK
from spool.model.rows import forward_rows
from spool.read.sample import Coverage

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.model.fields import FieldSpec
    from spool.model.refs import SegmentRef, StepRef

_MASK = Coverage(structs.replace(LOSS_MASK, align="token"), ())  # stored for responses, there for every token
MOST_GAPS = 100
"""Gaps of a field that are listed; all are counted."""


class FieldDetail(Struct, frozen=True, kw_only=True):
    """A field of a reference.

    Attributes:
        kind: stored dtype and inner shape.
        align: what a row stands for.
        n_rows: rows that it should have.
        n_missing: rows that were never sent.
        gaps: half-open ranges of positions that were never sent, at most `MOST_GAPS`.
        hot_bytes, cold_bytes: bytes that a read of its rows fetches there, each once; where chunks are compressed they
            are fetched whole, also for rows that are not its own.
    """

    kind: str
    align: str
    n_rows: int
    n_missing: int
    gaps: tuple[tuple[int, int], ...]
    hot_bytes: int
    cold_bytes: int


class Detail(Struct, frozen=True, kw_only=True):
    """What is known of a reference.

    Attributes:
        fields: by name; the loss mask takes no bytes where it follows from which tokens were generated.
        problem: why its bytes are not found; None where they are.
    """

    fields: dict[str, FieldDetail] = {}
    problem: str | None = None


def detail(sp: Spool, ref: StepRef | SegmentRef) -> Detail:
    """Return what is known of a reference; no payload is read, and what cannot be found is said.

    Raises:
        SessionStateError: the spool is closed.
    """
    sizes: dict[str, dict[str, int]] = {}
    found = place_of(sp, ref)
    for (name, tier), n_bytes in fetched_bytes(found.ranges).items():
        own = sizes.setdefault(name.partition(".")[0], {"hot": 0, "cold": 0})
        own[tier] += n_bytes
    try:
        (covered,) = sp.coverage([ref])
    except SpoolError as error:
        return Detail(problem=str(error))
    fields = {}
    for name, coverage in {**covered, LOSS_MASK.name: _MASK}.items():
        own = sizes.get(name, {"hot": 0, "cold": 0})
        fields[name] = FieldDetail(
            kind=_kind(coverage.spec),
            align=coverage.spec.align,
            n_rows=_n_rows(ref, coverage.spec),
            n_missing=sum(stop - start for start, stop in coverage.gaps),
            gaps=coverage.gaps[:MOST_GAPS],
            hot_bytes=own["hot"],
            cold_bytes=own["cold"],
        )
    return Detail(fields=fields, problem=found.error)


def _kind(spec: FieldSpec) -> str:
    return f"{'ragged ' if spec.ragged else ''}{spec.dtype}{list(spec.shape) if spec.shape else ''}"


def _n_rows(ref: StepRef | SegmentRef, spec: FieldSpec) -> int:
    if spec.align == "forward":
        return forward_rows(ref.units, ref.n_tokens)
    if spec.align == "response":
        return ref.response_length
    return ref.n_tokens if spec.align == "token" else len(getattr(ref, "steps", (0,)))
