"""The spiller's loop: look, do what is due, wait; whatever fails is tried again, and nothing is forgotten by it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby, islice
from operator import attrgetter

import msgspec

from spool.catalog import Catalog, PackRow
from spool.config import Config
from spool.errors import ConfigError, IntegrityError, SpoolError, StorageError
from spool.formats.manifest import PackEntry
from spool.locks import file_identity
from spool.logs import LogFeeder
from spool.logs.cold import ColdFeeder
from spool.logs.keys import gone_key
from spool.logs.packs import last_cold
from spool.logs.room import Disk, wanted
from spool.logs.streams import is_live
from spool.observe import Evicted, Observer, Spilled, tell
from spool.retention import Eviction, StoredUnit, eviction_plan, over, unit_evictions
from spool.root import read_cold_identity, read_identity
from spool.sizes import format_time
from spool.spiller.collect import Collected
from spool.spiller.elect import lock_path
from spool.spiller.evict import evict
from spool.spiller.mend import Mender
from spool.spiller.plan import ANY_PACK, ROUND_PACKS, Pressure, packs_to_spill, pressure
from spool.spiller.rollup import roll_up
from spool.spiller.status import Damaged, Status, status_path
from spool.spiller.upload import LATE_S, Uploader, all_of
from spool.stores.hot import HotStore
from spool.stores.local import write_atomic
from spool.stores.units import HotUnits, disk_bytes
from spool.write.recover import recover

log = logging.getLogger("spool.spiller")

LOOK_S, LONGEST_LOOK_S = 0.1, 1.0
TELL_S = 2.0
"""Between two signs of life, and how long the cold root has not answered before that is said."""
UPKEEP_S = 5.0
"""Between two looks at what is not urgent: dead writers, idle sessions, other nodes' news, retention."""
TIDY_S = 60.0
"""Between two looks at manifests that could be one, and at uploads that never ended."""
IDLE_S = 2.0
"""How long there is nothing to do before a spiller that nobody needs ends."""
GIVE_UP_S = 600.0
"""How long a spiller that no writer needs tries to bring over what is left to a cold root that fails."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
URGENT_S = 1.0
"""Between two looks at dead writers and at what may be deleted, where somebody waits for it."""
DAMAGED_S = 60.0
"""How long after a pack was found damaged it is looked at again: somebody may have restored it."""
STALE_UPLOAD_S = 6 * 3600.0
"""Uploads in parts that began longer ago were left by processes that died."""
STREAMS = 8
"""Streams whose packs are brought over at a time."""


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
        collect: deletes what retention lets go.
        observer: told of what was spilled and evicted; None for nobody.
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
        collect: Callable[[], Collected],
        observer: Observer | None = None,
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
        self._observer = observer
        self._units = HotUnits(self._root)
        self._uploader = Uploader(self._root, store, cold.objects, self._confirm_cold) if cold is not None else None
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="spool-spill-stream")
        self._status = Status(os.getpid(), 0.0)
        self._damaged: dict[tuple[str, int], tuple[Damaged, float]] = {}
        self._mender = Mender(self._root, catalog, feeder, cold, self._bring)
        self._upload_s = 0.0
        self._lock = file_identity(lock_path(self._root))
        self._kept_at = self._collected_at = self._recovered_at = self._tidied_at = float("-inf")
        self._looked_at = float("-inf")
        self._by_hand = False
        self._n_waiting = 0
        self._saying = threading.Lock()

    def run(self, stop: threading.Event, *, until_idle: bool) -> None:
        """Work until ``stop`` is set; with ``until_idle`` also end when nothing needs this spiller any more."""
        ended = threading.Event()
        teller = threading.Thread(target=self._tell_outages, args=(ended,), name="spool-spill-status", daemon=True)
        teller.start()
        try:
            self._run(stop, until_idle=until_idle)
        finally:
            ended.set()
            teller.join()

    def _tell_outages(self, ended: threading.Event) -> None:
        """Say now and then that this process is at work, and whether the cold root does not answer."""
        while not ended.wait(TELL_S):
            error, since = self._status.error, None if self._cold is None else self._cold.objects.failing_since
            if self._cold is not None and since is not None and time.time() - since >= TELL_S:
                url = self._cold.objects.url
                error = f"{url} has not answered since {format_time(since)}; it is asked again and again"
            self._say(error=error)

    def _run(self, stop: threading.Event, *, until_idle: bool) -> None:
        wait_s, pause_s, idle_since = LOOK_S, PAUSE_S, time.monotonic()
        while not stop.is_set():
            if not self._is_there():
                log.warning("the hot root %s was removed, its spiller ends", self._root)
                return
            try:
                busy = self.work()
                self._say(error=self._missing_cold())
                pause_s = PAUSE_S
            except (SpoolError, OSError) as error:
                log.warning("the spiller tries again in %.0f s: %s", pause_s, error)
                self._say(error=str(error))
                self._reconnect(error)
                if self._is_needed():
                    idle_since = time.monotonic()
                elif until_idle and time.monotonic() - idle_since > (GIVE_UP_S if self._has_backlog() else IDLE_S):
                    log.warning("nobody needs this spiller, it ends; the next writer or publish starts another")
                    return
                self._pause(stop, pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if busy or self._is_needed():
                idle_since = time.monotonic()
            elif until_idle and time.monotonic() - idle_since > IDLE_S:
                return
            wait_s = LOOK_S if busy else min(wait_s * 1.5, LONGEST_LOOK_S)
            if not busy:
                self._rest(stop, wait_s)

    def work(self) -> bool:
        """Do what is due once; return whether there was anything.

        Raises:
            SpoolError: a part of it failed; the others were done.
        """
        busy, failures = False, list[Exception]()
        for step in (self._take_in, self._keep_up, self._serve, self._spill, self._make_room):
            try:
                busy |= step()
            except (SpoolError, OSError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return busy

    def once(self, progress: Callable[[int, int], object] | None = None) -> list[PackRow]:
        """Bring over all packs that are sealed now, and do on the way what else is due.

        Args:
            progress: called with bytes done and bytes in all.

        Returns:
            What became of each; one that is damaged stays ``sealed``.

        Raises:
            SpoolError: a root failed; what was brought over is, and the rest can be done again.
        """
        self._by_hand = True
        self._feeder.catch_up()
        self._look_at_cold()
        self._keep_up()
        plan = self.sealed()
        if self._uploader is None or self._cold is None:
            return []
        total, done = sum(row.hot_bytes or 0 for row in plan), 0
        for stream, rows in groupby(plan, key=attrgetter("stream")):
            while part := list(islice(rows, ROUND_PACKS)):
                self._upload(self._uploader, stream, [row.pack for row in part])
                done += sum(row.hot_bytes or 0 for row in part)
                if progress is not None:
                    progress(done, total)
        self._serve()
        self._make_room()
        self._say(error=None)
        found = (self._catalog.packs.get(row.stream, row.pack) for row in plan)
        return [row for row in found if row is not None]

    def sealed(self) -> list[PackRow]:
        """Return the packs that `once` would bring over, in that order."""
        by_stream: dict[str, list[PackRow]] = {}
        for row in sorted(self._catalog.packs.rows("sealed"), key=attrgetter("pack")):
            by_stream.setdefault(row.stream, []).append(row)
        oldest_first = sorted(by_stream.values(), key=lambda rows: (rows[0].sealed_at or 0.0, rows[0].stream))
        return [row for rows in oldest_first for row in rows]

    def _is_there(self) -> bool:
        """Whether the root is still the one whose lock this spiller holds."""
        return file_identity(lock_path(self._root)) == self._lock

    def backlog(self) -> dict[str, list[int]]:
        """Return the packs that are to be brought over now, by stream."""
        return packs_to_spill(
            (row for row in self._catalog.packs.rows("sealed") if not self._is_damaged(row.stream, row.pack)),
            when=self._config.spill_when,
            requested=self._catalog.packs.seal_requests(),
            pressed=self._pressure().is_high,
        )

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown()
        if self._uploader is not None:
            self._uploader.close()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _rest(self, stop: threading.Event, wait_s: float) -> None:
        """Wait, but not while somebody waits for a pack or for room."""
        until = time.monotonic() + wait_s
        while not stop.wait(min(LOOK_S, max(until - time.monotonic(), 0.0))) and time.monotonic() < until:
            if wanted(self._root) or self._catalog.packs.seal_requests():
                return

    def _pause(self, stop: threading.Event, wait_s: float) -> None:
        """Wait after a failure; room is made meanwhile of what is safe already."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until and not stop.wait(min(PAUSE_S, wait_s)):
            with suppress(SpoolError, OSError):
                self._make_room()

    def _reconnect(self, error: Exception) -> None:
        """Let go of connections whose credentials are refused: new ones read them anew from where they come from."""
        if self._cold is not None and getattr(error, "details", {}).get("status") in (400, 401, 403):
            self._cold.objects.close()

    # -- what is due -------------------------------------------------------------------------------------------------

    def _take_in(self) -> bool:
        self._feeder.catch_up()
        return False

    def _look_at_cold(self) -> None:
        """Make sure that the cold root is still the one that this root joined, before it is read, trusted or changed.

        Raises:
            StorageError: it cannot be reached, or was emptied.
            ConfigError: it is another spool's.
        """
        if self._cold is not None and time.monotonic() - self._looked_at >= UPKEEP_S:
            self._confirm_cold()

    def _confirm_cold(self) -> None:
        """Do what `_look_at_cold` is about, however short ago that was done."""
        assert self._cold is not None
        self._looked_at, own = float("-inf"), read_identity(self._root)
        found = read_cold_identity(self._cold.objects)
        if found is None:
            raise StorageError(
                f"{self._cold.objects.url} has no spool.json any more: it was emptied, or something else is mounted "
                "there; nothing is brought over or evicted until what was there is back"
            )
        if own is not None and found.id != own.id:
            raise ConfigError(
                f"{self._cold.objects.url} belongs to spool {found.id}, {self._root} to {own.id}: another cold root "
                "was put in its place; nothing is brought over or evicted"
            )
        self._looked_at = time.monotonic()

    def _keep_up(self) -> bool:
        if time.monotonic() - self._kept_at < UPKEEP_S:
            return False
        self._kept_at = time.monotonic()
        recovered = self._recover()
        if self._cold is not None:
            self._look_at_cold()
            self._cold.catch_up()
        self._mender.work(recovered=recovered)
        self._expire()
        deleted = self._delete()  # first: what was deleted from elsewhere is not to be listed again
        self._tidy()
        return deleted

    def _tidy(self) -> None:
        """Keep the cold root easy to list, and free of what puts that never ended left behind."""
        if self._cold is None or time.monotonic() - self._tidied_at < TIDY_S:
            return
        assert self._uploader is not None
        for key in self._uploader.mend_documents(self._described_before()):
            log.warning("%s did not list the rows that are in the cold root, and is put again", key)
        roll_up(self._cold, self._feeder.stream_names())
        self._cold.objects.abort_stale_uploads(STALE_UPLOAD_S)
        self._tidied_at = time.monotonic()

    def _described_before(self) -> list[str]:
        """Return, the first time, the streams of which spillers before this one brought packs over: lately, or ever."""
        if self._tidied_at > float("-inf"):
            return []
        since = float("-inf") if self._by_hand else time.time() - LATE_S
        return [name for name in self._feeder.stream_names() if last_cold(self._root, name, default=since) > since]

    def _recover(self) -> bool:
        self._recovered_at = time.monotonic()
        found = recover(self._root)
        self._feeder.catch_up()
        return bool(found)

    def _delete(self) -> bool:
        self._collected_at = time.monotonic()
        n_deleted, self._n_waiting = self._collect()
        self._note(n_deleted=self._status.n_deleted + n_deleted)
        return n_deleted > 0

    def _serve(self) -> bool:
        """Take back requests that are served or that nobody can serve; seal for writers that are dead."""
        packs, unsealed = self._catalog.packs, False
        for stream, pack in packs.seal_requests().items():
            row = packs.get(stream, pack)
            if row is not None and row.state in ("spilled", "evicted", "gone"):
                packs.serve(stream, pack)
            elif not is_live(self._root, stream):
                states = set(packs.states(stream).values())
                unsealed |= "open" in states
                if self._recovered_at > 0 and not {"open", "sealed"} & states:
                    packs.serve(stream, pack)
        if unsealed and time.monotonic() - self._recovered_at >= URGENT_S:
            self._recover()
        return False

    def _spill(self) -> bool:
        if self._uploader is None:
            return False
        self._look_at_cold()
        backlog, started = self.backlog(), time.monotonic()
        if not backlog:
            return False
        uploads = [self._threads.submit(self._upload, self._uploader, *item) for item in backlog.items()]
        try:
            found = [entry for entries in all_of(uploads) for entry in entries]
        finally:
            self._upload_s += time.monotonic() - started
        n_spilled = self._status.n_spilled + len(found)
        stored = self._status.spilled_bytes + sum(entry.stored_bytes for entry in found)
        self._note(n_spilled=n_spilled, spilled_bytes=stored, bytes_per_s=stored / self._upload_s)
        return True

    def _bring(self, stream: str, pack: int) -> None:
        assert self._uploader is not None
        self._upload(self._uploader, stream, [pack])

    def _upload(self, uploader: Uploader, stream: str, packs: list[int]) -> list[PackEntry]:
        """Bring packs of one stream over; in a thread of its own."""
        started = time.monotonic()
        try:
            entries = uploader.upload(stream, packs)
        except IntegrityError as error:
            if len(packs) > 1:  # one of them is damaged: the others go alone
                return [entry for pack in packs for entry in self._upload(uploader, stream, [pack])]
            log.error("pack %d of stream %s stays in the hot root: %s", packs[0], stream, error)
            self._damaged[stream, packs[0]] = Damaged(stream, packs[0], str(error)), time.monotonic()
            return []
        seconds = time.monotonic() - started
        tell(self._observer, Spilled(len(entries), sum(entry.stored_bytes for entry in entries), seconds))
        for entry in entries:
            self._damaged.pop((stream, entry.pack), None)
            self._catalog.packs.mark(
                stream,
                entry.pack,
                "spilled",
                hot_bytes=entry.hot_bytes,
                stored_bytes=entry.stored_bytes,
                sealed_at=entry.sealed_at,
            )
        self._catalog.packs.serve(stream, max(packs))
        return entries

    def _make_room(self) -> bool:
        found, packs = self._pressure(), self._catalog.packs
        if not found.is_high:
            return False
        if self._cold is None and time.monotonic() - self._collected_at >= URGENT_S and self._delete():
            return True
        self._look_at_cold()
        has_spilled = self._cold is not None and next(packs.rows("spilled"), None) is not None
        plan = self._evictions(found) if has_spilled else []
        plan = [item for item in plan if self._is_safe(item)]
        for item in plan:
            evict(self._root, self._catalog, item.stream, item.pack)
        freed = sum(item.n_bytes for item in plan)
        if plan:
            tell(self._observer, Evicted(len(plan), freed))
        self._note(n_evicted=self._status.n_evicted + len(plan))
        freed_units = self._evict_units(found.used - freed, found.low)
        if wanted(self._root) and found.used - freed - freed_units > found.low:
            self._seal_more()
        return bool(plan) or freed_units > 0

    def _evict_units(self, used: int, low: int) -> int:
        """Take units out of the hot root that are safe in the cold one; return the bytes that this gives."""
        if self._uploader is None or used <= low:
            return 0
        units = [StoredUnit(unit.key, disk_bytes(unit.size), unit.used_at) for unit in self._units.all()]
        plan = unit_evictions(units, self._catalog.units.unpublished(), used=used, low=low)
        renew_before = time.time() - self._config.units_age_s / 2
        return self._uploader.units.evict([unit.key for unit in plan], self._catalog, renew_before=renew_before)

    def _is_safe(self, item: Eviction) -> bool:
        """Whether a pack is in the cold root now, whatever its marker says; one that is lost is brought over again."""
        assert self._uploader is not None and self._cold is not None
        if self._uploader.is_there(item.stream, item.pack):
            return True
        if self._cold.objects.info(gone_key(item.stream, item.pack)) is not None:
            return False  # it was deleted from elsewhere, and is here as soon as somebody collects
        log.warning("pack %d of %s is not in the cold root any more: it is brought over again", item.pack, item.stream)
        self._bring(item.stream, item.pack)
        return False

    def _evictions(self, found: Pressure) -> list[Eviction]:
        packs = self._catalog.packs
        uses, sessions = packs.uses()
        ended = over(sessions, now=time.time())
        return eviction_plan(uses, ended, used=found.used, high=found.high, low=found.low, limit=found.limit)

    def _seal_more(self) -> None:
        """Have open packs sealed, and room given back that was granted and not used: nothing else is left."""
        if next(self._catalog.packs.rows("sealed"), None) is not None and self._cold is not None:
            return
        for stream in self._feeder.stream_names():
            if is_live(self._root, stream):
                self._catalog.packs.request_seal(stream, ANY_PACK)

    # -- what it is about ----------------------------------------------------------------------------------------------

    def _pressure(self) -> Pressure:
        disk = Disk.of(self._root)
        return pressure(
            taken=sum(self._catalog.usage().values()),
            limit=self._config.hot_bytes,
            wanted=wanted(self._root),
            disk_total=disk.total,
            disk_free=disk.free,
        )

    def _is_damaged(self, stream: str, pack: int) -> bool:
        found = self._damaged.get((stream, pack))
        return found is not None and time.monotonic() - found[1] < DAMAGED_S

    def _missing_cold(self) -> str | None:
        """Say that packs are in a cold root that is not known here; None where there are none, or it is known."""
        packs = self._catalog.packs
        if self._cold is not None or not any(next(packs.rows(state), None) for state in ("spilled", "evicted")):
            return None
        return (
            f"packs of {self._root} are in a cold root, and its spool.json names none: they are neither evicted nor "
            "deleted until the spool is opened once with ?spill=URL"
        )

    def _has_backlog(self) -> bool:
        return self._cold is not None and next(self._catalog.packs.rows("sealed"), None) is not None

    def _is_needed(self) -> bool:
        """Whether a writer lives, which may seal a pack at any time, or deleted packs wait for their readers."""
        if self._n_waiting:
            return True
        own = self._own()
        return any(is_live(self._root, name) for name in self._feeder.stream_names() if name not in own)

    def _note(self, **counts: float) -> None:
        with self._saying:
            self._status = msgspec.structs.replace(self._status, **counts)

    def _refused(self) -> dict[tuple[str, int], Damaged]:
        """Return the packs that stay where they are, and why."""
        rivals = self._cold.rivals() if self._cold is not None else []
        refused = {(found.stream, found.pack): Damaged(found.stream, found.pack, found.message) for found in rivals}
        return {**refused, **{pack: found for pack, (found, _) in list(self._damaged.items())}}

    def _say(self, *, error: str | None) -> None:
        damaged = tuple(self._refused().values())
        now = time.time()
        with self._saying:
            changed = (error, damaged) != (self._status.error, self._status.damaged)
            if changed or now - self._status.at >= 1.0:
                self._status = msgspec.structs.replace(self._status, at=now, error=error, damaged=damaged)
                with suppress(SpoolError):
                    write_atomic(status_path(self._root), msgspec.json.encode(self._status), sync=False)
