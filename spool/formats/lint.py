"""Deep checks of stored routing: what was kept faithfully, yet cannot be what a router chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from spool.formats.layers import moe_parts, name_layers
from spool.formats.values import Array, absolute_layer, blocks

if TYPE_CHECKING:
    from spool.model.fields import FieldSpec

_CONSTANT_ROWS = 8
_Mask = npt.NDArray[np.bool_]


class Finding(Struct, frozen=True):
    """What `lint` found.

    Attributes:
        kind: ``zero_layers``, ``repeated_expert`` or ``constant_rows``.
        layers: the absolute layers where it was found.
        count: (row, layer) pairs.
        token: row of the first one.
        layer: layer of the first one.
        message: the same for people.
    """

    kind: str
    layers: tuple[int, ...]
    count: int
    token: int
    layer: int
    message: str


def lint(rows: Array, spec: FieldSpec, *, position: int = 0) -> list[Finding]:
    """Look for what is stored faithfully, yet cannot be what a router chose.

    MoE layers that are zero throughout, an expert twice in one row, and layers whose rows are all the same (from 8
    rows on). Nothing is found where topk is 1, but for constant rows.

    Args:
        rows: ``[k, layers, topk]``: the stored layers, or all of them.
        spec: the field.
        position: the forward row that ``rows[0]`` is.
    """
    if not rows.size:
        return []
    moe = np.zeros(rows.shape[1], bool)
    for part in moe_parts(spec, rows.shape[1]):
        moe[part] = True
    zero = moe & _zero_layers(rows) if rows.shape[2] > 1 and len(rows) > 1 else np.zeros_like(moe)
    found = [_zero_finding(rows, zero, spec, position), _repeat_finding(rows, moe & ~zero, spec, position)]
    if len(rows) >= _CONSTANT_ROWS:
        found.append(_constant_finding(rows, moe & ~zero, spec, position))
    return [finding for finding in found if finding is not None]


def _zero_layers(rows: Array) -> _Mask:
    zero = np.ones(rows.shape[1], bool)
    for _, block in blocks(rows):
        zero &= ~block.any(axis=(0, 2))
        if not zero.any():
            break
    return zero


def _zero_finding(rows: Array, zero: _Mask, spec: FieldSpec, position: int) -> Finding | None:
    layers = _absolute(zero, rows, spec)
    if not layers:
        return None
    message = f"layers {name_layers(layers)} are 0 in all of {len(rows)} rows, impossible with topk {rows.shape[2]}"
    return Finding("zero_layers", layers, len(rows) * len(layers), position, layers[0], message)


def _repeat_finding(rows: Array, moe: _Mask, spec: FieldSpec, position: int) -> Finding | None:
    count, first, where = 0, None, np.zeros(rows.shape[1], bool)
    for start, block in blocks(rows):
        ordered = np.sort(block, axis=2)
        same = ordered[:, :, 1:] == ordered[:, :, :-1]
        if spec.missing is not None:
            same &= ordered[:, :, 1:] >= 0
        hit = same.any(axis=2) & moe
        n = int(np.count_nonzero(hit))
        if n and first is None:
            row, layer = (int(i) for i in np.unravel_index(int(hit.argmax()), hit.shape))
            first = (position + start + row, layer, int(ordered[row, layer, 1:][same[row, layer]][0]))
        count += n
        where |= hit.any(axis=0)
    if first is None:
        return None
    token, layer = first[0], absolute_layer(spec, first[1], rows.shape[1])
    message = f"an expert is twice in {count} rows, first expert {first[2]} at token {token}, layer {layer}"
    return Finding("repeated_expert", _absolute(where, rows, spec), count, token, layer, message)


def _constant_finding(rows: Array, moe: _Mask, spec: FieldSpec, position: int) -> Finding | None:
    constant = moe.copy()
    for _, block in blocks(rows):
        constant &= (block == rows[0]).all(axis=(0, 2))
        if not constant.any():
            return None
    layers = _absolute(constant, rows, spec)
    if not layers:
        return None
    message = f"layers {name_layers(layers)} have the same experts in all of {len(rows)} rows"
    return Finding("constant_rows", layers, len(rows) * len(layers), position, layers[0], message)


def _absolute(mask: _Mask, rows: Array, spec: FieldSpec) -> tuple[int, ...]:
    return tuple(absolute_layer(spec, int(layer), rows.shape[1]) for layer in np.flatnonzero(mask))
