"""Segments as Parquet: a row for each, its fields as lists, readable by pyarrow and whatever else reads Parquet.

A field of inner shape ``[L, K]`` is a list of fixed-size lists of fixed-size lists. What was never sent is null: the
element of the list where a row is missing, the whole list where the segment has nothing of the field. bfloat16, which
Parquet does not have, becomes float32, bit for bit its upper half.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spool.errors import InputError
from spool.export.source import DtypeChoice, Source
from spool.formats.arrays import Ragged
from spool.formats.messages import printable
from spool.model.fields import LOSS_MASK
from spool.model.refs import SegmentRef, StepRef
from spool.read.lookup import extents_of, names_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.read.lookup import Selection

GROUP_BYTES = 32 << 20
"""Arrays of a row group, uncompressed; one segment at least."""
FILE_BYTES = 1 << 30
"""A file that has so many is closed, and the next one begun."""

Part = SegmentRef | StepRef

_VERSIONS = pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("stop", pa.int32())]))
_SPANS = pa.list_(
    pa.struct([("step", pa.int32()), ("start", pa.int32()), ("stop", pa.int32()), ("trained", pa.bool_())])
)
_IDENTITY: dict[str, pa.DataType] = {
    "id": pa.string(), "session_id": pa.string(), "group_id": pa.string(), "sample_index": pa.int64(),
    "rollout_step": pa.int64(), "source": pa.string(), "prompt_id": pa.string(), "split": pa.string(),
    "attempt": pa.int64(), "view": pa.string(), "index": pa.int32(), "count": pa.int32(),
    "steps": pa.list_(pa.int32()), "outcome": pa.string(), "finish_reason": pa.string(), "reward": pa.float64(),
    "n_tokens": pa.int64(), "n_rows": pa.int64(), "response_start": pa.int64(), "response_length": pa.int64(),
    "trainable_tokens": pa.int64(), "n_nonfinite": pa.int64(), "cut_tokens": pa.int64(), "superseded": pa.bool_(),
    "spans": _SPANS, "versions": _VERSIONS, "facts": pa.string(), "metadata": pa.string(), "messages": pa.string(),
    "tools": pa.string(),
}  # fmt: skip


class Column(NamedTuple):
    """A field as a column.

    Attributes:
        dtype: of its values; float32 where they are bfloat16.
        shape: inner shape of a row (of a value where ragged).
        ragged: rows have any number of values.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    ragged: bool

    @property
    def type(self) -> pa.DataType:
        """The Arrow type of a segment's cell."""
        inner = pa.from_numpy_dtype(self.dtype)
        for size in reversed(self.shape):
            inner = pa.list_(inner, size)
        return pa.list_(pa.list_(inner) if self.ragged else inner)


class TablePlan(NamedTuple):
    """What is to be written.

    Attributes:
        refs: the rows.
        columns: by field.
        sizes: bytes of the arrays of each row, ragged values counted as one a row.
        dtype: what is read.
    """

    refs: Sequence[Part]
    columns: dict[str, Column]
    sizes: list[int]
    dtype: DtypeChoice

    @property
    def schema(self) -> pa.Schema:
        """The schema of the files."""
        fields = {_column_name(name): column.type for name, column in self.columns.items()}
        return pa.schema([pa.field(name, kind) for name, kind in (_IDENTITY | fields).items()])


def plan_table(source: Source, refs: Sequence[Part], dtype: DtypeChoice) -> TablePlan:
    """Find out the columns and sizes of a table; no payload is read.

    Raises:
        InputError: a field has shapes that no one column holds.
    """
    columns: dict[str, Column] = {}
    sizes = []
    for ref in refs:
        found = _fields(source, ref, dtype)
        sizes.append(_array_bytes(found))
        for name, (column, _) in found.items():
            columns[name] = _merged(name, columns.get(name, column), column)
    return TablePlan(refs, columns, sizes, dtype)


def array_bytes(source: Source, ref: Part) -> int:
    """Return the bytes of the arrays of a reference as stored, ragged values counted as one a row."""
    return _array_bytes(_fields(source, ref, "stored"))


def _array_bytes(fields: dict[str, tuple[Column, int]]) -> int:
    return sum(n * column.dtype.itemsize * math.prod(column.shape) for column, n in fields.values())


def _fields(source: Source, ref: Part, dtype: DtypeChoice) -> dict[str, tuple[Column, int]]:
    """Return the columns of a reference and their rows."""
    found = ((name, source.select(ref, name)) for name in names_of(ref, None))
    return {name: (_column(chosen, dtype), chosen.n) for name, chosen in found if chosen is not None}


def _column(selection: Selection, dtype: DtypeChoice) -> Column:
    view = selection.view
    kind = view.train if dtype == "train" else view.stored
    return Column(np.dtype(np.float32) if kind == ml_dtypes.bfloat16 else kind, view.spec.row_shape, view.spec.ragged)


def _merged(name: str, one: Column, other: Column) -> Column:
    if (one.shape, one.ragged) != (other.shape, other.ragged):
        raise InputError(
            f"{name} has rows of shape {list(one.shape)} in some segments and {list(other.shape)} in others, which no "
            "column of a table holds; export them apart, or as --format spool",
            field=name,
        )
    return one._replace(dtype=np.promote_types(one.dtype, other.dtype))


def _column_name(field: str) -> str:
    return f"{field}_field" if field in _IDENTITY else field


def write_table(
    source: Source, plan: TablePlan, folder: str, progress: Callable[[int, int], object] | None = None
) -> None:
    """Write ``part-00000.parquet`` and so on into an empty folder; a row group at a time is in memory.

    Raises:
        SpoolError: something cannot be read.
        OSError: something cannot be written.
    """
    schema = plan.schema.with_metadata({"spool:id": source.spool_id})
    total, done, number = sum(plan.sizes), 0, 0
    groups = list(_groups(plan))
    while groups or not number:
        with open(f"{folder}/part-{number:05d}.parquet", "xb") as file:
            dictionary = [name for name, kind in _IDENTITY.items() if pa.types.is_string(kind)]
            with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=dictionary) as writer:
                while groups and file.tell() < FILE_BYTES:
                    rows = groups.pop(0)
                    writer.write_table(_table(source, plan, schema, rows), row_group_size=len(rows))
                    done += sum(plan.sizes[row] for row in rows)
                    if progress is not None:
                        progress(done, total)
        number += 1
    assert os.path.exists(f"{folder}/part-00000.parquet")


def _groups(plan: TablePlan) -> Iterator[range]:
    """Yield the rows of each row group."""
    start, n_bytes = 0, 0
    for row, size in enumerate(plan.sizes):
        if row > start and n_bytes + size > GROUP_BYTES:
            yield range(start, row)
            start, n_bytes = row, 0
        n_bytes += size
    if start < len(plan.sizes):
        yield range(start, len(plan.sizes))


def _table(source: Source, plan: TablePlan, schema: pa.Schema, rows: range) -> pa.Table:
    refs = plan.refs[rows.start : rows.stop]
    samples = source.read(refs, plan.dtype, None)
    facts = [_facts(source, ref) for ref in refs]
    arrays = [pa.array([row[name] for row in facts], kind) for name, kind in _IDENTITY.items()]
    for name, column in plan.columns.items():
        cells = [_cell(source, ref, name, column, sample.get(name)) for ref, sample in zip(refs, samples, strict=True)]
        arrays.append(pa.concat_arrays(cells))
    return pa.Table.from_arrays(arrays, schema=schema)


def _facts(source: Source, ref: Part) -> dict[str, Any]:
    row = source.session(ref.session_id)
    found = {name: getattr(ref, name, None) for name in _IDENTITY}
    found["versions"] = [{"version": v.version, "start": v.start, "stop": v.stop} for v in ref.versions]
    found["spans"] = [{"step": s.step, "start": s.start, "stop": s.stop, "trained": s.trained} for s in ref.spans]
    found["steps"] = list(ref.steps) if isinstance(ref, SegmentRef) else [ref.index]
    found["facts"] = _json(getattr(ref, "facts", {}))
    found["metadata"] = _json({} if row is None else row.metadata)
    found["messages"], found["tools"] = _json(source.messages(ref)), _json(source.tools(ref))
    return found


def _json(value: object) -> str:
    return json.dumps(printable(value), allow_nan=False)


def _cell(source: Source, ref: Part, name: str, column: Column, value: Any) -> pa.Array:
    """Return an array of one cell."""
    if value is None:
        return pa.nulls(1, column.type)
    # a loss mask has no gaps: where none was sent the step's tokens are trained
    selection = source.select(ref, name) if name != LOSS_MASK.name and extents_of(ref, name) else None
    values = value.values if isinstance(value, Ragged) else value
    n = len(value.offsets) - 1 if isinstance(value, Ragged) else len(value)
    mask = _mask(n, [] if selection is None else ((gap.to, gap.stop - gap.start) for gap in selection.gaps))
    inner = _nested(values, column, None if isinstance(value, Ragged) else mask)
    if isinstance(value, Ragged):
        offsets = pa.array(value.offsets.astype(np.int32))
        inner = pa.ListArray.from_arrays(offsets, inner, mask=None if mask is None else pa.array(mask))
    return pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), inner)


def _mask(n: int, gaps: Iterable[tuple[int, int]]) -> NDArray[np.bool_] | None:
    mask = None
    for start, length in gaps:
        mask = np.zeros(n, np.bool_) if mask is None else mask
        mask[start : start + length] = True
    return mask


def _nested(values: NDArray[Any], column: Column, mask: NDArray[np.bool_] | None) -> pa.Array:
    """Return ``[n, *shape]`` values as nested fixed-size lists; rows of ``mask`` are null."""
    flat = _plain(np.ascontiguousarray(values).reshape(-1), column.dtype)
    if not column.shape:
        return pa.array(flat, mask=mask)
    nested = pa.array(flat)
    for size in reversed(column.shape[1:]):
        nested = pa.FixedSizeListArray.from_arrays(nested, size)
    return pa.FixedSizeListArray.from_arrays(nested, column.shape[0], mask=None if mask is None else pa.array(mask))


def _plain(flat: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if flat.dtype == ml_dtypes.bfloat16:  # a cast would quieten signalling NaN
        flat = (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return flat.astype(dtype, copy=False)
