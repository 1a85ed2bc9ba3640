"""Segments end to end in one array a field, read straight into their places."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from spool.errors import InputError, NotFoundError
from spool.formats.arrays import Ragged
from spool.handle import Spool
from spool.model.fields import LOGPROBS, LOSS_MASK, TOKEN_IDS, FieldSpec, numpy_dtype
from spool.model.refs import SegmentRef
from spool.read.lookup import extents_of, names_of
from spool.read.memory import Memory
from spool.read.sample import Sample
from spool.read.select import layer_range
from spool.train.planning.items import Item, Piece, cut
from spool.train.planning.placement import Placement, before_response, placement, rebased, uncovered
from spool.train.restoring.fields import agreed
from spool.train.restoring.gaps import first_rows

Array = NDArray[Any]

ADDED = ("cu_seqlens", "cu_steps", "position_ids")
"""Names in a batch that are no fields."""

_KNOWN = {TOKEN_IDS.name: TOKEN_IDS, LOGPROBS.name: LOGPROBS, LOSS_MASK.name: LOSS_MASK}


class Wanted(Struct, frozen=True, kw_only=True):
    """What is read of each segment, as `Spool.read` takes it."""

    fields: tuple[str, ...] | None
    layers: slice | None
    dtype: Literal["train", "stored"]
    missing: int | Literal["error"]
    verify: Literal["whole", "always", "never"]

    def read(self, sp: Spool, refs: Sequence[SegmentRef], **more: Any) -> list[Sample]:
        """Read segments in one pass."""
        options: dict[str, Any] = {"fields": self.fields, **more}
        return sp.read(
            list(refs), layers=self.layers, dtype=self.dtype, missing=self.missing, verify=self.verify, **options
        )


class Packer:
    """Reads segments into packed arrays.

    Args:
        sp: where from.
        wanted: what.
        fill: stands in ``forward`` fields for the last row of each segment, which no forward has.
    """

    def __init__(self, sp: Spool, wanted: Wanted, fill: int) -> None:
        self._sp, self._wanted, self._fill = sp, wanted, fill
        self._memory = Memory(sp.config.reuse_bytes)
        self._specs: dict[tuple[str, tuple[str, ...]], FieldSpec] = {}

    def pack(self, refs: Sequence[SegmentRef]) -> dict[str, Any]:
        """Return writable arrays that share no memory; ``n`` rows are those of all segments.

        ``token``, ``response`` and ``forward`` fields are ``[n, ...]``, row *i* of each the same position: 0 stands
        before the response region, and ``fill`` for the forward over a last token. The value of a multimodal
        placeholder is repeated over its rows. ``step`` fields are joined. Fields of positions count from the first row
        of the batch, as int64. Beside them: ``cu_seqlens`` int32 ``[segments + 1]``, where segments begin;
        ``cu_steps``, the same of ``step`` fields, where there are such; ``position_ids`` int64 ``[n]``, the row in its
        segment.

        Raises:
            InputError: the segments do not have the same fields, or ``fill`` does not fit one.
            SpoolError: as `Spool.read` does.
        """
        begins = [*accumulate((ref.n_rows for ref in refs), initial=0)]
        pieces = [_whole(ref, number, begin) for number, (ref, begin) in enumerate(zip(refs, begins, strict=False))]
        columns = [self._column(name, refs, pieces, begins) for name in self._names(refs)]
        samples = self._read(refs, columns)
        packed: dict[str, Any] = {}
        for column in columns:
            values = [sample[column.spec.name] for sample in samples]
            packed[column.spec.name] = column.finish(values)
            if column.align == "step":
                packed["cu_steps"] = _int32([*accumulate(map(_n_rows, values), initial=0)])
        packed["cu_seqlens"] = _int32(begins)
        packed["position_ids"] = np.concatenate([np.arange(ref.n_rows) for ref in refs] or [np.arange(0)])
        return packed

    def _read(self, refs: Sequence[SegmentRef], columns: Sequence[_Column]) -> list[Sample]:
        """Read segments into their places, as far as these are known."""
        slots = [{column.spec.name: column.slot(number) for column in columns} for number in range(len(refs))]
        out = [{name: slot for name, slot in own.items() if slot is not None} for own in slots]
        names = [column.spec.name for column in columns]
        try:
            return self._wanted.read(self._sp, refs, fields=names, out=out)
        except InputError as error:
            self._wanted.read(self._sp, refs, fields=names)  # raises what is wrong beside the places
            raise InputError(
                f"segments of one batch differ in what a field is, {refs[0].id} from others: {error}; filter with "
                "where= so that all are of one model, or leave the field out, fields=",
                **error.details,
            ) from error

    def _names(self, refs: Sequence[SegmentRef]) -> list[str]:
        if not refs:
            return []
        fields = self._wanted.fields
        names = names_of(refs[0], fields)
        other = next((ref for ref in refs if set(names_of(ref, fields)) != set(names)), None)
        if other is not None:
            raise InputError(
                f"{refs[0].id} has the fields {', '.join(names)}, and {other.id} of the same batch has "
                f"{', '.join(names_of(other, None))}: name those that all have, fields=[...]",
                refs=[refs[0].id, other.id],
            )
        if taken := set(names) & set(ADDED):
            raise InputError(f"{min(taken)} is the name of what a batch has beside its fields: leave it out, fields=")
        return names

    def _column(self, name: str, refs: Sequence[SegmentRef], pieces: Sequence[Piece], begins: Sequence[int]) -> _Column:
        spec = _KNOWN.get(name) or self._spec(name, refs)
        align = "token" if name == LOSS_MASK.name else spec.align
        places = [] if align == "step" else _placements(align, pieces, refs)
        if spec.ragged or align == "step":
            array = np.zeros(begins[-1], np.int64) if spec.ragged and align != "step" else None
        else:
            shape, dtype = self._shape(spec), self._dtype(spec)
            if align == "forward":
                _check_fill(self._fill, dtype, name)
            array = self._memory.empty((begins[-1], *shape), dtype)
        fill = 0 if spec.ragged or align != "forward" else self._fill
        starts = [first_rows(ref) if spec.positions and ref.units else None for ref in refs]
        return _Column(spec, align, begins, places, starts, array, fill)

    def _spec(self, name: str, refs: Sequence[SegmentRef]) -> FieldSpec:
        """Return what a field of a batch is, whatever batches came before.

        Of a segment whose rows lie in the streams of an earlier one it is known: their schemas are frozen.
        """
        keys = [(name, tuple(dict.fromkeys([extent.stream for extent in extents_of(ref, name)]))) for ref in refs]
        if not all(key in self._specs for key in keys):
            found = self._recorded(name, refs)
            self._specs |= {key: spec for key, spec in zip(keys, found, strict=True) if key[1] and spec is not None}
        else:
            found = [self._specs[key] for key in keys]
        known = [(ref, spec) for ref, spec in zip(refs, found, strict=True) if spec is not None]
        spec = agreed(known, packed=True)
        if spec is None:
            self._wanted.read(self._sp, refs, fields=[name])  # raises, and says what there is
            raise InputError(f"no segment of the batch says what {name} is: leave it out, fields=", field=name)
        return spec

    def _recorded(self, name: str, refs: Sequence[SegmentRef]) -> list[FieldSpec | None]:
        with suppress(NotFoundError):
            return [found[name].spec if name in found else None for found in self._sp.coverage(refs, [name])]
        return [None] * len(refs)

    def _shape(self, spec: FieldSpec) -> tuple[int, ...]:
        if self._wanted.layers is None or spec.num_layers is None:
            return spec.row_shape
        start, stop = layer_range(self._wanted.layers, spec.num_layers, field=spec.name)
        return (stop - start, *spec.row_shape[1:])

    def _dtype(self, spec: FieldSpec) -> np.dtype[Any]:
        if spec.positions:
            return np.dtype(np.int64)
        return numpy_dtype((spec.train_dtype if self._wanted.dtype == "train" else None) or spec.dtype)


def _whole(ref: SegmentRef, number: int, begin: int) -> Piece:
    """Return a whole segment as the piece that begins at row ``begin``."""
    if not ref.n_rows:
        return Piece(number, 0, 0, 0, 0, begin, 0, 0)
    item = Item(ref.n_tokens, tuple((unit.position, unit.n_rows) for unit in ref.units))
    return cut(item, number, (0, ref.n_rows), begin)


def _placements(align: str, pieces: Sequence[Piece], refs: Sequence[SegmentRef]) -> list[Placement]:
    if align != "response":
        return [placement(piece, align) for piece in pieces]
    found = zip(pieces, refs, strict=True)
    return [placement(piece, align, absent=before_response(piece, ref.response_start)) for piece, ref in found]


class _Column(NamedTuple):
    """A field of a batch on its way.

    Attributes:
        spec: what it is.
        align: what its rows stand for; ``token`` for the loss mask, which a read gives for every token.
        begins: the first row of each in the batch, and one past the last row of all.
        places: where the rows of each go.
        starts: of fields of positions the first row of each token, counted in its segment; None where each is a row.
        array: takes the rows, or of a ragged field how many values each row has; None where rows are joined at the end.
        fill: stands where a segment has no row.
    """

    spec: FieldSpec
    align: str
    begins: Sequence[int]
    places: Sequence[Placement]
    starts: Sequence[NDArray[np.int64] | None]
    array: Array | None
    fill: int

    def slot(self, number: int) -> Array | None:
        """Return the memory that a segment can be read into; None where its rows are placed afterwards."""
        return None if self.array is None or self.spec.ragged else self.places[number].slot(self.array)

    def finish(self, values: Sequence[Any]) -> Any:
        """Return the packed array, given what was read of each segment."""
        if self.spec.ragged:
            return self._ragged(values)
        if self.array is None:
            return np.concatenate(values)
        self._place(values)
        if self.spec.positions:
            for begin, place, starts in zip(self.begins, self.places, self.starts, strict=False):
                own = self.array[place.first : place.last]
                own[:] = rebased(own, starts, begin)
        return self.array

    def _place(self, values: Sequence[Array]) -> None:
        assert self.array is not None
        for start, stop in uncovered(self.begins[-1], self.places):
            self.array[start:stop] = self.fill
        for number, (place, rows) in enumerate(zip(self.places, values, strict=True)):
            if self.slot(number) is None:
                place.put(self.array, rows)

    def _ragged(self, values: Sequence[Ragged]) -> Ragged:
        lengths, parts = [np.diff(rows.offsets) for rows in values], [rows.values for rows in values]
        if self.spec.positions:
            pairs = zip(parts, self.starts, self.begins, strict=False)
            parts = [rebased(part, starts, begin) for part, starts, begin in pairs]
        if self.array is None:
            counts = np.concatenate(lengths)
        else:
            self._place(lengths)
            counts, places = self.array, zip(parts, lengths, self.places, strict=True)
            parts = [_repeat_ragged(part, own, place.repeats) for part, own, place in places]
        return Ragged(np.concatenate(parts), np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def _n_rows(value: Any) -> int:
    return len(value.offsets) - 1 if isinstance(value, Ragged) else len(value)


def _repeat_ragged(values: Array, lengths: Array, repeats: NDArray[np.int64] | None) -> Array:
    if repeats is None or not len(lengths):
        return values
    rows = np.split(values, np.cumsum(lengths)[:-1])
    return np.concatenate([row for row, n in zip(rows, repeats.tolist(), strict=True) for _ in range(n)])


def _check_fill(fill: int, dtype: np.dtype[Any], name: str) -> None:
    if np.array(fill).astype(dtype) != fill:
        raise InputError(
            f"fill={fill} does not fit {name} as {dtype}, which has no forward over a segment's last token: give a "
            "number that fits, or dtype='train'",
            field=name, fill=fill, dtype=str(dtype),
        )  # fmt: skip


def _int32(ends: Sequence[int]) -> NDArray[np.int32]:
    if ends[-1] > np.iinfo(np.int32).max:
        raise InputError(f"a batch of {ends[-1]} rows is more than int32 cu_seqlens can say: give max_tokens=")
    return np.array(ends, np.int32)
