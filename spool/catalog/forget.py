"""What a deleted pack's events fed is taken out again: the index is as if only the other packs had been fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import apsw

from spool.catalog import fold, late, rivals
from spool.catalog.schema import FINAL, LATE, OPEN

# all events of a pack are of sessions that use it, so no index by log is needed
_EVENTS = """
SELECT e.id, e.sid, e.slot FROM uses u JOIN events e ON e.sid = u.sid AND e.log = u.via
WHERE u.pack = ?1 AND u.via = ?1"""
_LEFT = "SELECT EXISTS(SELECT 1 FROM events WHERE sid = ?)"


class _Lost(NamedTuple):
    event: int
    sid: int
    slot: int


def forget(connection: apsw.Connection, log: int) -> None:
    """Take out what the log of a pack fed.

    Args:
        connection: inside a transaction.
        log: the pack's number.
    """
    lost = [_Lost._make(row) for row in connection.execute(_EVENTS, (log,)).fetchall()]
    sids = sorted({item.sid for item in lost})
    views = _views_lost(connection, lost)
    connection.executemany("DELETE FROM events WHERE id = ?", [(item.event,) for item in lost])
    connection.execute("DELETE FROM uses WHERE pack = ?1 AND via = ?1", (log,))
    connection.execute("DELETE FROM uses WHERE via = ?1 AND via <> pack", (log,))
    for table in ("tools", "checkpoints", "units"):
        connection.execute(f"DELETE FROM {table} WHERE log = ?", (log,))  # noqa: S608
    left = {sid for sid in sids if connection.execute(_LEFT, (sid,)).get}
    _drop(connection, [sid for sid in sids if sid not in left])
    _fold_again(connection, [item for item in lost if item.sid in left], views)
    connection.execute("DELETE FROM logs WHERE id = ?", (log,))


def _views_lost(connection: apsw.Connection, lost: Sequence[_Lost]) -> list[tuple[int, str]]:
    """Return the sessions and views whose ending that counts goes."""
    going = {item.event for item in lost if item.slot == FINAL}
    sids = sorted({item.sid for item in lost if item.slot == FINAL})
    return [(sid, view) for sid in sids for view, ids in fold.finals(connection, sid).items() if ids[0] in going]


def _drop(connection: apsw.Connection, sids: Sequence[int]) -> None:
    """Take out sessions of which nothing else is stored."""
    for table in ("sessions", "segments", *late.TABLES):
        connection.executemany(f"DELETE FROM {table} WHERE sid = ?", [(sid,) for sid in sids])  # noqa: S608


def _fold_again(connection: apsw.Connection, lost: Sequence[_Lost], views: Sequence[tuple[int, str]]) -> None:
    """Say again what the lost events said, of sessions of which something else is stored."""

    def of(*slots: int) -> list[int]:
        return sorted({item.sid for item in lost if item.slot in slots})

    steps = sorted({(item.sid, item.slot) for item in lost if item.slot >= 0})
    left = {item.sid for item in lost}
    for sid, slot in steps:
        fold.settle(connection, sid, slot)
    for sid, view in views:
        if sid in left:
            fold.take_segments(connection, sid, view)
            for event_id in fold.finals(connection, sid).get(view, ())[:1]:
                fold.move_segments_in(connection, sid, event_id)
    for sid in of(OPEN):
        fold.opening(connection, sid)
    for sid in of(FINAL):
        fold.ending(connection, sid)
    owned = sorted({item.sid for item in lost if item.slot > LATE})
    fold.sums(connection, owned)
    for sid in dict.fromkeys(sid for sid, _ in steps):
        fold.last_step(connection, sid)
    for sid in owned:
        if connection.execute("SELECT contested FROM sessions WHERE sid = ?", (sid,)).get:
            rivals.look(connection, sid)
            rivals.settle(connection, sid)
    late.apply_again(connection, of(LATE))
