"""Zarr v3 arrays with the sharding codec, by hand: metadata documents, shard index, keys.

A shard in the hot tier is the plain rows in order, padded with zeros to whole inner chunks, and the index behind them:
inner chunk *i* lies at ``i * chunk_bytes``, so an append is a write and a slice is a read, and any Zarr v3 reader opens
the sealed file. Fill value 0 stands for rows of a pack that were skipped. Documents: Zarr v3 core and the
``sharding_indexed`` codec (ZEP 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from crc32c import crc32c

from spool.errors import ConfigError, IntegrityError, SpoolError
from spool.model.fields import ArraySpec, FieldSpec, Layout, Schema, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT = 1
"""Version of what a stream's ``zarr.json`` says in its attributes."""

_ZARR_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
)
MISSING = np.uint64(2**64 - 1)
"""Offset and size of an inner chunk that is not there."""
LITTLE: dict[str, object] = {"name": "bytes", "configuration": {"endian": "little"}}
CRC32C: dict[str, object] = {"name": "crc32c"}
"""Codecs as the documents name them."""
_GROUP = ("stream", "created", "schema", "layout")
"""What the attributes of every stream say; ``id`` is younger than the format, and later versions may add to them."""
SOME = "this zarr.json"
"""How errors call a document of which nobody said where it is."""


def shard_key(name: str, ndim: int, pack: int) -> str:
    """Return the key of shard ``pack`` under its stream: array ``x`` of 3 dimensions, pack 7 -> ``x/c/7/0/0``.

    Args:
        name: the array's name.
        ndim: its dimensions, rows included.
        pack: the shard's number along the rows.
    """
    return f"{name}/c/{pack}" + "/0" * (ndim - 1)


def group_key(stream: str) -> str:
    """Return the key of the document that describes a stream."""
    return f"streams/{stream}/zarr.json"


def array_key(stream: str, name: str) -> str:
    """Return the key of the document that describes a stored array of a stream."""
    return f"streams/{stream}/{name}/zarr.json"


def padded_bytes(n_data_bytes: int, *, chunk_bytes: int) -> int:
    """Return ``n_data_bytes`` rounded up to whole inner chunks; there the index begins."""
    return -(-n_data_bytes // chunk_bytes) * chunk_bytes


def shard_index(n_data_bytes: int, *, chunk_bytes: int, n_chunks: int) -> bytes:
    """Return the index that goes behind the padded data.

    Args:
        n_data_bytes: bytes of rows in the shard, padding not counted.
        chunk_bytes: bytes of one inner chunk.
        n_chunks: inner chunks of a full shard, R / C.

    Returns:
        ``16 * n_chunks + 4`` bytes: u64 offset and u64 size of each inner chunk (both 2**64-1 for one that is not
        there), and their crc32c.
    """
    present = padded_bytes(n_data_bytes, chunk_bytes=chunk_bytes) // chunk_bytes
    assert present <= n_chunks, f"{n_data_bytes} bytes do not fit {n_chunks} chunks of {chunk_bytes}"
    index = np.full((n_chunks, 2), MISSING, "<u8")
    index[:present, 0] = np.arange(present, dtype=np.uint64) * np.uint64(chunk_bytes)
    index[:present, 1] = chunk_bytes
    entries = index.tobytes()
    return entries + crc32c(entries).to_bytes(4, "little")


def padded_rows(shard_bytes: int, *, chunk_bytes: int, chunk_rows: int, shard_rows: int) -> int:
    """Return the rows that the inner chunks of a sealed shard of so many bytes hold, padding among them."""
    n_bytes = shard_bytes - 16 * (shard_rows // chunk_rows) - 4
    return max(n_bytes // chunk_bytes, 0) * chunk_rows


def array_metadata(
    spec: ArraySpec, *, chunk_rows: int, shard_rows: int, n_rows: int, valid_rows: Sequence[Sequence[int]]
) -> bytes:
    """Return the ``zarr.json`` of one stored array.

    Args:
        spec: its name, dtype and inner shape.
        chunk_rows: C, rows of an inner chunk.
        shard_rows: R, rows of a shard; a multiple of C.
        n_rows: rows up to the end of the last sealed pack.
        valid_rows: ``[start, count]`` of each pack's rows; what lies between was skipped and reads as 0.

    Raises:
        ConfigError: Zarr has no dtype for it.
    """
    sharding = {
        "chunk_shape": [chunk_rows, *spec.shape],
        "codecs": [LITTLE],
        "index_codecs": [LITTLE, CRC32C],
        "index_location": "end",
    }
    return array_document(spec, sharding, shard_rows=shard_rows, n_rows=n_rows, valid_rows=valid_rows)


def array_document(
    spec: ArraySpec,
    sharding: dict[str, object],
    *,
    shard_rows: int,
    n_rows: int,
    valid_rows: Sequence[Sequence[int]],
) -> bytes:
    """Return the ``zarr.json`` of one stored array of either tier.

    Args:
        spec: its name, dtype and inner shape.
        sharding: the configuration of the codec ``sharding_indexed``.
        shard_rows: R, rows of a shard.
        n_rows: rows up to the end of the last pack that is described.
        valid_rows: ``[start, count]`` of each pack's rows.

    Raises:
        ConfigError: Zarr has no dtype for it.
    """
    dtype, attributes = _zarr_dtype(spec), {"spool:rows": [list(pair) for pair in valid_rows]}
    if dtype != _name(spec):
        attributes["spool:dtype"] = _name(spec)  # type: ignore[assignment]
    return _document(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [n_rows, *spec.shape],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_rows, *spec.shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if dtype == "bool" else 0.0 if dtype.startswith("float") else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": attributes,
        }
    )


def parse_rows(data: bytes, what: str = SOME) -> tuple[int, list[tuple[int, int]]]:
    """Return ``n_rows`` and ``valid_rows`` of an array's ``zarr.json``; errors call it ``what``.

    Raises:
        IntegrityError: it is torn, or not one of ours.
    """
    document = parse_document(data, node_type="array", what=what)
    attributes = document.get("attributes")
    if not isinstance(attributes, dict) or "spool:rows" not in attributes:
        raise not_ours("its attributes lack spool:rows", what)
    try:
        rows = msgspec.convert(attributes["spool:rows"], list[tuple[int, int]])
    except msgspec.ValidationError as error:
        raise not_ours(f"its spool:rows does not fit: {error}", what) from error
    try:
        return msgspec.convert(document["shape"][0], int), rows
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise not_ours(f"its shape does not fit: {error}", what) from error


def group_metadata(schema: Schema, layout: Layout, *, stream: str, created: float, **attributes: object) -> bytes:
    """Return the ``zarr.json`` of a stream.

    Args:
        schema: its fields.
        layout: rows a chunk and a shard of each array.
        stream: its name.
        created: seconds since the epoch.
        attributes: more JSON-able facts; ``x`` is written as ``spool:x``.
    """
    facts = {
        "format": FORMAT,
        "stream": stream,
        "created": created,
        "schema": schema.fields,
        "layout": layout,
        **attributes,
    }
    named = {f"spool:{name}": value for name, value in facts.items()}
    return _document({"zarr_format": 3, "node_type": "group", "attributes": named})


def parse_group(data: bytes, what: str = SOME) -> tuple[Schema, Layout]:
    """Return the schema and the layout of a stream from its ``zarr.json``; errors call it ``what``.

    Raises:
        IntegrityError: it is torn, or not one of ours, or of a newer format.
    """
    facts = parse_attributes(data, what=what)
    try:
        schema = Schema(msgspec.convert(facts["schema"], tuple[FieldSpec, ...]))
    except (TypeError, msgspec.ValidationError, ConfigError) as error:
        raise not_ours(f"its spool:schema does not fit: {error}", what) from error
    try:
        sizes = msgspec.convert(facts["layout"], Layout)
        odd = [array.name for array in schema.arrays if not _is_sound(sizes, array.name)]
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise not_ours(f"its spool:layout does not fit: {error}", what) from error
    if odd:
        raise not_ours(f"its spool:layout does not fit {', '.join(odd)}", what)
    return schema, sizes


def _is_sound(sizes: Layout, name: str) -> bool:
    chunk_rows, shard_rows = sizes.chunk_rows[name], sizes.shard_rows[name]
    return 0 < chunk_rows <= shard_rows and shard_rows % chunk_rows == 0


def parse_attributes(data: bytes, what: str = SOME) -> dict[str, Any]:
    """Return what `group_metadata` was told, by name (``format``, ``stream``, ``created``, ...).

    Raises:
        IntegrityError: it is torn, or not one of ours, or of a newer format.
    """
    attributes = parse_document(data, node_type="group", what=what).get("attributes")
    if not isinstance(attributes, dict) or attributes.get("spool:format") != FORMAT:
        raise not_ours(f"its attributes do not say spool:format {FORMAT}", what)
    facts = {name[6:]: value for name, value in attributes.items() if name.startswith("spool:")}
    lacking = [f"spool:{name}" for name in _GROUP if name not in facts]
    if lacking:
        raise not_ours(f"its attributes lack {', '.join(lacking)}", what)
    if not isinstance(facts["created"], int | float):
        raise not_ours(f"its spool:created is no time but {facts['created']!r:.80}", what)
    return facts


def _zarr_dtype(spec: ArraySpec) -> str:
    name = _name(spec)
    if name == "bfloat16":
        return "uint16"
    if name not in _ZARR_DTYPES:
        raise ConfigError(f"array {spec.name!r}: Zarr has no dtype for {spec.dtype}; store float64 or integers instead")
    return name


def _name(spec: ArraySpec) -> str:
    return numpy_dtype(spec.dtype).name


def _document(value: dict[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=0)


def parse_document(data: bytes, *, node_type: str, what: str = SOME) -> dict[str, Any]:
    """Return a ``zarr.json`` of a Zarr v3 ``array`` or ``group``; errors call it ``what``.

    Raises:
        IntegrityError: it is torn, or describes something else.
    """
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise not_ours(error, what) from error
    if document.get("zarr_format") != 3 or document.get("node_type") != node_type:
        raise not_ours(f"it does not describe a Zarr v3 {node_type}", what)
    return document


def not_ours(why: object, what: str = SOME) -> SpoolError:
    """Return the error for a ``zarr.json`` that cannot be used."""
    return IntegrityError(f"{what} cannot be used: {why}; it is torn, damaged or newer: run `spool recover`", file=what)
