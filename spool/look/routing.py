"""Routing in numbers: how often each expert is chosen, how evenly, how steadily, and how two references differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from spool.errors import GapError, InputError, NotFoundError, ReleasedError
from spool.look.counting import Counter, common
from spool.look.rows import Rows
from spool.model.fields import TOKEN_IDS
from spool.model.refs import SegmentRef, StepRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spool.handle import Spool

    Progress = Callable[[int, int], object]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_COMPARED_TOKENS = 1 << 16


class RoutingSummary(Struct, frozen=True, eq=False, kw_only=True):
    """Counts of experts, of one reference or of many. Sums add up: see `add`.

    What nothing was counted for is NaN. A reference without routing has no layers.

    Attributes:
        layers: absolute numbers of the MoE layers [L].
        num_experts: E, experts a layer.
        topk: experts chosen for a row in a layer.
        load: int64 [L, E]: how often each expert was chosen.
        n_rows: forward rows that were counted.
        shared: int64 [L]: experts that a row has in common with the row before it, added up.
        n_pairs: pairs of neighbouring rows; over a gap there is none.
        n_missing: forward rows that were never sent.
        gaps: which those are, half-open, of one reference; empty for a sum.
        n_refs: references that were counted.
    """

    layers: tuple[int, ...] = ()
    num_experts: int = 0
    topk: int = 0
    load: Counts
    n_rows: int = 0
    shared: Counts
    n_pairs: int = 0
    n_missing: int = 0
    gaps: tuple[tuple[int, int], ...] = ()
    n_refs: int = 0

    @staticmethod
    def of(
        sp: Spool, ref: SegmentRef | StepRef, *, rows: slice | None = None, progress: Progress | None = None
    ) -> RoutingSummary:
        """Count the routing of a reference; memory does not depend on its length.

        Args:
            sp: the spool.
            ref: a segment or step.
            rows: only these forward rows.
            progress: called with how many rows were gone through, and how many there are.

        Raises:
            ReleasedError, IntegrityError, StorageError: it cannot be read.
        """
        summary = RoutingSummary.none()
        for summary, done, total in RoutingSummary.reading(sp, ref, rows=rows):  # noqa: B007
            if progress is not None:
                progress(done, total)
        return summary

    @staticmethod
    def reading(
        sp: Spool, ref: SegmentRef | StepRef, *, rows: slice | None = None
    ) -> Iterator[tuple[RoutingSummary, int, int]]:
        """Count like `of`, and give after every read what is known, how many rows that was, and of how many.

        The first comes before anything is read, so there always is one.
        """
        about = Rows(sp, ref)
        first, stop, _ = (rows or slice(None)).indices(about.n_rows)
        counter, total = Counter(ref.id, about.shape), max(stop - first, 0)
        gaps = tuple((max(low, first), min(high, stop)) for low, high in about.gaps if low < stop and high > first)
        done = 0
        yield RoutingSummary._made(about, counter, gaps), done, total
        for window in about.windows(rows):
            counter.take(window.positions, window.experts)
            done = window.stop - first
            yield RoutingSummary._made(about, counter, gaps), done, total
        if done < total:  # a gap at the end
            yield RoutingSummary._made(about, counter, gaps), total, total

    @staticmethod
    def _made(about: Rows, counter: Counter, gaps: tuple[tuple[int, int], ...]) -> RoutingSummary:
        return RoutingSummary(
            layers=about.layers,
            num_experts=about.num_experts,
            topk=about.topk,
            load=counter.load.copy(),
            n_rows=counter.n_rows,
            shared=counter.shared.copy(),
            n_pairs=counter.n_pairs,
            n_missing=sum(stop - start for start, stop in gaps),
            gaps=gaps,
            n_refs=1,
        )

    @staticmethod
    def none() -> RoutingSummary:
        """Return the summary of nothing, to which any can be added."""
        return RoutingSummary(load=np.zeros((0, 0), np.int64), shared=np.zeros(0, np.int64))

    @property
    def shape(self) -> tuple[tuple[int, ...], int, int]:
        """Layers, experts and top-k: summaries of one shape can be added and compared."""
        return self.layers, self.num_experts, self.topk

    def add(self, other: RoutingSummary) -> RoutingSummary:
        """Return the sum of both; rows that two references share are counted for each.

        Raises:
            InputError: they are of models of different shapes.
        """
        if not self.layers or not other.layers:
            one = self if self.layers else other
            load, shared = one.load, one.shared
        elif self.shape != other.shape:
            raise InputError(f"routing of different shapes has no sum: {_named(self)} and {_named(other)}")
        else:
            one, load, shared = self, self.load + other.load, self.shared + other.shared
        return RoutingSummary(
            layers=one.layers,
            num_experts=one.num_experts,
            topk=one.topk,
            load=load,
            n_rows=self.n_rows + other.n_rows,
            shared=shared,
            n_pairs=self.n_pairs + other.n_pairs,
            n_missing=self.n_missing + other.n_missing,
            n_refs=self.n_refs + other.n_refs,
        )

    @property
    def share(self) -> Floats:
        """Load as a part of its layer's: float64 [L, E], each row adding up to 1."""
        return _ratio(self.load, self.load.sum(axis=1, keepdims=True))

    @property
    def imbalance(self) -> Floats:
        """Load of the busiest expert over the mean [L]: 1 where all are used alike."""
        imbalance: Floats = self.share.max(axis=1, initial=0.0) * self.num_experts
        return imbalance

    @property
    def entropy(self) -> Floats:
        """Entropy of the load over its largest possible value [L]: 1 where all are used alike, 0 for one expert."""
        share = self.share
        bits: Floats = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
        return bits / math.log(self.num_experts) if self.num_experts > 1 else bits + 1.0

    @property
    def unused(self) -> Floats:
        """Part of a layer's experts that were never chosen [L]."""
        never = (self.load == 0).mean(axis=1) if self.num_experts else np.zeros(len(self.layers))
        return np.where(self.load.any(axis=1), never, np.nan)

    @property
    def overlap(self) -> Floats:
        """Part of its experts that a row has in common with the row before it, on average [L]."""
        return _ratio(self.shared, np.full(len(self.layers), self.n_pairs * self.topk))


class RoutingDifference(Struct, frozen=True, eq=False, kw_only=True):
    """How the routing of two references differs.

    Attributes:
        a, b: what each has.
        n_common: forward rows that both have, over the tokens in front that are the same.
        shared: int64 [L]: experts that they have in common on those rows, added up.
        equal: int64 [L]: rows on which all of them are the same.
    """

    a: RoutingSummary
    b: RoutingSummary
    n_common: int
    shared: Counts
    equal: Counts

    @property
    def layers(self) -> tuple[int, ...]:
        """Absolute numbers of the MoE layers."""
        return self.a.layers

    @property
    def distance(self) -> Floats:
        """Total variation of the loads [L]: 0 where each expert has the same share in both, 1 where none is shared."""
        distance: Floats = np.abs(self.a.share - self.b.share).sum(axis=1) / 2
        return distance

    @property
    def agreement(self) -> Floats:
        """Part of the experts that both chose, on the common rows [L]."""
        return _ratio(self.shared, np.full(len(self.layers), self.n_common * self.a.topk))

    @property
    def identical(self) -> Floats:
        """Part of the common rows on which both chose the same experts, in whatever order [L]."""
        return _ratio(self.equal, np.full(len(self.layers), self.n_common))


def compare(
    sp: Spool, a: SegmentRef | StepRef, b: SegmentRef | StepRef, *, progress: Progress | None = None
) -> RoutingDifference:
    """Compare the routing of two references.

    Args:
        sp: the spool.
        a, b: segments or steps.
        progress: called with how many rows were gone through, and how many there are, of three readings in turn.

    Raises:
        InputError: one has no routing, or they are of models of different shapes.
        ReleasedError, IntegrityError, StorageError: they cannot be read.
    """
    of_a = RoutingSummary.of(sp, a, progress=progress)
    of_b = RoutingSummary.of(sp, b, progress=progress)
    check_comparable(of_a, of_b)
    difference = None
    for difference, done, total in comparing(sp, a, b, of_a, of_b):  # noqa: B007
        if progress is not None:
            progress(done, total)
    assert difference is not None
    return difference


def check_comparable(a: RoutingSummary, b: RoutingSummary) -> None:
    """Check that two references have routing, of the same shape.

    Raises:
        InputError: they have not.
    """
    if not a.layers or not b.layers:
        raise InputError("only references that both have routed_experts can be compared")
    if a.shape != b.shape:
        raise InputError(f"routing of different shapes cannot be compared: {_named(a)} and {_named(b)}")


def comparing(
    sp: Spool, a: SegmentRef | StepRef, b: SegmentRef | StepRef, of_a: RoutingSummary, of_b: RoutingSummary
) -> Iterator[tuple[RoutingDifference, int, int]]:
    """Compare row by row, and give after every read what is known, how many rows that was, and of how many.

    Args:
        sp: the spool.
        a, b: segments or steps.
        of_a, of_b: their summaries, of one shape.
    """
    left, right = Rows(sp, a), Rows(sp, b)
    n_same = _same_tokens(sp, a, b)
    stop = min(int(left.starts[n_same]), left.n_rows, right.n_rows)
    n, end, shared, equal = 0, 0, np.zeros(len(left.layers), np.int64), np.zeros(len(left.layers), np.int64)
    yield RoutingDifference(a=of_a, b=of_b, n_common=n, shared=shared, equal=equal), end, stop
    for tokens, start, planned in left.plan(0, stop):
        end = min(planned, stop)
        kept = left.kept(start, end) & right.kept(start, end)
        one, other = (about.read(tokens)[: end - start][kept] for about in (left, right))
        found = common(one.transpose(2, 0, 1), other.transpose(2, 0, 1))
        shared = shared + found.sum(axis=0, dtype=np.int64)
        equal = equal + (found == left.topk).sum(axis=0, dtype=np.int64)
        n += len(one)
        yield RoutingDifference(a=of_a, b=of_b, n_common=n, shared=shared, equal=equal), end, stop
    if end < stop:  # a gap at the end
        yield RoutingDifference(a=of_a, b=of_b, n_common=n, shared=shared, equal=equal), stop, stop


def _same_tokens(sp: Spool, a: SegmentRef | StepRef, b: SegmentRef | StepRef) -> int:
    """Return how many tokens in front are the same, units included; 0 where they are not stored."""
    limit = min(a.n_tokens, b.n_tokens)
    for mine, theirs in zip(a.units, b.units, strict=False):
        if mine != theirs:
            limit = min(limit, mine.position, theirs.position)
            break
    else:
        shorter = min(len(a.units), len(b.units))
        limit = min([limit, *(unit.position for unit in (*a.units[shorter:], *b.units[shorter:]))])
    for start in range(0, limit, _COMPARED_TOKENS):
        part = slice(start, min(start + _COMPARED_TOKENS, limit))
        try:
            one, other = (sp.read(ref, fields=[TOKEN_IDS.name], tokens=part)[TOKEN_IDS.name] for ref in (a, b))
        except ReleasedError:
            raise
        except (NotFoundError, GapError):
            return start
        differs = np.flatnonzero(one != other)
        if differs.size:
            return start + int(differs[0])
    return limit


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> Floats:
    ratio: Floats = np.full(part.shape, np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio


def _named(summary: RoutingSummary) -> str:
    return f"{len(summary.layers)} layers of {summary.num_experts} experts, top {summary.topk}"
