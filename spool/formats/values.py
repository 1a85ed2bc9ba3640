"""Whether an array's values can stand in a field, exactly, and the error that names the first that cannot.

What may be stored in what:

- integers and booleans in an integer or boolean field: every value must lie in its range; nothing ever wraps;
- integers in a float field: up to 2**(bits of the mantissa), where every integer is exact;
- floats in an integer field: only whole numbers in range;
- float64 in any float field: rounded, since a Python float has no narrower form, but never from finite to infinite;
- any other float in a float field: only what comes back equal (float32 to bfloat16 is the caller's decision).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spool.errors import PayloadError
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

Array: TypeAlias = npt.NDArray[Any]

_BLOCK_BYTES = 1 << 20


def check_values(array: Array, spec: FieldSpec, *, what: str, position: int = 0) -> None:
    """Refuse rows that the field cannot hold exactly. Does not count them.

    Args:
        array: ``[n, *inner]``; ``inner`` is the field's row shape or, where only some layers are stored, that of these.
        spec: the field.
        what: names the place in errors, as ``"step 3"``.
        position: what row 0 stands for, for errors.

    Raises:
        PayloadError: another inner shape, or a value out of range; details field, step, token, layer, value, bound.
    """
    check_inner(array, spec, what=what)
    if not fits(array, spec):
        index = first_unfit(array, spec)
        if index is not None:
            raise value_error(array, index, spec, what=what, position=position)


def check_inner(array: Array, spec: FieldSpec, *, what: str) -> None:
    """Refuse an array whose rows have another shape than the field's; ``(0,)`` passes as no rows of any shape.

    Raises:
        PayloadError: names expected and got.
    """
    inner = array.shape[1:]
    if array.ndim and (inner in (spec.row_shape, spec.shape) or array.shape == (0,)):
        return
    shapes = dict.fromkeys((spec.row_shape, spec.shape))
    expected = " or ".join(str(("rows", *shape)).replace("'", "") for shape in shapes)
    raise PayloadError(
        f"{spec.name} of {what}: expected shape {expected}, got {array.shape}",
        field=spec.name, step=what, expected=[list(shape) for shape in shapes], got=list(array.shape),
    )  # fmt: skip


def fits(array: Array, spec: FieldSpec) -> bool:
    """Return whether every value can be stored; for integers one reduction, nothing is copied."""
    source, stored = array.dtype, numpy_dtype(spec.dtype)
    if not array.size:
        return True
    if source.kind in "iub":
        if source.kind == "b":
            array = array.view(np.uint8)
        low, high = value_range(spec)
        if integers_within(array, max(low, 0) if spec.bound is not None else low, high):
            return True
        if spec.missing is None or spec.bound is None:
            return False
        if spec.missing == -1:
            return integers_within(array, -1, high)
    elif stored.kind not in "iub" and np.can_cast(source, stored, "safe"):
        return True
    return first_unfit(array, spec) is None


def first_unfit(array: Array, spec: FieldSpec) -> tuple[int, ...] | None:
    """Return the index of the first value that cannot be stored, or None; works in blocks of 1 MiB."""
    for start, block in blocks(array):
        bad = _unfit(block, spec)
        if bad.any():
            first = np.unravel_index(int(bad.argmax()), bad.shape)
            return (start + int(first[0]), *(int(i) for i in first[1:]))
    return None


def value_range(spec: FieldSpec) -> tuple[int, int]:
    """Return the half-open range of integers that the field holds, its mark for missing entries included."""
    dtype = numpy_dtype(spec.dtype)
    if spec.bound is not None:
        return (spec.missing or 0), spec.bound
    if dtype.kind == "b":
        return 0, 2
    if dtype.kind in "iu":
        return int(np.iinfo(spec.dtype).min), int(np.iinfo(spec.dtype).max) + 1
    exact = 1 << (ml_dtypes.finfo(dtype).nmant + 1)  # type: ignore[no-untyped-call]
    return -exact, exact + 1


def value_error(array: Array, index: tuple[int, ...], spec: FieldSpec, *, what: str, position: int) -> PayloadError:
    """Return the error for the value at ``index``: its token (or row), its absolute layer, and why it does not fit."""
    value = item(array, index)
    noun = "expert id" if spec.name == ROUTED_EXPERTS else "value"
    row = "row" if spec.align == "step" else "token"
    details: dict[str, object] = {"field": spec.name, "step": what, "token": position + index[0]}
    place = f"{row} {position + index[0]}"
    if spec.num_layers is not None and len(index) > 1:
        details["layer"] = absolute_layer(spec, index[1], array.shape[1])
        place += f", layer {details['layer']}"
    elif len(index) > 1:
        place += f", entry {', '.join(map(str, index[1:]))}"
    return PayloadError(
        f"{spec.name} of {what}: {noun} {value} at {place} {reason(array, value, spec)}",
        **details, value=value, bound=spec.bound,
    )  # fmt: skip


def absolute_layer(spec: FieldSpec, layer: int, n_layers: int) -> int:
    """Return the absolute number of entry ``layer`` of a layer axis with ``n_layers`` (all, or the stored ones)."""
    return layer if spec.layers is None or n_layers == spec.num_layers else spec.layers[layer]


def blocks(array: Array) -> Iterator[tuple[int, Array]]:
    """Iterate over (first row, rows) in views of about 1 MiB along axis 0; a 0-d array is one row."""
    array = np.atleast_1d(array)
    row_bytes = max(1, array.itemsize * math.prod(array.shape[1:]))
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(array), step):
        yield start, array[start : start + step]


def integers_within(array: Array, low: int, high: int) -> bool:
    """Whether all lie in ``[low, high)``: one maximum where ``low`` is 0, as negatives seen unsigned are huge."""
    smallest, largest, unsigned = _limits(array.dtype)
    if low <= smallest and largest < high:
        return True
    if low == 0:
        return int(np.maximum.reduce(array.view(unsigned), axis=None)) < min(high, largest + 1)
    return int(array.max()) < high and int(array.min()) >= low


@lru_cache(maxsize=32)
def _limits(dtype: np.dtype[Any]) -> tuple[int, int, np.dtype[Any]]:
    """Smallest and largest value of an integer dtype, and the unsigned dtype of its size and byte order."""
    info = np.iinfo(dtype)
    return int(info.min), int(info.max), np.dtype(dtype.str.replace("i", "u"))


def _unfit(block: Array, spec: FieldSpec) -> npt.NDArray[np.bool_]:
    stored = numpy_dtype(spec.dtype)
    if block.dtype.kind == "b":
        block = block.view(np.uint8)
    whole = block.dtype.kind in "iu"
    if whole or stored.kind in "iub":
        numbers = block if whole else block.astype(np.float64)
        low, high = value_range(spec)
        good = (numbers >= low) & (numbers < high)
        if spec.bound is not None and spec.missing is not None:
            good &= (numbers >= 0) | (numbers == spec.missing)
        return ~good if whole else ~(good & (np.trunc(numbers) == numbers))
    with np.errstate(all="ignore"):
        cast = block.astype(stored)
        if block.dtype.itemsize >= 8:
            return np.isfinite(block) & ~np.isfinite(cast)
        changed: npt.NDArray[np.bool_] = (cast.astype(block.dtype) != block) & ~np.isnan(block)
        return changed


def reason(array: Array, value: float | str, spec: FieldSpec) -> str:
    """Return why ``value``, an item of ``array``, cannot stand in the field: the end of a sentence."""
    stored = numpy_dtype(spec.dtype)
    if stored.kind not in "iub":
        return f"cannot be held by {spec.dtype} unchanged; cast it yourself where that is meant"
    if array.dtype.kind not in "iub" and not (isinstance(value, float) and value.is_integer()):
        return f"is not a whole number, as {spec.dtype} needs"
    if spec.bound is None:
        low, high = value_range(spec)
        return f"is outside [{low}, {high}) of {spec.dtype}"
    if spec.missing is not None:
        return f"is outside [0, {spec.bound}) and is not the mark {spec.missing} of a missing entry"
    hint = "; -1 inside a row needs a spec with a signed dtype and missing=-1"
    return f"is outside [0, {spec.bound})" + (hint if value == -1 and spec.align == "forward" else "")


def item(array: Array, index: tuple[int, ...]) -> float | str:
    """The value as a JSON-able number, NaN and infinities as text."""
    if array.dtype.kind in "iub":
        return int(array[index])
    value = float(array[index])
    return value if math.isfinite(value) else str(value)
