"""Deleting what retention lets go: tombstone first, then the hot copy, and after a while the objects.

A reader that finds an object missing looks for the tombstone, which is there before anything is taken away and stays.
Whoever is killed in between has decided all the same: the next collector goes on where the tombstones say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import msgspec

from spool.catalog import Catalog
from spool.catalog.rows import PackUse
from spool.errors import NotFoundError
from spool.formats.cold_arrays import cold_array_metadata, parse_cold_array, parse_cold_group
from spool.formats.shard import group_key
from spool.logs.cold import ColdFeeder
from spool.logs.keys import MANIFESTS, fact_key, gone_key, is_fact_stream, is_rollup, parse_pack_key
from spool.logs.packs import GoneMark, list_packs
from spool.logs.streams import stream_names
from spool.model.events import SessionDiscarded
from spool.points import reach
from spool.retention import Decision, Policy, decide
from spool.spiller.evict import delete
from spool.spiller.turns import turn
from spool.stores.local import map_os_error
from spool.stores.objects import Objects

Pack = tuple[str, int]


class Collected(NamedTuple):
    """What a collector did.

    Attributes:
        n_gone: packs that it deleted.
        n_waiting: packs whose objects are still there for readers that began before.
    """

    n_gone: int
    n_waiting: int


class Collector:
    """Deletes the packs that retention lets go.

    Args:
        root: the hot root, whose streams' packs are deleted; None for all packs of a cold root.
        catalog: the index; forgets them.
        cold: the cold root; None where there is none.
        policy: what may be deleted.
        grace_s: how long readers may finish before objects go.
        withdraw: records that sessions are withdrawn; used where there is no cold root that could say so.
        refresh: brings the catalog up to date.
    """

    def __init__(
        self,
        root: str | None,
        catalog: Catalog,
        cold: ColdFeeder | None,
        policy: Policy,
        *,
        grace_s: float,
        withdraw: Callable[[Sequence[str]], object],
        refresh: Callable[[], object],
    ) -> None:
        self._root = root
        self._catalog = catalog
        self._cold = cold
        self._policy = policy
        self._grace_s = grace_s
        self._withdraw = withdraw
        self._refresh = refresh
        self._streams = frozenset(() if root is None else stream_names(root))

    def plan(self) -> list[Decision]:
        """Return what would happen to each sealed pack that is this collector's to delete, in that order.

        Only packs whose events were known before the catalog was brought up to date: what else was acknowledged by
        the time they were sealed, in packs that follow them, is known then, too.
        """
        known = self._catalog.packs.known()
        self._refresh()
        disputed: set[Pack] = set()
        while True:
            decisions = self._decide(known, disputed)
            found = {(item.stream, item.pack) for item in decisions if item.go and self._is_disputed(item)}
            if not found:
                return [decision for decision in decisions if self._is_mine(decision.stream)]
            disputed |= found  # what stays holds the endings of its sessions: decide anew

    def _decide(self, known: Collection[Pack], disputed: Collection[Pack]) -> list[Decision]:
        uses, sessions = self._catalog.packs.uses()
        return decide(
            [use if (use.row.stream, use.row.pack) in known else _unknown(use) for use in uses], sessions, self._policy,
            now=time.time(), mine=self._is_mine, has_cold=self._cold is not None, disputed=disputed,
        )  # fmt: skip

    def _is_disputed(self, item: Decision) -> bool:
        return self._cold is not None and self._cold.is_other(item.stream, item.pack)

    def run(self, plan: Iterable[Decision]) -> Collected:
        """Carry out a plan, and what earlier ones left.

        Raises:
            SpoolError: a root failed; call it again.
        """
        going = [decision for decision in plan if decision.go]
        self._record_ends(going)
        for decision in going:
            self._delete((decision.stream, decision.pack), GoneMark(time.time(), decision.why))
        buried = self._cold.tombstones() if self._cold is not None else {}
        if self._root is not None:
            self._finish_hot(self._root, buried)
        return Collected(len(going), 0 if self._cold is None else self._finish_cold(self._cold, buried))

    def _record_ends(self, going: Sequence[Decision]) -> None:
        """Say, where it stays, that sessions are over whose last word goes; once, however often they lose a pack."""
        packs = {(decision.stream, decision.pack) for decision in going}
        ends = dict.fromkeys(session_id for decision in going for session_id in decision.ends)
        unsaid = [session_id for session_id in ends if not self._is_withdrawn(session_id, packs)]
        if unsaid and self._cold is not None:
            self._cold.write_facts([SessionDiscarded(session_id, time.time()) for session_id in unsaid])
        elif unsaid:
            self._withdraw(unsaid)

    def _is_withdrawn(self, session_id: str, going: Collection[Pack]) -> bool:
        located = self._catalog.session_events(session_id)
        return any(
            isinstance(item.event, SessionDiscarded) and (item.stream, item.pack) not in going for item in located
        )

    def _delete(self, pack: Pack, gone: GoneMark) -> None:
        if self._cold is not None:
            bury(self._cold.objects, pack, gone)
        if self._root is not None and not is_fact_stream(pack[0]):
            delete(self._root, self._catalog, *pack, gone)
        else:
            self._catalog.forget(*pack, at=gone.at, reason=gone.reason)

    def _finish_hot(self, root: str, buried: Mapping[Pack, GoneMark]) -> None:
        """Complete what was broken off after a pack was marked as deleted, or buried from elsewhere.

        A tombstone of what another copy of this root brought over says nothing of the pack of that name here.
        """
        by_stream: dict[str, set[int]] = {}
        for stream, pack in buried:
            by_stream.setdefault(stream, set()).add(pack)
        for stream in self._streams:
            folder = f"{root}/streams/{stream}/records"
            try:
                found = list_packs(folder)
            except OSError as error:
                raise map_os_error(error, what="list", path=folder) from error
            for pack in sorted((found.sealed | found.cold) & (found.gone | by_stream.get(stream, set()))):
                if pack in found.gone or self._cold is None or self._cold.is_same(stream, pack):
                    delete(root, self._catalog, stream, pack, buried.get((stream, pack)) or GoneMark(time.time()))

    def _finish_cold(self, cold: ColdFeeder, buried: Mapping[Pack, GoneMark]) -> int:
        """Delete what was buried long enough ago; return how many packs wait for that."""
        mine = {pack: gone for pack, gone in buried.items() if not gone.done and self._is_mine(pack[0])}
        # a time far ahead is that of a clock that was wrong
        due = {pack: gone for pack, gone in mine.items() if abs(time.time() - (gone.at or 0.0)) >= self._grace_s}
        with turn(self._root, alone=True) if self._root is not None and due else nullcontext():
            for _ in finish(cold, due, buried):
                pass
        return len(mine) - len(due)

    def _is_mine(self, stream: str) -> bool:
        """Whether this collector deletes a stream's packs; fact files belong to no node, so each one may."""
        return self._root is None or stream in self._streams or (is_fact_stream(stream) and self._cold is not None)


def _unknown(use: PackUse) -> PackUse:
    return msgspec.structs.replace(use, row=msgspec.structs.replace(use.row, known=False))


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


def finish(cold: ColdFeeder, due: Mapping[Pack, GoneMark], buried: Collection[Pack]) -> Iterator[Pack]:
    """Delete the objects of buried packs; yield those that are done.

    Args:
        cold: the cold root.
        due: the packs, and what their tombstones say; no reader is at them any more.
        buried: all that are deleted, these and others.

    Raises:
        StorageError: the cold root failed; call it again.
    """
    objects = cold.objects
    by_stream: dict[str, list[int]] = {}
    for stream, pack in due:
        by_stream.setdefault(stream, []).append(pack)
    manifests = [found.key for found in objects.list(MANIFESTS)] if due else []
    objects.delete(_empty_rollups(cold, manifests, set(buried)))
    for stream, packs in by_stream.items():
        _take_out_of_documents(objects, stream, packs)
        for key in _objects_of(objects, stream, packs, manifests):
            objects.delete([key])
            reach("collect.object")
        reach("collect.objects")
        for number in packs:
            gone = msgspec.structs.replace(due[stream, number], done=True)
            objects.put(gone_key(stream, number), msgspec.json.encode(gone))
            yield stream, number


def _empty_rollups(cold: ColdFeeder, manifests: Iterable[str], buried: set[Pack]) -> list[str]:
    """Return the roll-ups of which every pack is deleted."""
    rollups = ((key, cold.packs_in(key)) for key in manifests if is_rollup(key))
    return [key for key, packs in rollups if packs and buried.issuperset(packs)]


def _objects_of(objects: Objects, stream: str, packs: Iterable[int], manifests: Iterable[str]) -> Iterator[str]:
    """Yield the keys of everything that packs of a stream have in the cold root, their manifests first."""
    ends = tuple(f"-{stream}-{pack}.parquet" for pack in packs)
    yield from (key for key in manifests if key.endswith(ends))
    chosen = {(stream, pack) for pack in packs}
    yield from (found.key for found in objects.list(f"streams/{stream}/") if parse_pack_key(found.key) in chosen)


def _take_out_of_documents(objects: Objects, stream: str, packs: Iterable[int]) -> None:
    """Say in the arrays' documents that rows of packs are no longer there: elsewhere they would read as zeros."""
    try:
        layouts = parse_cold_group(objects.get(group_key(stream)), f"{objects.url}/{group_key(stream)}")[1]
    except NotFoundError:
        return
    for name, layout in layouts.items():
        key = f"streams/{stream}/{name}/zarr.json"
        try:
            n_rows, valid = parse_cold_array(layout, objects.get(key), f"{objects.url}/{key}")
        except NotFoundError:
            continue
        gone = {pack * layout.shard_rows for pack in packs}
        left = [pair for pair in valid if pair[0] not in gone]
        if left != valid:
            objects.put(key, cold_array_metadata(layout, n_rows=n_rows, valid_rows=left))
