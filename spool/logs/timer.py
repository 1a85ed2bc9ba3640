"""A thread that keeps the index close behind this process's own appends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from spool.errors import SpoolError
from spool.logs.feeder import LogFeeder

log = logging.getLogger("spool.logs")

DELAY_S = 0.03
"""From a commit to its ingest; with the ingest itself below 50 ms."""

RETRY_S = 1.0


class FeedTimer:
    """Runs `LogFeeder.catch_up` soon after commits; asleep while there are none.

    Its thread starts with the first commit, is made anew in a forked child, and does not keep the interpreter alive.

    Args:
        feeder: what is run.
        streams: names of the streams to look at, asked each time; all of the root where None.
    """

    def __init__(self, feeder: LogFeeder, streams: Callable[[], Sequence[str]] | None = None) -> None:
        self._feeder = feeder
        self._streams = streams
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def notify(self, *_: object) -> None:
        """Say that something was committed; takes any arguments, so that it can be a writer's ``on_commit``."""
        if self._pid != os.getpid():
            self._reset()
        if not self._wake.is_set():
            self._wake.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="spool-feed", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Take in what was committed and end the thread; later commits are left to the next `LogFeeder.catch_up`."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            self._closing.set()
            self._wake.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        wake, closing = self._wake, self._closing
        while True:
            wake.wait()
            closing.wait(DELAY_S)
            last = closing.is_set()
            wake.clear()
            try:
                self._feeder.catch_up(self._streams() if self._streams is not None else None)
            except (SpoolError, OSError) as error:
                log.warning("the catalog is behind: %s", error)
                wake.set()
                closing.wait(RETRY_S)
            if last:
                return
