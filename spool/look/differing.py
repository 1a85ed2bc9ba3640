"""The first place at which the payload of two references differs, field by field, read in windows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs

from spool.errors import NotFoundError, ReleasedError
from spool.look.rows import token_rows
from spool.model.fields import LOSS_MASK, ROUTED_EXPERTS
from spool.read.sample import Coverage, Ragged
from spool.read.select import n_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from spool.handle import Spool
    from spool.model.fields import FieldSpec
    from spool.model.refs import Ref

    Array = NDArray[Any]

WINDOW_BYTES = 8 << 20
"""Bytes of one field that are read at once, of either reference."""
_RAGGED_ROWS = 4096
_LIKELY_SHARED = 8
"""With so many references before its prefix is compared, to pass over what both share with them."""

_MASK = Coverage(structs.replace(LOSS_MASK, align="token"), ())
"""To a reader it has a row for every token."""


class Differs(NamedTuple):
    """The first place at which a field differs; members as those of `spool.look.diff.Difference`."""

    part: str
    what: str
    place: dict[str, Any]
    a: Any
    b: Any
    how: str = ""


class _Pair(NamedTuple):
    """One field of two references.

    Attributes:
        name: the field.
        sp_a, a, sp_b, b: the spools and references.
        one, other: what the field is there.
    """

    name: str
    sp_a: Spool
    a: Ref
    sp_b: Spool
    b: Ref
    one: Coverage
    other: Coverage


def first_of_fields(
    sp_a: Spool,
    a: Ref,
    sp_b: Spool,
    b: Ref,
    fields: Sequence[str] | None = None,
    *,
    before: Sequence[tuple[Ref, Ref]] = (),
) -> Iterator[Differs]:
    """Yield for each field in which two references differ the first place.

    Fields that only one has, another dtype or shape, and rows that only one has come as such; values are compared bit
    for bit as far as both go.

    Args:
        sp_a, a, sp_b, b: the spools and references.
        fields: only these; all that either has where None.
        before: references that were compared already: rows that both share with them are passed over.

    Raises:
        NotFoundError: neither has one of ``fields``.
        ReleasedError, IntegrityError, StorageError: something cannot be read.
    """
    has_a, has_b = _fields(sp_a, a, fields), _fields(sp_b, b, fields)
    for name in fields or ():
        if name not in has_a and name not in has_b:
            raise NotFoundError(f"neither has a field {name!r}; there are {', '.join({**has_a, **has_b})}", field=name)
    for name in dict.fromkeys([*has_a, *has_b]):
        if name not in has_a or name not in has_b:
            yield Differs(
                name, "field", {}, _there(has_a.get(name)), _there(has_b.get(name)), "only one has this field"
            )
            continue
        pair = _Pair(name, sp_a, a, sp_b, b, has_a[name], has_b[name])
        yield from _of_field(pair, _shared_start(pair, before))


def _fields(sp: Spool, ref: Ref, fields: Sequence[str] | None) -> dict[str, Coverage]:
    found: dict[str, Coverage] = {}
    if fields is None:
        found = sp.coverage([ref])[0]
    for name in fields or ():
        if name == LOSS_MASK.name:
            continue
        try:
            found.update(sp.coverage([ref], [name])[0])
        except ReleasedError:
            raise
        except NotFoundError:
            continue
    if fields is None or LOSS_MASK.name in fields:
        found[LOSS_MASK.name] = _MASK
    order = ("token_ids", LOSS_MASK.name, "logprobs", ROUTED_EXPERTS)
    return {
        name: found[name] for name in sorted(found, key=lambda name: (order.index(name) if name in order else 9, name))
    }


def _there(coverage: Coverage | None) -> str | None:
    return None if coverage is None else _described(coverage.spec)


def _described(spec: FieldSpec) -> str:
    kind = f"ragged {spec.dtype}" if spec.ragged else spec.dtype
    return f"{kind}{list(spec.shape)} a {spec.align}" if spec.shape else f"{kind} a {spec.align}"


def _of_field(pair: _Pair, start: int) -> Iterator[Differs]:
    one, other = pair.one.spec, pair.other.spec
    if (one.align, one.ragged) != (other.align, other.ragged) or _shape(one) != _shape(other):
        yield Differs(pair.name, "shape", {}, _described(one), _described(other))
        return
    if one.dtype != other.dtype:
        yield Differs(pair.name, "dtype", {}, one.dtype, other.dtype, "values are compared as trainers get them")
    gap = _first_gap(pair)
    value = _first_value(pair, start, gap)
    if value is not None and (gap is None or value[0] <= gap[0]):
        yield value[1]
    elif gap is not None:
        yield gap[1]


def _shape(spec: FieldSpec) -> tuple[Any, ...]:
    """Return what rows look like to a reader, who gets absolute layers."""
    return (spec.num_layers, *spec.shape[1:]) if spec.num_layers is not None else spec.shape


# -- gaps ------------------------------------------------------------------------------------------------------------


def _first_gap(pair: _Pair) -> tuple[int, Differs] | None:
    """Return the first position that was sent of one only, as far as both go."""
    end = min(_n_rows(pair.a, pair.one.spec), _n_rows(pair.b, pair.other.spec))
    edges = sorted({0, *(edge for gap in (*pair.one.gaps, *pair.other.gaps) for edge in gap)})
    for position in edges:
        missing = [_within(position, coverage.gaps) for coverage in (pair.one, pair.other)]
        if position < end and missing[0] != missing[1]:
            shown = ["never sent" if is_missing else "sent" for is_missing in missing]
            place = _place(pair, position, ())
            return position, Differs(pair.name, "gap", place, *shown)
    return None


def _n_rows(ref: Ref, spec: FieldSpec) -> int:
    if spec.align == "step":
        return int(n_steps(ref))
    return max(ref.n_rows - 1, 0) if spec.align == "forward" else ref.n_tokens


def _within(position: int, gaps: Sequence[tuple[int, int]]) -> bool:
    return any(start <= position < stop for start, stop in gaps)


# -- values ----------------------------------------------------------------------------------------------------------


def _first_value(pair: _Pair, start: int, gap: tuple[int, Differs] | None) -> tuple[int, Differs] | None:
    """Return the first position at which both have values that differ, not behind a gap of one."""
    n_tokens = min(pair.a.n_tokens, pair.b.n_tokens)
    spec = pair.one.spec
    if spec.align == "step":
        return _in_window(pair, slice(0, n_tokens), 0, 0)
    step = _window_tokens(spec)
    for low in range(start, n_tokens, step):
        high = min(low + step, n_tokens)
        first = [_first_row(ref, spec, low) for ref in (pair.a, pair.b)]
        if gap is not None and min(first) > gap[0]:
            return None
        found = _in_window(pair, slice(low, high), *first)
        if found is not None:
            return found
    return None


def _window_tokens(spec: FieldSpec) -> int:
    if spec.ragged:
        return _RAGGED_ROWS
    # what is read is narrow or, where dtypes differ, as wide as a trainer's
    return max(WINDOW_BYTES // max(4 * int(math.prod(_shape(spec))), 1), 1)


def _first_row(ref: Ref, spec: FieldSpec, token: int) -> int:
    """Return the position that row 0 of a read from ``token`` on stands for."""
    if spec.align == "response":
        return max(token, ref.response_start)
    if spec.align == "forward" and ref.units:
        return int(token_rows(ref)[token])
    return token


def _in_window(pair: _Pair, tokens: slice, first_a: int, first_b: int) -> tuple[int, Differs] | None:
    stored = pair.one.spec.dtype == pair.other.spec.dtype
    read = [
        sp.read(
            ref, fields=[pair.name], tokens=None if pair.one.spec.align == "step" else tokens,
            dtype="stored" if stored else "train", missing=0,
        )[pair.name]
        for sp, ref in ((pair.sp_a, pair.a), (pair.sp_b, pair.b))
    ]  # fmt: skip
    first = max(first_a, first_b)
    if isinstance(read[0], Ragged):
        return _in_ragged(pair, read[0], read[1], first, first - first_a, first - first_b)
    one, other = read[0][first - first_a :], read[1][first - first_b :]
    n = min(len(one), len(other))
    differs = _unequal(one[:n], other[:n])
    for position, coverage in ((first, pair.one), (first, pair.other)):
        for low, high in coverage.gaps:
            differs[max(low - position, 0) : max(high - position, 0)] = False
    if not differs.any():
        return None
    row, *index = (int(axis) for axis in np.unravel_index(int(np.argmax(differs)), differs.shape))
    return first + row, _value(pair, first + row, tuple(index), one[row], other[row])


def _unequal(a: Array, b: Array) -> NDArray[np.bool_]:
    """Return where two arrays differ, bit for bit where they are of one dtype."""
    if a.dtype != b.dtype:
        return np.asarray(a != b)
    bits = f"u{a.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits))


def _value(pair: _Pair, position: int, index: tuple[int, ...], a: Array, b: Array) -> Differs:
    place = _place(pair, position, index)
    if pair.one.spec.num_layers is not None and index:
        layer = index[0]
        # of a layer all entries are shown: one expert says little without the others
        if np.ndim(a[layer]) == 1:
            place.pop("index")
            return Differs(pair.name, "value", place, _listed(a[layer]), _listed(b[layer]))
    one, other = a[index], b[index]
    return Differs(pair.name, "value", place, _item(one), _item(other), _how(one, other))


def _in_ragged(pair: _Pair, a: Ragged, b: Ragged, first: int, skip_a: int, skip_b: int) -> tuple[int, Differs] | None:
    for row in range(min(len(a.offsets) - 1 - skip_a, len(b.offsets) - 1 - skip_b)):
        position = first + row
        if _within(position, pair.one.gaps) or _within(position, pair.other.gaps):
            continue
        one, other = (
            found.values[found.offsets[row + skip] : found.offsets[row + skip + 1]]
            for found, skip in ((a, skip_a), (b, skip_b))
        )
        n = min(len(one), len(other))
        differs = np.argwhere(_unequal(one[:n], other[:n]))
        if differs.size:
            index = tuple(int(axis) for axis in differs[0])
            return position, _value(pair, position, index, one, other)
        if len(one) != len(other):
            return position, Differs(pair.name, "n_values", _place(pair, position, ()), len(one), len(other))
    return None


def _listed(row: Array) -> list[Any]:
    return [_item(value) for value in row]


def _item(value: Any) -> Any:
    return float(value) if value.dtype.kind in "fV" else value.item()


def _how(a: Any, b: Any) -> str:
    """Return in what two values differ that look alike."""
    if a.dtype.kind not in "fV" or b.dtype.kind not in "fV":
        return ""
    one, other = float(a), float(b)
    if math.isnan(one) and math.isnan(other):
        return f"NaNs of different bits, {_bits(a)} and {_bits(b)}"
    return "zeros of different sign" if one == other == 0.0 else ""


def _bits(value: Any) -> str:
    return f"0x{value.tobytes()[::-1].hex()}"


# -- places ----------------------------------------------------------------------------------------------------------


def _place(pair: _Pair, position: int, index: tuple[int, ...]) -> dict[str, Any]:
    spec, ref = pair.one.spec, pair.a
    if spec.align == "step":
        steps = getattr(ref, "steps", None) or (getattr(ref, "index", 0),)
        place: dict[str, Any] = {"step": steps[position]}
    else:
        token = position
        if spec.align == "forward" and ref.units:
            token = int(np.searchsorted(token_rows(ref), position, "right")) - 1
        place = {"step": _step_at(ref, token), "token": token}
        if token != position:
            place["row"] = position
    if index and spec.num_layers is not None:
        place["layer"], index = index[0], index[1:]
    if index:
        place["index"] = list(index)
    return place


def _step_at(ref: Ref, token: int) -> int | None:
    """Return the step that generated a token, or whose prompt it came with."""
    for span in ref.spans:
        if token < span.stop:
            return span.step
    return ref.spans[-1].step if ref.spans else None


# -- what was compared before ----------------------------------------------------------------------------------------


def _shared_start(pair: _Pair, before: Sequence[tuple[Ref, Ref]]) -> int:
    """Return before which token both references have the rows of a pair that was compared already."""
    if pair.one.spec.ragged or pair.a.units or pair.b.units or pair.name == LOSS_MASK.name:
        return 0
    each = (
        min(_shared(pair.a, one, pair.name), _shared(pair.b, other, pair.name))
        for one, other in before[-_LIKELY_SHARED:]
    )
    return max(each, default=0)


def _shared(a: Ref, b: Ref, name: str) -> int:
    """Return before which position two references have the same rows."""
    end = 0
    for one, other in zip(a.extents.get(name, ()), b.extents.get(name, ()), strict=False):
        if (one.stream, one.row, one.position) != (other.stream, other.row, other.position) or one.position > end:
            break
        end = one.position + min(one.n, other.n)
        if one.n != other.n:
            break
    return end
