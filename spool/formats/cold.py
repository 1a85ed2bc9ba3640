"""Shards of the cold tier: made of the rows of a hot one, and read by byte range.

A cold shard begins with its index, so that nobody needs its size, and then has its inner chunks end to end, each
with a crc32c behind it. Codec ``raw`` stores a chunk as it is: where a row lies follows from its number, and no index
is read. Codec ``zstd`` compresses it; where axis 0 of a row is layers, a chunk holds one layer of a row group and the
layers of a group are neighbours, so that all of them are one range and a slice of them a smaller one.
"""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from spool.errors import IntegrityError
from spool.formats.cold_arrays import CRC_BYTES, ZSTD_LEVEL, Codec, ColdLayout, cold_layout
from spool.formats.shard import MISSING
from spool.model.fields import MAX_CHUNK_BYTES, MAX_CHUNK_ROWS, ROUTED_EXPERTS, ArraySpec, Layout, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Buffer: TypeAlias = Any
"""Bytes in memory: anything with the buffer protocol, C-contiguous."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
Index: TypeAlias = npt.NDArray[np.uint64]
"""``[row groups, layers, 2]``: offset and size of each chunk with its crc32c, both 2**64-1 for one not there."""

SAMPLE_BYTES = 16 << 20
"""Bytes of rows that are compressed to choose a codec."""

_BLOCK_BYTES = 256 << 10
_MIN_SAMPLE_BYTES = 64 << 10
_CRC = struct.Struct("<I")
_compressor = pa.Codec("zstd", compression_level=ZSTD_LEVEL)


class ChunkSpan(NamedTuple):
    """Where a chunk lies in its object, crc32c included: bytes ``[start, stop)``; its row group and stored layer."""

    start: int
    stop: int
    group: int
    layer: int

    def __str__(self) -> str:
        return f"row group {self.group}, layer {self.layer}"


def choose_codec(spec: ArraySpec, rows: Buffer, *, layered: bool) -> Codec:
    """Return the codec that a stream's array gets for good, by its first rows.

    Routing is compressed where that saves at least a tenth, others where it saves at least a third. Less than 64 KiB
    say nothing: then routing is compressed and others are not.

    Args:
        spec: the array.
        rows: stored rows; whole chunks spread over them are compressed, up to `SAMPLE_BYTES`.
        layered: axis 0 of the inner shape is layers.
    """
    data, experts = _as_bytes(rows), spec.name == ROUTED_EXPERTS
    if data.size < _MIN_SAMPLE_BYTES:
        return "zstd" if experts else "raw"
    n = max(1, min(MAX_CHUNK_ROWS, MAX_CHUNK_BYTES // spec.row_bytes, data.size // spec.row_bytes))
    # powers of two, as a stream's C is
    n = 1 << (n.bit_length() - 1)
    whole = data.size // spec.row_bytes // n * n
    plan = cold_layout(spec, Layout({spec.name: n}, {spec.name: whole}), "zstd", layered=layered)
    every = -(-whole * spec.row_bytes // SAMPLE_BYTES)
    chunks = [chunk for group in range(0, plan.n_groups, every) for chunk in _compress(plan, data, group)]
    kept = sum(len(chunk) for chunk in chunks) / (len(chunks) * plan.chunk_bytes)
    return "zstd" if kept <= (0.9 if experts else 2 / 3) else "raw"


# -- writing ---------------------------------------------------------------------------------------------------------


def encode_shard(layout: ColdLayout, rows: Buffer, *, workers: int = 1, into: Buffer | None = None) -> memoryview:
    """Return a cold shard as the bytes of its object.

    Bytes are copied once; where they are compressed, before that into the order of layers and after it to their place.

    Args:
        layout: of the array.
        rows: ``[n, *shape]`` in the stored dtype, or its bytes; at most R rows, and none is legal.
        workers: threads that compress.
        into: writable memory of `ColdLayout.max_shard_bytes` or more to encode into; where several shards are encoded,
            memory that was used before is faster than new pages.

    Returns:
        A view of ``into``, or of new memory.
    """
    data = _as_bytes(rows)
    n_rows, odd = divmod(data.size, layout.spec.row_bytes)
    assert not odd and n_rows <= layout.shard_rows, f"{data.size} bytes are no rows of a shard of {layout}"
    return encode_pieces(layout, [data], n_rows, workers=workers, into=into)


def encode_pieces(
    layout: ColdLayout, pieces: Iterable[Buffer], n_rows: int, *, workers: int = 1, into: Buffer | None = None
) -> memoryview:
    """`encode_shard` of rows that come in pieces, so that they are not in memory all at once.

    Args:
        layout: of the array.
        pieces: consecutive rows, ``n_rows`` in all; each but the last holds whole chunks. One is done with when the
            next is asked for.
        n_rows: at most R.
        workers, into: as `encode_shard`.
    """
    room = layout.max_shard_bytes(n_rows)
    out = np.empty(room, np.uint8) if into is None else _as_bytes(into)[:room]
    assert out.size == room, f"{out.size} bytes do not take a shard of up to {room}"
    fill = _fill_raw if layout.codec == "raw" else _fill_zstd
    sizes, end = [np.empty(0, np.uint64)], layout.index_bytes
    for piece in pieces:
        sizes.append(fill(layout, _as_bytes(piece), out[end:], workers))
        end += int(sizes[-1].sum())
    out[: layout.index_bytes] = _index(layout, np.concatenate(sizes))
    return out[:end].data


def _index(layout: ColdLayout, sizes: npt.NDArray[np.uint64]) -> Bytes:
    # of chunks one behind the other
    index = np.full((layout.n_groups * layout.n_layers, 2), MISSING, "<u8")
    index[: len(sizes), 1] = sizes
    index[: len(sizes), 0] = layout.index_bytes + np.cumsum(sizes) - sizes
    entries = index.tobytes()
    return _as_bytes(entries + _crc(entries))


def _fill_raw(layout: ColdLayout, data: Bytes, out: Bytes, _: int) -> npt.NDArray[np.uint64]:
    """Write chunks and their checksums, in blocks that stay in the cache between the two."""
    chunk = layout.chunk_bytes
    n_chunks, (n_whole, left) = -(-data.size // chunk), divmod(data.size, chunk)
    into = out[: n_chunks * (chunk + CRC_BYTES)].reshape(n_chunks, chunk + CRC_BYTES)
    whole = data[: n_whole * chunk].reshape(n_whole, chunk)
    if left:
        into[n_whole, :left] = data[n_whole * chunk :]
        into[n_whole, left:chunk] = 0
    step = max(1, _BLOCK_BYTES // chunk)
    for start in range(0, n_chunks, step):
        block = into[start : start + step]
        source = whole[start : start + step]
        block[: len(source), :chunk] = source
        sums = [crc32c(row) for row in block[:, :chunk]]
        block[:, chunk:] = np.array(sums, "<u4").view(np.uint8).reshape(-1, CRC_BYTES)
    return np.full(n_chunks, chunk + CRC_BYTES, np.uint64)


def _fill_zstd(layout: ColdLayout, data: Bytes, out: Bytes, workers: int) -> npt.NDArray[np.uint64]:
    """Write compressed chunks and their checksums, while the next ones are compressed."""
    sizes, end, target = [], 0, out.data
    for chunk in _compressed(layout, data, workers):
        view = memoryview(chunk).cast("B")
        target[end : end + len(view)] = view
        _CRC.pack_into(target, end + len(view), crc32c(view))
        sizes.append(len(view) + CRC_BYTES)
        end += sizes[-1]
    return np.array(sizes, np.uint64)


def _compressed(layout: ColdLayout, data: Bytes, workers: int) -> Iterator[Buffer]:
    groups = range(-(-data.size // (layout.chunk_rows * layout.spec.row_bytes)))
    if workers <= 1 or len(groups) <= 1:
        for group in groups:
            yield from _compress(layout, data, group)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="spool-encode") as pool:
        for chunks in pool.map(lambda group: _compress(layout, data, group), groups):
            yield from chunks


def _compress(layout: ColdLayout, data: Bytes, group: int) -> list[Buffer]:
    """Return the compressed chunks of a row group, padded with zeros where it is the last."""
    size = layout.chunk_rows * layout.spec.row_bytes
    rows = data[group * size : (group + 1) * size]
    n, layers = len(rows) // layout.spec.row_bytes, layout.n_layers
    if layers == 1 and len(rows) == size:
        return [_compressor.compress(rows)]
    # a row's share of a layer is moved as one item: item by item takes as long as compressing
    item = np.dtype(f"V{layout.layer_bytes}")
    chunks = np.empty((layers, layout.chunk_rows), item)
    chunks[:, :n] = rows.view(item).reshape(n, layers).T
    chunks[:, n:] = np.zeros((), item)
    return [_compressor.compress(chunk) for chunk in chunks.view(np.uint8).reshape(layers, layout.chunk_bytes)]


# -- reading ---------------------------------------------------------------------------------------------------------


def raw_span(layout: ColdLayout, row: int, n: int, *, verify: bool = False) -> tuple[int, int]:
    """Return the bytes ``[start, stop)`` of a raw object that hold rows ``[row, row + n)`` of its shard.

    With ``verify`` they are widened to whole chunks and their checksums. Without rows ``start`` is ``stop``.
    """
    pieces = raw_pieces(layout, row, n)
    if not pieces or not verify:
        return (pieces[0][0], pieces[-1][1]) if pieces else (layout.index_bytes, layout.index_bytes)
    stride = layout.chunk_bytes + CRC_BYTES
    start = layout.index_bytes + row // layout.chunk_rows * stride
    return start, start + len(pieces) * stride


def raw_pieces(layout: ColdLayout, row: int, n: int) -> list[tuple[int, int]]:
    """Return the bytes ``[start, stop)`` of a raw object that are rows ``[row, row + n)``, one pair a chunk."""
    pieces, chunk_rows = [], layout.chunk_rows
    for chunk in range(row // chunk_rows, -(-(row + n) // chunk_rows) if n else 0):
        # rows before this chunk, and a checksum for each whole chunk before it
        gap = layout.index_bytes + chunk * CRC_BYTES
        low, high = max(row, chunk * chunk_rows), min(row + n, (chunk + 1) * chunk_rows)
        pieces.append((gap + low * layout.spec.row_bytes, gap + high * layout.spec.row_bytes))
    return pieces


def raw_rows(layout: ColdLayout, data: Buffer, row: int, n: int, *, verify: bool = False) -> memoryview:
    """Return the bytes of rows ``[row, row + n)`` of a raw shard, C order.

    Args:
        layout: of the array.
        data: the bytes of `raw_span` with the same arguments.
        row: first row in the shard.
        n: rows.
        verify: check the checksum of each chunk.

    Returns:
        A view of ``data`` where the rows lie in one chunk, else a copy.

    Raises:
        IntegrityError: there are more or fewer bytes, or a checksum does not fit.
    """
    start, stop = raw_span(layout, row, n, verify=verify)
    view = memoryview(data).cast("B")
    if len(view) != stop - start:
        raise _damaged(layout, f"rows {row} to {row + n} take {stop - start} bytes, got {len(view)}")
    if verify:
        stride = layout.chunk_bytes + CRC_BYTES
        for number, at in enumerate(range(0, len(view), stride), row // layout.chunk_rows):
            _decode(layout, view[at : at + stride], f"row group {number}")
    pieces = [view[low - start : high - start] for low, high in raw_pieces(layout, row, n)]
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def parse_index(layout: ColdLayout, data: Buffer) -> Index:
    """Return the index of a shard.

    Args:
        layout: of the array.
        data: the first `ColdLayout.index_bytes` of the object.

    Raises:
        IntegrityError: its checksum does not fit, or its chunks do not lie one behind the other.
    """
    view = memoryview(data).cast("B")
    if len(view) != layout.index_bytes or _crc(view[:-CRC_BYTES]) != view[-CRC_BYTES:]:
        raise _damaged(layout, f"the index, {len(view)} of {layout.index_bytes} bytes, does not match its crc32c")
    index = np.frombuffer(view[:-CRC_BYTES], "<u8").reshape(-1, 2)
    there = index[index[:, 0] != MISSING]
    sizes = there[:, 1]
    odd = (sizes <= CRC_BYTES).any() or (sizes > layout.max_shard_bytes(layout.chunk_rows)).any()
    if odd or not np.array_equal(_index(layout, sizes), _as_bytes(view)):
        raise _damaged(layout, "the index names chunks that do not lie one behind the other")
    return index.reshape(layout.n_groups, layout.n_layers, 2)


def zstd_spans(layout: ColdLayout, index: Index, row: int, n: int, layers: slice | None = None) -> list[ChunkSpan]:
    """Return the chunks that hold rows ``[row, row + n)`` of a shard, in the order in which they lie.

    Args:
        layout: of the array.
        index: of the shard.
        row: first row in the shard.
        n: rows.
        layers: the stored layers that are wanted, all for None; spans of all layers are one range.

    Raises:
        IntegrityError: such a chunk is not in the shard.
    """
    if n == 0:
        return []
    low, high = _bounds(layout, layers)
    first, last = row // layout.chunk_rows, (row + n - 1) // layout.chunk_rows
    part = index[first : last + 1, low:high]
    if len(part) != last + 1 - first or (part[..., 0] == MISSING).any():
        raise _damaged(layout, f"rows {row} to {row + n} are not in it")
    return [
        ChunkSpan(start, start + size, group, layer)
        for group, chunks in enumerate(part.tolist(), first)
        for layer, (start, size) in enumerate(chunks, low)
    ]


def decode_chunk(layout: ColdLayout, data: Buffer, *, where: str = "a chunk") -> npt.NDArray[Any]:
    """Return a chunk ``[chunk_rows, ...]`` in the stored dtype, read-only.

    Args:
        layout: of the array.
        data: the bytes of its span, crc32c included.
        where: names it in errors, as ``"row group 3"``.

    Raises:
        IntegrityError: its checksum does not fit, or it does not decompress to a chunk.
    """
    return np.frombuffer(_decode(layout, data, where), numpy_dtype(layout.spec.dtype)).reshape(layout.chunk_shape)


def place_chunks(
    layout: ColdLayout,
    chunks: Iterable[tuple[ChunkSpan, Buffer]],
    out: npt.NDArray[Any],
    row: int,
    layers: slice | None = None,
) -> None:
    """Decode chunks and copy their rows to where they stand in ``out``; threads may share it, each with its chunks.

    Args:
        layout: of the array.
        chunks: of the spans that `zstd_spans` returned, with their bytes.
        out: ``[n, layers, ...]`` or ``[n, *shape]`` in the stored dtype, C-contiguous: rows ``[row, row + n)``.
        row: as given to `zstd_spans`.
        layers: as given to `zstd_spans`.

    Raises:
        IntegrityError: a chunk is damaged; names row group and layer. What is in ``out`` then is not to be used.
    """
    assert out.flags.c_contiguous
    lowest, highest = _bounds(layout, layers)
    item, n = np.dtype(f"V{layout.layer_bytes}"), len(out)
    into = out.reshape(-1).view(item).reshape(n, highest - lowest)
    for span, data in chunks:
        rows = np.frombuffer(_decode(layout, data, span), item)
        skipped = span.group * layout.chunk_rows - row
        low, high = max(skipped, 0), min(skipped + layout.chunk_rows, n)
        into[low:high, span.layer - lowest] = rows[low - skipped : high - skipped]


def _decode(layout: ColdLayout, data: Buffer, where: str | ChunkSpan) -> Buffer:
    """Return the bytes of a chunk, checked."""
    view = memoryview(data).cast("B")
    body = view[:-CRC_BYTES]
    if _crc(body) != view[-CRC_BYTES:]:
        raise _damaged(layout, f"{where} does not match its crc32c")
    try:
        plain = body if layout.codec == "raw" else _compressor.decompress(body, layout.chunk_bytes)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(layout, f"{where} does not decompress: {error}") from error
    if len(plain) != layout.chunk_bytes:
        raise _damaged(layout, f"{where} has {len(plain)} bytes for {layout.chunk_bytes}")
    return plain


# -- shared ----------------------------------------------------------------------------------------------------------


def _as_bytes(data: Buffer) -> Bytes:
    """Return memory as uint8, without a copy where it is C-contiguous."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.asarray(memoryview(data).cast("B"))


def _bounds(layout: ColdLayout, layers: slice | None) -> tuple[int, int]:
    return (layers or slice(None)).indices(layout.n_layers)[:2]


def _crc(data: Buffer) -> bytes:
    return _CRC.pack(crc32c(data))


def _damaged(layout: ColdLayout, why: str) -> IntegrityError:
    return IntegrityError(
        f"cold shard of {layout.spec.name}: {why}; it is not what was spilled", field=layout.spec.name
    )
