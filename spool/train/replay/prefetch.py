"""Reading ahead of whoever consumes, by a bounded number of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")


def read_ahead(
    jobs: Iterable[J], read: Callable[[J], R], *, n_bytes: Callable[[J], float], limit_bytes: int
) -> Generator[R, None, None]:
    """Yield ``read(job)`` for each job, in order; while one is consumed a thread reads the next ones.

    Args:
        jobs: what to read.
        read: reads one; on the thread, one at a time.
        n_bytes: what a job will take, asked when it is its turn.
        limit_bytes: most that jobs take which are read, or being read, and not yet asked for. One that takes more is
            read when it is asked for. 0: no thread.

    Raises:
        Exception: what ``read`` raised, in the place of the job; nothing is yielded afterwards.
    """
    if not limit_bytes:
        for job in jobs:
            yield read(job)
        return
    ahead = _Ahead(jobs, read, n_bytes, limit_bytes)
    try:
        while ahead.begin_one():
            yield ahead.take()
    finally:
        ahead.end()


class _Ahead(Generic[J, R]):
    """Jobs that wait, and those that were begun."""

    def __init__(
        self, jobs: Iterable[J], read: Callable[[J], R], n_bytes: Callable[[J], float], limit_bytes: int
    ) -> None:
        self._jobs = iter(jobs)
        self._next: list[J] = []
        self._read, self._n_bytes, self._limit_bytes = read, n_bytes, limit_bytes
        self._begun: deque[tuple[Future[R], float]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool-replay")

    def begin_one(self) -> bool:
        """Begin a job where none is begun; return False where there is none."""
        if not self._begun and self._look():
            self._begin()
        return bool(self._begun)

    def take(self) -> R:
        """Return the result of the job that was begun first, and begin the next ones, as far as the limit goes."""
        result = self._begun.popleft()[0].result()
        self._fill()
        return result

    def _fill(self) -> None:
        while self._look():
            if sum(size for _, size in self._begun) + self._n_bytes(self._next[0]) > self._limit_bytes:
                return
            self._begin()

    def _look(self) -> bool:
        if not self._next:
            self._next += islice(self._jobs, 1)
        return bool(self._next)

    def _begin(self) -> None:
        job = self._next.pop()
        self._begun.append((self._thread.submit(self._read, job), self._n_bytes(job)))

    def end(self) -> None:
        """Leave out what is not begun, and wait for what is being read."""
        self._thread.shutdown(cancel_futures=True)
