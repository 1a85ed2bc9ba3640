"""A stream: the append-only log of one writer process.

Appends fill rows one after the other (the fill lock) straight into the rings of the open pack, and publish them
together with the frame of their event. Then one thread of those that wait writes for all (see `spool.write.commit`).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from spool import locks
from spool.errors import ConfigError, InputError, SessionStateError, SpoolError, moved_away
from spool.formats.frames import LOG_HEADER, frame
from spool.model.fields import MAX_SHARD_BYTES, Schema, layout
from spool.points import reach
from spool.write.commit import Committer, OnCommit
from spool.write.folder import Folder, make_folder
from spool.write.group import Ticket
from spool.write.mover import Mover
from spool.write.pack import Pack
from spool.write.ring import Fill, make_rings
from spool.write.sealer import Finished, Sealer
from spool.write.space import Grants, Space
from spool.write.tape import Tape

log = logging.getLogger("spool.write")

MAX_LOG_BYTES = 64 << 20
"""A pack whose log has so many bytes takes no more events."""

LOOK_S = 1.0
"""Between two looks whether the stream is still where it was made."""

Durability = Literal["process", "disk"]


class Rows(Struct, frozen=True):
    """Rows to append to one stored array.

    Attributes:
        n: how many.
        fill: ``fill(dst, first)`` writes the rows from number ``first`` on into ``dst``, ``[k, *shape]`` of the stored
            dtype. It is called for pieces, in order, and keeps no reference to ``dst``.
    """

    n: int
    fill: Fill


class Run(Struct, frozen=True, gc=False):
    """Consecutive rows of one array that one append wrote; never across packs.

    Attributes:
        row: the first row in the array.
        n: number of rows.
        crc: crc32c of their stored bytes.
    """

    row: int
    n: int
    crc: int


class Position(NamedTuple):
    """Where the next frame goes: the pack, the offset in its log, and the number of the frame in it."""

    pack: int
    offset: int
    n_events: int


Runs = Mapping[str, tuple[Run, ...]]

_writers: set[StreamWriter] = set()


class StreamWriter:
    """The one writer of a stream. Safe from many threads; of no use in a forked child.

    Use `create_stream`.

    Attributes:
        name: of the stream.
        schema: its fields.
        layout: rows a chunk and a shard of each array.
    """

    def __init__(
        self,
        folder: Folder,
        lock_fd: int,
        *,
        space: Space,
        durability: Durability,
        pack_age_s: float | None,
        direct: bool,
        on_commit: OnCommit | None,
    ) -> None:
        self.name = folder.name
        self.schema = folder.schema
        self.layout = folder.layout
        self._folder = folder
        self._lock_fd: int | None = lock_fd
        self._place = locks.file_identity(folder.path)
        self._sync = durability == "disk"
        self._pack_age_s = pack_age_s
        self._direct = direct
        self._row_bytes = {spec.name: spec.row_bytes for spec in folder.schema.arrays}
        self._rings = make_rings(folder.schema.arrays)
        self._overhead = sum(ring.flush_bytes for ring in self._rings.values())  # tails, later padding and index
        self._grants = Grants(space, folder.name)
        self._sealer = Sealer(folder, direct=direct, settle=self._grants.settle, confirm=self._confirm_there)
        self._fill_lock = threading.Lock()
        self._committer = Committer(folder.path, sync=self._sync, on_commit=on_commit)
        self._mover = None if self._sync else Mover()
        self._next_pack = 0
        self._split: list[Pack] = []
        self._over = ""
        self._looked_at = time.monotonic()
        _writers.add(self)

    @property
    def position(self) -> Position:
        """Where the next frame goes, as far as this thread can know."""
        pack = self._committer.pack
        return Position(pack.number, pack.log.end, pack.log.n_events) if pack else Position(self._next_pack, 0, 0)

    def append(
        self, rows: Mapping[str, Rows], event: Callable[[Runs], bytes | None], held: Callable[[], bytes] | None = None
    ) -> Runs:
        """Append rows to arrays, and commit the event that refers to them, whole or not at all.

        Args:
            rows: by array; arrays that are left out get none.
            event: called with the runs, and with others where the first were undone because the thread that wrote them
                was interrupted; returns the encoded event, or None where it is to be committed later (then the rows
                stay until the stream is sealed, whatever comes of it).
            held: returns an encoded event for each pack that is full before ``event`` can be written: it says whose
                the rows are.

        Returns:
            The runs of each array in ``rows``; more than one where the append is larger than a pack.

        Raises:
            InputError: the stream has no such array; whatever ``fill`` and ``event`` raise passes through.
            CapacityError: no room in the hot tier or on its disk.
            StorageError: the disk failed.
            SessionStateError: the stream is closed, or belongs to another process.
        """
        n_bytes = self._payload_bytes(rows)
        while True:
            runs, ticket, cost = self._publish(rows, event, held, n_bytes)
            if ticket is None or self._finish(ticket, cost):
                return runs

    def _publish(
        self,
        rows: Mapping[str, Rows],
        event: Callable[[Runs], bytes | None],
        held: Callable[[], bytes] | None,
        cost: int,
    ) -> tuple[Runs, Ticket | None, int]:
        """Fill rows and hand them over; return their runs, what to wait for, and the room that all takes."""
        with self._fill_lock:
            self._ready()
            self._grants.take(cost)
            try:
                runs = self._fill(rows, held)
                reach("append.filled")
                payload = event(runs)
                data = b"" if payload is None else frame(payload)
                self._grants.take(len(data))
                cost += len(data)
                ticket = self._committer.publish(data)
            except BaseException:
                self._undo(cost)
                raise
            if self._split:
                self._finish_split(ticket)
        return runs, ticket, cost

    def commit(self, payload: bytes) -> None:
        """Commit an encoded event.

        Raises:
            CapacityError, StorageError, SessionStateError: as `append`; the event is not committed.
        """
        self.append({}, lambda _: payload)

    def stored_bytes(self, runs: Runs) -> int:
        """Return the bytes of the rows that an append wrote."""
        return sum(run.n * self._row_bytes[name] for name, found in runs.items() for run in found)

    def roll_if_aged(self) -> None:
        """Seal the open pack in the background if it is older than ``pack_age_s`` and not empty; for a timer.

        Raises:
            SpoolError: as `append`.
        """
        with self._fill_lock:
            if not self._over:
                self._repair()
                self._roll_due()

    def roll(self, *, for_room: bool = False) -> None:
        """Seal the open pack in the background if it is not empty, and give back room that is not needed.

        Args:
            for_room: leave a pack without rows open: the next one would take as much as this one gives back.

        Raises:
            SpoolError: as `append`.
        """
        with self._fill_lock:
            if self._over:
                return
            self._repair()
            pack = self._committer.pack
            if pack is not None and (pack.has_rows if for_room else not pack.is_empty):
                self._roll(background=True)
            else:
                self._grants.give_back()

    def flush(self) -> None:
        """Seal the open pack, and return when all packs so far are sealed.

        Raises:
            SpoolError: one could not be sealed; what is committed stays readable by reference, and a later flush
                tries again.
        """
        with self._fill_lock:
            self._check_open()
            self._repair()
            if self._committer.pack is not None and not self._committer.pack.is_empty:
                self._roll(background=False)
        self._sealer.drain()

    def close(self) -> None:
        """Seal what is open and let go of the stream; nothing can be appended any more. Idempotent.

        Raises:
            SpoolError: a pack could not be sealed; the stream is let go of all the same, and recovery will seal it.
        """
        with self._fill_lock:
            if self._over:
                return
            self._over = "closed"
            try:
                self._repair()
                if self._committer.pack is not None:
                    self._roll(background=False)
                self._sealer.drain()
            finally:
                if self._mover is not None:
                    self._mover.close()
                if self._committer.pack is not None:
                    self._committer.pack.abandon()
                self._committer.pack, self._rings = None, {}
                self._grants.give_back()
                self._unlock()
                _writers.discard(self)

    def forked(self) -> None:
        """Let go of everything in a forked child, without touching the parent's stream."""
        self._over = self._over or "opened in another process, before a fork"
        self._unlock()
        for pack in (*self._split, *filter(None, [self._committer.pack])):
            pack.abandon()
        self._committer.pack, self._split, self._rings = None, [], {}
        self._fill_lock = threading.Lock()

    # -- filling: with the fill lock -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._over:
            raise SessionStateError(
                f"stream {self.name} is {self._over}: open a stream of your own", stream=self.name, state=self._over
            )

    def _check_there(self) -> None:
        """Look, once in a while, whether the stream is still where it was made: open files outlive their names."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._confirm_there()

    def _confirm_there(self) -> None:
        """Do what `_check_there` is about, however short ago that was done."""
        if locks.file_identity(self._folder.path) != self._place:
            raise moved_away(self._folder.root)
        self._looked_at = time.monotonic()

    def _ready(self) -> None:
        """Make sure that there is an open pack to fill."""
        self._check_open()
        self._check_there()
        self._repair()
        self._roll_due()
        if self._committer.pack is None:
            self._open_pack()

    def _payload_bytes(self, rows: Mapping[str, Rows]) -> int:
        try:
            return sum(source.n * self._row_bytes[name] for name, source in rows.items())
        except KeyError as error:
            raise InputError(
                f"stream {self.name} has no array {error}; it has {', '.join(self._row_bytes) or 'none'}",
                stream=self.name,
            ) from error

    def _fill(self, rows: Mapping[str, Rows], held: Callable[[], bytes] | None) -> dict[str, tuple[Run, ...]]:
        pack = self._committer.open_pack
        if any(source.n > pack.tapes[name].room for name, source in rows.items()) and pack.has_rows:
            self._roll(background=True)
            pack = self._open_pack()
        left = {name: source.n for name, source in rows.items() if source.n}
        runs: dict[str, tuple[Run, ...]] = dict.fromkeys(rows, ())
        while True:
            for name, n_left in left.items():
                tape = pack.tapes[name]
                n = min(n_left, tape.room)
                if n:
                    runs[name] += (self._fill_run(tape, rows[name], n_left, n),)
                    left[name] -= n
            if not any(left.values()):
                return runs
            mark = b"" if held is None else frame(held())
            self._grants.take(len(mark))
            self._committer.drain(mark)
            self._split.append(pack)
            self._committer.pack = None
            pack = self._open_pack()

    def _fill_run(self, tape: Tape, source: Rows, n_left: int, n: int) -> Run:
        row, crc, first = tape.next_row, 0, source.n - n_left
        stop = first + n
        while first < stop:
            k = stop - first if tape.fits(stop - first) else tape.piece(stop - first)
            if not tape.fits(k):
                self._committer.drain()
            crc = tape.fill(k, source.fill, first, crc)
            first += k
        return Run(row, n, crc)

    def _undo(self, cost: int) -> None:
        """Drop what an append filled that failed before its frame was handed over, or with it."""
        self._grants.put_back(cost)
        try:
            self._committer.undo()
            spoiled = self._committer.repair()
        finally:
            self._retire_split(whole=False)
        if spoiled is not None:
            self._retire(spoiled, background=True)

    def _repair(self) -> None:
        """Undo a failed write, if there was one."""
        spoiled = self._committer.repair()
        if spoiled is not None:
            self._retire(spoiled, background=True)

    def _finish(self, ticket: Ticket, cost: int) -> bool:
        """Wait for a ticket, without the fill lock; if it failed, help to undo and raise.

        Returns:
            False where it is to be done again, since the thread that wrote was interrupted, which is its own affair.
        """
        error = self._committer.wait(ticket)
        if error is None:
            return True
        self._grants.put_back(cost)
        with self._fill_lock:
            self._repair()
        if isinstance(error, InterruptedError) or not isinstance(error, Exception):
            return False
        raise self._committer.error(error) from error

    def _finish_split(self, ticket: Ticket | None) -> None:
        """Wait for a ticket with the fill lock, since whether the packs before the open one count hangs on it."""
        try:
            if ticket is not None:
                self._committer.wait(ticket)
        finally:
            self._retire_split(whole=ticket is None or ticket.error is None)

    # -- packs: with the fill lock -------------------------------------------------------------------------------------

    def _open_pack(self) -> Pack:
        self._confirm_there()
        cost = self._overhead + len(LOG_HEADER)
        self._grants.take(cost)
        number, self._next_pack = self._next_pack, self._next_pack + 1  # whatever an interruption leaves of a pack
        try:
            pack = Pack(self._folder, number, self._rings, direct=self._direct, sync=self._sync, mover=self._mover)
        except BaseException as error:
            self._grants.put_back(cost)
            if isinstance(error, OSError):
                self._next_pack = number
                raise self._committer.error(error) from error
            raise
        self._committer.pack = pack
        return pack

    def _roll_due(self) -> None:
        """Roll a pack that is old, or has a long log (a stream of facts never fills a shard)."""
        pack, age = self._committer.pack, self._pack_age_s
        if pack is None:
            return
        old = age is not None and time.monotonic() - pack.opened >= age and not pack.is_empty
        if old or pack.log.end >= MAX_LOG_BYTES:
            self._roll(background=True)

    def _roll(self, *, background: bool) -> None:
        """Write out the open pack and hand it to the sealer."""
        self._committer.drain()
        pack, self._committer.pack = self._committer.open_pack, None
        self._retire(pack, background=background)

    def _retire(self, pack: Pack, *, background: bool) -> None:
        pack.close()
        taken = pack.n_bytes + self._overhead
        self._sealer.add(Finished(pack.number, pack.rows, pack.log.end, taken), background=background)

    def _retire_split(self, *, whole: bool) -> None:
        """Hand over packs that one append filled and went beyond; sealing cuts them to their complete appends."""
        packs, self._split = self._split, []
        for pack in packs:
            if whole:
                pack.publish_whole(keep=True)
            self._retire(pack, background=True)

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            locks.release(fd)


def create_stream(
    root: str,
    schema: Schema,
    *,
    space: Space,
    durability: Durability = "process",
    pack_age_s: float | None = None,
    direct: bool = True,
    on_commit: OnCommit | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    spool_id: str | None = None,
) -> StreamWriter:
    """Make a new stream under a hot root, and return its writer.

    Args:
        root: the hot root, an existing folder on a local file system.
        schema: the stream's fields; none for a stream of facts.
        space: where room in the hot tier is asked for.
        durability: ``process``: what is committed survives the process; ``disk``: also the machine.
        pack_age_s: a pack that is older is sealed at the next append; None: only when full.
        direct: write shards past the page cache where the file system allows it.
        on_commit: called by the thread that wrote, with the pack and the end of its log, after each group of events;
            quick, and from any thread.
        max_shard_bytes: how large a shard may grow.
        spool_id: the spool's, kept with the stream.

    Raises:
        ConfigError: Zarr cannot store a field, or an option is wrong.
        SpoolError: the folder cannot be made.
    """
    if durability not in ("process", "disk"):
        raise ConfigError(f"durability={durability!r} is neither 'process' nor 'disk'", got=durability)
    folder, lock_fd = make_folder(root, schema, layout(schema, max_shard_bytes=max_shard_bytes), spool_id)
    return StreamWriter(
        folder,
        lock_fd,
        space=space,
        durability=durability,
        pack_age_s=pack_age_s,
        direct=direct,
        on_commit=on_commit,
    )


def _after_fork() -> None:
    for writer in _writers:
        writer.forked()
    _writers.clear()


def _at_exit() -> None:
    for writer in list(_writers):
        try:
            writer.close()
        except SpoolError as error:
            log.warning("stream %s could not be sealed at exit, recovery will: %s", writer.name, error)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
