"""Group commit: of all threads that wait for their data to be on disk, one writes for all.

The first to come takes its turn and writes what is queued by then. What is queued meanwhile is the next group; a leader
wakes one of those before the threads it wrote for, so the disk does not wait for them.

Whose turn it is, is a lock of the interpreter's own, taken by ``with`` and nothing else: it is let go of however a
thread leaves, even where a signal handler raises between any two instructions. Waking is only a hint. Where it is lost,
because the thread that should wake or be woken was interrupted, the others look for themselves after `PATIENCE_S`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE_S = 0.5
"""How long a thread relies on being woken."""


class Ticket:
    """One thread's wish that all that is published so far be written, and ``frame`` be committed.

    Attributes:
        frame: the event's frame; empty for a thread that only needs room.
        done: the wish was served, or has failed.
        error: why it failed.
    """

    __slots__ = ("_wake", "done", "error", "frame")

    def __init__(self, frame: bytes = b"") -> None:
        self.frame = frame
        self.done = False
        self.error: BaseException | None = None
        self._wake = threading.Lock()
        self._wake.acquire()

    def wake(self) -> None:
        """Let the waiting thread look: its ticket is served, or it is its turn."""
        with suppress(RuntimeError):  # woken already
            self._wake.release()

    def wait(self) -> None:
        """Return when woken, or after `PATIENCE_S`."""
        self._wake.acquire(timeout=PATIENCE_S)


class Group(Generic[T]):
    """The queue of tickets and the right to write.

    Args:
        snapshot: called by a leader under `mutex`: what is published now.
        write: called by the leader, without `mutex`, with the tickets and the snapshot. What it raises fails them.
        broke_off: called, still in the leader's turn, where ``write`` was left by an exception: returns which of the
            tickets are written all the same.

    Attributes:
        mutex: protects the queue and whatever is published together with a ticket; held briefly.
    """

    def __init__(
        self,
        snapshot: Callable[[], T],
        write: Callable[[list[Ticket], T], None],
        broke_off: Callable[[list[Ticket], BaseException], list[Ticket]],
    ) -> None:
        self.mutex = threading.Lock()
        self._turn = threading.Lock()
        self._snapshot = snapshot
        self._write = write
        self._broke_off = broke_off
        self._queue: list[Ticket] = []
        self._batch: list[Ticket] = []

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a ticket, with `mutex` held; then `run` it."""
        self._queue.append(ticket)

    def fail_queued(self, error: BaseException) -> None:
        """Fail all that is queued, with `mutex` held."""
        for ticket in self._queue:
            ticket.error, ticket.done = error, True
            ticket.wake()
        self._queue = []

    def run(self, ticket: Ticket) -> None:
        """Return when a queued ticket is done; its ``error`` says how.

        What a signal handler raises meanwhile is raised when the ticket is done.
        """
        interruption: BaseException | None = None
        while not ticket.done:
            try:
                if self._turn.locked():
                    ticket.wait()
                if not ticket.done:
                    self._take_turn(ticket)
            except BaseException as raised:  # noqa: BLE001 - raised again below
                interruption = raised
        if interruption is not None:
            raise interruption

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the right to write without writing; what is queued waits."""
        try:
            with self._turn:
                yield
        finally:
            self._wake_next()

    def _take_turn(self, ticket: Ticket) -> None:
        served: list[Ticket] = []
        try:
            with self._turn:
                if not ticket.done:
                    self._lead(served)
        finally:
            self._wake_next()
            for other in served:
                if other is not ticket:
                    other.wake()

    def _wake_next(self) -> None:
        queue = self._queue  # whoever comes later finds that nobody has the turn
        if queue:
            queue[0].wake()

    def _lead(self, served: list[Ticket]) -> None:
        if self._batch:
            self._finish(InterruptedError("the thread that wrote was interrupted"))
        with self.mutex:
            batch, self._batch, self._queue = self._queue, self._queue, []
            snapshot = self._snapshot()
        served.extend(batch)
        error: BaseException | None = None
        try:
            self._write(batch, snapshot)
        except BaseException as raised:
            error = raised
            if not isinstance(raised, Exception):
                raise
        finally:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        served = set() if error is None else set(map(id, self._broke_off(self._batch, error)))
        for ticket in self._batch:
            if error is not None and id(ticket) not in served:
                ticket.error = ticket.error or error
            ticket.done = True
        self._batch = []
