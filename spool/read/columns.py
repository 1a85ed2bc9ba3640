"""One field of one reference on its way into memory: what to ask the store for, and what to make of it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from spool.errors import IntegrityError
from spool.formats.arrays import Ragged
from spool.read.assemble import Array, Target
from spool.read.select import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from spool.model.refs import Extent
    from spool.read.fetch import Batch
    from spool.read.streams import FieldView


class MaskColumn:
    """A loss mask: what the spans say, less what a stored mask clears.

    Args:
        mask: uint8 ``[n]`` from the spans.
        view: the stored field, where there is one.
        runs: its rows, in the coordinates of ``mask``.
        batch: gets what to read.
        out: the caller's array.
    """

    def __init__(
        self, mask: NDArray[np.uint8], view: FieldView | None, runs: Sequence[Run], batch: Batch, out: Array | None
    ) -> None:
        self._mask = mask
        self._out = out
        self._stored: NDArray[np.uint8] | None = None
        if view is not None and runs:
            self._stored = np.ones(len(mask), np.uint8)
            batch.want(view.values, runs, Target(self._stored))

    def finish(self) -> Array:
        """Return the mask; what was asked for is read."""
        if self._stored is not None:
            self._mask &= self._stored != 0
        if self._out is None:
            return self._mask
        self._out[...] = self._mask
        return self._out


class RaggedColumn:
    """A ragged field, read in two passes: end offsets, then the values between them.

    The values of the *i*-th extent of ``FIELD.offsets`` are the run of rows that the *i*-th extent of
    ``FIELD.values`` is part of, whole; an end offset counts values of that run, so a cut extent also reads the end
    offset of the row in front. Gaps become empty rows.

    Args:
        view: the field.
        runs: rows of the offsets array.
        n: rows of the result.
        values: extents of the values, one for each extent of the offsets.
        batch: gets the end offsets to read.
    """

    def __init__(self, view: FieldView, runs: Sequence[Run], n: int, values: Sequence[Extent], batch: Batch) -> None:
        self._view = view
        self._runs = runs
        self._values = values
        self._n = n
        self._starts = [0]
        for run in runs:
            self._starts.append(self._starts[-1] + run.n + 1)
        self._ends = np.zeros(self._starts[-1], np.uint64)
        batch.want(view.offsets, self.end_runs(), Target(self._ends))

    def end_runs(self) -> list[Run]:
        """Return the end offsets to read."""
        return [_run_of_ends(run, at) for run, at in zip(self._runs, self._starts, strict=False)]

    def value_runs(self) -> list[Run]:
        """Return the values to read; the end offsets are there.

        Raises:
            IntegrityError: end offsets fall, or lead out of the values.
        """
        ends = self._ends.astype(np.int64)
        lengths = np.zeros(self._n, np.int64)
        for run, (start, stop) in zip(self._runs, pairwise(self._starts), strict=True):
            lengths[run.to : run.to + run.n] = np.diff(ends[start:stop])
            self._check(run, lengths[run.to : run.to + run.n], int(ends[start]), int(ends[stop - 1]))
        self._offsets = np.zeros(self._n + 1, np.int64)
        np.cumsum(lengths, out=self._offsets[1:])
        found = []
        for run, start in zip(self._runs, self._starts, strict=False):
            extent = self._values[run.number]
            row = extent.row - extent.before + int(ends[start])
            to, stop = int(self._offsets[run.to]), int(self._offsets[run.to + run.n])
            if stop > to:
                found.append(Run(extent, run.number, row, stop - to, to))
        return found

    def want_values(self, batch: Batch, make: Callable[[FieldView, int], Target]) -> None:
        """Add the values to ``batch``; the end offsets are there.

        Args:
            batch: gets what to read.
            make: returns what takes so many values of the field.

        Raises:
            IntegrityError: end offsets fall, or lead out of the values.
        """
        runs = self.value_runs()
        target = make(self._view, int(self._offsets[-1]))
        self._array = target.array
        batch.want(self._view.values, runs, target)

    def _check(self, run: Run, lengths: NDArray[np.int64], first: int, last: int) -> None:
        name, stream = self._view.spec.name, run.extent.stream
        extent = self._values[run.number] if run.number < len(self._values) else None
        n_values = extent.before + extent.n + extent.after if extent is not None else 0
        if extent is None or extent.stream != stream or first < 0 or last > n_values or (lengths < 0).any():
            raise IntegrityError(
                f"end offsets of {name} in rows [{run.row}, {run.row + run.n}) of stream {stream} do not lead "
                f"through the {n_values} values they belong to; reference or stream is damaged: run `spool verify`",
                stream=stream, field=name, rows=[run.row, run.row + run.n],
            )  # fmt: skip

    def finish(self) -> Ragged:
        """Return values and offsets; both passes are done."""
        return Ragged(self._array, self._offsets)


def _run_of_ends(run: Run, at: int) -> Run:
    if run.row > run.extent.row - run.extent.before:
        return run._replace(row=run.row - 1, n=run.n + 1, to=at)
    return run._replace(to=at + 1)


LateColumn = MaskColumn | RaggedColumn
"""What becomes an array once something is read."""
