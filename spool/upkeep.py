"""A thread of a recording process for what happens by age: packs roll, idle sessions end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spool.errors import SpoolError

log = logging.getLogger("spool.upkeep")

SHORTEST_S, LONGEST_S = 0.05, 5.0


class Upkeep:
    """Calls ``work`` again and again; does not keep the interpreter alive, and does not survive a fork.

    Args:
        work: what is due is done by it; what it raises is logged, and it is called again.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._period_s = LONGEST_S
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, age_s: float) -> None:
        """Look often enough for something that is due after ``age_s``."""
        self._period_s = min(self._period_s, max(age_s / 4, SHORTEST_S))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spool-upkeep", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; returns when ``work`` is not running any more."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._work()
            except (SpoolError, OSError) as error:
                log.warning("upkeep goes on after: %s", error)
