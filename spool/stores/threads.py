"""What a store has once a process: clients and threads that are made again after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class PerProcess(Generic[T]):
    """One value a process, made at its first use there.

    What a parent made stays referenced in its forked children, so that nothing there closes the parent's sockets or
    waits for its threads. There is no lock that a fork could leave taken: two threads may both make a value, and the
    later one is dropped unused.

    Args:
        make: makes the value; it opens nothing before it is used.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._by_pid: dict[int, T] = {}

    def get(self) -> T:
        """Return this process's value."""
        found = self._by_pid.get(os.getpid())
        return self._by_pid.setdefault(os.getpid(), self._make()) if found is None else found

    def take(self) -> T | None:
        """Return and forget this process's value; None where none was made."""
        return self._by_pid.pop(os.getpid(), None)


class Threads:
    """A bounded number of threads that do a store's blocking calls, remade after a fork.

    Args:
        n: how many at most.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._pool = PerProcess(lambda: ThreadPoolExecutor(n, thread_name_prefix="spool-objects"))

    def map(self, call: Callable[[T], R], items: Iterable[T], *, width: int | None = None) -> list[R]:
        """Return ``[call(item) for item in items]``, in order, at most ``width`` at once.

        The first error is raised as soon as it is known: calls that wait are dropped, calls at work end unobserved.
        Never called from one of the threads themselves.
        """
        todo = list(items)
        if len(todo) < 2:
            return [call(item) for item in todo]
        pool, running = self._pool.get(), set[Future[R]]()
        results: list[Future[R]] = []
        try:
            for item in todo:
                if len(running) >= (width or self._n):
                    running = _some_end(running)
                results.append(pool.submit(call, item))
                running.add(results[-1])
            while running:
                running = _some_end(running)
        except BaseException:
            for future in running:
                future.cancel()
            raise
        return [future.result() for future in results]

    def close(self) -> None:
        """Let the threads of this process end after what they are at."""
        pool = self._pool.take()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _some_end(running: set[Future[R]]) -> set[Future[R]]:
    """Wait until at least one call is done; return those that are not, or raise an error of those that are."""
    done, waiting = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return waiting
