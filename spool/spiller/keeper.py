"""What a recording process does for the spiller: it rolls packs that someone waits for, and keeps a spiller alive."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterable

from spool.catalog import Catalog
from spool.errors import CapacityError, SpoolError
from spool.logs.room import want
from spool.spiller import elect
from spool.spiller.plan import ANY_PACK
from spool.write.space import GRANT_BYTES
from spool.write.stream import StreamWriter

log = logging.getLogger("spool.spiller")

LOOK_S = 1.0
"""Between two looks whether a spiller lives."""
LAG = 10
"""For so many intervals a stream whose last pack is still on its way rolls no other: those who wait meanwhile share."""


class Keeper:
    """Serves seal requests of this process's streams and starts a spiller where there is none.

    Args:
        root: the hot root.
        uri: of the spool, for the spiller.
        catalog: holds the requests of all processes.
        interval_s: a stream rolls for a request at most once in so long.
        patience_s: how long an append has waited for room before a spiller is started for it.
    """

    def __init__(self, root: str, uri: str, catalog: Catalog, *, interval_s: float, patience_s: float = 0.0) -> None:
        self._root = root
        self._uri = uri
        self._catalog = catalog
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._rolled: dict[str, tuple[int, float]] = {}
        self._looked_at = 0.0
        self._started: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()

    def serve(self, writers: Iterable[StreamWriter]) -> None:
        """Roll the streams whose open pack someone waits for; the request stays until the pack is in the cold root.

        Raises:
            SpoolError: one cannot be rolled; the others were, and it is tried again.
        """
        requests, failures = self._catalog.packs.seal_requests(), list[SpoolError]()
        for writer in writers:
            wanted = requests.get(writer.name, -1)
            if wanted >= writer.position.pack and self._is_due(writer.name):
                try:
                    self._roll(writer, wanted)
                except SpoolError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _is_due(self, stream: str) -> bool:
        """Whether a stream may roll: its last roll was long ago, and is no longer on its way to the cold root."""
        pack, at = self._rolled.get(stream, (-1, float("-inf")))
        age_s = time.monotonic() - at
        if age_s < self._interval_s:
            return False
        row = self._catalog.packs.get(stream, pack) if age_s < LAG * self._interval_s else None
        return row is None or row.state not in ("open", "sealed")

    def _roll(self, writer: StreamWriter, wanted: int) -> None:
        self._rolled[writer.name] = (writer.position.pack, time.monotonic())
        writer.roll()
        if wanted == ANY_PACK:
            self._catalog.packs.serve(writer.name, wanted)

    def press(self, error: CapacityError, waited_s: float) -> None:
        """Have room made for what was refused with ``error`` and waits since ``waited_s``.

        Raises:
            StorageError, OSError: it cannot be asked for now.
        """
        amounts = [error.details.get(name) for name in ("grant", "need")]
        want(self._root, max((amount for amount in amounts if isinstance(amount, int)), default=GRANT_BYTES))
        if waited_s >= self._patience_s:
            self.keep_running()

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
