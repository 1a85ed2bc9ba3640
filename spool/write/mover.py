"""A thread that moves blocks of tails to shard files, so that small appends do not wait for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Mover:
    """One thread, started with the first job and gone with `close`. Of no use in a forked child."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Have ``job`` called soon, behind those before it; it must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spool-mover", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread to be had, or the interpreter ends
                self._thread = None
                job()
                return
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread behind its last job."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
