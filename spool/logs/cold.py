"""A cold root -> catalog: its manifests, fact files and deletions, read as they appear. And records, by pack."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from spool.catalog import Catalog
from spool.errors import IntegrityError, NotFoundError
from spool.formats import manifest, records
from spool.formats.frames import encode_event
from spool.formats.manifest import PackEntry
from spool.formats.shard import group_key, parse_group
from spool.logs.packs import parse_tombstone
from spool.model.events import Event
from spool.stores.objects import ObjectInfo, Objects

log = logging.getLogger("spool.logs")

MANIFESTS, FACTS, GONE = "manifests/", "facts/", "gone/"
PAGE = 64
"""Objects that are taken in by one transaction."""
FETCHES = 8
"""Of those, how many are fetched at a time."""

_KEPT_BYTES = 64 << 20
_FACT_STREAM = "facts-"


def records_key(stream: str, pack: int) -> str:
    """Return where the records of a pack lie."""
    return f"streams/{stream}/records/{pack}.arrow"


def gone_key(stream: str, pack: int) -> str:
    """Return the object that says that a pack is deleted: its tombstone."""
    return f"{GONE}{stream}-{pack}"


def parse_gone_key(key: str) -> tuple[str, int] | None:
    """Return the pack that a tombstone is about; None for a key of something else."""
    stream, _, number = key.removeprefix(GONE).rpartition("-")
    return (stream, int(number)) if stream and number.isdecimal() else None


def manifest_key(entry: PackEntry) -> str:
    """Return where a pack's manifest lies: by the time it was sealed, so that a repeated upload writes the same."""
    return f"{MANIFESTS}{int(entry.sealed_at * 1000):013d}-{entry.stream}-{entry.pack}.parquet"


def parse_manifest_key(key: str) -> tuple[str, int] | None:
    """Return the pack that a manifest is about; None for a roll-up of many."""
    _, _, name = key.removeprefix(MANIFESTS).removesuffix(".parquet").partition("-")
    stream, _, number = name.rpartition("-")
    return (stream, int(number)) if stream != "rollup" and number.isdecimal() else None


def fact_stream(key: str) -> str:
    """Return the name under which the catalog files the events of a fact file."""
    return _FACT_STREAM + key.removeprefix(FACTS).removesuffix(".parquet")


def fact_key(stream: str) -> str:
    """Return the fact file that a name of `fact_stream` stands for."""
    return f"{FACTS}{stream.removeprefix(_FACT_STREAM)}.parquet"


def is_fact_stream(stream: str) -> bool:
    """Whether a name in the catalog is that of a fact file."""
    return stream.startswith(_FACT_STREAM)


class ColdFeeder:
    """Feeds the catalog from a cold root; safe from many threads and after a fork.

    Nothing is trusted to stay: each look lists the root anew.

    Args:
        objects: the cold root.
        catalog: what is fed.
        is_local: whether a stream is in a hot root of the same catalog, whose files say in which tiers its packs are.
    """

    def __init__(self, objects: Objects, catalog: Catalog, is_local: Callable[[str], bool] = lambda _: False) -> None:
        self.objects = objects
        self._catalog = catalog
        self._is_local = is_local
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="spool-manifests")
        self._layouts: dict[str, Mapping[str, int]] = {}
        self._looked_at = 0.0
        self._records: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._damaged: dict[str, ObjectInfo] = {}

    def _own(self) -> threading.RLock:
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    # -- feeding -----------------------------------------------------------------------------------------------------

    def catch_up(self, *, after_s: float = 0.0) -> None:
        """Take in what is new in the cold root, unless that was done less than ``after_s`` ago.

        An object that is damaged is left out, with a warning, until another is in its place; see `damaged`.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        with self._own():
            if after_s and time.monotonic() - self._looked_at < after_s:
                return
            while not self._look():
                pass  # an object went between listing and reading: it was rolled up, so list again
            self._looked_at = time.monotonic()

    def damaged(self) -> list[str]:
        """Return the keys of objects that could not be taken in."""
        with self._own():
            return list(self._damaged)

    def _look(self) -> bool:
        gone = [found.key for found in self.objects.list(GONE)]
        there = {found.key: found for prefix in (MANIFESTS, FACTS) for found in self.objects.list(prefix)}
        self._damaged = {key: info for key, info in self._damaged.items() if there.get(key) == info}
        seen = self._catalog.packs.seen()
        new = [found for key, found in there.items() if key not in seen and key not in self._damaged]
        for start in range(0, len(new), PAGE):
            if not self._take_in(new[start : start + PAGE]):
                return False
        for key in gone:
            pack = parse_gone_key(key)
            if pack is not None and key not in seen:
                told = parse_tombstone(self.objects.get(key), key)
                self._catalog.forget(*pack, at=told.at, reason=told.reason)
                self._catalog.packs.saw([key])
        lost = seen.difference(there, gone)
        for key in lost:
            if key.startswith(FACTS):
                self._catalog.forget(fact_stream(key), 0)
        self._catalog.packs.unsee(lost)
        return True

    def _take_in(self, infos: Sequence[ObjectInfo]) -> bool:
        """Take in objects; return False where one is no longer there."""
        try:
            found = list(self._threads.map(lambda info: self.objects.get(info.key), infos))
        except NotFoundError:
            return False
        parsed = [(info.key, self._parse(info, data)) for info, data in zip(infos, found, strict=True)]
        whole = [(key, parts) for key, parts in parsed if parts is not None]
        with self._catalog.bulk():
            for key, parts in whole:
                for entry, events in parts:
                    if entry is None:
                        self._catalog.ingest_pack(fact_stream(key), 0, events)
                    else:
                        self._take_in_pack(entry, events)
            self._catalog.packs.saw([key for key, _ in whole])
        return True

    def _parse(self, info: ObjectInfo, data: bytes) -> Sequence[tuple[PackEntry | None, Sequence[bytes]]] | None:
        """Return what is in a manifest, or in a fact file, which has no entry; None where it is damaged."""
        try:
            return [(None, manifest.decode_facts(data))] if info.key.startswith(FACTS) else manifest.decode(data)
        except IntegrityError as error:
            log.warning("%s/%s is damaged and left out of the index: %s", self.objects.url, info.key, error)
            self._damaged[info.key] = info
            return None

    def _take_in_pack(self, entry: PackEntry, events: Sequence[bytes]) -> None:
        self._catalog.ingest_pack(entry.stream, entry.pack, events, shard_rows=self.shard_rows)
        if self._is_local(entry.stream):
            return  # whoever put the manifest may have died before it said so in the hot root, and does it again
        self._catalog.packs.mark(
            entry.stream,
            entry.pack,
            "evicted",
            hot_bytes=entry.hot_bytes,
            stored_bytes=entry.stored_bytes,
            sealed_at=entry.sealed_at,
        )

    def shard_rows(self, stream: str) -> Mapping[str, int] | None:
        """Return R of each array of a stream, or None where the cold root does not know the stream.

        Raises:
            StorageError: the cold root cannot be reached.
        """
        known = self._layouts.get(stream)
        if known is None:
            try:
                known = self._layouts[stream] = parse_group(self.objects.get(group_key(stream)))[1].shard_rows
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
        self.objects.put(key, manifest.encode_facts(payloads))
        self._catalog.ingest_pack(fact_stream(key), 0, payloads)
        self._catalog.packs.saw([key])

    # -- reading records ---------------------------------------------------------------------------------------------

    def records(self, stream: str, pack: int) -> bytes:
        """Return the records file of a pack.

        Raises:
            NotFoundError: it is not there.
            StorageError: the cold root cannot be reached.
        """
        with self._own():
            known = self._records.get((stream, pack))
            if known is not None:
                self._records.move_to_end((stream, pack))
                return known
        data = self.objects.get(records_key(stream, pack))
        with self._own():
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
