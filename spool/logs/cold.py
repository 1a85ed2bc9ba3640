"""A cold root -> catalog: its manifests, fact files and deletions, read as they appear. And records, by pack."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from spool.catalog import Catalog
from spool.errors import NotFoundError
from spool.formats import manifest, records
from spool.formats.frames import encode_event
from spool.formats.manifest import PackEntry
from spool.model.events import Event
from spool.stores.objects import Objects


MANIFESTS, FACTS, GONE = "manifests/", "facts/", "gone/"
PAGE = 64
"""Objects that are fetched together and taken in by one transaction."""

_KEPT_BYTES = 64 << 20


def records_key(stream: str, pack: int) -> str:
    """Return where the records of a pack lie."""
    return f"streams/{stream}/records/{pack}.arrow"


def gone_key(stream: str, pack: int) -> str:
    """Return the object that says that a pack is deleted."""
    return f"{GONE}{stream}-{pack}"


def parse_gone(key: str) -> tuple[str, int] | None:
    """Return the pack that a key in ``gone/`` is about; None for a key of something else."""
    stream, _, number = key.removeprefix(GONE).rpartition("-")
    return (stream, int(number)) if stream and number.isdecimal() else None


class ColdFeeder:
    """Feeds the catalog from a cold root; safe from many threads and after a fork.

    Nothing is trusted to stay: each look lists the root anew.

    Args:
        objects: the cold root.
        catalog: what is fed.
    """

    def __init__(self, objects: Objects, catalog: Catalog) -> None:
        self.objects = objects
        self._catalog = catalog
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._records: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def _own(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    # -- feeding -----------------------------------------------------------------------------------------------------

    def catch_up(self, *, after_s: float = 0.0) -> None:
        """Take in what is new in the cold root, unless that was done less than ``after_s`` ago.

        Raises:
            StorageError: the cold root cannot be reached.
            IntegrityError: an object is damaged.
        """
        with self._own():
            if after_s and time.monotonic() - self._looked_at < after_s:
                return
            while not self._look():
                pass  # an object went between listing and reading: it was rolled up, so list again
            self._looked_at = time.monotonic()

    def _look(self) -> bool:
        gone = [found.key for found in self.objects.list(GONE)]
        there = [found.key for prefix in (MANIFESTS, FACTS) for found in self.objects.list(prefix)]
        seen = self._catalog.seen_objects()
        new = [key for key in there if key not in seen]
        for start in range(0, len(new), PAGE):
            page = new[start : start + PAGE]
            try:
                found = [self.objects.get(key) for key in page]
            except NotFoundError:
                return False
            self._take_in(page, found)
        for key in gone:
            pack = parse_gone(key)
            if pack is not None and key not in seen:
                self._catalog.forget(*pack)
                self._catalog.saw([key])
        return True

    def _take_in(self, keys: Sequence[str], found: Sequence[bytes]) -> None:
        for key, data in zip(keys, found, strict=True):
            if key.startswith(FACTS):
                self._catalog.ingest_pack(fact_stream(key), 0, manifest.decode_facts(data))
            else:
                for entry, events in manifest.decode(data):
                    self._catalog.ingest_pack(entry.stream, entry.pack, events, entry=entry)
        self._catalog.saw(keys)

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
        self._catalog.saw([key])

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


def fact_stream(key: str) -> str:
    """Return the name under which the catalog files the events of a fact file."""
    return "facts-" + key.removeprefix(FACTS).removesuffix(".parquet")


def manifest_key(entry: PackEntry) -> str:
    """Return where a pack's manifest lies: by the time it was sealed, so that a repeated upload writes the same."""
    return f"{MANIFESTS}{int(entry.sealed_at * 1000):013d}-{entry.stream}-{entry.pack}.parquet"
