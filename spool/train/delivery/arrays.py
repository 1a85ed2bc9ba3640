"""Which arrays a micro-batch has, and where each lies in its memory. Pure: no payload, no memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from spool.errors import InputError
from spool.formats.layers import bounds
from spool.model.fields import TOKEN_IDS, FieldSpec, numpy_dtype
from spool.train.planning.items import Range
from spool.train.planning.shares import PLACED, Share
from spool.train.restoring.gaps import consecutive, has_experts
from spool.train.restoring.layouts import VERSIONS
from spool.train.restoring.versions import NO_VERSION

ALIGNED_BYTES = 4096
"""Arrays begin on pages, so that direct reads go right into them."""

ADDED = ("position_ids", "cu_seqlens", "cu_seqlens_padded")
"""Names in a micro-batch that are no fields."""


class Array(Struct, frozen=True, array_like=True):
    """An array of a micro-batch.

    Attributes:
        name: of the field, or one of `ADDED`.
        dtype: as `spool.model.fields.numpy_dtype` knows it.
        shape: of the array.
        offset: first byte in the memory of the micro-batch.
        absent: what marks an absent entry inside a row; None where there is no such mark.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    absent: int | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def view(self, memory: Any) -> NDArray[Any]:
        """Return the array in ``memory``, a buffer of the whole micro-batch; as writable as that is."""
        n = prod(self.shape)
        return np.frombuffer(memory, numpy_dtype(self.dtype), n, self.offset).reshape(self.shape)


class Arrangement(NamedTuple):
    """The arrays of one micro-batch, in the order they lie in, and the bytes they take together."""

    arrays: tuple[Array, ...]
    n_bytes: int


def arrange(
    share: Share, specs: Mapping[str, FieldSpec], layers: slice | None, dtype: Literal["stored", "train"]
) -> Arrangement:
    """Return which arrays a share of a micro-batch takes.

    Raises:
        InputError: a field has no layers, or not these.
    """
    wanted = [(spec.name, _dtype(spec, dtype), (share.n_rows, *_row_shape(spec, layers))) for spec in specs.values()]
    n_seqlens = len(share.cu_seqlens)
    wanted += [("position_ids", "int64", (share.n_rows,)), *((name, "int32", (n_seqlens,)) for name in ADDED[1:])]
    arrays, at = [], 0
    for name, kind, shape in wanted:
        array = Array(name, kind, shape, at, specs[name].missing if name in specs else None)
        arrays.append(array)
        at += -(-array.n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return Arrangement(tuple(arrays), max(at, ALIGNED_BYTES))


def check_fields(specs: Iterable[FieldSpec], *, split: bool) -> None:
    """Refuse fields that have no row for each row of a share.

    Raises:
        InputError: one is ragged or of steps, is named like something else, or holds positions of a split sequence.
    """
    for spec in specs:
        if spec.ragged or spec.align not in PLACED:
            what = "has any number of values a row" if spec.ragged else f"has a row a {spec.align}"
            raise InputError(
                f"{spec.name} {what}, and a micro-batch has one for each position: leave it out (fields=), and read it "
                "with Spool.read",
                field=spec.name,
            )
        if spec.name in ADDED:
            raise InputError(f"a field is called {spec.name}, as what a micro-batch has beside: leave it out (fields=)")
        if spec.positions and split:
            raise InputError(
                f"{spec.name} holds token positions, which have no place where context-parallel ranks have parts of "
                "the sequence: leave it out (fields=)",
                field=spec.name,
            )


def pad(
    array: NDArray[Any],
    spec: FieldSpec,
    rows: Iterable[Range],
    numbers: NDArray[np.int64],
    *,
    layers: slice | None,
    token: int,
) -> None:
    """Set what stands for padding.

    Consecutive experts stand for routing (`gaps.consecutive`): legal ids, spread over all of them.
    Elsewhere it is 0, -1 for weight versions, and what a field's spec says of missing values.

    Args:
        array: the field's rows in a share.
        spec: of the field.
        rows: which are padding.
        numbers: as `behind` returns them.
        layers: absolute layers that the array has; all for None.
        token: for ``token_ids``.
    """
    if has_experts(spec):
        for start, stop in rows:
            array[start:stop] = consecutive(spec, numbers[start:stop], layers)
        return
    value = {TOKEN_IDS.name: token, VERSIONS.name: NO_VERSION}.get(spec.name, spec.missing or 0)
    for start, stop in rows:
        array[start:stop] = value


def behind(share: Share, lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return for each row of a share how far it is behind the real ones of its sequence; 0 for these.

    Args:
        share: of a micro-batch.
        lengths: real rows of each of its sequences.
    """
    found = [np.zeros(0, np.int64)]
    for (start, stop), number in zip(share.positions, share.sequences, strict=True):
        length = lengths[number] if number < len(lengths) else 0
        found.append(np.maximum(np.arange(start, stop) - length, 0))
    return np.concatenate(found)


def _dtype(spec: FieldSpec, dtype: Literal["stored", "train"]) -> str:
    if spec.positions:
        return "int64"
    return (spec.train_dtype if dtype == "train" else None) or spec.dtype


def _row_shape(spec: FieldSpec, layers: slice | None) -> tuple[int, ...]:
    if spec.num_layers is None or layers is None:
        return spec.row_shape
    start, stop = bounds(spec, layers)
    return (stop - start, *spec.row_shape[1:])
