"""Waiting for room: whatever commits is tried again until there is some, for ``append_timeout_s``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from spool.errors import CapacityError

T = TypeVar("T")

FIRST_WAIT_S = 0.005
LONGEST_WAIT_S = 0.25


class Host(Protocol):
    """Who has room made."""

    append_timeout_s: float

    def press(self, error: CapacityError, waited_s: float) -> None:
        """Have room made for what was refused with ``error``, and waits since ``waited_s``; it does not raise."""
        ...


def with_room(host: Host, call: Callable[[], T]) -> T:
    """Return ``call()``; where it finds no room, have some made and try again until ``append_timeout_s`` are over.

    Args:
        host: makes room.
        call: leaves all as it was where it raises CapacityError, and holds no lock between two tries.

    Raises:
        CapacityError: there was no room in all that time.
    """
    room = _Patience(host)
    while True:
        try:
            return room.attempt(call)
        except CapacityError as error:
            time.sleep(room.next_wait_s(error))


async def with_room_async(host: Host, on_thread: Callable[[Callable[[], T]], Awaitable[T]], call: Callable[[], T]) -> T:
    """`with_room`, calling ``call`` by ``on_thread`` and sleeping on the event loop."""
    room = _Patience(host)
    while True:
        try:
            return await on_thread(lambda: room.attempt(call))
        except CapacityError as error:
            await asyncio.sleep(room.next_wait_s(error))


class _Patience:
    """Growing waits up to a deadline."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._began = time.monotonic()
        self._wait_s = FIRST_WAIT_S

    def attempt(self, call: Callable[[], T]) -> T:
        """Return ``call()``; where it finds no room, have some made before that is said."""
        try:
            return call()
        except CapacityError as error:
            if not _is_hopeless(error):
                self._host.press(error, time.monotonic() - self._began)
            raise

    def next_wait_s(self, error: CapacityError) -> float:
        """Return how long to wait before the next try; raise ``error`` where waiting is over, or of no use."""
        wait_s = self._wait_s
        if _is_hopeless(error) or time.monotonic() + wait_s - self._began > self._host.append_timeout_s:
            raise error
        self._wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return wait_s


def _is_hopeless(error: CapacityError) -> bool:
    limit, need = error.details.get("limit"), error.details.get("need")
    return isinstance(limit, int) and isinstance(need, int) and need > limit
