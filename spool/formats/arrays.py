"""Whatever a caller or an engine hands over, as numpy arrays whose values the field's stored dtype can hold.

Two kinds of functions: those without a spec take a ``what`` that names the whole thing (``"logprobs of step 3"``),
those with a spec take a ``what`` that names the place (``"step 3"``) and put the field's name in front.
"""

from __future__ import annotations

import itertools
import reprlib
import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from spool.errors import PayloadError
from spool.formats.values import (
    Array,
    check_inner,
    check_values,
    first_unfit,
    fits,
    integers_within,
    item,
    reason,
    value_error,
)
from spool.model.fields import FieldSpec, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PIECE",
    "Ragged",
    "as_array",
    "as_floats",
    "as_token_ids",
    "bits_view",
    "check_values",
    "copy_rows",
    "count_nonfinite",
    "ragged",
    "value_view",
]

Tensor: TypeAlias = Any
"""A torch.Tensor; torch is not imported here."""

PIECE = 32_768
"""Values of a list converted at once; other threads get the GIL in between."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT32_END = 1 << 31


class Ragged(NamedTuple):
    """Rows of any length, end to end.

    Attributes:
        values: ``[sum of lengths, *inner]``.
        offsets: int64 ``[n + 1]``, from 0 to ``len(values)``; row *i* is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: Array
    offsets: Array


def as_array(value: object, *, what: str) -> Array:
    """Return ``value`` as a numeric array, by value and dtype as it is.

    Arrays keep their strides, byte order and memory (no copy); torch tensors too, unless they live on a device, and
    bfloat16 stays bfloat16 (of ml_dtypes). Lists become int64, float64 or bool, in pieces of `PIECE` values.

    Args:
        value: numpy array, torch tensor, (nested) list, scalar, or anything with a buffer or ``__array__``.
        what: names the value in errors.

    Raises:
        PayloadError: not numeric, ragged, or None, null or masked entries; names the index where it can.
    """
    if (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)) or getattr(value, "null_count", None):
        raise PayloadError(f"{what}: has masked or null entries; fill them first", what=what)
    try:
        if isinstance(value, list | tuple):
            array = _from_sequence(value, what)
        elif _is_tensor(value):
            array = _from_tensor(value)
        else:
            array = np.asarray(value)
    except PayloadError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise PayloadError(f"{what}: cannot be read as an array: {error}", what=what) from error
    _refuse_non_numeric(array, what, 0)
    return array


def as_token_ids(value: object, *, what: str) -> Array:
    """Return token ids as native C-contiguous int32 ``[n]``; the caller's memory where it has that form already.

    Raises:
        PayloadError: not one axis, not integers, negative, or beyond int32; names index and value.
    """
    if isinstance(value, list | tuple) and value and type(value[0]) is int:
        packed = _pack_int32(value)
        if packed is not None:
            value = packed
    array = as_array(value, what=what)
    if array.ndim != 1:
        raise PayloadError(f"{what}: must have one axis, got shape {array.shape}", what=what, got=list(array.shape))
    if array.size and array.dtype.kind not in "iu":
        raise PayloadError(f"{what}: must be integers, not {array.dtype.name}", what=what, got=array.dtype.name)
    if array.size and not integers_within(array, 0, _INT32_END):
        index = int(np.flatnonzero((array < 0) | (array >= _INT32_END))[0])
        token = int(array[index])
        raise PayloadError(
            f"{what}: token id {token} at index {index} is outside [0, 2**31)", what=what, index=index, value=token
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def as_floats(value: object, *, what: str) -> Array:
    """Return native C-contiguous float32 ``[n]``; float32 input is kept bit for bit, float64 is rounded.

    Raises:
        PayloadError: not one axis, not numbers, or not to be held by float32 (see the module's table).
    """
    array = as_array(value, what=what)
    if array.ndim != 1:
        raise PayloadError(f"{what}: must have one axis, got shape {array.shape}", what=what, got=list(array.shape))
    if array.size and array.dtype.kind == "b":
        raise PayloadError(f"{what}: must be numbers, not bool", what=what, got="bool")
    spec = _FLOAT32
    if not fits(array, spec):
        index = first_unfit(array, spec)
        if index is not None:
            bad = item(array, index)
            raise PayloadError(
                f"{what}: {bad} at index {index[0]} {reason(array, bad, spec)}", what=what, index=index[0], value=bad
            )
    if array.dtype == np.float32 and array.flags.c_contiguous:
        return array
    out = np.empty(array.shape, np.float32)
    copy_rows(out, array)
    return out


def count_nonfinite(array: Array) -> int:
    """Return how many values are NaN or infinite."""
    return int(array.size - np.count_nonzero(np.isfinite(array)))


def copy_rows(dst: Array, src: Array) -> None:
    """Cast ``src``, whose values were checked, into ``dst`` of the same shape; no temporary of its size is made.

    ``dst`` is writable and has the field's dtype, bfloat16 and bool included: bits from disk go through `value_view`.
    """
    if not dst.size:
        return
    assert dst.shape == src.shape, (dst.shape, src.shape)
    if src.dtype.kind in "fV" and src.dtype != dst.dtype:
        with np.errstate(all="ignore"):
            np.copyto(dst, src, casting="unsafe")
    else:
        np.copyto(dst, src, casting="unsafe")


def bits_view(array: Array, dtype: str) -> Array:
    """Return an array of ``dtype`` as it stands on disk: bfloat16 as uint16, bool as uint8, others as they are."""
    plain = {"bfloat16": np.uint16, "bool": np.uint8}.get(dtype)
    return array if plain is None else array.view(plain)


def value_view(bits: Array, dtype: str) -> Array:
    """Return what `bits_view` returned as an array of ``dtype`` again (a view)."""
    return bits.view(numpy_dtype(dtype)) if dtype in ("bfloat16", "bool") else bits


def ragged(value: object, spec: FieldSpec, *, what: str, position: int = 0) -> tuple[Array, Array]:
    """Return a ragged field's values ``[sum, *inner]`` and its end offsets, uint64 ``[n]``, one a row.

    Args:
        value: a list (or array) of rows, each an array or list of values; or a `Ragged`. Empty rows are legal.
        spec: the field; ``spec.shape`` is the inner shape of one value.
        what: names the place in errors, as ``"step 3"``.
        position: what row 0 stands for, for errors.

    Raises:
        PayloadError: offsets that do not describe the values, or values that the field cannot hold.
    """
    name = f"{spec.name} of {what}"
    values, ends = _split_ragged(value, name) if isinstance(value, Ragged) else _join_rows(value, name)
    if not values.size and values.shape[1:] != spec.shape:
        values = np.empty((0, *spec.shape), numpy_dtype(spec.dtype))
    check_inner(values, spec, what=what)
    index = None if fits(values, spec) else first_unfit(values, spec)
    if index is not None:
        row = int(np.searchsorted(ends, index[0], side="right"))
        raise value_error(values, index, spec, what=what, position=position + row - index[0])
    return values, ends


_FLOAT32 = FieldSpec(name="floats", dtype="float32", align="response")


def _is_tensor(value: object) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def _from_tensor(tensor: Tensor) -> Array:
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    array: Array = tensor.numpy()
    return array


def _from_sequence(values: Sequence[Any], what: str) -> Array:
    if not values:
        return np.empty(0)
    if _is_tensor(values[0]):
        return np.stack([as_array(item, what=f"{what}, item {i}") for i, item in enumerate(values)])
    step = max(1, PIECE // max(1, np.size(values[0])))
    if len(values) <= step:
        return _from_piece(values)
    parts = []
    for start in range(0, len(values), step):
        parts.append(_from_piece(values[start : start + step]))
        _refuse_non_numeric(parts[-1], what, start)
    return _concatenate(parts)


def _from_piece(values: Sequence[Any]) -> Array:
    array = np.asarray(values)
    if array.dtype == np.float64 and array.size and array.max() >= 2.0**63:
        # numpy makes floats of integers that need both int64 and uint64, which would round 64-bit hashes.
        exact = np.array(values, dtype=object)
        if all(isinstance(item, int) for item in exact.flat):
            return np.asarray(values, dtype=np.uint64)
    return array


def _concatenate(parts: list[Array]) -> Array:
    """Join along axis 0; int64 beside uint64 becomes uint64, never float64."""
    dtypes = {part.dtype for part in parts}
    if dtypes == {np.dtype(np.int64), np.dtype(np.uint64)}:
        if any(part.min(initial=0) < 0 for part in parts):
            raise ValueError("negative integers beside integers of 2**63 and more")
        parts = [part.astype(np.uint64) for part in parts]
    return np.concatenate(parts)


def _pack_int32(values: Sequence[Any]) -> Array | None:
    """Integers as int32, twice as fast as ``np.asarray``; None where one is something else or does not fit."""
    out = np.empty(len(values), np.int32)
    view = out.data.cast("B")
    try:
        for start in range(0, len(values), PIECE):
            piece = values[start : start + PIECE]
            struct.pack_into(f"={len(piece)}i", view, 4 * start, *piece)
    except struct.error:
        return None
    return out


def _refuse_non_numeric(array: Array, what: str, start: int) -> None:
    """Raise unless the dtype is numeric; ``start`` is the index of the array's first entry in the whole."""
    if array.dtype.kind in "biuf" or array.dtype == _BFLOAT16:
        return
    if array.dtype != object:
        raise PayloadError(f"{what}: dtype {array.dtype} is not numeric", what=what, got=str(array.dtype))
    for index, entry in np.ndenumerate(array):
        if not isinstance(entry, int | float | np.number):
            place = [start + index[0], *index[1:]] if index else []
            where = f" at index {', '.join(map(str, place))}" if place else ""
            raise PayloadError(
                f"{what}: {reprlib.repr(entry)}{where} is not a number",
                what=what, index=place[0] if len(place) == 1 else place,
            )  # fmt: skip
    raise PayloadError(f"{what}: has integers beyond 64 bits, or numbers as objects; give a numeric array", what=what)


def _split_ragged(value: Ragged, name: str) -> tuple[Array, Array]:
    values = as_array(value.values, what=f"values of {name}")
    offsets = as_array(value.offsets, what=f"offsets of {name}")
    if not values.ndim or offsets.ndim != 1 or not offsets.size or offsets.dtype.kind not in "iu":
        raise PayloadError(
            f"{name}: needs values [sum, ...] and integer offsets [n + 1], got {values.shape} and "
            f"{offsets.dtype.name} {offsets.shape}",
            what=name,
        )
    offsets = offsets.astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise PayloadError(
            f"{name}: offsets must rise from 0 to the {len(values)} values, got {offsets[0]} to {offsets[-1]}"
            + ("" if offsets[0] or offsets[-1] != len(values) else ", falling in between"),
            what=name, expected=[0, len(values)], got=[int(offsets[0]), int(offsets[-1])],
        )  # fmt: skip
    return values, offsets[1:].astype(np.uint64)


def _join_rows(value: object, name: str) -> tuple[Array, Array]:
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        array = as_array(value, what=name)
        if array.ndim < 2 and array.shape != (0,):
            raise PayloadError(f"{name}: needs rows of values, got shape {array.shape}", what=name)
        n, width = array.shape if array.ndim == 2 else (*array.shape, 0)[:2]
        return array.reshape(n * width, *array.shape[2:]), np.arange(1, n + 1, dtype=np.uint64) * np.uint64(width)
    try:
        lengths = np.fromiter(map(len, value), np.int64, len(value))
    except TypeError as error:
        index = next(i for i, row in enumerate(value) if not hasattr(row, "__len__") or np.ndim(row) == 0)
        raise PayloadError(
            f"{name}: row {index} is {reprlib.repr(value[index])}, not a list of values", what=name, index=index
        ) from error
    if {type(row) for row in value} <= {list, tuple}:
        values = as_array(list(itertools.chain.from_iterable(value)), what=f"values of {name}")
    else:
        parts = [as_array(row, what=f"row {i} of {name}") for i, row in enumerate(value) if len(row)]
        try:
            values = _concatenate(parts) if parts else np.empty(0)
        except ValueError as error:
            raise PayloadError(f"{name}: rows do not join: {error}", what=name) from error
    return values, np.cumsum(lengths).astype(np.uint64)
