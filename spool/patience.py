"""Waiting for room: whatever commits is tried again until there is some, for ``append_timeout_s``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from spool.errors import CapacityError
from spool.observe import Observer, Waited, tell

T = TypeVar("T")

FIRST_WAIT_S = 0.005
LONGEST_WAIT_S = 0.25


def with_room(timeout_s: float, call: Callable[[], T], observer: Observer | None = None) -> T:
    """Return ``call()``; where it finds no room, try again until ``timeout_s`` are over.

    Args:
        timeout_s: how long to wait.
        call: leaves all as it was where it raises CapacityError, and holds no lock between two tries.
        observer: told how long it waited, where it had to.

    Raises:
        CapacityError: there was no room in all that time.
    """
    room = _Patience(timeout_s)
    try:
        while True:
            try:
                return call()
            except CapacityError as error:
                time.sleep(room.next_wait_s(error))
    finally:
        room.say(observer)


async def with_room_async(timeout_s: float, call: Callable[[], Awaitable[T]], observer: Observer | None = None) -> T:
    """`with_room`, sleeping on the event loop."""
    room = _Patience(timeout_s)
    try:
        while True:
            try:
                return await call()
            except CapacityError as error:
                await asyncio.sleep(room.next_wait_s(error))
    finally:
        room.say(observer)


class _Patience:
    """Growing waits up to a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s
        self._wait_s = FIRST_WAIT_S
        self._since: float | None = None

    def next_wait_s(self, error: CapacityError) -> float:
        """Return how long to wait before the next try; raise ``error`` where waiting is over, or of no use."""
        wait_s, limit, need = self._wait_s, error.details.get("limit"), error.details.get("need")
        hopeless = isinstance(limit, int) and isinstance(need, int) and need > limit
        if hopeless or time.monotonic() + wait_s > self._until:
            raise error
        self._since = self._since or time.monotonic()
        self._wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return wait_s

    def say(self, observer: Observer | None) -> None:
        """Tell how long was waited, if at all."""
        if self._since is not None:
            tell(observer, Waited(time.monotonic() - self._since, "room"))
