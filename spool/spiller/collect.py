"""Deleting what retention lets go: tombstone first, then the hot copy, and after a while the objects.

A reader that finds an object missing looks for the tombstone, which is there before anything is taken away and stays.
Whoever is killed in between has decided all the same: the next collector goes on where the tombstones say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import msgspec

from spool.catalog import Catalog
from spool.errors import NotFoundError
from spool.formats.cold_arrays import cold_array_metadata, parse_cold_array, parse_cold_group
from spool.formats.shard import group_key
from spool.logs.cold import GONE, MANIFESTS, ColdFeeder, fact_key, gone_key, is_fact_stream, parse_gone_key
from spool.logs.packs import GoneMark, marker_path, parse_tombstone
from spool.points import reach
from spool.retention import Decision, Policy, decide
from spool.spiller.evict import complete_deletions, delete
from spool.spiller.turns import turn
from spool.stores.objects import Objects

Pack = tuple[str, int]


class Collector:
    """Deletes the packs that retention lets go.

    Args:
        root: the hot root, whose streams' packs are deleted; None for all packs of a cold root.
        catalog: the index; forgets them.
        cold: the cold root; None where there is none.
        policy: what may be deleted.
        grace_s: how long readers may finish before objects go.
        withdraw: records that a session is withdrawn.
    """

    def __init__(
        self,
        root: str | None,
        catalog: Catalog,
        cold: ColdFeeder | None,
        policy: Policy,
        *,
        grace_s: float,
        withdraw: Callable[[str], object],
    ) -> None:
        self._root = root
        self._catalog = catalog
        self._cold = cold
        self._policy = policy
        self._grace_s = grace_s
        self._withdraw = withdraw

    def plan(self) -> list[Decision]:
        """Return what would happen to each sealed pack that is this collector's to delete, in that order."""
        packs = self._catalog.packs
        decisions = decide(packs.uses(), packs.sessions(), self._policy, now=time.time())
        return [decision for decision in decisions if self._is_mine(decision.stream)]

    def run(self, plan: Iterable[Decision]) -> int:
        """Carry out a plan, and what earlier ones left; return how many packs went.

        Raises:
            SpoolError: a root failed; call it again.
        """
        n_gone = self._complete()
        for decision in plan:
            if decision.go:
                for session_id in decision.ends:
                    self._withdraw(session_id)
                self._delete((decision.stream, decision.pack), GoneMark(time.time(), decision.why))
                n_gone += 1
        if self._cold is not None:
            with turn(self._root) if self._root is not None else nullcontext():
                for _ in finish(self._cold.objects, grace_s=self._grace_s, mine=self._is_mine):
                    pass
        return n_gone

    def _complete(self) -> int:
        """Delete from the hot root what is decided to go; return how many packs that were."""
        if self._root is None:
            return 0
        n_gone = len(complete_deletions(self._root, self._catalog))
        if self._cold is None:
            return n_gone
        for found in self._cold.objects.list(GONE):
            pack = parse_gone_key(found.key)
            if pack is None or not self._is_mine(pack[0]):
                continue
            if not os.path.exists(marker_path(self._root, *pack, "gone")):
                gone = parse_tombstone(self._cold.objects.get(found.key), found.key)
                delete(self._root, self._catalog, *pack, msgspec.structs.replace(gone, done=False))
                n_gone += 1
        return n_gone

    def _delete(self, pack: Pack, gone: GoneMark) -> None:
        if self._cold is not None:
            bury(self._cold.objects, pack, gone)
        if self._root is not None:
            delete(self._root, self._catalog, *pack, gone)
        else:
            self._catalog.forget(*pack, at=gone.at, reason=gone.reason)

    def _is_mine(self, stream: str) -> bool:
        return self._root is None or os.path.isdir(f"{self._root}/streams/{stream}")


def bury(objects: Objects, pack: Pack, gone: GoneMark) -> None:
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
    due: dict[str, dict[int, GoneMark]] = {}
    for found in objects.list(GONE):
        pack = parse_gone_key(found.key)
        if pack is None or not mine(pack[0]):
            continue
        gone = parse_tombstone(objects.get(found.key), found.key)
        if not gone.done and time.time() - (gone.at or 0.0) >= grace_s:
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
