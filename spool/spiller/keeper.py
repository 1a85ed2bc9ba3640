"""What a recording process does for the spiller: it rolls packs that someone waits for, and keeps a spiller alive."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterable

from spool.catalog import Catalog
from spool.spiller import elect
from spool.write.stream import StreamWriter

log = logging.getLogger("spool.spiller")

LOOK_S = 1.0
"""Between two looks whether a spiller lives."""


class Keeper:
    """Serves seal requests of this process's streams and starts a spiller where there is none.

    Args:
        root: the hot root.
        uri: of the spool, for the spiller.
        catalog: holds the requests of all processes.
        interval_s: a stream rolls for a request at most once in so long.
    """

    def __init__(self, root: str, uri: str, catalog: Catalog, *, interval_s: float) -> None:
        self._root = root
        self._uri = uri
        self._catalog = catalog
        self._interval_s = interval_s
        self._rolled_at: dict[str, float] = {}
        self._looked_at = 0.0
        self._started: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()

    def serve(self, writers: Iterable[StreamWriter]) -> None:
        """Roll the streams whose open pack someone waits for; the request stays until the pack is in the cold root.

        Raises:
            SpoolError: one cannot be rolled; it is tried again.
        """
        requests = self._catalog.packs.seal_requests()
        now = time.monotonic()
        for writer in writers:
            wanted = requests.get(writer.name)
            if wanted is None:
                continue
            if wanted < writer.position.pack or now - self._rolled_at.get(writer.name, 0.0) < self._interval_s:
                continue
            self._rolled_at[writer.name] = now
            writer.roll()

    def keep_running(self, *, now: bool = False) -> None:
        """Start a spiller if there is none; looks at most once in `LOOK_S` unless ``now``.

        Raises:
            StorageError: the lock file cannot be opened.
        """
        if self._pid != os.getpid():
            self._started, self._pid = None, os.getpid()
        if self._started is not None and self._started.poll() is not None:
            if self._started.returncode:
                log.warning("the spiller ended with %d; see %s/spiller.log", self._started.returncode, self._root)
            self._started = None
        if not now and time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        if not elect.is_running(self._root):
            self._started = elect.start(self._root, self._uri) or self._started
