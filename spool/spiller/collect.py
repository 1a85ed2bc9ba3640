"""Deleting what retention lets go: tombstone first, then the hot copy, and after a while the objects.

A reader that finds an object missing looks for the tombstone, which is there before anything is taken away and stays.
Whoever is killed in between has decided all the same: the next collector goes on where the tombstones say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from spool.errors import NotFoundError
from spool.formats.cold_arrays import cold_array_metadata, parse_cold_array, parse_cold_group
from spool.formats.shard import group_key
from spool.logs.cold import GONE, MANIFESTS, fact_key, gone_key, is_fact_stream, parse_gone_key
from spool.logs.markers import Gone, parse_gone
from spool.points import reach
from spool.stores.objects import Objects

Pack = tuple[str, int]


def bury(objects: Objects, pack: Pack, gone: Gone) -> None:
    """Put a tombstone: from now on the pack is deleted for everyone, and its objects may go.

    Raises:
        StorageError: the cold root failed.
    """
    if is_fact_stream(pack[0]):
        objects.delete([fact_key(pack[0])])
    else:
        objects.put(gone_key(*pack), msgspec.json.encode(gone))
    reach("collect.tombstone")


def finish(objects: Objects, *, grace_s: float, mine: Callable[[str], bool]) -> Iterator[Pack]:
    """Delete the objects of packs that were buried longer than ``grace_s`` ago; yield those that are done.

    Args:
        objects: the cold root.
        grace_s: how long readers may finish.
        mine: whether a stream's packs are this collector's to delete.

    Raises:
        StorageError: the cold root failed; call it again.
    """
    due: dict[str, dict[int, Gone]] = {}
    for found in objects.list(GONE):
        pack = parse_gone_key(found.key)
        if pack is None or not mine(pack[0]):
            continue
        gone = parse_gone(objects.get(found.key), found.key)
        if not gone.done and time.time() - gone.at >= grace_s:
            due.setdefault(pack[0], {})[pack[1]] = gone
    manifests = [found.key for found in objects.list(MANIFESTS)] if due else []
    for stream, packs in due.items():
        _take_out_of_documents(objects, stream, packs)
        for key in _objects_of(objects, stream, packs, manifests):
            objects.delete([key])
            reach("collect.object")
        reach("collect.objects")
        for number, gone in packs.items():
            objects.put(gone_key(stream, number), msgspec.json.encode(msgspec.structs.replace(gone, done=True)))
            yield stream, number


def _objects_of(objects: Objects, stream: str, packs: Iterable[int], manifests: Iterable[str]) -> Iterator[str]:
    """Yield the keys of everything that packs of a stream have in the cold root, their manifests first."""
    ends = tuple(f"-{stream}-{pack}.parquet" for pack in packs)
    yield from (key for key in manifests if key.endswith(ends))
    numbers = {str(pack) for pack in packs}
    for found in objects.list(f"streams/{stream}/"):
        parts = found.key.split("/")[2:]
        is_shard = len(parts) > 2 and parts[1] == "c" and parts[2] in numbers
        if is_shard or (parts[0] == "records" and parts[1].removesuffix(".arrow") in numbers):
            yield found.key


def _take_out_of_documents(objects: Objects, stream: str, packs: Iterable[int]) -> None:
    """Say in the arrays' documents that rows of packs are no longer there: elsewhere they would read as zeros."""
    try:
        layouts = parse_cold_group(objects.get(group_key(stream)))[1]
    except NotFoundError:
        return
    for name, layout in layouts.items():
        key = f"streams/{stream}/{name}/zarr.json"
        try:
            n_rows, valid = parse_cold_array(layout, objects.get(key))
        except NotFoundError:
            continue
        gone = {pack * layout.shard_rows for pack in packs}
        left = [pair for pair in valid if pair[0] not in gone]
        if left != valid:
            objects.put(key, cold_array_metadata(layout, n_rows=n_rows, valid_rows=left))
