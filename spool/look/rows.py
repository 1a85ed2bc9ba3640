"""Routed experts of one reference, a bounded number of forward rows at a time."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spool.errors import NotFoundError, ReleasedError
from spool.model.fields import ROUTED_EXPERTS
from spool.model.rows import forward_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from spool.handle import Spool
    from spool.model.refs import Ref

WINDOW_ROWS = 4096
"""Forward rows of a read; a unit that expands to more is read whole."""


class Window(NamedTuple):
    """Rows that were read together.

    Attributes:
        positions: int64 [n], ascending: the forward rows these are; those that were never sent are left out.
        experts: stored dtype [n, layers, topk].
        stop: one past the last forward row that was asked for so far.
    """

    positions: NDArray[np.int64]
    experts: NDArray[Any]
    stop: int


class Rows:
    """What is known of a reference's routing before any of it is read.

    Attributes:
        ref: the reference.
        layers: absolute numbers of the MoE layers; empty where the reference has no routing.
        num_experts, topk: 0 where it has none.
        n_rows: forward rows that it should have.
        gaps: half-open ranges of forward rows that were never sent.
        starts: int64 [n_tokens + 1]: the first forward row of each token.
    """

    def __init__(self, sp: Spool, ref: Ref) -> None:
        self._sp, self.ref = sp, ref
        self.n_rows = forward_rows(ref.units, ref.n_tokens)
        self.starts = token_rows(ref)
        self.layers: tuple[int, ...] = ()
        self.num_experts = self.topk = 0
        self.gaps: tuple[tuple[int, int], ...] = ((0, self.n_rows),) if self.n_rows else ()
        try:
            found = sp.coverage([ref], [ROUTED_EXPERTS])[0].get(ROUTED_EXPERTS)
        except ReleasedError:
            raise
        except NotFoundError:
            found = None
        if found is not None:
            spec = found.spec
            self.layers = tuple(range(spec.num_layers or 0)) if spec.layers is None else spec.layers
            self.num_experts, self.topk, self.gaps = spec.bound or 0, spec.shape[-1], found.gaps

    @property
    def shape(self) -> tuple[tuple[int, ...], int, int]:
        """What two references must share for their experts to be comparable."""
        return self.layers, self.num_experts, self.topk

    def read(self, tokens: slice) -> NDArray[Any]:
        """Return the experts of the rows of ``tokens`` as they are stored, MoE layers only; 0 in gaps."""
        span = slice(self.layers[0], self.layers[-1] + 1)
        sample = self._sp.read(self.ref, fields=[ROUTED_EXPERTS], tokens=tokens, layers=span, dtype="stored", missing=0)
        rows: NDArray[Any] = sample[ROUTED_EXPERTS]
        if rows.shape[1] != len(self.layers):
            rows = rows[:, np.asarray(self.layers) - self.layers[0]]
        return rows

    def windows(self, rows: slice | None = None) -> Iterator[Window]:
        """Read the rows that there are, `WINDOW_ROWS` at a time; what is all gap is passed over."""
        first, stop, _ = (rows or slice(None)).indices(self.n_rows)
        for tokens, start, end in self.plan(first, stop):
            kept = self.kept(start, end) & _within(start, end, first, stop)
            experts = self.read(tokens)
            positions = np.arange(start, end, dtype=np.int64)
            yield Window(positions[kept], experts if kept.all() else experts[kept], min(end, stop))

    def plan(self, first: int, stop: int) -> Iterator[tuple[slice, int, int]]:
        """Return what to read for the rows ``[first, stop)``: tokens, and the rows ``[start, end)`` that they have."""
        if not self.layers:
            return
        opens = [gap[0] for gap in self.gaps]
        while first < stop:
            number = bisect_right(opens, first) - 1
            gap_stop = self.gaps[number][1] if number >= 0 else 0
            if gap_stop > first:
                first = gap_stop
                continue
            token = self._token(first)
            last = max(self._token(int(self.starts[token]) + WINDOW_ROWS), token + 1)
            start, end = int(self.starts[token]), min(int(self.starts[last]), self.n_rows)
            yield slice(token, last), start, end
            first = end

    def _token(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, "right")) - 1

    def kept(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the forward rows ``[start, stop)`` were sent."""
        kept = np.ones(stop - start, np.bool_)
        for low, high in self.gaps[max(bisect_right(self.gaps, (start, start)) - 1, 0) :]:
            if low >= stop:
                break
            kept[max(low - start, 0) : max(high - start, 0)] = False
        return kept


def token_rows(ref: Ref) -> NDArray[np.int64]:
    """Return the first forward row of each token, and one past those of the last: int64 [n_tokens + 1]."""
    widths = np.ones(ref.n_tokens + 1, np.int64)
    for unit in ref.units:
        widths[unit.position + 1] = unit.n_rows
    widths[0] = 0
    return np.cumsum(widths)


def _within(start: int, stop: int, first: int, last: int) -> NDArray[np.bool_]:
    positions = np.arange(start, stop)
    return (positions >= first) & (positions < last)
