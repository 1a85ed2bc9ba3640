"""Events -> rows, inside one transaction.

Logs arrive in any interleaving, so every rule here gives the same rows in any order: the first of several openings or
endings or steps of one index, the last of several facts, each by (time, stream, pack, frame); a withdrawn index never
comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import apsw
import msgspec
from msgspec.structs import replace

from spool.catalog.rows import LogItem
from spool.catalog.schema import DISCARD, FINAL, OPEN
from spool.model.events import (
    Annotated,
    Attached,
    Checkpointed,
    Released,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    Single,
    StepCommitted,
    StepDiscarded,
    ToolsStored,
    Transaction,
    without_text,
)
from spool.model.refs import SegmentRef

encode = msgspec.msgpack.Encoder().encode
decode_event: Callable[[bytes], Single] = msgspec.msgpack.Decoder(Single).decode
decode_ref: Callable[[bytes], SegmentRef] = msgspec.msgpack.Decoder(SegmentRef).decode

ORDER = "e.at, l.stream, l.pack, e.seq, e.inner"
_IDENTITY = ("group_id", "sample_index", "rollout_step", "source", "prompt_id", "split", "attempt")
_OPENED = (*_IDENTITY, "prefer", "trim", "idle_s")
_SEGMENT = ("count", "n_tokens", "n_rows", "response_start", "response_length", "trainable_tokens", "n_steps",
            "finish_reason", "n_nonfinite", "cut_tokens", "superseded", "first_version", "last_version")  # fmt: skip

_ADD = """
INSERT INTO events(sid, slot, kind, live, at, log, seq, inner, offset, n_new, n_generated, n_nonfinite, event)
VALUES(?1, ?2, ?3, ?3 = 'step' AND NOT EXISTS(SELECT 1 FROM events WHERE sid = ?1 AND slot = ?2),
    ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12) RETURNING live"""
_SUM = """
UPDATE sessions SET n_steps = n_steps + ?2, n_tokens = n_tokens + ?3, n_generated = n_generated + ?4,
    n_nonfinite = n_nonfinite + ?5, last_at = max(ifnull(last_at, ?6), ?6) WHERE sid = ?1"""
_LAST = """
SELECT slot, event FROM events WHERE sid = ? AND slot >= 0 AND live = 1 ORDER BY slot DESC LIMIT 1"""
_SAME_SLOT = f"""
SELECT e.id, e.kind, e.live, e.n_new, e.n_generated, e.n_nonfinite, e.event
FROM events e JOIN logs l ON l.id = e.log WHERE e.sid = ? AND e.slot = ? ORDER BY {ORDER}"""  # noqa: S608
_NEWER = """
SELECT 1 FROM {table} e JOIN logs l ON l.id = e.log
WHERE e.sid = ? AND {keys} AND (e.at, l.stream, l.pack, e.seq, e.inner) > (?, ?, ?, ?, ?)"""

Owned = SessionOpened | StepCommitted | StepDiscarded | SessionFinalized | SessionDiscarded
T = TypeVar("T")


class Prepared(NamedTuple):
    """An inner event ready to be stored."""

    seq: int
    offset: int
    inner: int
    event: Single
    data: bytes


def prepare(items: Sequence[LogItem]) -> list[Prepared]:
    """Encode what the rows will hold; done before the transaction, which stays short and free of the caller's code."""
    ready = []
    for item in items:
        events = item.event.events if isinstance(item.event, Transaction) else (item.event,)
        ready += [Prepared(item.seq, item.offset, n, event, _light(event)) for n, event in enumerate(events)]
    return ready


def _light(event: Single) -> bytes:
    if isinstance(event, SessionFinalized):
        return encode(replace(event, segments=()))
    return b"" if isinstance(event, ToolsStored) else encode(without_text(event))


class _Change:
    """What a transaction adds to the counts of a session."""

    __slots__ = ("last_at", "last_index", "n_generated", "n_new", "n_nonfinite", "n_steps", "reason", "relast")

    def __init__(self) -> None:
        self.n_steps = self.n_new = self.n_generated = self.n_nonfinite = 0
        self.last_at: float | None = None
        self.last_index = -1
        self.reason: str | None = None
        self.relast = False

    def add(self, sign: int, n_new: int, n_generated: int, n_nonfinite: int) -> None:
        self.n_steps += sign
        self.n_new += sign * n_new
        self.n_generated += sign * n_generated
        self.n_nonfinite += sign * n_nonfinite


class Ingest:
    """Applies the events of one pack's log inside the transaction of ``connection``."""

    def __init__(self, connection: apsw.Connection, log: int, stream: str, pack: int) -> None:
        self._connection = connection
        self._log = log
        self._place = (stream, pack)
        self._sids: dict[str, int] = {}
        self._changes: dict[int, _Change] = {}
        self._handlers: dict[type, Callable[[Prepared, Any], None]] = {
            SessionOpened: self._opened,
            StepCommitted: self._step,
            ToolsStored: self._tools,
            StepDiscarded: self._withdrawn,
            SessionFinalized: self._finalized,
            SessionDiscarded: self._discarded,
            Annotated: self._annotated,
            Attached: self._attached,
            Released: self._released,
            Checkpointed: self._checkpointed,
        }

    def apply(self, items: Iterable[Prepared]) -> None:
        """Store events."""
        for item in items:
            self._handlers[type(item.event)](item, item.event)

    def finish(self) -> None:
        """Write the sums of the touched sessions."""
        execute = self._connection.execute
        for sid, change in self._changes.items():
            sums = (change.n_steps, change.n_new, change.n_generated, change.n_nonfinite, change.last_at)
            execute(_SUM, (sid, *sums))
            if change.relast:
                last: tuple[Any, ...] = execute(_LAST, (sid,)).fetchone() or (None, None)
                slot, reason = last[0], last[1] and _as(StepCommitted, decode_event(last[1])).finish_reason
                execute("UPDATE sessions SET last_index = ?, finish_reason = ? WHERE sid = ?", (slot, reason, sid))
            elif change.last_index >= 0:
                execute(
                    "UPDATE sessions SET last_index = ?1, finish_reason = ?2 "
                    "WHERE sid = ?3 AND ifnull(last_index, -1) < ?1",
                    (change.last_index, change.reason, sid),
                )

    # -- one kind of event each --------------------------------------------------------------------------------------

    def _opened(self, item: Prepared, event: SessionOpened) -> None:
        sid, _ = self._own(item, event, OPEN, "open")
        rows = self._slot(sid, OPEN)
        first = min((_as(SessionOpened, decode_event(row[-1])) for row in rows), key=lambda opened: opened.resumed)
        values = [_fit(getattr(first, name)) for name in _OPENED]
        columns = ", ".join(f"{name} = ?" for name in (*_OPENED, "metadata", "opened_at"))
        self._connection.execute(
            f"UPDATE sessions SET {columns} WHERE sid = ?",  # noqa: S608
            (*values, encode(first.metadata), first.at, sid),
        )

    def _step(self, item: Prepared, event: StepCommitted) -> None:
        counts = (event.n_tokens - event.base, event.n_tokens - event.n_prompt, event.n_nonfinite)
        sid, counts_now = self._own(item, event, event.index, "step", counts)
        change = self._changes[sid]
        if not counts_now:
            self._settle(sid, event.index)
            return
        change.add(1, *counts)
        if event.index > change.last_index:
            change.last_index, change.reason = event.index, event.finish_reason

    def _withdrawn(self, item: Prepared, event: StepDiscarded) -> None:
        sid, _ = self._own(item, event, event.index, "undo")
        self._settle(sid, event.index)

    def _settle(self, sid: int, index: int) -> None:
        """Say again which step of an index counts, where there is more than one event of that index."""
        rows = self._slot(sid, index)
        steps = [row for row in rows if row[1] == "step"]
        withdrawn = len(steps) < len(rows)
        change = self._changes[sid]
        change.relast = True
        for number, (event_id, _, live, *counts, _) in enumerate(steps):
            now = int(number == 0 and not withdrawn)
            if now != live:
                self._connection.execute("UPDATE events SET live = ? WHERE id = ?", (now, event_id))
                change.add(now - live, *counts)

    def _finalized(self, item: Prepared, event: SessionFinalized) -> None:
        sid, _ = self._own(item, event, FINAL, "final")
        rows = self._slot(sid, FINAL)
        finals = [(row[0], _as(SessionFinalized, decode_event(row[-1]))) for row in rows]
        own = self._connection.last_insert_rowid()
        if next(number for number, final in finals if final.view == event.view) == own:
            self._segments(sid, event)
        first = finals[0][1]
        self._connection.execute(
            "UPDATE sessions SET outcome = ?2, view = ?3, finished_at = ?4, "
            "n_segments = (SELECT count(*) FROM segments WHERE sid = ?1 AND view = ?3) WHERE sid = ?1",
            (sid, first.outcome, first.view, first.at),
        )

    def _segments(self, sid: int, event: SessionFinalized) -> None:
        execute = self._connection.execute
        execute("DELETE FROM segments WHERE sid = ? AND view = ?", (sid, event.view))
        names = ("sid", "view", "idx", "target", *_SEGMENT, "ref")
        sql = f"INSERT OR REPLACE INTO segments({', '.join(names)}) VALUES({', '.join('?' * len(names))})"
        for ref in event.segments:
            facts = _segment_columns(ref)
            key = (sid, event.view, ref.index, ref.key)
            execute(sql, (*key, *(facts[name] for name in _SEGMENT), encode(ref)))

    def _discarded(self, item: Prepared, event: SessionDiscarded) -> None:
        sid, _ = self._own(item, event, DISCARD, "discard")
        self._connection.execute(
            "UPDATE sessions SET discarded_at = min(ifnull(discarded_at, ?1), ?1) WHERE sid = ?2", (event.at, sid)
        )

    def _annotated(self, item: Prepared, event: Annotated) -> None:
        sid = self._sid(event.session_id)
        for key, value in event.facts.items():
            row = {"key": key, "target": event.segment or "", "value": _native(value), "packed": encode(value)}
            self._last_wins("facts", ("key", "target"), sid, item, row)

    def _attached(self, item: Prepared, event: Attached) -> None:
        row = {"target": event.target, "field": event.field.name, "event": item.data}
        self._last_wins("attachments", ("target", "field"), self._sid(event.session_id), item, row)

    def _released(self, _: Prepared, event: Released) -> None:
        sid = self._sid(event.session_id)
        # 0 stands for no tag, since null cannot be part of a key and any text can be a tag
        tag = 0 if event.tag is None else event.tag
        for target in event.segments:
            self._connection.execute(
                "INSERT INTO releases VALUES(?, ?, ?, ?) ON CONFLICT DO UPDATE SET at = min(at, excluded.at)",
                (sid, target, tag, event.at),
            )

    def _checkpointed(self, _: Prepared, event: Checkpointed) -> None:
        self._connection.execute(
            "INSERT INTO checkpoints VALUES(?, ?) ON CONFLICT DO UPDATE SET at = max(at, excluded.at)",
            (event.tag, event.at),
        )

    def _tools(self, item: Prepared, event: ToolsStored) -> None:
        self._connection.execute(
            "INSERT INTO tools VALUES(?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (event.key, self._log, item.seq, item.inner, item.offset),
        )

    # -- shared ------------------------------------------------------------------------------------------------------

    def _own(
        self, item: Prepared, event: Owned, slot: int, kind: str, counts: tuple[int, int, int] = (0, 0, 0)
    ) -> tuple[int, bool]:
        """Store an event of the session's owner; return the session's number and, of a step, whether it counts."""
        sid = self._sid(event.session_id)
        change = self._changes.get(sid)
        if change is None:
            change = self._changes[sid] = _Change()
        if change.last_at is None or event.at > change.last_at:
            change.last_at = event.at
        values = (sid, slot, kind, event.at, self._log, item.seq, item.inner, item.offset, *counts, item.data)
        return sid, bool(self._connection.execute(_ADD, values).get)

    def _slot(self, sid: int, slot: int) -> list[tuple[Any, ...]]:
        return self._connection.execute(_SAME_SLOT, (sid, slot)).fetchall()

    def _sid(self, session_id: str) -> int:
        sid = self._sids.get(session_id)
        if sid is None:
            execute = self._connection.execute
            sid = execute("SELECT sid FROM sessions WHERE session_id = ?", (session_id,)).get
            if sid is None:
                sid = execute("INSERT INTO sessions(session_id) VALUES(?) RETURNING sid", (session_id,)).get
            self._sids[session_id] = sid
        return sid

    def _last_wins(self, table: str, keys: tuple[str, ...], sid: int, item: Prepared, row: dict[str, Any]) -> None:
        at = item.event.at  # type: ignore[union-attr]
        order = (at, *self._place, item.seq, item.inner)
        newer = _NEWER.format(table=table, keys=" AND ".join(f"e.{key} = ?" for key in keys))
        if self._connection.execute(newer, (sid, *(row[key] for key in keys), *order)).get is None:
            row = {"sid": sid, **row, "at": at, "log": self._log, "seq": item.seq, "inner": item.inner}
            sql = f"INSERT OR REPLACE INTO {table}({', '.join(row)}) VALUES({', '.join('?' * len(row))})"
            self._connection.execute(sql, tuple(row.values()))


def _segment_columns(ref: SegmentRef) -> dict[str, Any]:
    first, last = ref.version_span or (None, None)
    return {
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
        "first_version": _version(first),
        "last_version": _version(last),
    }


def _version(name: str | None) -> int | float | str | None:
    # a number, so that filters compare 9 < 12
    return _fit(int(name)) if name is not None and name.isdecimal() and len(name) < 300 else name


def _native(value: object) -> int | float | str | None:
    """Return a fact as SQL compares it: numbers and text as they are, the rest as JSON."""
    if isinstance(value, int):
        return _fit(value)
    if value is None or isinstance(value, float | str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        # what JSON cannot say (a list as a key) is not filtered on, and never keeps an event out of the index
        return None


def _fit(value: T) -> T | float:
    # SQLite's integers have 64 bits, msgpack's go further
    return float(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 else value


def _as(kind: type[T], event: object) -> T:
    assert isinstance(event, kind)
    return event
