"""A stream: the append-only log of one writer process.

Appends fill rows one after the other (the fill lock) straight into the rings of the open pack, and publish them
together with the frame of their event. Then one thread of those that wait writes for all: payload first, frames last
(see `spool.write.group`). What a failed write leaves behind is undone by the first thread that gets both the fill lock
and the right to write; until then nothing else is published.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from spool.errors import ConfigError, InputError, SessionStateError, SpoolError, StorageError
from spool.formats.frames import LOG_HEADER, frame
from spool.model.fields import MAX_SHARD_BYTES, Schema, layout
from spool.stores.local import map_os_error
from spool.write.folder import Folder, make_folder
from spool.write.group import Group, Ticket
from spool.write.pack import Mark, Pack
from spool.write.ring import Fill, make_rings
from spool.write.seal import Finished, Sealer
from spool.write.space import Grants, Space
from spool.write.tape import Tape

log = logging.getLogger("spool.write")

Durability = Literal["process", "disk"]


class Rows(NamedTuple):
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
OnCommit = Callable[[int, int], None]

_writers: weakref.WeakSet[StreamWriter] = weakref.WeakSet()


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
        self._sync = durability == "disk"
        self._pack_age_s = pack_age_s
        self._direct = direct
        self._on_commit = on_commit
        self._row_bytes = {spec.name: spec.row_bytes for spec in folder.schema.arrays}
        self._rings = make_rings(folder.schema.arrays)
        self._overhead = sum(ring.flush_bytes for ring in self._rings.values())  # tails, later padding and index
        self._grants = Grants(space, folder.name)
        self._sealer = Sealer(folder, direct=direct, settle=self._grants.settle)
        self._fill_lock = threading.Lock()
        self._group: Group[tuple[Pack | None, list[Mark]]] = Group(self._published, self._write)
        self._pack: Pack | None = None
        self._next_pack = 0
        self._split: list[Pack] = []
        self._failure: BaseException | None = None
        self._spoiled = False
        self._over = ""
        _writers.add(self)

    @property
    def position(self) -> Position:
        """Where the next frame goes, as far as this thread can know."""
        pack = self._pack
        return Position(pack.number, pack.log.end, pack.log.n_events) if pack else Position(self._next_pack, 0, 0)

    def append(self, rows: Mapping[str, Rows], event: Callable[[Runs], bytes | None]) -> Runs:
        """Append rows to arrays, and commit the event that refers to them, whole or not at all.

        Args:
            rows: by array; arrays that are left out get none.
            event: called once with the runs; returns the encoded event, or None where it is to be committed later
                (then the rows stay until the stream is sealed, whatever comes of it).

        Returns:
            The runs of each array in ``rows``; more than one where the append is larger than a pack.

        Raises:
            InputError: the stream has no such array; whatever ``fill`` and ``event`` raise passes through.
            CapacityError: no room in the hot tier or on its disk.
            StorageError: the disk failed.
            SessionStateError: the stream is closed, or belongs to another process.
        """
        cost, error = self._payload_bytes(rows), None
        with self._fill_lock:
            self._ready()
            self._grants.take(cost)
            try:
                runs = self._fill(rows)
                payload = event(runs)
                data = b"" if payload is None else frame(payload)
                self._grants.take(len(data))
                cost += len(data)
                ticket, leads = self._publish(data)
                if self._split and ticket:
                    error = self._await(ticket, leads=leads)
                self._retire_split(whole=error is None)
            except BaseException:
                self._undo(cost)
                raise
        if ticket is not None:
            self._finish(ticket, cost, leads=leads)
        return runs

    def commit(self, payload: bytes) -> None:
        """Commit an encoded event.

        Raises:
            CapacityError, StorageError, SessionStateError: as `append`; the event is not committed.
        """
        data = frame(payload)
        with self._fill_lock:
            self._ready()
            self._grants.take(len(data))
            try:
                ticket, leads = self._publish(data)
            except BaseException:
                self._grants.put_back(len(data))
                raise
        assert ticket is not None
        self._finish(ticket, len(data), leads=leads)

    def roll_if_aged(self) -> None:
        """Seal the open pack in the background if it is older than ``pack_age_s`` and not empty; for a timer.

        Raises:
            SpoolError: as `append`.
        """
        with self._fill_lock:
            if not self._over:
                self._repair()
                self._roll_aged()

    def flush(self) -> None:
        """Seal the open pack, and return when all packs so far are sealed.

        Raises:
            SpoolError: one could not be sealed; what is committed stays readable by reference, and a later flush
                tries again.
        """
        with self._fill_lock:
            self._check_open()
            self._repair()
            if self._pack is not None and not self._pack.is_empty:
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
                if self._pack is not None:
                    self._roll(background=False)
                self._sealer.drain()
            finally:
                self._grants.close()
                self._rings = {}
                self._unlock()

    def forked(self) -> None:
        """Let go of everything in a forked child, without touching the parent's stream."""
        self._over = self._over or "opened in another process, before a fork"
        self._unlock()
        for pack in (*self._split, *filter(None, [self._pack])):
            pack.close()
        self._pack, self._split, self._rings = None, [], {}
        self._fill_lock = threading.Lock()
        self._group = Group(self._published, self._write)

    # -- filling: with the fill lock -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._over:
            raise SessionStateError(
                f"stream {self.name} is {self._over}: open a stream of your own", stream=self.name, state=self._over
            )

    def _ready(self) -> None:
        """Make sure that there is an open pack to fill."""
        self._check_open()
        self._repair()
        self._roll_aged()
        if self._pack is None:
            self._open_pack()

    def _payload_bytes(self, rows: Mapping[str, Rows]) -> int:
        try:
            return sum(source.n * self._row_bytes[name] for name, source in rows.items())
        except KeyError as error:
            raise InputError(
                f"stream {self.name} has no array {error}; it has {', '.join(self._row_bytes) or 'none'}",
                stream=self.name,
            ) from error

    def _fill(self, rows: Mapping[str, Rows]) -> dict[str, tuple[Run, ...]]:
        pack = self._open()
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
                    runs[name] += (self._fill_run(pack, tape, rows[name], n_left, n),)
                    left[name] -= n
            if not any(left.values()):
                return runs
            self._drain()
            self._split.append(pack)
            self._pack = None
            pack = self._open_pack()

    def _fill_run(self, pack: Pack, tape: Tape, source: Rows, n_left: int, n: int) -> Run:
        row, crc, first = tape.next_row, 0, source.n - n_left
        stop = first + n
        while first < stop:
            k = stop - first if tape.fits(stop - first) else tape.piece(stop - first)
            if not tape.fits(k):
                pack.publish_part()
                self._drain()
            crc = tape.fill(k, source.fill, first, crc)
            first += k
        return Run(row, n, crc)

    def _publish(self, data: bytes) -> tuple[Ticket | None, bool]:
        """Hand what is filled to the next leader, with the frame of its event, or to keep where that is empty."""
        with self._group.mutex:
            if self._failure is not None:
                raise self._error(self._failure)
            self._open().publish_whole(keep=not data)
            if not data:
                return None, False
            ticket = Ticket(data)
            return ticket, self._group.enqueue(ticket)

    def _drain(self) -> None:
        """Have all that is filled written out."""
        ticket = Ticket()
        with self._group.mutex:
            if self._failure is None:
                self._open().publish_part()
                leads = self._group.enqueue(ticket)
            else:
                ticket.done, ticket.error, leads = True, self._failure, True
        error = self._await(ticket, leads=leads)
        if error is not None:
            self._repair()
            raise self._error(error) from error

    def _undo(self, cost: int) -> None:
        """Drop what an append filled that failed before its frame was handed over, or with it."""
        self._grants.put_back(cost)
        try:
            if self._failure is not None:
                self._repair()
            elif self._pack is not None and self._pack.has_partial:
                with self._group.exclusive():
                    self._pack.rewind(to_kept=False)
            elif self._pack is not None:
                self._pack.forget()
        except OSError as error:
            raise self._error(error) from error
        finally:
            self._retire_split(whole=False)

    # -- packs: with the fill lock -------------------------------------------------------------------------------------

    def _open(self) -> Pack:
        assert self._pack is not None, "no pack is open"
        return self._pack

    def _open_pack(self) -> Pack:
        cost = self._overhead + len(LOG_HEADER)
        self._grants.take(cost)
        try:
            pack = Pack(self._folder, self._next_pack, self._rings, direct=self._direct, sync=self._sync)
        except BaseException as error:
            self._grants.put_back(cost)
            if isinstance(error, OSError):
                raise self._error(error) from error
            raise
        self._pack = pack
        self._next_pack += 1
        return pack

    def _roll_aged(self) -> None:
        pack, age = self._pack, self._pack_age_s
        if pack and age is not None and time.monotonic() - pack.opened >= age and not pack.is_empty:
            self._roll(background=True)

    def _roll(self, *, background: bool) -> None:
        """Write out the open pack and hand it to the sealer."""
        self._drain()
        pack, self._pack = self._open(), None
        self._retire(pack, background=background)

    def _retire(self, pack: Pack, *, background: bool) -> None:
        pack.close()
        overhead = sum(ring.flush_bytes for ring in self._rings.values())
        self._sealer.add(Finished(pack.number, pack.rows, pack.log.end, pack.n_bytes + overhead), background=background)

    def _retire_split(self, *, whole: bool) -> None:
        """Hand over packs that one append filled and went beyond; sealing cuts them to their complete appends."""
        packs, self._split = self._split, []
        for pack in packs:
            if whole:
                pack.publish_whole(keep=True)
            self._retire(pack, background=True)

    # -- writing: the leader of a group --------------------------------------------------------------------------------

    def _published(self) -> tuple[Pack | None, list[Mark]]:
        return self._pack, self._pack.marks() if self._pack else []

    def _write(self, batch: list[Ticket], published: tuple[Pack | None, list[Mark]]) -> None:
        pack, marks = published
        assert pack is not None, "a ticket without a pack"
        try:
            self._write_payload(pack, marks)
            tickets = [ticket for ticket in batch if ticket.frame]
            if tickets:
                self._write_frames(pack, tickets)
        except BaseException as error:
            self._fail(error)
            raise
        with self._group.mutex:
            for tape, _, whole in marks:
                tape.kept = max(tape.kept, whole)
        pack.settle()
        if self._on_commit is not None and tickets:
            try:
                self._on_commit(pack.number, pack.log.end)
            except Exception:
                log.exception("the commit hook of stream %s failed; the events are committed", self.name)

    def _write_payload(self, pack: Pack, marks: list[Mark]) -> None:
        pack.write(marks)
        if self._sync:
            with self._spoils():
                pack.sync()

    def _write_frames(self, pack: Pack, tickets: list[Ticket]) -> None:
        end, n_events = pack.log.end, pack.log.n_events
        n_whole, error = pack.log.append([ticket.frame for ticket in tickets])
        if n_whole and self._sync:
            try:
                with self._spoils():
                    pack.log.sync()
            except OSError:
                pack.log.cut(end, n_events)
                raise
        if error is not None and n_whole == 0:
            raise error
        for ticket in tickets[n_whole:]:
            ticket.error = error

    @contextlib.contextmanager
    def _spoils(self) -> Iterator[None]:
        """A failed sync spoils the pack: the kernel may have dropped what it could not write."""
        try:
            yield
        except Exception:
            self._spoiled = True
            raise

    def _fail(self, error: BaseException) -> None:
        with self._group.mutex:
            self._failure = error
            failed = self._group.fail_queued(error)
        for ticket in failed:
            ticket.wake()

    # -- waiting and failing -------------------------------------------------------------------------------------------

    def _await(self, ticket: Ticket, *, leads: bool) -> BaseException | None:
        if not ticket.done:
            self._group.run(ticket, leads=leads)
        return ticket.error

    def _finish(self, ticket: Ticket, cost: int, *, leads: bool) -> None:
        """Wait for a ticket, without the fill lock; if it failed, help to undo and raise."""
        error = self._await(ticket, leads=leads)
        if error is not None:
            self._grants.put_back(cost)
            with self._fill_lock:
                self._repair()
            raise self._error(error) from error

    def _repair(self) -> None:
        """Undo a failed write: back to what is committed or held. With the fill lock."""
        if self._failure is None:
            return
        with self._group.exclusive():
            pack = self._pack
            try:
                if pack is not None:
                    pack.rewind(to_kept=True)
                    if self._spoiled:
                        pack.write(pack.marks())
                        pack.settle()
            except OSError as error:
                raise self._error(error) from error
            if pack is not None and self._spoiled:
                self._pack = None
                self._retire(pack, background=True)
            self._failure, self._spoiled = None, False

    def _error(self, error: BaseException) -> SpoolError:
        """Return an error of one's own for what failed in the thread that wrote."""
        if isinstance(error, SpoolError):
            return type(error)(str(error), **error.details)
        if isinstance(error, OSError):
            return map_os_error(error, what="append to", path=self._folder.path)
        return StorageError(
            f"the thread that wrote to stream {self.name} for this one was interrupted ({error!r}); append again",
            stream=self.name,
        )

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)


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

    Raises:
        ConfigError: Zarr cannot store a field, or an option is wrong.
        SpoolError: the folder cannot be made.
    """
    if durability not in ("process", "disk"):
        raise ConfigError(f"durability={durability!r} is neither 'process' nor 'disk'", got=durability)
    folder, lock_fd = make_folder(root, schema, layout(schema, max_shard_bytes=max_shard_bytes))
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
    for writer in list(_writers):
        writer.forked()


def _at_exit() -> None:
    for writer in list(_writers):
        try:
            writer.close()
        except SpoolError as error:
            log.warning("stream %s could not be sealed at exit, recovery will: %s", writer.name, error)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
