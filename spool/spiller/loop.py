"""The spiller's loop: look, do what is due, wait; whatever fails is tried again, and nothing is forgotten by it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec
from msgspec import Struct

from spool.catalog import Catalog
from spool.config import Config
from spool.errors import IntegrityError, SpoolError
from spool.logs import LogFeeder
from spool.logs.cold import ColdFeeder
from spool.logs.streams import is_live
from spool.retention import Eviction, eviction_plan, over
from spool.spiller.evict import evict
from spool.spiller.mend import Mender
from spool.spiller.plan import packs_to_spill
from spool.spiller.upload import Uploader
from spool.stores.hot import HotStore
from spool.stores.local import read_file, write_atomic
from spool.write.recover import recover

log = logging.getLogger("spool.spiller")

HIGH, LOW = 0.85, 0.75
"""Of ``hot_bytes``: above the first packs are evicted until below the second."""
LOOK_S, LONGEST_LOOK_S = 0.1, 1.0
UPKEEP_S = 5.0
"""Between two looks at what is not urgent: dead writers, idle sessions, other nodes' news, retention."""
IDLE_S = 2.0
"""How long there is nothing to do before a spiller that nobody needs ends."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Status(Struct, frozen=True):
    """What a spiller says of itself, in ``spiller.json`` of the hot root.

    Attributes:
        pid: its process.
        at: seconds since the epoch.
        n_spilled, spilled_bytes: packs brought over since it started, and their bytes in the cold root.
        bytes_per_s: stored bytes a second while it was uploading.
        n_evicted, n_deleted: packs taken out of the hot root.
        damaged: packs that are not as they were recorded and stay where they are.
        error: why the last round failed; None where it did not.
    """

    pid: int
    at: float
    n_spilled: int = 0
    spilled_bytes: int = 0
    bytes_per_s: float = 0.0
    n_evicted: int = 0
    n_deleted: int = 0
    damaged: tuple[str, ...] = ()
    error: str | None = None


def status_path(root: str) -> str:
    """Return where a root's spiller says how it is doing."""
    return f"{root}/spiller.json"


def read_status(root: str) -> Status | None:
    """Return what the last spiller said of itself, or None where none ever did."""
    with suppress(SpoolError, msgspec.DecodeError):
        return msgspec.json.decode(read_file(status_path(root)), type=Status)
    return None


class Spiller:
    """One hot root's spiller. Whoever makes it holds the lock; see `elect`.

    Args:
        config: of the spool; it has a hot root.
        catalog: the root's.
        feeder: feeds it from the root.
        cold: feeds it from the cold root; None where there is none.
        store: the root's bytes.
        own: returns the streams of this very process, which needs no spiller for itself.
        expire: ends idle sessions of dead writers.
        collect: deletes what retention lets go; returns how many packs.
    """

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        feeder: LogFeeder,
        cold: ColdFeeder | None,
        store: HotStore,
        *,
        own: Callable[[], Collection[str]],
        expire: Callable[[], object],
        collect: Callable[[], int],
    ) -> None:
        assert config.root is not None
        self._root = config.root
        self._config = config
        self._catalog = catalog
        self._feeder = feeder
        self._cold = cold
        self._own = own
        self._expire = expire
        self._collect = collect
        self._uploader = Uploader(self._root, store, cold.objects) if cold is not None else None
        self._mender = Mender(self._root, catalog, feeder, cold, lambda stream, pack: self._bring(stream, [pack]))
        self._status = Status(os.getpid(), time.time())
        self._damaged: dict[tuple[str, int], str] = {}
        self._upload_s = 0.0
        self._kept_at = 0.0

    def run(self, stop: threading.Event, *, until_idle: bool) -> None:
        """Work until ``stop`` is set; with ``until_idle`` also end when nothing needs this spiller any more."""
        wait_s, pause_s, idle_since = LOOK_S, PAUSE_S, time.monotonic()
        while not stop.is_set():
            try:
                busy = self.work()
                self._say(error=None)
                pause_s = PAUSE_S
            except (SpoolError, OSError) as error:
                log.warning("the spiller tries again in %.0f s: %s", pause_s, error)
                self._say(error=str(error))
                stop.wait(pause_s)
                pause_s, idle_since = min(2 * pause_s, LONGEST_PAUSE_S), time.monotonic()
                continue
            if busy or self._is_needed():
                idle_since = time.monotonic()
            elif until_idle and time.monotonic() - idle_since > IDLE_S:
                return
            wait_s = LOOK_S if busy else min(wait_s * 1.5, LONGEST_LOOK_S)
            if not busy:
                stop.wait(wait_s)

    def work(self) -> bool:
        """Do what is due once; return whether there was anything."""
        self._feeder.catch_up()
        busy = self._keep_up()
        busy |= self._spill()
        busy |= self._make_room()
        return busy

    def backlog(self) -> dict[str, list[int]]:
        """Return the packs that are to be brought over now, by stream."""
        return packs_to_spill(
            (row for row in self._catalog.packs.rows("sealed") if (row.stream, row.pack) not in self._damaged),
            when=self._config.spill_when,
            requested=self._catalog.packs.seal_requests(),
            pressed=self._taken() > self._limit(HIGH),
        )

    def close(self) -> None:
        """Let go of the threads."""
        if self._uploader is not None:
            self._uploader.close()

    # -- what is due -------------------------------------------------------------------------------------------------

    def _keep_up(self) -> bool:
        if time.monotonic() - self._kept_at < UPKEEP_S:
            return False
        self._kept_at = time.monotonic()
        recovered = recover(self._root)
        self._feeder.catch_up()
        if self._cold is not None:
            self._cold.catch_up()
        self._mender.work(recovered=bool(recovered))
        self._expire()
        n_deleted = self._collect()
        self._status = msgspec.structs.replace(self._status, n_deleted=self._status.n_deleted + n_deleted)
        return n_deleted > 0

    def _spill(self) -> bool:
        if self._uploader is None:
            return False
        backlog = self.backlog()
        for stream, packs in backlog.items():
            self._bring(stream, packs)
        return bool(backlog)

    def _bring(self, stream: str, packs: list[int]) -> None:
        assert self._uploader is not None
        self._upload(self._uploader, stream, packs)

    def _upload(self, uploader: Uploader, stream: str, packs: list[int]) -> None:
        started = time.monotonic()
        try:
            entries = uploader.upload(stream, packs)
        except IntegrityError as error:
            if len(packs) > 1:  # one of them is damaged: the others go alone
                for pack in packs:
                    self._upload(uploader, stream, [pack])
                return
            log.error("pack %d of stream %s stays in the hot root: %s", packs[0], stream, error)
            self._damaged[stream, packs[0]] = str(error)
            return
        self._upload_s += time.monotonic() - started
        for entry in entries:
            self._catalog.packs.mark(
                stream,
                entry.pack,
                "spilled",
                hot_bytes=entry.hot_bytes,
                stored_bytes=entry.stored_bytes,
                sealed_at=entry.sealed_at,
            )
        self._catalog.packs.serve(stream, max(packs))
        n_spilled = self._status.n_spilled + len(entries)
        stored = self._status.spilled_bytes + sum(entry.stored_bytes for entry in entries)
        self._status = msgspec.structs.replace(
            self._status, n_spilled=n_spilled, spilled_bytes=stored, bytes_per_s=stored / self._upload_s
        )

    def _make_room(self) -> bool:
        taken, plan = self._taken(), list[Eviction]()
        if taken > self._limit(HIGH):
            packs, now = self._catalog.packs, time.time()
            plan = eviction_plan(
                packs.uses(),
                over(packs.sessions(), now=now),
                used=taken,
                high=int(self._limit(HIGH)),
                low=int(self._limit(LOW)),
                limit=self._config.hot_bytes or 0,
            )
        for item in plan:
            evict(self._root, self._catalog, item.stream, item.pack)
        self._status = msgspec.structs.replace(self._status, n_evicted=self._status.n_evicted + len(plan))
        return bool(plan)

    # -- what it is about ----------------------------------------------------------------------------------------------

    def _taken(self) -> int:
        return sum(self._catalog.usage().values())

    def _limit(self, part: float) -> float:
        return float("inf") if self._config.hot_bytes is None else part * self._config.hot_bytes

    def _is_needed(self) -> bool:
        """Whether a writer lives, which may seal a pack at any time."""
        own = self._own()
        return any(is_live(self._root, name) for name in self._feeder.stream_names() if name not in own)

    def _say(self, *, error: str | None) -> None:
        damaged = tuple(f"pack {pack} of {stream}: {text}" for (stream, pack), text in self._damaged.items())
        now = time.time()
        changed = (error, damaged) != (self._status.error, self._status.damaged)
        if changed or now - self._status.at >= 1.0:
            self._status = msgspec.structs.replace(self._status, at=now, error=error, damaged=damaged)
            with suppress(SpoolError):
                write_atomic(status_path(self._root), msgspec.json.encode(self._status), sync=False)
