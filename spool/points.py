"""Named points between two steps that a crash may separate; tests and the harness stop a process there.

Where nothing listens, reaching one costs a look at a global.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from spool.errors import ConfigError

POINTS = (
    "append.filled",  # rows are in the rings, the event is not built
    "append.written",  # payload is on disk, the frame is not
    "append.committed",  # the frame is on disk, nobody was told
    "put.written",  # a unit is written, and has no name
    "put.named",  # it has, and nobody was told
    "seal.shards",  # shards are whole and durable
    "seal.documents",  # zarr.json and records have their names, tails and log are there
    "spill.claimed",  # the records of a pack are in the cold root
    "spill.shard",  # one of its shards is
    "spill.objects",  # all are
    "spill.documents",  # the arrays' documents are
    "spill.unit",  # one of the units that a pack names is, its manifest is not
    "spill.manifest",  # the manifest is, the marker is not
    "spill.marked",  # the marker is, the catalog does not know
    "evict.shard",  # one shard of an evicted (or deleted) pack is removed
    "evict.removed",  # all its files are, the catalog does not know
    "evict.unit",  # a unit is removed from the hot root
    "release.recorded",  # a release is committed
    "collect.tombstone",  # the cold root says that a pack is gone
    "delete.marked",  # the hot root does
    "delete.removed",  # its files are removed, the catalog does not know
    "collect.object",  # one of its objects is deleted
    "collect.objects",  # all are, the tombstone does not say so
    "collect.units",  # it is said which units are deleted
    "delete.unit",  # a unit of the hot root has lost its name, its file is there
    "collect.unit",  # a unit is deleted from the cold root
    "rollup.written",  # a roll-up is there beside the manifests in it
    "rollup.removed",  # one of those manifests is deleted
)
"""All of them, in the order of a pack's life."""

_listener: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Say that ``point`` is reached."""
    if _listener is not None:
        _listener(point)


def listen(listener: Callable[[str], None] | None) -> None:
    """Have ``listener`` called with every point that is reached; None for nobody."""
    global _listener  # noqa: PLW0603 - there is one process to stop
    _listener = listener


def kill_at(point: str, nth: int = 1) -> None:
    """Kill this process with SIGKILL when ``point`` is reached for the ``nth`` time.

    Raises:
        ConfigError: there is no such point.
    """
    if point not in POINTS:
        raise ConfigError(f"there is no point {point!r} to be killed at; there are {', '.join(POINTS)}")
    left = nth

    def count(reached: str) -> None:
        nonlocal left
        left -= reached == point
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    listen(count)
