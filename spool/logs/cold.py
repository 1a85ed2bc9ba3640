"""A cold root -> catalog: its manifests, fact files and deletions, read as they appear. And records, by pack."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import NamedTuple

import msgspec
from msgspec import Struct

from spool.catalog import Catalog
from spool.errors import IntegrityError, NotFoundError, StorageError, another_cold_root
from spool.formats import manifest, records
from spool.formats.frames import encode_event
from spool.formats.manifest import PackEntry
from spool.formats.shard import group_key, parse_group
from spool.logs.feeder import Pack, Problem
from spool.logs.keys import (
    FACTS,
    GONE,
    IDENTITY,
    MANIFESTS,
    fact_stream,
    is_rollup,
    parse_gone_key,
    parse_manifest_key,
    records_key,
    time_of,
)
from spool.logs.packs import GoneMark, parse_tombstone
from spool.model.events import Event
from spool.model.fields import ArraySize, array_sizes
from spool.stores.objects import ObjectInfo, Objects

log = logging.getLogger("spool.logs")

PAGE = 64
"""Objects that are taken in by one transaction."""
FETCHES = 8
"""Of those, how many are fetched at a time."""

_LISTINGS = 32
_KEPT_BYTES = 64 << 20


class _Identity(Struct):
    id: str


class _Read(NamedTuple):
    """An object that was read: a manifest's packs but for ``rivals``, or the events of a fact file."""

    info: ObjectInfo
    packs: list[tuple[PackEntry, list[bytes]]]
    facts: list[bytes]
    rivals: list[Problem]


class ColdFeeder:
    """Feeds the catalog from a cold root; safe from many threads and after a fork.

    Nothing is trusted to stay: each look lists the root anew.

    Args:
        objects: the cold root.
        catalog: what is fed.
        is_local: whether a hot root of the same catalog has files of a pack, which say in what tiers it is.
        unspilled: returns the records of a pack that this hot root has and did not bring over; None where it has none.
        spool_id: of the spool whose cold root it is; whose it was at the first look where None.
    """

    def __init__(
        self,
        objects: Objects,
        catalog: Catalog,
        is_local: Callable[[str, int], bool] = lambda *_: False,
        unspilled: Callable[[str, int], bytes | None] = lambda *_: None,
        *,
        spool_id: str | None = None,
    ) -> None:
        self.objects = objects
        self._catalog = catalog
        self._is_local = is_local
        self._unspilled = unspilled
        self._spool_id = spool_id
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._records_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="spool-manifests")
        self._sizes: dict[str, Mapping[str, ArraySize]] = {}
        self._looked_at = 0.0
        self._records: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._packs_in: dict[str, tuple[Pack, ...]] = {}
        self._done: dict[Pack, GoneMark] = {}
        self._damaged: dict[str, tuple[ObjectInfo, Problem]] = {}
        self._rivals: dict[str, tuple[ObjectInfo, list[Problem]]] = {}

    def _own(self) -> threading.RLock:
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    # -- feeding -----------------------------------------------------------------------------------------------------

    def catch_up(self, *, after_s: float = 0.0) -> list[Problem]:
        """Take in what is new in the cold root, unless that was done less than ``after_s`` ago.

        Returns:
            The objects that are damaged, and what `rivals` does; all others are taken in.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        with self._own():
            if not after_s or time.monotonic() - self._looked_at >= after_s:
                for _ in range(_LISTINGS):
                    if self._look():
                        break  # else an object went between listing and reading: it was rolled up, so list again
                else:
                    raise StorageError(f"{self.objects.url} changes faster than it can be listed; try again")
                self._looked_at = time.monotonic()
            return self.problems()

    def problems(self) -> list[Problem]:
        """Return what was found damaged the last time; it waits for nobody who looks just now."""
        return [*(problem for _, problem in list(self._damaged.values())), *self.rivals()]

    def rivals(self) -> list[Problem]:
        """Return the packs of the hot root that manifests list with other records: copies of it are in use."""
        found = {(it.stream, it.pack): it for _, problems in list(self._rivals.values()) for it in problems}
        return [problem for pack, problem in found.items() if self._unspilled(*pack) is not None]

    def rebuild(self) -> list[Problem]:
        """Empty an index that has no other source, and feed it anew.

        Raises:
            StorageError: the cold root cannot be reached; the old index is still there.
        """
        with self._own(), self._catalog.rebuilding():
            self._damaged.clear()
            self._rivals.clear()
            return self.catch_up()

    def damaged(self) -> list[str]:
        """Return the keys of objects that could not be taken in."""
        return list(self._damaged)

    def _look(self) -> bool:
        # what is known is asked for first: another process may take in an object that is put after the listing
        seen = self._catalog.packs.seen()
        gone = {found.key: found for found in self.objects.list(GONE)}
        there = {found.key: found for prefix in (MANIFESTS, FACTS) for found in self.objects.list(prefix)}
        buried = [key for key in gone if key not in seen]
        new = [found for key, found in there.items() if key not in seen and not self._is_damaged(found)]
        lost = seen.difference(there, gone)
        if buried or new or lost:
            self.confirm()
        self._forget_buried(buried)
        for known in (self._damaged, self._rivals):
            for key in known.keys() - there.keys():
                del known[key]
        whole = True
        # an index that nobody else sees is filled in one go
        with self._catalog.bulk() if self._catalog.in_memory else nullcontext():
            for found, contents in self._fetched(new):
                whole &= self._take_in(found, contents)
        if lost:
            self._forget_lost(lost)
        return whole

    def _identify(self) -> str | None:
        """Return the id of the spool whose cold root is there; None where there is none, or its file is torn."""
        try:
            return msgspec.json.decode(self._get(IDENTITY) or b"", type=_Identity).id
        except msgspec.DecodeError:
            return None

    def confirm(self) -> None:
        """Make sure that this is the spool's own cold root, and that what is not listed is not only out of sight.

        Raises:
            StorageError: the root is empty, or another one.
        """
        found = self._identify()
        if self._spool_id is None:
            self._spool_id = found
        if found is None or found != self._spool_id:
            raise another_cold_root(self.objects.url, found, self._spool_id)

    def _is_damaged(self, found: ObjectInfo) -> bool:
        known = self._damaged.get(found.key) or self._rivals.get(found.key)
        return known is not None and known[0] == found

    def _forget_buried(self, keys: Sequence[str]) -> None:
        """Take out what deleted packs fed; before manifests are read, which may still list them."""
        if self._catalog.is_borrowed:
            known = [key for key in keys if self._is_forgotten(key)]
            self._catalog.packs.saw(known)
            keys = [key for key in keys if key not in known]
        for start in range(0, len(keys), PAGE):
            page = keys[start : start + PAGE]
            told = list(self._threads.map(self._tombstone_here, page))
            with self._catalog.bulk():
                for key, mark in zip(page, told, strict=True):
                    pack = parse_gone_key(key)
                    if pack is not None and mark is not None:
                        self._catalog.forget(*pack, at=mark.at, reason=mark.reason)
                self._catalog.packs.saw(page)

    def _is_forgotten(self, key: str) -> bool:
        pack = parse_gone_key(key)
        return pack is not None and self._catalog.packs.states(pack[0]).get(pack[1]) == "gone"

    def _tombstone_here(self, key: str) -> GoneMark | None:
        """Return what a tombstone says; None where it is not about the pack of that name in the hot root."""
        pack = parse_gone_key(key)
        return self._tombstone(key) if pack is None or self.is_same(*pack) else None

    def _tombstone(self, key: str) -> GoneMark | None:
        """Return what a tombstone says; None where there is none. A torn one says all the same that the pack goes."""
        data = self._get(key)
        try:
            return None if data is None else parse_tombstone(data, key)
        except IntegrityError as error:
            log.warning("%s", error)
            return GoneMark()

    def _forget_lost(self, keys: Collection[str]) -> None:
        for key in keys:
            self._packs_in.pop(key, None)
            if key.startswith(FACTS):
                self._catalog.lose(fact_stream(key), 0)  # rolled up, deleted, or only out of sight
        if keys:
            self._catalog.packs.unsee(keys)

    def _get(self, key: str) -> bytes | None:
        try:
            return self.objects.get(key)
        except NotFoundError:
            return None

    def _fetched(self, new: Sequence[ObjectInfo]) -> Iterator[tuple[Sequence[ObjectInfo], list[bytes | None]]]:
        """Yield pages of objects and what is in them; while one is taken in, the next is fetched."""
        pages = [new[start : start + PAGE] for start in range(0, len(new), PAGE)]
        ahead: list[Future[bytes | None]] = []
        for page, later in zip(pages, [*pages[1:], []], strict=False):
            jobs = ahead or [self._threads.submit(self._get_listed, info) for info in page]
            ahead = [self._threads.submit(self._get_listed, info) for info in later]
            yield page, [job.result() for job in jobs]

    def _get_listed(self, info: ObjectInfo) -> bytes | None:
        """Return an object of which the listing told the size; None where it is no longer there."""
        try:
            return self.objects.get_range(info.key, 0, info.size)
        except NotFoundError:
            return None
        except IntegrityError:  # it is another one by now
            return self._get(info.key)

    def _take_in(self, found: Sequence[ObjectInfo], contents: Sequence[bytes | None]) -> bool:
        """Take in objects, but for damaged ones; return False where one is no longer there."""
        read = [item for info, data in zip(found, contents, strict=True) if data is not None
                for item in self._decode(info, data)]  # fmt: skip
        if self._catalog.is_borrowed and all(map(self._is_known, read)):
            for item in read:
                self._saw(item)
            return None not in contents
        with self._catalog.bulk():
            for item in read:
                try:
                    self._store(item)
                except IntegrityError as error:
                    self._report(item.info, error)
                else:
                    self._damaged.pop(item.info.key, None)
                    self._saw(item)
        return None not in contents

    def _is_known(self, item: _Read) -> bool:
        """Whether the index has all that is in an object, from the logs of the hot root."""
        packs = [(entry.stream, entry.pack) for entry, _ in item.packs]
        known = self._catalog.offsets([stream for stream, _ in packs])
        return not item.facts and all(pack in known and known[pack].sealed and self._is_local(*pack) for pack in packs)

    def _saw(self, item: _Read) -> None:
        """Note that an object was taken in; one with rivals is looked at by each process, which then knows of them."""
        if item.rivals:
            self._rivals[item.info.key] = item.info, item.rivals
        else:
            self._catalog.packs.saw([item.info.key])

    def _decode(self, info: ObjectInfo, data: bytes) -> Iterator[_Read]:
        """Yield what is in an object; nothing of a damaged one. Before the transaction, as others wait for that."""
        try:
            if info.key.startswith(FACTS):
                yield _Read(info, [], manifest.decode_facts(data), [])
                return
            packs = manifest.decode(data)
            for entry, _ in packs:
                self.sizes(entry.stream)
        except IntegrityError as error:
            self._report(info, error)
            return
        if is_rollup(info.key):
            self._packs_in[info.key] = tuple((entry.stream, entry.pack) for entry, _ in packs)
        # what the hot root has and did not bring over is what its own files say, whoever has a pack of that name
        own = [entry for entry, _ in packs if self._unspilled(entry.stream, entry.pack) is not None]
        rivals = [self._rival(info, entry) for entry in own if self.is_other(entry.stream, entry.pack)]
        yield _Read(info, [(entry, events) for entry, events in packs if entry not in own], [], rivals)

    def _rival(self, info: ObjectInfo, entry: PackEntry) -> Problem:
        where = f"{self.objects.url}/{info.key}"
        text = (
            f"{where} lists pack {entry.pack} of stream {entry.stream} with other records than it has here: two copies "
            "of one hot root are in use. Nothing of the pack is deleted or evicted here: take this copy out of use, or "
            "if it is the one to keep, `spool export` what only it has"
        )
        log.warning("%s", text)
        return Problem(entry.stream, entry.pack, "rival", text, file=where)

    def _report(self, info: ObjectInfo, error: IntegrityError) -> None:
        where = f"{self.objects.url}/{info.key}"
        stream, pack = parse_manifest_key(info.key)
        self._damaged[info.key] = info, Problem(stream, pack, "damaged", f"{where}: {error}", file=where)
        log.warning("%s: %s", where, error)

    def _store(self, read: _Read) -> None:
        if read.info.key.startswith(FACTS):
            self._take_in_facts(read.info.key, read.facts, read.info.size)
        for entry, events in read.packs:
            self._take_in_pack(entry, events)

    def _take_in_facts(self, key: str, payloads: Sequence[bytes], n_bytes: int) -> None:
        name = fact_stream(key)
        if self._catalog.ingest_pack(name, 0, payloads, sizes=self.sizes):
            self._catalog.packs.mark(name, 0, "evicted", stored_bytes=n_bytes, sealed_at=time_of(key))

    def _take_in_pack(self, entry: PackEntry, events: Sequence[bytes]) -> None:
        self._catalog.ingest_pack(entry.stream, entry.pack, events, sizes=self.sizes)
        if not self._is_local(entry.stream, entry.pack):
            self._catalog.packs.mark(
                entry.stream,
                entry.pack,
                "evicted",
                hot_bytes=0,
                stored_bytes=entry.stored_bytes,
                sealed_at=entry.sealed_at,
            )

    # -- what is there -----------------------------------------------------------------------------------------------

    def tombstones(self) -> dict[Pack, GoneMark]:
        """Return what is said of each deleted pack; of one that is done with it is read once.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        with self._own():
            packs = {found.key: pack for found in self.objects.list(GONE) if (pack := parse_gone_key(found.key))}
            waiting = [key for key, pack in packs.items() if pack not in self._done]
            told = dict(zip(waiting, self._threads.map(self._tombstone, waiting), strict=True))
            marks = {packs[key]: mark for key, mark in told.items() if mark is not None}
            self._done.update({pack: mark for pack, mark in marks.items() if mark.done})
            there = set(packs.values())
            return {**{pack: mark for pack, mark in self._done.items() if pack in there}, **marks}

    def is_other(self, stream: str, pack: int) -> bool:
        """Whether the cold root has other records of a pack that the hot root has and did not bring over.

        Raises:
            StorageError: a root cannot be read.
        """
        own = self._unspilled(stream, pack)
        return own is not None and self._get(records_key(stream, pack)) not in (None, own)

    def is_same(self, stream: str, pack: int) -> bool:
        """Whether what the cold root says of a pack is about the one that the hot root has.

        It is where that has none or brought it over, or where the same records are there now.

        Raises:
            StorageError: a root cannot be read.
        """
        own = self._unspilled(stream, pack)
        return own is None or self._get(records_key(stream, pack)) == own

    def packs_in(self, key: str) -> tuple[Pack, ...] | None:
        """Return the packs that a roll-up lists; None where it is damaged or no longer there."""
        with self._own():
            known = self._packs_in.get(key)
            if known is None and (data := self._get(key)) is not None:
                with suppress(IntegrityError):
                    known = tuple((entry.stream, entry.pack) for entry, _ in manifest.decode(data))
                    self._packs_in[key] = known
            return known

    def entries(self) -> dict[Pack, PackEntry]:
        """Return what all manifests say of their packs, read anew; damaged ones are left out.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        entries: dict[Pack, PackEntry] = {}
        with self._own():
            for data in self._threads.map(self._get, [found.key for found in self.objects.list(MANIFESTS)]):
                with suppress(IntegrityError):
                    entries.update({(entry.stream, entry.pack): entry for entry, _ in manifest.decode(data or b"")})
        return entries

    def sizes(self, stream: str) -> Mapping[str, ArraySize] | None:
        """Return the sizes of each array of a stream, or None where the cold root does not know the stream.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        known = self._sizes.get(stream)
        if known is None:
            try:
                key = group_key(stream)
                found = parse_group(self.objects.get(key), f"{self.objects.url}/{key}")
                known = self._sizes[stream] = array_sizes(*found)
            except NotFoundError:
                return None
        return known

    # -- writing facts -----------------------------------------------------------------------------------------------

    def write_facts(self, events: Sequence[Event]) -> None:
        """Record events in a file of their own, the one thing that a process without hot root writes.

        Raises:
            StorageError: the cold root cannot be written to.
        """
        key = f"{FACTS}{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(16)}.parquet"
        payloads = [encode_event(event) for event in events]
        data = manifest.encode_facts(payloads)
        self.confirm()
        self.objects.put(key, data)
        self.confirm()  # else it went to what else is mounted there now
        with self._catalog.bulk():
            self._take_in_facts(key, payloads, len(data))
            self._catalog.packs.saw([key])

    # -- reading records ---------------------------------------------------------------------------------------------

    def records(self, stream: str, pack: int) -> bytes:
        """Return the records file of a pack.

        Raises:
            NotFoundError: it is not there.
            StorageError: the cold root cannot be reached.
        """
        self._own()
        with self._records_lock:
            known = self._records.get((stream, pack))
            if known is not None:
                self._records.move_to_end((stream, pack))
                return known
        data = self.objects.get(records_key(stream, pack))
        with self._records_lock:
            self._records[stream, pack] = data
            while sum(map(len, self._records.values())) > _KEPT_BYTES and len(self._records) > 1:
                self._records.popitem(last=False)
        return data

    def events(self, stream: str, pack: int) -> list[bytes]:
        """Return the events of a pack, for an index that is made anew.

        Raises:
            NotFoundError, IntegrityError, StorageError: as `records`.
        """
        return records.decode(self.records(stream, pack))
