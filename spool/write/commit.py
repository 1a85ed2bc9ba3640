"""Committing what is filled: payload first, frames last, and all undone that a failure leaves half-done.

What a failed write leaves behind is undone by the first thread that has both the fill lock and the right to write;
until then nothing else is published.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from spool.errors import SpoolError, StorageError
from spool.points import reach
from spool.stores.local import map_os_error
from spool.write.group import Group, Ticket
from spool.write.pack import Mark, Pack

log = logging.getLogger("spool.write")

OnCommit = Callable[[int, int], None]


class _Attempt:
    """One leader's writing: enough to say, wherever it broke off, what of it counts."""

    __slots__ = ("_n_before", "batch", "over", "pack")

    def __init__(self, pack: Pack, batch: list[Ticket]) -> None:
        self.pack = pack
        self.batch = batch
        self.over = False
        self._n_before = pack.log.n_events

    @property
    def n_whole(self) -> int:
        """How many of the tickets with frames are committed."""
        self.pack.log.recount()
        return self.pack.log.n_events - self._n_before

    @property
    def served(self) -> list[Ticket]:
        """The tickets that are written."""
        n_whole = self.n_whole
        frames = [ticket for ticket in self.batch if ticket.frame]
        return [ticket for ticket in self.batch if not ticket.frame] + frames[:n_whole] if n_whole else []


class Committer:
    """Writes the open pack of a stream on behalf of the threads that append to it.

    Args:
        path: the stream's folder, for messages.
        sync: make all durable before it counts as committed.
        on_commit: told the pack and the end of its log after each group of events.

    Attributes:
        pack: the open pack; set with the fill lock held, when nothing is published that is not written.
    """

    def __init__(self, path: str, *, sync: bool, on_commit: OnCommit | None) -> None:
        self.pack: Pack | None = None
        self._path = path
        self._sync = sync
        self._on_commit = on_commit
        self._group: Group[tuple[Pack | None, list[Mark]]] = Group(self._published, self._write, self._broke_off)
        self._attempt: _Attempt | None = None
        self._failure: BaseException | None = None
        self._spoiled = False

    @property
    def open_pack(self) -> Pack:
        """The open pack, where there must be one."""
        assert self.pack is not None, "no pack is open"
        return self.pack

    # -- with the fill lock --------------------------------------------------------------------------------------------

    def publish(self, data: bytes) -> Ticket | None:
        """Hand what is filled to the next leader, with the frame of its event, or to keep where that is empty.

        Returns:
            The ticket to `wait` for; None where there is nothing to wait for.

        Raises:
            SpoolError: a write has failed meanwhile; `undo` what was filled.
        """
        with self._group.mutex:
            if self._failure is not None:
                raise self.error(self._failure)
            self.open_pack.publish_whole(keep=not data)
            if not data:
                return None
            ticket = Ticket(data)
            self._group.enqueue(ticket)
            return ticket

    def drain(self, data: bytes = b"") -> None:
        """Have all that is filled written out, even a part of an append, and a frame that does not make it count.

        Raises:
            SpoolError: it could not be.
        """
        ticket = Ticket(data)
        with self._group.mutex:
            if self._failure is not None:
                raise self.error(self._failure)
            self.open_pack.publish_part()
            self._group.enqueue(ticket)
        error = self.wait(ticket)
        if error is not None:
            raise self.error(error) from error

    def undo(self) -> None:
        """Drop what an append filled that is not published whole.

        Raises:
            SpoolError: it could not be cut off on disk.
        """
        if self.pack is None or self._failure is not None:
            return  # nothing, or left to `repair`
        if not self.pack.has_partial:
            self.pack.forget()
            return
        with self._group.exclusive(), self._mapped():
            self.pack.rewind(to_kept=False)

    def repair(self) -> Pack | None:
        """Undo a failed write: back to what is committed or held.

        Returns:
            A pack that cannot be gone on with, since what was written may not be on disk; it is no longer the open one.

        Raises:
            SpoolError: it could not be undone; nothing can be published until it is.
        """
        if self._failure is None:
            return None
        with self._group.exclusive(), self._mapped():
            pack, spoiled, attempt = self.pack, self._spoiled, self._attempt
            committed = attempt is not None and attempt.pack is pack and attempt.n_whole > 0
            if pack is not None and committed:
                pack.publish_whole(keep=True)
            elif pack is not None:
                pack.rewind(to_kept=True)
            if pack is not None and (committed or spoiled):
                pack.write(pack.marks())
                pack.settle()
            if spoiled:
                self.pack = None
            self._attempt, self._failure, self._spoiled = None, None, False
        return pack if spoiled else None

    # -- without it ----------------------------------------------------------------------------------------------------

    def wait(self, ticket: Ticket) -> BaseException | None:
        """Return when a published ticket is served, or why it failed."""
        self._group.run(ticket)
        return ticket.error

    def error(self, error: BaseException) -> SpoolError:
        """Return an error of one's own for what failed in the thread that wrote."""
        if isinstance(error, SpoolError):
            return type(error)(str(error), **error.details)
        if isinstance(error, OSError):
            return map_os_error(error, what="append to", path=self._path)
        return StorageError(f"the thread that wrote to {self._path} was interrupted ({error!r}); append again")

    # -- the leader of a group -----------------------------------------------------------------------------------------

    def _published(self) -> tuple[Pack | None, list[Mark]]:
        return self.pack, self.pack.marks() if self.pack else []

    def _write(self, batch: list[Ticket], published: tuple[Pack | None, list[Mark]]) -> None:
        pack, marks = published
        assert pack is not None, "a ticket without a pack"
        frames = [ticket.frame for ticket in batch if ticket.frame]
        attempt = self._attempt = _Attempt(pack, batch)
        error: BaseException | None = None
        try:
            self._write_payload(pack, marks)
            if frames:
                reach("append.written")
                error = self._write_frames(pack, frames)
                reach("append.committed")
        except BaseException as raised:  # noqa: BLE001 - raised again below
            error = raised
        if error is not None and attempt.n_whole == 0:
            raise error
        with self._group.mutex:
            for tape, _, whole in marks:
                tape.kept = max(tape.kept, whole)
        pack.settle()
        attempt.over = True
        if frames and self._on_commit is not None:
            self._tell(self._on_commit, pack)
        if error is not None:
            raise error

    def _broke_off(self, batch: list[Ticket], error: BaseException) -> list[Ticket]:
        """Note that a leader did not come to its end; return which of its tickets are written all the same."""
        attempt = self._attempt
        if attempt is None or attempt.batch is not batch:
            return []
        if not attempt.over and self._failure is None:
            with self._group.mutex:
                self._failure = error
                self._group.fail_queued(error)
        return attempt.served

    def _write_payload(self, pack: Pack, marks: list[Mark]) -> None:
        pack.write(marks)
        if self._sync:
            with self._spoils():
                pack.sync()

    def _write_frames(self, pack: Pack, frames: list[bytes]) -> BaseException | None:
        if self._sync:  # nobody shall see an event that may yet fail
            pack.log.prepare(frames)
            with self._spoils():
                pack.log.sync()
        return pack.log.append(frames)

    def _tell(self, on_commit: OnCommit, pack: Pack) -> None:
        try:
            on_commit(pack.number, pack.log.end)
        except Exception:
            log.exception("the commit hook of %s failed; the events are committed", self._path)

    @contextlib.contextmanager
    def _spoils(self) -> Iterator[None]:
        """A failed sync spoils the pack: the kernel may have dropped what it could not write."""
        try:
            yield
        except Exception:
            self._spoiled = True
            raise

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.error(error) from error
