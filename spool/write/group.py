"""Group commit: of all threads that wait for their data to be on disk, one writes for all.

The first to come leads. What is queued while it writes waits for it, and the first of those leads next. A leader hands
over before it wakes the threads it wrote for, so the disk does not wait for them. It hands over only to a thread that
does wait: one that queued a ticket and was interrupted before it came to that is written for all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Ticket:
    """One thread's wish that all that is published so far be written, and ``frame`` be committed.

    Attributes:
        frame: the event's frame; empty for a thread that only needs room.
        done: the wish was served, or has failed.
        error: why it failed.
        waiting: a thread is in, or about to be in, `wait`.
    """

    __slots__ = ("_wake", "done", "error", "exclusive", "frame", "waiting")

    def __init__(self, frame: bytes = b"", *, exclusive: bool = False) -> None:
        self.frame = frame
        self.exclusive = exclusive
        self.done = False
        self.waiting = False
        self.error: BaseException | None = None
        self._wake = threading.Lock()
        self._wake.acquire()

    def wake(self) -> None:
        """Let the waiting thread go on: served, failed, or as the next leader."""
        self._wake.release()

    def wait(self) -> BaseException | None:
        """Wait for `wake`; return the exception that a signal handler raised meanwhile.

        A thread may not leave before: the group counts on it.
        """
        interruption: BaseException | None = None
        while True:
            try:
                self._wake.acquire()
            except BaseException as raised:  # noqa: BLE001 - raised again by the caller
                interruption = raised
            else:
                return interruption


class Group(Generic[T]):
    """The queue of tickets and the right to write.

    Args:
        snapshot: called by a leader under `mutex`: what is published now.
        write: called by the leader, without `mutex`, with the tickets with frames and the snapshot; sets the error
            of each that failed. What it raises fails all of them.

    Attributes:
        mutex: protects the queue and whatever is published together with a ticket; held briefly.
    """

    def __init__(self, snapshot: Callable[[], T], write: Callable[[list[Ticket], T], None]) -> None:
        self.mutex = threading.Lock()
        self._snapshot = snapshot
        self._write = write
        self._queue: list[Ticket] = []
        self._busy = False

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a ticket, with `mutex` held; then `run` it."""
        self._queue.append(ticket)

    def fail_queued(self, error: BaseException) -> list[Ticket]:
        """Fail all that is queued, with `mutex` held; return the tickets, for the caller to `wake` without it."""
        failed = [ticket for ticket in self._queue if not ticket.exclusive]
        self._queue = [ticket for ticket in self._queue if ticket.exclusive]
        for ticket in failed:
            ticket.error, ticket.done = error, True
        return failed

    def run(self, ticket: Ticket) -> None:
        """Return when a queued ticket is done; its ``error`` says how."""
        with self.mutex:
            if ticket.done:
                return
            leads = self._claim(ticket)
        interruption = None if leads else ticket.wait()
        if not ticket.done:
            self._lead(ticket)
        if interruption is not None:
            raise interruption

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the right to write without writing; what is queued waits."""
        ticket = Ticket(exclusive=True)
        with self.mutex:
            self._queue.append(ticket)
            leads = self._claim(ticket)
        interruption = None if leads else ticket.wait()
        try:
            with self.mutex:
                self._queue.remove(ticket)
            yield
        finally:
            self._hand_over()
        if interruption is not None:
            raise interruption

    def _claim(self, ticket: Ticket) -> bool:
        if self._busy:
            ticket.waiting = True
            return False
        self._busy = True
        return True

    def _lead(self, own: Ticket) -> None:
        batch: list[Ticket] = []
        try:
            with self.mutex:
                batch = [ticket for ticket in self._queue if not ticket.exclusive]
                self._queue = [ticket for ticket in self._queue if ticket.exclusive]
                snapshot = self._snapshot()
            self._write(batch, snapshot)
        except BaseException as error:
            for ticket in batch:
                ticket.error = ticket.error or error
            if not isinstance(error, Exception):
                raise
        finally:
            for ticket in batch:
                ticket.done = True
            self._hand_over()
            for ticket in batch:
                if ticket is not own:
                    ticket.wake()

    def _hand_over(self) -> None:
        with self.mutex:
            following = next((ticket for ticket in self._queue if ticket.waiting), None)
            self._busy = following is not None
        if following is not None:
            following.wake()
