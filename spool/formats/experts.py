"""Rows of the forward (``routed_experts`` and its like): place and check them, narrow them for disk, widen them back.

Row *p* is the forward over token *p*, so that *T* tokens have *T - 1* rows. Layers are absolute everywhere but in
the stored arrays of a spec that lists its layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from spool.errors import InputError, PayloadError
from spool.formats.arrays import as_array, copy_rows
from spool.formats.layers import bounds, moe_parts, name_layers, selection, stored_layers
from spool.formats.lint import Finding, lint
from spool.formats.values import (
    Array,
    absolute_layer,
    blocks,
    check_inner,
    check_values,
    integers_within,
    value_range,
)
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, numpy_dtype

__all__ = ["Chunk", "Finding", "Piece", "lint", "pieces", "store", "stored_layers", "widen"]


class Chunk(Struct, frozen=True, eq=False):
    """A part of one call's rows, as a preempted and resumed call returns them.

    Attributes:
        rows: ``[r, layers, topk]`` in any form that `pieces` takes.
        start: the forward row that ``rows[0]`` is.
        weight_version: the weights that computed them.
    """

    rows: Any
    start: int
    weight_version: str | None = None


class Piece(NamedTuple):
    """Consecutive rows without a gap: a view of what the caller gave.

    Attributes:
        position: the forward row that ``rows[0]`` is.
        rows: ``[k, layers, topk]``, checked, in the dtype and with the strides given.
    """

    position: int
    rows: Array


def pieces(payload: object, spec: FieldSpec, *, n_rows: int, start: int = 0, what: str) -> tuple[Piece, ...]:
    """Return what of a step's payload is data, where it stands, and refuse what cannot be true.

    The row count decides where rows stand, whatever the engine was asked for: ``T-1-start`` (from ``start`` on),
    ``T-1`` (all), or one more of either, whose last row is no forward and is dropped unseen. Rows that are -1 in every
    stored layer were not sent: they are left out, and split the rest.

    Args:
        payload: rows ``[r, layers, *inner]``, all layers or only the stored ones; an array, a tensor, nested lists, a
            `Chunk` or a list of them.
        spec: a field aligned with ``forward``.
        n_rows: T, the rows that the step's tokens expand to (the tokens, where no placeholder stands for more).
        start: the row from which on the engine was asked to send.
        what: names the place in errors, as ``"step 3"``.

    Returns:
        Views of the payload, in the order given: for chunks that overlap the caller decides which one holds.

    Raises:
        PayloadError: another row count or shape, values out of range, dense layers that are not zero, MoE layers of
            nothing but zeros, -1 inside a row where the spec has no such mark. Costs less than `store`.
    """
    if isinstance(payload, Chunk):
        payload = [payload]
    if isinstance(payload, list | tuple) and payload and isinstance(payload[0], Chunk):
        return tuple(piece for chunk in payload for piece in _chunk_pieces(chunk, spec, n_rows, what))
    rows = _as_rows(payload, spec, what)
    position, n = _place(len(rows), spec, n_rows, int(start), what)
    return _check(rows[:n], position, spec, what)


def store(dst: Array, rows: Array, spec: FieldSpec) -> None:
    """Narrow checked rows into ``dst``, without a temporary of their size.

    Args:
        dst: writable ``[k, *spec.shape]`` of the stored dtype.
        rows: ``[k, layers, *inner]`` of any dtype, strides and byte order: all layers, or the stored ones.
        spec: the field.
    """
    if spec.layers is None or rows.shape[1] == dst.shape[1]:
        copy_rows(dst, rows)
        return
    for ours, theirs in selection(spec.layers, 0, rows.shape[1]).pairs:
        copy_rows(dst[:, ours], rows[:, theirs])


def widen(out: Array, stored: Array, spec: FieldSpec, layers: slice | None = None) -> None:
    """Spread stored rows over absolute layers; layers that are not stored become 0. Every byte is written once.

    Args:
        out: writable ``[k, selected layers, *inner]``, any dtype that holds the field's values.
        stored: ``[k, stored layers, *inner]``: all of them, or those of `stored_layers`.
        spec: the field.
        layers: absolute layers, ``slice(start, stop)``; None for all.

    Raises:
        InputError: ``out`` has another number of layers, or a dtype that would change values.
    """
    _check_out(out, spec)
    if spec.num_layers is None:
        copy_rows(out, stored)
        return
    start, stop = bounds(spec, layers)
    if out.shape[1] != stop - start:
        raise InputError(f"{spec.name}: out has {out.shape[1]} layers, layers {start} to {stop} are {stop - start}")
    chosen = stored_layers(spec, layers)
    if stored.shape[1] == spec.shape[0]:
        stored = stored[:, chosen]
    if stored.shape[1] != chosen.stop - chosen.start:
        raise InputError(f"{spec.name}: {stored.shape[1]} stored layers are not those of layers {start} to {stop}")
    if spec.layers is None:
        copy_rows(out, stored)
        return
    parts = selection(spec.layers, start, stop)
    for part in parts.dense:
        out[:, part] = 0
    for ours, theirs in parts.pairs:
        copy_rows(out[:, theirs], stored[:, ours])


def _as_rows(payload: object, spec: FieldSpec, what: str) -> Array:
    name = f"{spec.name} of {what}"
    rows = as_array(payload, what=name)
    check_inner(rows, spec, what=what)
    if rows.size and spec.name == ROUTED_EXPERTS and rows.dtype.kind not in "iu":
        raise PayloadError(
            f"{name}: expert ids must be integers, not {rows.dtype.name}",
            field=spec.name, step=what, got=rows.dtype.name,
        )  # fmt: skip
    return rows.reshape(0, *spec.row_shape) if rows.shape == (0,) else rows


def _place(r: int, spec: FieldSpec, n_rows: int, start: int, what: str) -> tuple[int, int]:
    """The forward row where ``r`` rows begin, and how many of them are forwards."""
    last = max(0, n_rows - 1)
    if start >= 0:
        for n, position in ((last - start, start), (last, 0), (n_rows - start, start), (n_rows, 0)):
            if r == n:
                return position, max(0, min(r, last - position))
    expected = sorted({n for n in (last - start, last, n_rows - start, n_rows) if start >= 0 and n >= 0})
    raise PayloadError(
        f"{spec.name} of {what}: got {r} rows for {n_rows} tokens, start {start}; "
        f"expected {' or '.join(map(str, expected)) or 'start to be at least 0'}",
        field=spec.name, step=what, expected=expected, got=r, start=start, n_rows=n_rows,
    )  # fmt: skip


def _chunk_pieces(chunk: object, spec: FieldSpec, n_rows: int, what: str) -> tuple[Piece, ...]:
    if not isinstance(chunk, Chunk):
        raise PayloadError(
            f"{spec.name} of {what}: chunks and arrays are mixed in one list", field=spec.name, step=what
        )
    rows = _as_rows(chunk.rows, spec, what)
    start, last = int(chunk.start), max(0, n_rows - 1)
    end = start + len(rows)
    if start < 0 or end > n_rows:
        raise PayloadError(
            f"{spec.name} of {what}: a chunk of rows {start} to {end} leaves the {last} rows of {n_rows} tokens",
            field=spec.name, step=what, expected=[0, last], got=[start, end], n_rows=n_rows,
        )  # fmt: skip
    return _check(rows[: max(0, last - start)], start, spec, what)


def _check(rows: Array, position: int, spec: FieldSpec, what: str) -> tuple[Piece, ...]:
    if not len(rows):
        return ()
    runs = [(0, len(rows))]
    whole = rows.dtype.kind in "iu" and numpy_dtype(spec.dtype).kind in "iu"
    if not (whole and integers_within(rows, 0, value_range(spec)[1])):
        if whole and _marks_gaps(spec):
            runs = _data_runs(rows, spec)
        for first, end in runs:
            check_values(rows[first:end], spec, what=what, position=position + first)
    if spec.layers is not None and rows.shape[1] != len(spec.layers):
        _check_dense(rows, runs, position, spec, what)
    if spec.name == ROUTED_EXPERTS and rows.ndim == 3 and rows.shape[2] > 1:
        _check_zero(rows, runs, spec, what)
    return tuple(Piece(position + first, rows[first:end]) for first, end in runs)


def _marks_gaps(spec: FieldSpec) -> bool:
    """Whether a row of -1 is an absent row: everywhere but in signed fields where -1 is a value like others."""
    return spec.bound is not None or spec.missing is not None or numpy_dtype(spec.dtype).kind == "u"


def _data_runs(rows: Array, spec: FieldSpec) -> list[tuple[int, int]]:
    """Runs ``[first, end)`` of the rows that are not -1 in every stored layer."""
    if rows.ndim == 1:
        rows = rows[:, None]
    parts = moe_parts(spec, rows.shape[1])
    absent = rows[(slice(None), parts[0].start or 0, *[0] * (rows.ndim - 2))] == -1
    for first, block in blocks(rows):
        candidates = absent[first : first + len(block)]
        for part in parts:
            if candidates.any():
                candidates &= (block[:, part] == -1).reshape(len(block), -1).all(axis=1)
    edges = np.flatnonzero(np.diff(absent, prepend=True, append=True)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _check_dense(rows: Array, runs: list[tuple[int, int]], position: int, spec: FieldSpec, what: str) -> None:
    assert spec.layers is not None
    for part in selection(spec.layers, 0, rows.shape[1]).dense:
        for first, end in runs:
            dense = rows[first:end, part]
            if not dense.any():
                continue
            index = tuple(int(i) for i in np.argwhere(dense)[0])
            token, layer, value = position + first + index[0], range(rows.shape[1])[part][index[1]], dense[index].item()
            raise PayloadError(
                f"{spec.name} of {what}: {value} at token {token}, layer {layer}, which the spec does not list: "
                f"its layers are {name_layers(spec.layers)}, and the others must be 0",
                field=spec.name, step=what, token=token, layer=layer, value=value, bound=spec.bound,
            )  # fmt: skip


def _check_zero(rows: Array, runs: list[tuple[int, int]], spec: FieldSpec, what: str) -> None:
    """Refuse layers that are zero in every row; all rows are looked at only in layers that are zero in the first."""
    n = sum([end - first for first, end in runs])
    if n < 2:
        return
    seen = np.logical_or.reduce(rows[runs[0][0]], axis=1).tolist()
    if all(seen):
        return
    layers = [
        absolute_layer(spec, layer, rows.shape[1])
        for part in moe_parts(spec, rows.shape[1])
        for layer in range(rows.shape[1])[part]
        if not seen[layer] and not any(rows[first:end, layer].any() for first, end in runs)
    ]
    if layers:
        raise PayloadError(
            f"{spec.name} of {what}: layers {name_layers(layers)} are 0 in all of {n} rows, which no router with topk "
            f"{spec.shape[-1]} chooses; known causes: a kernel that does not report its choice, a pipeline stage that "
            "returned its own layers only, dense layers that moe_layers should leave out",
            field=spec.name, step=what, layers=layers, n_rows=n,
        )  # fmt: skip


def _check_out(out: Array, spec: FieldSpec) -> None:
    if out.dtype.kind not in "iu":
        return
    low, high = value_range(spec)
    info = np.iinfo(out.dtype)
    if numpy_dtype(spec.dtype).kind not in "iub" or low < info.min or high - 1 > info.max:
        raise InputError(
            f"{spec.name}: {out.dtype.name} does not hold its values, {spec.dtype} in [{low}, {high})",
            field=spec.name, got=out.dtype.name,
        )  # fmt: skip
