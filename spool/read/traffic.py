"""How many requests this process has under way to cold roots, all of them together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Traffic:
    def __init__(self) -> None:
        self.change = threading.Condition(threading.Lock())
        self.n_requests = 0


_traffic = _Traffic()


@contextmanager
def under_way(limit: int) -> Iterator[None]:
    """Wait until fewer than ``limit`` requests of this process are under way; inside, there is one more."""
    traffic = _traffic
    with traffic.change:
        traffic.change.wait_for(lambda: traffic.n_requests < limit)
        traffic.n_requests += 1
    try:
        yield
    finally:
        with traffic.change:
            traffic.n_requests -= 1
            traffic.change.notify_all()


def _after_fork() -> None:
    global _traffic  # noqa: PLW0603 - the threads that would count down are in the parent
    _traffic = _Traffic()


os.register_at_fork(after_in_child=_after_fork)
