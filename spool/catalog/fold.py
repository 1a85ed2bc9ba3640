"""What is said of a session, from the events that are stored of it: the same whatever the order they came in.

The first of several openings, endings or steps of one index counts, by (time, stream, pack, frame); a withdrawn index
never comes back. An ending that does not count keeps its segments inside its event, for when the one before it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import apsw
import msgspec
from msgspec.structs import replace

from spool.catalog.schema import DISCARD, FINAL, OPEN
from spool.model.events import SessionFinalized, SessionOpened, Single, StepCommitted
from spool.model.refs import SegmentRef, VersionSpan, numbered, version_span

encode = msgspec.msgpack.Encoder().encode
decode_event: Callable[[bytes], Single] = msgspec.msgpack.Decoder(Single).decode
decode_ref: Callable[[bytes], SegmentRef] = msgspec.msgpack.Decoder(SegmentRef).decode

ORDER = "e.at, l.stream, l.pack, e.seq, e.inner"
OPENED = ("group_id", "sample_index", "rollout_step", "source", "prompt_id", "split", "attempt", "prefer", "trim",
          "idle_s", "metadata", "opened_at")  # fmt: skip
_SEGMENT = ("count", "n_tokens", "n_rows", "response_start", "response_length", "trainable_tokens", "n_steps",
            "finish_reason", "n_nonfinite", "cut_tokens", "superseded", "first_version", "last_version")  # fmt: skip

# ruff: noqa: S608 - every part of these statements is a constant of this module
_NAMES = ("sid", "view", "idx", "target", *_SEGMENT, "ref")
_ADD_SEGMENT = f"INSERT OR REPLACE INTO segments({', '.join(_NAMES)}) VALUES({', '.join('?' * len(_NAMES))})"
_SET_OPENED = f"UPDATE sessions SET {', '.join(f'{name} = ?' for name in OPENED)} WHERE sid = ?"
_SAME_SLOT = f"""
SELECT e.id, e.kind, e.live, e.n_new, e.n_generated, e.n_nonfinite, e.event
FROM events e JOIN logs l ON l.id = e.log WHERE e.sid = ? AND e.slot = ? ORDER BY {ORDER}"""
_LAST = "SELECT slot, event FROM events WHERE sid = ? AND slot >= 0 AND live = 1 ORDER BY slot DESC LIMIT 1"
_SUMS = """
UPDATE sessions SET (n_steps, n_tokens, n_generated, n_nonfinite) =
    (SELECT count(*), CAST(total(n_new) AS INTEGER), CAST(total(n_generated) AS INTEGER),
         CAST(total(n_nonfinite) AS INTEGER)
     FROM events WHERE sid = ?1 AND slot >= 0 AND live = 1),
    last_at = (SELECT max(at) FROM events WHERE sid = ?1 AND slot >= ?2),
    discarded_at = (SELECT min(at) FROM events WHERE sid = ?1 AND slot = ?3) WHERE sid = ?1"""

T = TypeVar("T")


def same_slot(connection: apsw.Connection, sid: int, slot: int) -> list[tuple[Any, ...]]:
    """Return id, kind, live, the counts and the event of what is stored for a slot, the first first."""
    return connection.execute(_SAME_SLOT, (sid, slot)).fetchall()


def settle(connection: apsw.Connection, sid: int, index: int) -> list[tuple[int, int, int, int]]:
    """Say again which step of an index counts; return sign and counts of each step for which that changed."""
    rows = same_slot(connection, sid, index)
    steps = [row for row in rows if row[1] == "step"]
    withdrawn, changes = len(steps) < len(rows), []
    for number, (event_id, _, live, *counts, _) in enumerate(steps):
        now = int(number == 0 and not withdrawn)
        if now != live:
            connection.execute("UPDATE events SET live = ? WHERE id = ?", (now, event_id))
            changes.append((now - live, *counts))
    return changes


def opening_values(event: SessionOpened) -> list[Any]:
    """Return the columns `OPENED` of an opening."""
    plain = [fit(getattr(event, name)) for name in OPENED[:-2]]
    return [*plain, encode(event.metadata), event.at]


def opening(connection: apsw.Connection, sid: int) -> None:
    """Say again how a session was opened: by the first opening that is no resumption, if there is one."""
    set_opening(
        connection, sid, [as_kind(SessionOpened, decode_event(row[-1])) for row in same_slot(connection, sid, OPEN)]
    )


def set_opening(connection: apsw.Connection, sid: int, events: Sequence[SessionOpened]) -> None:
    """Say how a session was opened, out of the openings that count."""
    values = opening_values(min(events, key=lambda event: event.resumed)) if events else [None] * len(OPENED)
    connection.execute(_SET_OPENED, (*values, sid))


def ending(connection: apsw.Connection, sid: int) -> None:
    """Say again how a session ended; its segments are there."""
    rows = same_slot(connection, sid, FINAL)
    first = as_kind(SessionFinalized, decode_event(rows[0][-1])) if rows else None
    connection.execute(
        "UPDATE sessions SET outcome = ?2, view = ?3, finished_at = ?4, "
        "n_segments = (SELECT count(*) FROM segments WHERE sid = ?1 AND view = ?3) WHERE sid = ?1",
        (sid, *((first.outcome, first.view, first.at) if first else (None, None, None))),
    )


def finals(connection: apsw.Connection, sid: int) -> dict[str, list[int]]:
    """Return by view the ids of the endings, the one that counts first."""
    found: dict[str, list[int]] = {}
    for event_id, *_, data in same_slot(connection, sid, FINAL):
        found.setdefault(as_kind(SessionFinalized, decode_event(data)).view, []).append(event_id)
    return found


def put_segments(connection: apsw.Connection, sid: int, event: SessionFinalized) -> None:
    """Store the segments of the ending that counts for its view."""
    for ref in event.segments:
        facts = _segment_columns(ref)
        key = (sid, event.view, ref.index, ref.key)
        connection.execute(_ADD_SEGMENT, (*key, *(facts[name] for name in _SEGMENT), encode(ref)))


def take_segments(connection: apsw.Connection, sid: int, view: str) -> tuple[SegmentRef, ...]:
    """Take out and return the segments of a view."""
    where = "FROM segments WHERE sid = ? AND view = ?"
    found: list[Any] = connection.execute(f"SELECT ref {where} ORDER BY idx", (sid, view)).fetchall()
    connection.execute(f"DELETE {where}", (sid, view))
    return tuple(decode_ref(data) for (data,) in found)


def move_segments_in(connection: apsw.Connection, sid: int, event_id: int) -> None:
    """Make an ending count: its segments become rows, out of its event."""
    data = connection.execute("SELECT event FROM events WHERE id = ?", (event_id,)).get
    event = as_kind(SessionFinalized, decode_event(data))
    put_segments(connection, sid, event)
    set_event(connection, event_id, replace(event, segments=()))


def move_segments_out(connection: apsw.Connection, sid: int, event_id: int) -> None:
    """Make an ending count no longer: its segments go from the rows into its event."""
    data = connection.execute("SELECT event FROM events WHERE id = ?", (event_id,)).get
    event = as_kind(SessionFinalized, decode_event(data))
    set_event(connection, event_id, replace(event, segments=take_segments(connection, sid, event.view)))


def set_event(connection: apsw.Connection, event_id: int, event: Single) -> None:
    """Replace what is stored of an event."""
    connection.execute("UPDATE events SET event = ? WHERE id = ?", (encode(event), event_id))


def last_step(connection: apsw.Connection, sid: int) -> None:
    """Say again which step is the last that counts."""
    last: tuple[Any, ...] = connection.execute(_LAST, (sid,)).fetchone() or (None, None)
    reason = last[1] and as_kind(StepCommitted, decode_event(last[1])).finish_reason
    connection.execute("UPDATE sessions SET last_index = ?, finish_reason = ? WHERE sid = ?", (last[0], reason, sid))


def sums(connection: apsw.Connection, sids: Sequence[int]) -> None:
    """Say again the counts and times of sessions, from all that is stored of them."""
    connection.executemany(_SUMS, [(sid, OPEN, DISCARD) for sid in sids])


def versions(spans: Sequence[VersionSpan]) -> tuple[int | float | str | None, int | float | str | None]:
    """Return the oldest and the newest weight version of some tokens as columns; None where there is none."""
    first, last = version_span(spans) or (None, None)
    return version_column(first), version_column(last)


def _segment_columns(ref: SegmentRef) -> dict[str, Any]:
    first, last = versions(ref.versions)
    columns = {
        "count": ref.count,
        "n_tokens": ref.n_tokens,
        "n_rows": ref.n_rows,
        "response_start": ref.response_start,
        "response_length": ref.response_length,
        "trainable_tokens": ref.trainable_tokens,
        "n_steps": len(ref.steps),
        "finish_reason": ref.finish_reason,
        "n_nonfinite": ref.n_nonfinite,
        "cut_tokens": ref.cut_tokens,
        "superseded": ref.superseded,
        "first_version": first,
        "last_version": last,
    }
    return {name: fit(value) for name, value in columns.items()}


def version_column(name: str | None) -> int | float | str | None:
    """Return a weight version as a column: a number where it is one, so that filters compare 9 < 12."""
    numbers = None if name is None else numbered([name])
    return name if name is None or numbers is None else fit(numbers[name])


def fit(value: T) -> T | float:
    """Return an integer beyond 64 bits as a float: SQLite's integers have 64 bits, msgpack's go further."""
    return float(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 else value


def as_kind(kind: type[T], event: object) -> T:
    """Return ``event``, which is of that kind."""
    assert isinstance(event, kind)
    return event
