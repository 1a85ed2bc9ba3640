"""The arrays that rows land in: widened, masked, filled, ragged; without any I/O."""

from __future__ import annotations

import operator
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from spool.errors import InputError
from spool.formats.arrays import copy_rows
from spool.formats.experts import widen
from spool.read.streams import Dtype, Source, holds, mantissa_bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spool.model.refs import Span
    from spool.read.select import Gap, Range

Array = NDArray[Any]
Missing = int | Literal["error"]


class Target:
    """An array that takes stored rows.

    Args:
        array: ``[n, *inner]``, any strides.
        layers: the absolute layers that axis 1 holds; None where the field has none, or where it holds all.
    """

    __slots__ = ("_bytes", "array", "layers")

    def __init__(self, array: Array, layers: slice | None = None) -> None:
        self.array = array
        self.layers = layers
        self._bytes: memoryview | None = None

    def takes(self, source: Source) -> bool:
        """Return whether the stored bytes of ``source`` are what this array holds."""
        return (
            self.array.dtype == source.dtype
            and self.layers is None
            and source.field.layers is None
            and self.array.flags.c_contiguous
        )

    def slot(self, source: Source, row: int, n_bytes: int) -> memoryview:
        """Return the memory of rows from ``row`` on, of an array that takes ``source``."""
        if self._bytes is None:
            self._bytes = self.array.reshape(-1).view(np.uint8).data
        start = row * source.row_bytes
        return self._bytes[start : start + n_bytes]

    def put(self, source: Source, row: int, data: NDArray[np.uint8]) -> None:
        """Store the rows in ``data``, as ``source`` stores them, from ``row`` on."""
        n = len(data) // source.row_bytes
        self.put_rows(source, row, data.view(source.dtype).reshape(n, *source.shape))

    def put_rows(self, source: Source, row: int, stored: Array) -> None:
        """Store rows from ``row`` on; of a field with layers, all that are stored or those that this array holds."""
        into = self.array[row : row + len(stored)]
        if self.layers is None and source.field.layers is None:
            copy_rows(into, stored)
        else:
            widen(into, stored, source.field, self.layers)


def fill(array: Array, gaps: Iterable[Gap], value: int) -> None:
    """Set the rows of ``gaps``."""
    for gap in gaps:
        array[gap.to : gap.to + gap.stop - gap.start] = value


def check_missing(missing: Missing, dtype: Dtype, *, field: str) -> int:
    """Return ``missing`` if rows of ``dtype`` can hold it.

    Raises:
        InputError: they cannot.
    """
    try:
        value = operator.index(missing)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(f"missing={missing!r:.80} is neither 'error' nor an integer", field=field) from error
    if dtype.kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    elif dtype.kind == "b":
        low, high = 0, 1
    else:
        high = 2 << mantissa_bits(dtype)
        low = -high
    if not low <= value <= high:
        raise InputError(
            f"missing={value} does not fit {field} as {dtype} ([{low}, {high}]); take another value, or dtype='train'",
            field=field, missing=value, dtype=str(dtype),
        )  # fmt: skip
    return value


def span_mask(spans: Sequence[Span], ranges: Iterable[Range], n: int) -> NDArray[np.uint8]:
    """Return 1 for each token of ``ranges`` that a trained span generated, 0 for the others; uint8 ``[n]``."""
    mask = np.zeros(n, np.uint8)
    stops = [span.stop for span in spans]
    to = 0
    for start, stop in ranges:
        index = bisect_right(stops, start)
        while index < len(spans) and spans[index].start < stop:
            span = spans[index]
            if span.trained:
                low, high = max(span.start, start), min(span.stop, stop)
                mask[to + low - start : to + high - start] = 1
            index += 1
        to += stop - start
    return mask


def check_out(out: object, shape: tuple[int, ...], stored: Dtype, *, field: str) -> None:
    """Refuse an array that cannot take rows as they would be returned.

    Raises:
        InputError: not a writable numpy array of ``shape`` and of a dtype that holds every value of ``stored``.
    """
    if not isinstance(out, np.ndarray) or not out.flags.writeable:
        raise InputError(f"out= for {field} must be a writable numpy array", field=field)
    if out.shape != shape:
        raise InputError(f"out= for {field} must have shape {shape}, got {out.shape}", field=field, expected=shape)
    if not holds(out.dtype, stored):
        raise InputError(f"out= for {field} is {out.dtype}, which does not hold {stored} without loss", field=field)
