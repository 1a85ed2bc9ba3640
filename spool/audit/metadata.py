"""The metadata by which any Zarr v3 reader finds the rows: groups, arrays, shard indexes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from spool.audit.report import Finding, Findings
from spool.audit.streams import Stream, Streams, group_key
from spool.errors import SpoolError
from spool.formats import shard
from spool.logs.packs import has_left
from spool.logs.streams import records_path
from spool.model.fields import ArraySpec
from spool.stores.hot import HotStore

Ends = Mapping[str, Mapping[int, int]]
"""How many rows of an array (by name) in a pack are named by steps, counted from the pack's first."""


def check_metadata(
    streams: Streams,
    name: str,
    ends: Ends,
    findings: Findings,
    *,
    skip: Collection[str] = (),
    elsewhere: Collection[int] = (),
) -> set[int]:
    """Check what a stream's documents and the indexes of its sealed shards say.

    Args:
        streams: of the root.
        name: the stream.
        ends: rows of the stream that must be there.
        findings: takes what is wrong.
        skip: paths of shards known to be damaged.
        elsewhere: packs that are no longer in the hot root: the documents list them still, as they did others.

    Returns:
        The packs in the hot root that the documents call sealed.
    """
    stream, store = streams.get(name), streams.store
    if isinstance(stream, SpoolError):
        path = store.path(group_key(name))
        findings.add(Finding(kind="integrity", text=str(stream), stream=name, file=path))
        return set()
    # looked for before the documents are read: a live writer seals on
    sealed = {pack for pack in {*chain(*ends.values())} if os.path.exists(records_path(store.root, name, pack))}
    packs: set[int] = set()
    for array in stream.schema.arrays:
        key = f"streams/{name}/{array.name}/zarr.json"
        where = {"kind": "integrity", "stream": name, "field": array.name}
        try:
            data = store.read(key)
            valid = shard.parse_rows(data, store.path(key))[1]
        except SpoolError as error:
            findings.add(Finding(**where, text=str(error), file=store.path(key)))  # type: ignore[arg-type]
            continue
        shard_rows = stream.layout.shard_rows[array.name]
        here = [pair for pair in valid if pair[0] // shard_rows not in elsewhere]
        packs |= {first // shard_rows for first, count in here if count}
        named = {pack: n for pack, n in ends.get(array.name, {}).items() if pack in sealed}
        if not _is_right(stream, array, data, valid, named):
            text = "it does not say what the stream's schema, its layout and the steps say: the bytes were altered"
            findings.add(Finding(**where, text=text, file=store.path(key)))  # type: ignore[arg-type]
            continue
        for path, rows in _without_index(store, stream, array, here):
            if path not in skip and not has_left(store.root, name, rows[0] // shard_rows, path):
                text = (
                    "the index of the shard is missing or altered: its rows are there, but Zarr readers do not open it"
                )
                findings.add(Finding(**where, text=text, rows=rows, file=path))  # type: ignore[arg-type]
    return packs


def _is_right(
    stream: Stream, array: ArraySpec, data: bytes, valid: Sequence[tuple[int, int]], named: Mapping[int, int]
) -> bool:
    shard_rows = stream.layout.shard_rows[array.name]
    counts = {first // shard_rows: count for first, count in valid}
    expected = shard.array_metadata(
        array,
        chunk_rows=stream.layout.chunk_rows[array.name],
        shard_rows=shard_rows,
        n_rows=sum(valid[-1]) if valid else 0,
        valid_rows=valid,
    )
    document, wanted = msgspec.json.decode(data), msgspec.json.decode(expected)
    # those of later versions say nothing of what this one knows
    document["attributes"] = {name: document["attributes"].get(name) for name in wanted["attributes"]}
    return (
        document == wanted
        and all(first % shard_rows == 0 and 0 <= count <= shard_rows for first, count in valid)
        and all(counts.get(pack, 0) >= n for pack, n in named.items())
    )


def _without_index(
    store: HotStore, stream: Stream, array: ArraySpec, valid: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    chunk_rows, shard_rows = stream.layout.chunk_rows[array.name], stream.layout.shard_rows[array.name]
    for first, count in valid:
        index = shard.shard_index(
            count * array.row_bytes, chunk_bytes=chunk_rows * array.row_bytes, n_chunks=shard_rows // chunk_rows
        )
        key = stream.shard_key(array, first)
        if count and _end(store, key, len(index)) != index:
            yield store.path(key), (first, first + count)


def _end(store: HotStore, key: str, n_bytes: int) -> bytes:
    try:
        size = store.size(key)
        with store.borrow(key, max(size - n_bytes, 0), min(size, n_bytes)) as view:
            return bytes(view)
    except SpoolError:
        return b""
