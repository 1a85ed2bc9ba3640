"""Arrays of the cold tier: how their shards lie, and the Zarr v3 documents that say so.

All of it is stock: ``sharding_indexed`` with the index at the start, codecs ``bytes``, ``zstd`` and ``crc32c``. The
codec of an array is chosen once a stream and named by the group's document; nothing else decides how its shards lie.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from spool.formats.shard import (
    CRC32C,
    LITTLE,
    SOME,
    array_document,
    group_metadata,
    not_ours,
    parse_attributes,
    parse_document,
    parse_group,
    parse_rows,
)
from spool.model.fields import ArraySpec, Layout, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Codec = Literal["raw", "zstd"]

CRC_BYTES = 4
LAYER_CHUNK_ROWS = 2048
ZSTD_LEVEL = 1
_ZSTD: dict[str, object] = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}


class ColdLayout(Struct, frozen=True, dict=True):
    """How the shards of an array lie in the cold tier.

    Attributes:
        spec: the array.
        codec: ``raw`` or ``zstd``.
        chunk_rows: rows of an inner chunk, of a row group; divides R.
        shard_rows: R, rows of a shard.
        n_layers: chunks of a row group, one a stored layer; 1 where a chunk holds whole rows.
    """

    spec: ArraySpec
    codec: Codec
    chunk_rows: int
    shard_rows: int
    n_layers: int = 1

    @cached_property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of an inner chunk, rows included."""
        shape = self.spec.shape
        return (self.chunk_rows, shape[0] // self.n_layers, *shape[1:]) if shape else (self.chunk_rows,)

    @cached_property
    def n_groups(self) -> int:
        """Row groups of a full shard."""
        return self.shard_rows // self.chunk_rows

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes that a chunk holds of one row."""
        return self.spec.row_bytes // self.n_layers

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk, neither compressed nor with its crc32c."""
        return self.chunk_rows * self.layer_bytes

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the index with its crc32c; the first chunk begins there."""
        return 16 * self.n_groups * self.n_layers + CRC_BYTES

    def max_shard_bytes(self, n_rows: int) -> int:
        """Return what a shard of ``n_rows`` takes at most; exactly that where it is raw."""
        # zstd's own bound for bytes that do not compress
        excess = 0 if self.codec == "raw" else (self.chunk_bytes >> 8) + 64
        n_chunks = -(-n_rows // self.chunk_rows) * self.n_layers
        return self.index_bytes + n_chunks * (self.chunk_bytes + excess + CRC_BYTES)


def cold_layout(spec: ArraySpec, layout: Layout, codec: Codec, *, layered: bool) -> ColdLayout:
    """Return how an array lies in the cold tier.

    Args:
        spec: the array.
        layout: rows a chunk and a shard in the hot tier.
        codec: as chosen for the stream.
        layered: axis 0 of its inner shape is layers.
    """
    chunk_rows, shard_rows = layout.chunk_rows[spec.name], layout.shard_rows[spec.name]
    if codec == "zstd" and layered and spec.shape:
        return ColdLayout(spec, codec, min(chunk_rows, LAYER_CHUNK_ROWS), shard_rows, spec.shape[0])
    return ColdLayout(spec, codec, chunk_rows, shard_rows)


def cold_layouts(schema: Schema, layout: Layout, codecs: Mapping[str, Codec]) -> dict[str, ColdLayout]:
    """Return the layout of each array of a stream, by name."""
    return {
        spec.name: cold_layout(spec, layout, codecs[spec.name], layered=field.num_layers is not None)
        for field in schema.fields
        for spec in field.arrays
    }


def cold_array_metadata(layout: ColdLayout, *, n_rows: int, valid_rows: Sequence[Sequence[int]]) -> bytes:
    """Return the ``zarr.json`` of an array in the cold tier; arguments as of `shard.array_metadata`.

    Raises:
        ConfigError: Zarr has no dtype for it.
    """
    sharding: dict[str, object] = {
        "chunk_shape": list(layout.chunk_shape),
        "codecs": [LITTLE, CRC32C] if layout.codec == "raw" else [LITTLE, _ZSTD, CRC32C],
        "index_codecs": [LITTLE, CRC32C],
        "index_location": "start",
    }
    return array_document(layout.spec, sharding, shard_rows=layout.shard_rows, n_rows=n_rows, valid_rows=valid_rows)


def parse_cold_array(layout: ColdLayout, data: bytes, what: str = SOME) -> tuple[int, list[tuple[int, int]]]:
    """Return ``n_rows`` and ``valid_rows`` of an array's ``zarr.json``, which must describe ``layout``.

    Raises:
        IntegrityError: it is torn, not one of ours, or describes other shards.
    """
    n_rows, valid_rows = parse_rows(data, what=what)
    ours = msgspec.json.decode(cold_array_metadata(layout, n_rows=n_rows, valid_rows=valid_rows))
    theirs = parse_document(data, node_type="array", what=what)
    odd = [name for name in ("shape", "data_type", "chunk_grid", "codecs") if theirs.get(name) != ours[name]]
    odd += [name for name, value in ours["attributes"].items() if theirs["attributes"].get(name) != value]
    if odd:
        raise not_ours(
            f"it describes another {' and '.join(odd)} than array {layout.spec.name!r} of this stream has", what
        )
    return n_rows, valid_rows


def cold_group_metadata(
    schema: Schema, layout: Layout, codecs: Mapping[str, Codec], *, stream: str, created: float, **attributes: object
) -> bytes:
    """Return the ``zarr.json`` of a stream in the cold tier: as in the hot one, and the codec of every array."""
    assert set(codecs) == {spec.name for spec in schema.arrays}
    return group_metadata(schema, layout, stream=stream, created=created, codecs=codecs, **attributes)


def parse_cold_group(data: bytes, what: str = SOME) -> tuple[Schema, dict[str, ColdLayout]]:
    """Return the schema of a stream and the cold layout of each of its arrays, by name.

    Raises:
        IntegrityError: it is torn, or not one of ours, or of a newer format.
    """
    schema, layout = parse_group(data, what=what)
    try:
        codecs = msgspec.convert(parse_attributes(data, what=what)["codecs"], dict[str, Codec])
        return schema, cold_layouts(schema, layout, codecs)
    except (LookupError, msgspec.ValidationError) as error:
        raise not_ours(f"its spool:codecs do not fit: {error}", what) from error
