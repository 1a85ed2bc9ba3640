"""Memory for the rows of one array that its shard file does not hold yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from spool.model.fields import ArraySpec, numpy_dtype
from spool.stores.local import BLOCK, aligned_buffer

Fill = Callable[[npt.NDArray[Any], int], None]

BUDGET_BYTES = 16 << 20
FLUSH_BYTES = 1 << 20
_NARROW_BYTES = 2 * FLUSH_BYTES
_LEAST_BYTES = 64 << 10


class Ring:
    """A page-aligned ring of bytes, addressed by their offset in the shard.

    The byte at offset *i* lies at ``i % n_bytes``. Whoever fills and whoever writes out keep to disjoint ranges, so
    filling goes on behind a range that is being written.

    Args:
        spec: the array whose rows it holds.
        n_bytes: a multiple of `BLOCK`, and room for two rows at least.

    Attributes:
        n_bytes: its size.
        flush_bytes: from so many bytes on, whole blocks move to the shard file; at most half the ring.
    """

    def __init__(self, spec: ArraySpec, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.flush_bytes = min(FLUSH_BYTES, n_bytes // 2)
        self._shape = spec.shape
        self._dtype = numpy_dtype(spec.dtype)
        self._row_bytes = spec.row_bytes
        self._memory = aligned_buffer(n_bytes)
        self._array = np.frombuffer(self._memory, np.uint8)

    def parts(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` as one view, or two where they wrap; no copy."""
        low, n = start % self.n_bytes, stop - start
        first = min(n, self.n_bytes - low)
        views = [self._memory[low : low + first]]
        if first < n:
            views.append(self._memory[: n - first])
        return views

    def fill(self, start: int, n: int, fill: Fill, first: int, crc: int) -> int:
        """Let ``fill`` write ``n`` rows at offset ``start``; return ``crc`` continued over their bytes.

        Args:
            start: offset in the shard; a multiple of the row's bytes.
            n: rows; they fit the free part of the ring.
            fill: called with ``dst [k, *shape]`` and the number of its first row, for pieces in order.
            first: number of the first row for ``fill``.
            crc: crc32c so far.
        """
        while n:
            low = start % self.n_bytes
            k = min(n, (self.n_bytes - low) // self._row_bytes)
            if k:
                stop = low + k * self._row_bytes
                fill(self._array[low:stop].view(self._dtype).reshape(k, *self._shape), first)
                crc = crc32c(self._memory[low:stop], crc)
            else:
                k, crc = 1, self._fill_across_end(low, fill, first, crc)
            start, first, n = start + k * self._row_bytes, first + k, n - k
        return crc

    def _fill_across_end(self, low: int, fill: Fill, first: int, crc: int) -> int:
        row = np.empty((1, *self._shape), self._dtype)
        fill(row, first)
        data = row.reshape(-1).view(np.uint8)
        head = self.n_bytes - low
        self._array[low:] = data[:head]
        self._array[: self._row_bytes - head] = data[head:]
        return crc32c(data.data, crc)


def make_rings(arrays: Sequence[ArraySpec]) -> dict[str, Ring]:
    """Return a ring for each array: together about `BUDGET_BYTES`, shared out by the width of the rows.

    Narrow arrays get 2 MiB, less where there are many arrays, and 64 KiB or two rows at least.
    """
    if not arrays:
        return {}
    least = min(_NARROW_BYTES, BUDGET_BYTES // (2 * len(arrays)))
    rest, width = BUDGET_BYTES - least * len(arrays), sum(spec.row_bytes for spec in arrays)
    return {
        spec.name: Ring(
            spec, _whole_blocks(max(least + rest * spec.row_bytes // width, _LEAST_BYTES, 2 * (spec.row_bytes + BLOCK)))
        )
        for spec in arrays
    }


def _whole_blocks(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK) * BLOCK
