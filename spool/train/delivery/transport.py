"""What carries messages and micro-batches between the process that reads and the ranks: what every way offers.

Over a Unix socket, with memfds: `link`, `memory`, `join`. Over Ray: `spool.integrations.ray`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from spool.train.delivery.memory import Room
from spool.train.delivery.messages import Message
from spool.train.delivery.work import Settings


class Link(Protocol):
    """One end of a connection between a rank and the process that reads."""

    def send(self, message: Message, memory: Any = None) -> None:
        """Send a message, in order, and memory with it; never waits, is safe from any thread and from finalizers."""

    def receive(self) -> tuple[Message, Any]:
        """Return the next message, and the memory that came with it, or None.

        Raises:
            EOFError: the other end is gone; also if asked again.
        """

    def close(self) -> None:
        """Send what is waiting, but not for long, and go; `receive` raises EOFError at both ends."""


class RankLink(Link, Protocol):
    """A rank's end."""

    def map(self, memory: Any, n_bytes: int) -> Any:
        """Return what came with a message as a writable buffer, which takes weak references; ``memory`` is used up.

        Raises:
            CapacityError: this process cannot take it.
            EOFError: it is gone with the other end.
        """

    def drop(self, memory: Any) -> None:
        """Let go of what came with a message, or None, and is not mapped."""

    def death(self, pid: int | None) -> str:
        """Return in words which process read, and how it died, once `receive` raised EOFError.

        Args:
            pid: what it said of itself.
        """


class Listener(Protocol):
    """Where ranks come in."""

    def accept(self, timeout_s: float) -> Link | None:
        """Return a link to a rank that came; None where none does in this time."""

    def close(self) -> None:
        """Let nobody else in."""


class Memory(Protocol):
    """Where micro-batches lie on their way."""

    def room(self, need_bytes: int) -> Room:
        """Return what is free; where that is less than is needed, once it is sure."""

    def made(self, n_bytes: int, fill: Callable[[Any], None]) -> AbstractContextManager[Any]:
        """Return what `Link.send` takes, for as long as the context lasts; links keep what they were given.

        Args:
            n_bytes: of the micro-batch.
            fill: writes it into the buffer that it is called with.

        Raises:
            CapacityError: there is not so much.
        """


Join = Callable[[str, Settings], RankLink]
"""How a rank comes to its place's process that reads, by the place's digest; the first one starts it.

Raises RankError where there is none and none can be started.
"""
