"""Where a row lies: the frozen schemas of streams, read once each, and what a field looks like over several of them."""

from __future__ import annotations

import re
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from spool.errors import InputError, IntegrityError
from spool.formats.shard import shard_key
from spool.model.fields import ArraySpec, FieldSpec, Layout, Schema, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from spool.model.refs import Extent

Dtype = np.dtype[Any]

_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class Source:
    """A stored array of one stream: which object and byte a row is at.

    Attributes:
        stream: the stream's name.
        field: the spec of the field it carries.
        name: the array's name.
        dtype: stored dtype.
        shape: inner shape of a stored row.
        row_bytes: bytes of a stored row.
        shard_rows: R, rows of an object.
    """

    __slots__ = ("_keys", "_ndim", "_prefix", "dtype", "field", "name", "row_bytes", "shape", "shard_rows", "stream")

    def __init__(self, stream: str, field: FieldSpec, array: ArraySpec, layout: Layout) -> None:
        self.stream = stream
        self.field = field
        self.name = array.name
        self.dtype: Dtype = numpy_dtype(array.dtype)
        self.shape = array.shape
        self.row_bytes = array.row_bytes
        self.shard_rows = layout.shard_rows[array.name]
        self._ndim = 1 + len(array.shape)
        self._keys: dict[int, str] = {}
        self._prefix = f"streams/{stream}/"

    def locate(self, extent: Extent) -> tuple[str, int]:
        """Return the object that holds ``extent`` and the number of that object's first row.

        Raises:
            IntegrityError: the extent does not lie in one object, so the reference is damaged.
        """
        start, n_rows = extent.whole
        pack, first = divmod(start, self.shard_rows)
        if first + n_rows > self.shard_rows or extent.before < 0 or extent.n < 0 or extent.after < 0 or pack < 0:
            raise IntegrityError(
                f"{n_rows} rows of {self.name} at row {start} of stream {self.stream} would cross "
                f"a shard of {self.shard_rows} rows; the reference is damaged, take it from the catalog again",
                stream=self.stream, field=self.field.name, rows=[extent.row, extent.row + extent.n],
            )  # fmt: skip
        return self._keys.get(pack) or self.key(pack), pack * self.shard_rows

    def key(self, pack: int) -> str:
        """Return the object that holds the array's rows of a pack."""
        key = self._keys.get(pack)
        if key is None:
            key = self._keys[pack] = self._prefix + shard_key(self.name, self._ndim, pack)
        return key

    def pack_of(self, key: str) -> int:
        """Return the pack whose rows the object at ``key`` holds; the inverse of `key`."""
        return int(key.removeprefix(f"{self._prefix}{self.name}/c/").partition("/")[0])


class FieldView(NamedTuple):
    """A field as one or several streams have it.

    Attributes:
        spec: name, alignment, inner shape; the first stream's.
        stored: dtype that holds what each stream stores, without loss.
        train: dtype for a trainer.
        values: the array by stream; of a ragged field its values.
        offsets: of a ragged field the end offsets by stream.
    """

    spec: FieldSpec
    stored: Dtype
    train: Dtype
    values: dict[str, Source]
    offsets: dict[str, Source]

    @property
    def facts(self) -> tuple[object, ...]:
        """What has to be the same in all streams."""
        return self.spec.align, self.spec.ragged, self.spec.num_layers, self.spec.row_shape


def builtin(spec: FieldSpec) -> FieldView:
    """Return the view of a field of which nothing is stored: one that is the same in every stream, or has no rows."""
    return FieldView(spec, numpy_dtype(spec.dtype), numpy_dtype(spec.train_dtype or spec.dtype), {}, {})


class Streams:
    """The streams' schemas. A schema is frozen, so it is read once; safe to use from many threads.

    Args:
        read: returns the fields of a stream, and how its arrays are laid out.
    """

    def __init__(self, read: Callable[[str], tuple[Schema, Layout]]) -> None:
        self._read = read
        self._streams: dict[str, dict[str, FieldView]] = {}
        self._merged: dict[tuple[str, tuple[str, ...]], FieldView] = {}

    def fields(self, stream: str) -> dict[str, FieldView]:
        """Return the fields of a stream by name."""
        known = self._streams.get(stream)
        if known is None:
            if not _STREAM.fullmatch(stream):
                raise IntegrityError(f"{stream!r} names no stream; the reference is damaged", stream=stream)
            known = self._streams[stream] = _views(stream, *self._read(stream))
        return known

    def field(self, name: str, extents: Iterable[Extent]) -> FieldView:
        """Return what ``name`` is over the streams of ``extents``, of which there is at least one.

        Raises:
            IntegrityError: a stream has no such field.
            InputError: two streams have it in ways that no array can hold both.
        """
        names = tuple(dict.fromkeys([extent.stream for extent in extents]))
        view = self._merged.get((name, names))
        if view is None:
            view = self._merged[name, names] = reduce(_merge, (self._one(name, stream) for stream in names))
        return view

    def _one(self, name: str, stream: str) -> FieldView:
        view = self.fields(stream).get(name)
        if view is None:
            raise IntegrityError(
                f"a reference names rows of {name} in stream {stream}, whose schema has only "
                f"{', '.join(self.fields(stream)) or 'no field'}; the reference or the stream is damaged",
                field=name, stream=stream,
            )  # fmt: skip
        return view


def _views(stream: str, schema: Schema, layout: Layout) -> dict[str, FieldView]:
    views = {}
    for spec in schema.fields:
        *offsets, values = (Source(stream, spec, array, layout) for array in spec.arrays)
        train = numpy_dtype(spec.train_dtype or spec.dtype)
        ends = {stream: offsets[0]} if offsets else {}
        views[spec.name] = FieldView(spec, values.dtype, train, {stream: values}, ends)
    return views


def _merge(one: FieldView, other: FieldView) -> FieldView:
    if one.facts != other.facts:
        raise InputError(
            f"field {one.spec.name} is {one.facts} in {', '.join(one.values)} and {other.facts} in "
            f"{', '.join(other.values)}; no array holds both, read the parts one by one",
            field=one.spec.name,
        )
    stored, train = _widest(one.spec.name, one.stored, other.stored), _widest(one.spec.name, one.train, other.train)
    return FieldView(one.spec, stored, train, one.values | other.values, one.offsets | other.offsets)


def _widest(field: str, one: Dtype, other: Dtype) -> Dtype:
    try:
        wide: Dtype = np.promote_types(one, other)
    except TypeError:
        wide = one
    if not (holds(wide, one) and holds(wide, other)):
        raise InputError(
            f"field {field} is stored as {one} and as {other}, and no dtype holds both; read the parts one by one",
            field=field,
        )
    return wide


def holds(wide: Dtype, narrow: Dtype) -> bool:
    """Return whether every value of ``narrow`` is one of ``wide``: numpy's safe casts, less int64 in float64."""
    if not np.can_cast(narrow, wide, "safe"):
        return False
    if narrow.kind not in "iu" or wide.kind in "iuc":
        return True
    return narrow.itemsize * 8 - (narrow.kind == "i") <= mantissa_bits(wide) + 1


def mantissa_bits(dtype: Dtype) -> int:
    """Return the stored bits of a float dtype's mantissa."""
    return int(ml_dtypes.finfo(dtype).nmant)  # type: ignore[no-untyped-call]
