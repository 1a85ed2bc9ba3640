"""Commit logs -> catalog: what is new in the streams of a hot root is decoded and taken in."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from spool.catalog import Catalog, DamagedError, LogItem, LogState, PackState, Place
from spool.errors import IntegrityError, SpoolError
from spool.formats import records
from spool.formats.frames import LOG_HEADER, Scan, check_header, decode_event, find_frame, scan
from spool.logs import events
from spool.logs.packs import Cold, GoneMark, KnownSizes, Listing, list_packs, pack_bytes, read_cold, read_gone
from spool.logs.streams import is_live, log_path, measure, records_path, stream_names
from spool.model.events import Single
from spool.stores.local import map_os_error
from spool.stores.units import ACCOUNT, HotUnits

log = logging.getLogger("spool.logs")

WINDOW_BYTES = 4 << 20
"""How much of a log is read at once; a larger frame is read whole."""

BATCH_EVENTS = 2000
"""Frames of sealed records taken in by one transaction."""

RACY_NS = 50_000_000
"""A folder changed less than this ago may change again without its time showing it."""

COLD_RETRY_S = 5.0
"""Between two attempts to read the events of evicted packs."""

OTHERS_S, OTHERS_STEP_S = 1.0, 0.01
"""How long, and how often, it is looked whether a live writer brought into the index what it recorded."""

_LISTINGS = 3
_BEFORE: dict[PackState, set[PackState | None]] = {
    "sealed": {None, "open"},
    "spilled": {None, "open", "sealed"},
    "evicted": {None, "open", "sealed", "spilled"},
}

Kind = Literal["torn", "damaged", "short", "evicted", "rival"]

Pack = tuple[str, int]


class Problem(Struct, frozen=True):
    """A log, or the records of a sealed pack, that the catalog could not take in whole.

    Attributes:
        stream: the stream's name.
        pack: number of the pack.
        kind: ``torn``: an unfinished frame of a killed writer, never acknowledged; ``damaged``: bytes that are no
            event, before others or in a sealed pack; ``short``: fewer events than were there before; ``evicted``: its
            events are in the cold root, and could not be read there; ``rival``: the cold root has another pack of its
            name, which a copy of this root brought over.
        message: what is wrong and what to do.
        file: the object that it is about, where that is none of the hot root's files.
    """

    stream: str
    pack: int
    kind: Kind
    message: str
    file: str | None = None


class _Known:
    """What this process remembers of a stream between two looks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while the stream is looked at: others are not held up by its ingest
        self.changed_ns: int | None = None
        self.logs: list[int] = []
        self.states: dict[int, LogState] = {}
        self.tiers: dict[int, PackState] = {}
        self.evicted: list[int] = []  # not fed yet
        self.retry_at = 0.0
        self.stuck: dict[int, tuple[int, int]] = {}
        self.others: tuple[object, object] | None = None  # what was there when the index had all of it


def _tiers(found: Listing) -> Iterator[tuple[int, PackState]]:
    """Yield the packs of a stream that are sealed and not deleted, and the tiers their files say they are in."""
    sealed = found.sealed - found.gone
    for pack in sorted(sealed):
        yield pack, "spilled" if pack in found.cold else "sealed"
    for pack in sorted(found.cold - sealed - found.logs - found.gone):
        yield pack, "evicted"


class LogFeeder:
    """Feeds the catalog of a hot root from its streams; safe from many threads, processes, and after a fork.

    Args:
        root: the hot root; empty where there is none, and then nothing is found.
        catalog: what is fed.
        cold: the cold root, for packs that are no longer in the hot one; None where there is none.

    Attributes:
        sizes: returns the sizes of each stored array of a stream of either root.
    """

    def __init__(self, root: str, catalog: Catalog, cold: Cold | None = None) -> None:
        self._root = root
        self._catalog = catalog
        self._cold = cold
        self.sizes = KnownSizes(root, cold)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self._generation: object = None
        self._known: dict[str, _Known] = {}
        self._names: tuple[int, list[str]] | None = None
        self._problems: dict[Pack, Problem] = {}

    def _own(self) -> threading.RLock:
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    # -- feeding -----------------------------------------------------------------------------------------------------

    def catch_up(self, streams: Sequence[str] | None = None) -> list[Problem]:
        """Take in every event that is in the logs by now; two `stat` a stream where nothing is new.

        A frame that is not whole yet is left for the next time. A catalog found damaged is moved aside and fed anew.

        Args:
            streams: look only at these; at all where None.

        Returns:
            What cannot be taken in, as far as it was seen by this object.

        Raises:
            StorageError: a log cannot be read, or another process's transaction lasts too long.
            CapacityError: the disk of the catalog is full.
        """
        try:
            with self._own():
                self._check_same_catalog()
                names = self._stream_names() if streams is None else streams
                streams_known = [(name, self._known.setdefault(name, _Known())) for name in names]
            for name, known in streams_known:
                self._look(name, known)
        except DamagedError as error:
            with self._own():
                self._start_anew(error)
        return self.problems()

    def problems(self) -> list[Problem]:
        """Return what could not be taken in, as far as it was seen by this object."""
        with self._own():
            self._problems = {pack: found for pack, found in self._problems.items() if not self._is_over(found)}
            return list(self._problems.values())

    def _is_over(self, problem: Problem) -> bool:
        """Whether a pack whose events were not to be had was deleted, as the cold root says meanwhile."""
        if problem.kind != "evicted":
            return False
        return self._catalog.packs.states(problem.stream).get(problem.pack) == "gone"

    def rebuild(self) -> list[Problem]:
        """Empty the catalog and feed it from the first event on; return what cannot be taken in.

        It is done in place, in one transaction: other processes see the old index until it ends, and a failure leaves
        it. A new file renamed in would leave the open connections of other processes with the old one.

        Raises:
            StorageError, CapacityError: as `catch_up`; the old index is still there.
        """
        with self._own():
            try:
                self._forget()
                before = self._catalog.offsets()
                with self._catalog.rebuilding():
                    self._look_at_all()
                    self._report_lost(before)
            except DamagedError as error:
                self._start_anew(error)
            except BaseException:
                self._forget()
                raise
            return list(self._problems.values())

    def _report_lost(self, before: Mapping[Pack, LogState]) -> None:
        """Report packs that are there and gave fewer events than the old index knew."""
        after = self._catalog.offsets()
        for (name, pack), state in before.items():
            n_events = after.get((name, pack), LogState()).n_events
            paths = log_path(self._root, name, pack), records_path(self._root, name, pack)
            problem = self._problems.get((name, pack))
            if problem is not None and problem.kind == "damaged":
                continue
            if n_events < state.n_events and any(map(os.path.exists, paths)):
                text = f"{n_events} events are there, {state.n_events} were known: the file was cut; some are lost"
                self._report(name, pack, "short", text)

    def _start_anew(self, damage: DamagedError) -> None:
        self._catalog.reset(damage)
        log.warning("the catalog was damaged and is fed anew; the old file is %s", self._catalog.moved_aside)
        self._forget()
        self._look_at_all()

    def _check_same_catalog(self) -> None:
        if self._catalog.damage is not None:
            raise self._catalog.damage
        generation = self._catalog.generation
        if generation != self._generation:
            self._forget()
            self._generation = generation

    def _look_at_all(self) -> None:
        self._check_same_catalog()
        for name in self._stream_names():
            self._look(name, self._known.setdefault(name, _Known()))

    def _look(self, name: str, known: _Known) -> None:
        with known.lock:
            if self._catalog.is_borrowed and self._others_feed(name, known):
                return
            for _ in range(_LISTINGS):
                if self._look_at(name, known):
                    break
                # a log was sealed between listing and reading: list again
                known.changed_ns = None

    def _others_feed(self, name: str, known: _Known) -> bool:
        """Whether all that is there now is in the index, of which this process only reads the file.

        What a live writer has just recorded it brings there itself, within `OTHERS_S`.
        """
        folder = f"{self._root}/streams/{name}/records"
        try:
            there = os.stat(folder).st_mtime_ns, list_packs(folder)
            sizes = {pack: os.stat(log_path(self._root, name, pack)).st_size for pack in there[1].logs - there[1].gone}
        except OSError:
            return False
        if known.others == (there, sizes):
            return True
        deadline = time.monotonic() + OTHERS_S
        while self._lacks(name, there[1], sizes, known):
            if time.monotonic() > deadline or not is_live(self._root, name):
                return False
            time.sleep(OTHERS_STEP_S)
        known.others = there, sizes
        return True

    def _lacks(self, name: str, there: Listing, sizes: Mapping[int, int], known: _Known) -> bool:
        """Whether the index lacks events of a stream, or what became of its packs."""
        self._refresh(name, known)
        states = {pack: known.states.get(pack, LogState()) for pack in there.logs | there.sealed | there.cold}
        unread = any(size > max(states[pack].offset, len(LOG_HEADER)) and not states[pack].sealed
                     for pack, size in sizes.items())  # fmt: skip
        unknown = any(not states[pack].sealed for pack in (there.sealed | there.cold) - there.logs - there.gone)
        return (
            unread
            or unknown
            or any(known.tiers.get(pack) in _BEFORE[state] for pack, state in _tiers(there))
            or any(known.tiers.get(pack) != "gone" for pack in there.gone)
        )

    def stream_names(self) -> list[str]:
        """Return the names of the root's streams."""
        with self._own():
            return self._stream_names()

    def _stream_names(self) -> list[str]:
        """Return the streams, listed anew where the folder that holds them changed."""
        if not self._root:
            return []
        try:
            changed_ns = os.stat(f"{self._root}/streams").st_mtime_ns
        except FileNotFoundError:
            changed_ns = 0
        if self._names is not None and self._names[0] == changed_ns:
            return self._names[1]
        names = stream_names(self._root)
        self._names = (changed_ns, names) if time.time_ns() - changed_ns > RACY_NS else None
        for gone in self._known.keys() - set(names):
            self._drop(gone)
        return names

    def _drop(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)
            self._problems = {key: problem for key, problem in self._problems.items() if key[0] != name}

    def _look_at(self, name: str, known: _Known) -> bool:
        folder = f"{self._root}/streams/{name}/records"
        try:
            changed_ns = os.stat(folder).st_mtime_ns
            if changed_ns != known.changed_ns:
                self._list(name, folder, known)
                settled = time.time_ns() - changed_ns > RACY_NS
                known.changed_ns = changed_ns if settled else None
        except FileNotFoundError:
            self._drop(name)
            return True
        except SpoolError:  # some are OSErrors too
            raise
        except OSError as error:
            raise map_os_error(error, what="list", path=folder) from error
        if known.evicted and time.monotonic() >= known.retry_at:
            self._feed_evicted(name, known)
        there = [self._feed_log(name, pack, known) for pack in known.logs]
        return all(there)

    def _list(self, name: str, folder: str, known: _Known) -> None:
        found = list_packs(folder)
        self._refresh(name, known)
        for pack in sorted(found.gone):
            if known.tiers.get(pack) != "gone":
                self._forget_pack(name, pack, known)
        logs, sealed = found.logs - found.gone, found.sealed - found.logs - found.gone
        evicted = found.cold - found.sealed - found.logs - found.gone
        known.logs = self._unknown(known, logs)
        for pack in self._unknown(known, sealed):
            self._feed_sealed(name, pack, known)
        for pack, state in _tiers(found):
            self._mark(name, pack, known, state)
        waiting = self._unknown(known, evicted)
        if waiting != known.evicted:
            known.evicted, known.retry_at = waiting, 0.0

    @staticmethod
    def _unknown(known: _Known, packs: set[int]) -> list[int]:
        return sorted(pack for pack in packs if not known.states.get(pack, LogState()).sealed)

    def _refresh(self, name: str, known: _Known) -> None:
        known.states = {pack: state for (_, pack), state in self._catalog.offsets([name]).items()}
        known.tiers = self._catalog.packs.states(name)

    def _mark(self, name: str, pack: int, known: _Known, state: PackState) -> None:
        """Say in which tiers a pack is, where the catalog does not know that yet."""
        if known.tiers.get(pack) not in _BEFORE[state]:
            return
        if state == "sealed":
            try:
                sealed_at = os.stat(records_path(self._root, name, pack)).st_mtime
            except FileNotFoundError:
                return
            self._catalog.packs.mark(
                name, pack, state, hot_bytes=pack_bytes(self._root, name, pack), sealed_at=sealed_at
            )
        else:
            mark = read_cold(self._root, name, pack)
            self._catalog.packs.mark(
                name, pack, state,
                hot_bytes=mark.hot_bytes, stored_bytes=mark.stored_bytes, sealed_at=mark.sealed_at,
            )  # fmt: skip
        known.tiers[pack] = state

    def _forget_pack(self, name: str, pack: int, known: _Known) -> None:
        mark = read_gone(self._root, name, pack)
        self._catalog.forget(
            name, pack, at=mark.at if mark is not None else None, reason=mark.reason if mark is not None else None
        )
        known.states.pop(pack, None)
        known.tiers[pack] = "gone"
        with self._lock:
            self._problems.pop((name, pack), None)

    # -- open packs --------------------------------------------------------------------------------------------------

    def _feed_log(self, name: str, pack: int, known: _Known) -> bool:
        """Take in what is new in a log; return False where it is no longer there."""
        path = log_path(self._root, name, pack)
        try:
            found = os.stat(path)
            mark = found.st_size, found.st_mtime_ns
            if found.st_size <= len(LOG_HEADER) or known.stuck.get(pack) == mark:
                return True
            if found.st_size == known.states.get(pack, LogState()).offset:
                return True
            # another process may have taken it in
            self._refresh(name, known)
            with open(path, "rb", buffering=0) as file:
                self._insist(name, pack, known, lambda: self._read_log(file.fileno(), name, pack, known))
        except FileNotFoundError:
            return False
        except SpoolError:  # some are OSErrors too, and not of this file
            raise
        except OSError as error:
            raise map_os_error(error, what="read", path=path) from error
        if (name, pack) in self._problems:
            known.stuck[pack] = mark
        return True

    def _read_log(self, fd: int, name: str, pack: int, known: _Known) -> bool:
        """Take in the frames that are there by now; return False where another process did first."""
        size = os.fstat(fd).st_size  # a writer may add to it faster than this reads
        state = known.states.get(pack, LogState())
        if state.sealed or state.offset < 0:
            return True
        window, offset = WINDOW_BYTES, state.offset or len(LOG_HEADER)
        if state.offset == 0:
            try:
                check_header(os.pread(fd, len(LOG_HEADER), 0))
            except IntegrityError as error:
                self._report(name, pack, "damaged", str(error))
                return True
        while True:
            data = os.pread(fd, window, offset)
            frames = scan(data, 0)
            items = list(self._items(name, pack, frames, offset, state.n_events))
            if not items:
                if len(data) < window:
                    self._report_rest(fd, name, pack, offset, len(data))
                    return True
                window *= 2
                continue
            end = offset + frames.end
            if not self._catalog.ingest(name, pack, start=state.offset, end=end, items=items, sizes=self.sizes):
                return False
            state = known.states[pack] = LogState(end, state.n_events + len(items))
            if end >= size:
                self._problems.pop((name, pack), None)
                return True
            window, offset = WINDOW_BYTES, end

    def _items(self, name: str, pack: int, frames: Scan, base: int, seq: int) -> Iterator[LogItem]:
        for frame in frames:
            try:
                event = decode_event(frame.payload)
            except IntegrityError as error:
                frames.end = frame.offset
                self._report(name, pack, "damaged", f"at byte {base + frame.offset}: {error}")
                return
            yield LogItem(seq, base + frame.offset, event)
            seq += 1

    def _report_rest(self, fd: int, name: str, pack: int, offset: int, n_left: int) -> None:
        size = os.fstat(fd).st_size
        if size < offset:
            text = f"it ends at byte {size}, events were read up to {offset}: some are lost; rebuild the catalog"
            self._report(name, pack, "short", text)
        elif n_left == 0:
            self._problems.pop((name, pack), None)
        elif (name, pack) not in self._problems and not is_live(self._root, name):
            behind = find_frame(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), offset)
            if behind is None:
                text = f"{n_left} bytes at {offset} are an unfinished event of a killed writer; run recovery to seal it"
                self._report(name, pack, "torn", text)
            else:
                text = f"bytes {offset} to {behind} are damaged, events follow; run recovery to save those"
                self._report(name, pack, "damaged", text)

    def _report(self, name: str, pack: int, kind: Kind, text: str) -> None:
        problem = Problem(name, pack, kind, f"stream {name}, records of pack {pack}: {text}")
        if self._problems.get((name, pack)) != problem:
            log.warning("%s", problem.message)
        with self._lock:
            self._problems[name, pack] = problem

    # -- sealed packs ------------------------------------------------------------------------------------------------

    def _feed_sealed(self, name: str, pack: int, known: _Known) -> None:
        path = records_path(self._root, name, pack)
        self._problems.pop((name, pack), None)
        try:
            payloads = records.decode(events.map_file(path))
        except FileNotFoundError:
            return
        except IntegrityError as error:
            self._report(name, pack, "damaged", str(error))
            return
        except OSError as error:
            raise map_os_error(error, what="read", path=path) from error
        self._feed_rows(name, pack, known, payloads)

    def _feed_evicted(self, name: str, known: _Known) -> None:
        """Take in the events of packs that are in the cold root only."""
        known.retry_at = time.monotonic() + COLD_RETRY_S
        known.tiers = self._catalog.packs.states(name)
        known.evicted = [pack for pack in known.evicted if known.tiers.get(pack) != "gone"]
        for pack in list(known.evicted):
            if self._cold is None:
                self._report(name, pack, "evicted", "its events are in the cold root; open the spool with spill=")
                continue
            try:
                payloads = self._cold.events(name, pack)
            except SpoolError as error:
                self._report(name, pack, "evicted", f"its events are in the cold root: {error}")
                continue
            self._problems.pop((name, pack), None)
            self._feed_rows(name, pack, known, payloads)
            known.evicted.remove(pack)

    def _feed_rows(self, name: str, pack: int, known: _Known, payloads: Sequence[bytes]) -> None:
        self._insist(name, pack, known, lambda: self._ingest_rows(name, pack, known, payloads))

    def _insist(self, name: str, pack: int, known: _Known, feed: Callable[[], bool]) -> None:
        """Feed a pack, again where another process did so first; an index that goes on refusing it is another one's."""
        while not feed():
            before = known.states.get(pack)
            self._refresh(name, known)
            if known.states.get(pack) == before and not feed():
                text = "the index refuses it, though it says that it does not know it: rebuild the catalog"
                self._report(name, pack, "short", text)
                return

    def _ingest_rows(self, name: str, pack: int, known: _Known, payloads: Sequence[bytes]) -> bool:
        state = known.states.get(pack, LogState())
        if state.sealed:
            return True
        if len(payloads) < state.n_events:
            text = f"sealed with {len(payloads)} events, {state.n_events} were read before; rebuild the catalog"
            self._report(name, pack, "short", text)
        first = state.n_events
        while True:
            chosen = payloads[first : first + BATCH_EVENTS]
            try:
                items = [LogItem(seq, -1, decode_event(payload)) for seq, payload in enumerate(chosen, first)]
            except IntegrityError as error:
                self._report(name, pack, "damaged", str(error))
                return True
            first += len(items)
            last = first >= len(payloads)
            taken = self._catalog.ingest(
                name, pack, start=state.offset, end=-1, items=items, sealed=last, sizes=self.sizes
            )
            if not taken:
                return False
            state = known.states[pack] = LogState(-1, first, last)
            if last:
                return True

    # -- reading back and measuring ------------------------------------------------------------------------------------

    def read_event(self, place: Place) -> Single:
        """Return the whole event at ``place``, with its messages.

        Raises:
            ReleasedError: its pack was released or discarded, and deleted.
            IntegrityError: the record is damaged or lost.
            StorageError: it cannot be read.
        """
        return self.read_events([place])[0]

    def read_events(self, places: Sequence[Place]) -> list[Single]:
        """Return the whole events at ``places``, in their order; each file is opened once.

        Raises:
            ReleasedError, IntegrityError, StorageError: as `read_event`.
        """
        return events.read_events(self._root, places, self._records, self._gone)

    def _records(self, stream: str, pack: int) -> bytes | None:
        return self._cold.records(stream, pack) if self._cold is not None else None

    def _gone(self, stream: str, pack: int) -> GoneMark | None:
        mark = read_gone(self._root, stream, pack)
        if mark is None:
            row = self._catalog.packs.get(stream, pack)
            mark = GoneMark(row.gone_at, row.reason) if row is not None and row.state == "gone" else None
        return mark

    def account(self) -> None:
        """Correct the catalog's account of room by the files' sizes: grants of killed writers end, lost ones return.

        Raises:
            StorageError: the catalog cannot be written.
        """
        before = self._catalog.usage()
        names = stream_names(self._root)
        live = {name for name in names if is_live(self._root, name)}
        exact = {name: measure(self._root, name) for name in names if name not in live}
        gone = dict.fromkeys(before.keys() - {*names, ACCOUNT}, 0)
        assumed = {name: measure(self._root, name) for name in live}
        units = HotUnits(self._root)
        with units.still() as known:
            (exact if known else assumed)[ACCOUNT] = units.measure()
            self._catalog.account({**exact, **gone}, assumed)
