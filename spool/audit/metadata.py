"""The metadata by which any Zarr v3 reader finds the rows: groups, arrays, shard indexes."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from spool.audit.report import Finding, Findings
from spool.audit.streams import Stream, Streams, group_key
from spool.errors import SpoolError
from spool.formats import shard
from spool.model.fields import ArraySpec
from spool.stores.hot import HotStore


def check_metadata(streams: Streams, name: str, findings: Findings, *, skip: Collection[str] = ()) -> set[int]:
    """Check what a stream's documents and the indexes of its sealed shards say.

    Args:
        streams: of the root.
        name: the stream.
        findings: takes what is wrong.
        skip: paths of shards known to be damaged.

    Returns:
        The packs that the documents call sealed.
    """
    stream, store = streams.get(name), streams.store
    path = store.path(group_key(name))
    if isinstance(stream, SpoolError):
        findings.add(Finding(kind="integrity", text=str(stream), stream=name, file=path))
        return set()
    if _differs_from_copy(store, name):
        text = "it is not what it was made as, the copy in the file lock: the bytes were altered"
        findings.add(Finding(kind="integrity", text=text, stream=name, file=path))
    packs: set[int] = set()
    for array in stream.schema.arrays:
        packs |= _check_array(store, stream, array, findings, skip)
    return packs


def _differs_from_copy(store: HotStore, name: str) -> bool:
    try:
        copy = store.read(f"streams/{name}/lock")
    except SpoolError:
        return False
    return copy != store.read(group_key(name))


def _check_array(
    store: HotStore, stream: Stream, array: ArraySpec, findings: Findings, skip: Collection[str]
) -> set[int]:
    key = f"streams/{stream.name}/{array.name}/zarr.json"
    chunk_rows, shard_rows = stream.layout.chunk_rows[array.name], stream.layout.shard_rows[array.name]

    def report(text: str, file: str, rows: tuple[int, int] | None = None) -> None:
        where = {"stream": stream.name, "field": array.name, "file": file}
        findings.add(Finding(kind="integrity", text=text, rows=rows, **where))  # type: ignore[arg-type]

    try:
        data = store.read(key)
        n_rows, valid = shard.parse_rows(data)
    except SpoolError as error:
        report(str(error), store.path(key))
        return set()
    expected = shard.array_metadata(
        array, chunk_rows=chunk_rows, shard_rows=shard_rows, n_rows=n_rows, valid_rows=valid
    )  # fmt: skip
    if msgspec.json.decode(data) != msgspec.json.decode(expected):
        report("it does not say what the stream's schema and layout say: the bytes were altered", store.path(key))
    for first, count in valid:
        shard_key = stream.shard_key(array, first)
        index = shard.shard_index(
            count * array.row_bytes, chunk_bytes=chunk_rows * array.row_bytes, n_chunks=shard_rows // chunk_rows
        )
        if count and store.path(shard_key) not in skip and _end(store, shard_key, len(index)) != index:
            text = "the index of the shard is missing or altered: Zarr readers cannot open it, its rows are there"
            report(text, store.path(shard_key), (first, first + count))
    return {first // shard_rows for first, count in valid if count}


def _end(store: HotStore, key: str, n_bytes: int) -> bytes:
    try:
        size = store.size(key)
        with store.borrow(key, max(size - n_bytes, 0), min(size, n_bytes)) as view:
            return bytes(view)
    except SpoolError:
        return b""
