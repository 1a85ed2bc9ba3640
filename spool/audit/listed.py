"""Rows of arrays by what their documents list, and by the sizes of what is not sealed yet."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping

from spool.errors import SpoolError
from spool.formats.shard import parse_rows
from spool.model.fields import ArraySpec, Layout, Schema
from spool.stores.hot import HotStore
from spool.stores.objects import Objects

log = logging.getLogger("spool.audit")

Rows = Counter[tuple[str, str]]


def listed_rows(
    store: HotStore | None,
    objects: Objects | None,
    streams: Mapping[str, tuple[Schema, Layout]],
    there: set[tuple[str, int]],
) -> tuple[Rows, Rows]:
    """Return the rows of each stream's array, and those that lie in the cold root.

    Args:
        store: reads the hot root; None to take what the cold root's documents list.
        objects: the cold root; None where there is none.
        streams: what is known of each.
        there: packs, by stream and number, that are in the cold root.
    """
    rows: Rows = Counter()
    cold_rows: Rows = Counter()
    for name, (schema, layout) in streams.items():
        for array in schema.arrays:
            size = layout.shard_rows[array.name]
            found = _sealed(store, objects, name, array.name)
            packs = {start // size: n for start, n in found}
            rows[name, array.name] += sum(packs.values())
            if store is None:
                cold_rows[name, array.name] += sum(packs.values())
                continue
            cold_rows[name, array.name] += sum(n for pack, n in packs.items() if (name, pack) in there)
            rows[name, array.name] += _open_bytes(store, name, array, set(packs)) // array.row_bytes
    return rows, cold_rows


def _sealed(store: HotStore | None, objects: Objects | None, stream: str, array: str) -> list[tuple[int, int]]:
    """Return first row and number of rows of each sealed pack; none where the document is not there or not ours."""
    key = f"streams/{stream}/{array}/zarr.json"
    try:
        if store is not None:
            return parse_rows(store.read(key), store.path(key))[1]
        return [] if objects is None else parse_rows(objects.get(key), f"{objects.url}/{key}")[1]
    except SpoolError as error:
        log.debug("rows of %s of stream %s are not counted: %s", array, stream, error)
        return []


def _open_bytes(store: HotStore, stream: str, array: ArraySpec, sealed: set[int]) -> int:
    """Return the bytes of rows in shards that are not sealed, and in tails."""
    folder, found = store.path(f"streams/{stream}/{array.name}"), 0
    for path, _, names in os.walk(folder):
        for name in names:
            if name.startswith("tail-"):
                found += _size(os.path.join(path, name))
            elif name != "zarr.json" and name[:1] != ".":
                pack = os.path.relpath(os.path.join(path, name), os.path.join(folder, "c")).split(os.sep)[0]
                found += _size(os.path.join(path, name)) if pack.isdecimal() and int(pack) not in sealed else 0
    return found


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
