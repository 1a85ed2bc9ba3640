"""Late facts -> rows: annotations, late arrays and releases, folded so that the order of feeding does not matter.

The events themselves stay in the table of events, so that what an older one said comes back when a newer one goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import apsw
import msgspec

from spool.catalog.fold import decode_event, encode, fit
from spool.catalog.schema import LATE
from spool.model.events import Annotated, Attached, Released

# ruff: noqa: S608 - every part of these statements is a constant of this module
_NEWER = """
SELECT 1 FROM {table} e JOIN logs l ON l.id = e.log
WHERE e.sid = ? AND {keys} AND (e.at, l.stream, l.pack, e.seq, e.inner) > (?, ?, ?, ?, ?)"""
_STORED = """
SELECT l.id, l.stream, l.pack, e.seq, e.inner, e.event FROM events e JOIN logs l ON l.id = e.log
WHERE e.sid = ? AND e.slot = ?"""

LateEvent = Annotated | Attached | Released
TABLES = ("facts", "attachments", "releases")


class At(NamedTuple):
    """Where an event is recorded: number of the log, stream, pack, frame, and place in the frame."""

    log: int
    stream: str
    pack: int
    seq: int
    inner: int


def apply(connection: apsw.Connection, sid: int, at: At, event: LateEvent) -> None:
    """Let a late event have its effect."""
    if isinstance(event, Annotated):
        for key, value in event.facts.items():
            row = {"key": key, "target": event.segment or "", "value": _native(value), "packed": encode(value)}
            _last_wins(connection, "facts", ("key", "target"), sid, at, event.at, row)
    elif isinstance(event, Attached):
        row = {"target": event.target, "field": event.field.name, "event": encode(event)}
        _last_wins(connection, "attachments", ("target", "field"), sid, at, event.at, row)
    else:
        _release(connection, sid, event)


def apply_again(connection: apsw.Connection, sids: Iterable[int]) -> None:
    """Take out what is known late of sessions and fold it from the events that are stored."""
    for sid in sids:
        for table in TABLES:
            connection.execute(f"DELETE FROM {table} WHERE sid = ?", (sid,))
        stored: list[Any] = connection.execute(_STORED, (sid, LATE)).fetchall()
        for *at, data in stored:
            event = decode_event(data)
            assert isinstance(event, Annotated | Attached | Released)
            apply(connection, sid, At(*at), event)


def _release(connection: apsw.Connection, sid: int, event: Released) -> None:
    # 0 stands for no tag, since null cannot be part of a key and any text can be a tag
    tag = 0 if event.tag is None else event.tag
    connection.executemany(
        "INSERT INTO releases VALUES(?, ?, ?, ?) ON CONFLICT DO UPDATE SET at = min(at, excluded.at)",
        [(sid, target, tag, event.at) for target in event.segments],
    )


def _last_wins(
    connection: apsw.Connection,
    table: str,
    keys: tuple[str, ...],
    sid: int,
    at: At,
    time: float,
    row: dict[str, Any],
) -> None:
    order = (time, at.stream, at.pack, at.seq, at.inner)
    newer = _NEWER.format(table=table, keys=" AND ".join(f"e.{key} = ?" for key in keys))
    if connection.execute(newer, (sid, *(row[key] for key in keys), *order)).get is None:
        row = {"sid": sid, **row, "at": time, "log": at.log, "seq": at.seq, "inner": at.inner}
        sql = f"INSERT OR REPLACE INTO {table}({', '.join(row)}) VALUES({', '.join('?' * len(row))})"
        connection.execute(sql, tuple(row.values()))


def _native(value: object) -> int | float | str | None:
    """Return a fact as SQL compares it: numbers and text as they are, the rest as JSON."""
    if isinstance(value, int):
        return fit(value)
    if value is None or isinstance(value, float | str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        # what JSON cannot say (a list as a key) is not filtered on, and never keeps an event out of the index
        return None
