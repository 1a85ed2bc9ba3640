"""Which packs hold rows or events of a session: found while its events are taken in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import apsw

from spool.model.events import Attached, Single, StepCommitted
from spool.model.fields import ArraySize
from spool.model.refs import Extent

StreamSizes = Callable[[str], Mapping[str, ArraySize] | None]
"""Returns the sizes of each stored array of a stream; None where there is no such stream. What cannot be told for now
is raised: a pack whose rows are not known to be used could be deleted."""

_ADD = """
INSERT INTO uses(pack, sid, via, data) VALUES(?, ?, ?, ?) ON CONFLICT DO UPDATE SET data = max(data, excluded.data)"""


def no_sizes(stream: str) -> None:
    """Know no stream: only the packs that hold a session's events are found."""


class Uses:
    """Collects what the events of one pack use.

    Args:
        stream: the pack's stream.
        pack: its number.
        sizes: of any stream.
    """

    def __init__(self, stream: str, pack: int, sizes: StreamSizes) -> None:
        self._stream = stream
        self._ask = sizes
        self._known: dict[str, Mapping[str, ArraySize]] = {}
        self._pack = pack
        self._own: dict[str, tuple[int, int]] = {}
        self._here: dict[int, int] = {}
        self._elsewhere: set[tuple[str, int, int]] = set()

    def ask(self, events: Iterable[Single]) -> None:
        """Learn the sizes of the streams that events name rows of; done before a transaction, as it may take long."""
        streams = {
            run.stream
            for event in events
            if isinstance(event, StepCommitted | Attached)
            for runs in event.extents.values()
            for run in runs
        }
        self._known.update({stream: self._ask(stream) or {} for stream in streams - self._known.keys()})
        sizes = self._known.get(self._stream, {})
        self._own = {array: (self._pack * n, self._pack * n + n) for array, (n, _) in sizes.items()}

    def event(self, sid: int, *, data: bool) -> None:
        """Note an event of a session; ``data``: it is more than a late fact."""
        if data:
            self._here[sid] = 1
        else:
            self._here.setdefault(sid, 0)

    def rows(self, sid: int, extents: Mapping[str, tuple[Extent, ...]]) -> int:
        """Note rows that an event of a session names; most lie in the pack of the event. Return their bytes."""
        stream, own = self._stream, self._own
        n_bytes = 0
        for array, runs in extents.items():
            low, high = own.get(array, (0, 0))
            for run in runs:
                if run.stream != stream or not low <= run.row < high:
                    self._far(sid, array, run)
                size = self._known[run.stream].get(array)
                n_bytes += run.n * size.row_bytes if size is not None else 0
        return n_bytes

    def _far(self, sid: int, array: str, run: Extent) -> None:
        size = self._known[run.stream].get(array)
        if size is not None and run.n:
            self._elsewhere.add((run.stream, run.row // size.shard_rows, sid))

    def write(self, connection: apsw.Connection, log: int) -> None:
        """Store what was noted; ``log`` is the number of the pack with the events."""
        rows = [(log, sid, log, data) for sid, data in sorted(self._here.items())]
        packs: dict[tuple[str, int], int] = {}
        for stream, pack, sid in sorted(self._elsewhere):
            if (stream, pack) not in packs:
                packs[stream, pack] = pack_id(connection, stream, pack)
            rows.append((packs[stream, pack], sid, log, 1))
        connection.executemany(_ADD, rows)


def pack_id(connection: apsw.Connection, stream: str, pack: int) -> int:
    """Return the number of a pack, given to it where it has none."""
    found = connection.execute("SELECT id FROM packs WHERE stream = ? AND pack = ?", (stream, pack)).get
    if found is None:
        found = connection.execute("INSERT INTO packs(stream, pack) VALUES(?, ?) RETURNING id", (stream, pack)).get
    return int(found)
