"""Events -> rows, inside one transaction.

Logs arrive in any interleaving, so every rule here gives the same rows in any order; see `spool.catalog.fold`. Steps
are most of what there is: those that surely are the first of their index are collected and stored together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import apsw
import msgspec
from msgspec.structs import replace

from spool.catalog import fold, late, rivals
from spool.catalog.fold import encode
from spool.catalog.late import At, LateEvent
from spool.catalog.rows import LogItem
from spool.catalog.schema import DISCARD, FINAL, LATE, OPEN
from spool.catalog.uses import Uses
from spool.errors import IntegrityError
from spool.model.events import (
    Annotated,
    Attached,
    Checkpointed,
    Event,
    Released,
    RowsHeld,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    Single,
    StepCommitted,
    StepDiscarded,
    ToolsStored,
    parts,
    without_text,
)
from spool.model.units import own_keys

log = logging.getLogger("spool.catalog")

_decode: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode

_ADD = """
INSERT INTO events(sid, slot, kind, live, at, log, seq, inner, offset, n_new, n_generated, n_nonfinite,
    parent, n_bytes, first_version, last_version, event)
VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_ADD_OPENED = (
    f"INSERT INTO sessions(session_id, {', '.join(fold.OPENED)}) "
    f"VALUES({', '.join('?' * (len(fold.OPENED) + 1))}) RETURNING sid"
)
_SUM = """
UPDATE sessions SET n_steps = n_steps + ?2, n_tokens = n_tokens + ?3, n_generated = n_generated + ?4,
    n_nonfinite = n_nonfinite + ?5, last_at = max(ifnull(last_at, ?6), ?6),
    finish_reason = iif(?7 > ifnull(last_index, -1), ?8, finish_reason),
    last_index = iif(?7 > ifnull(last_index, -1), ?7, last_index) WHERE sid = ?1"""

_ADD_UNIT = "INSERT OR IGNORE INTO units VALUES(?, ?, ?)"
_KNOWN = "SELECT sid, contested FROM sessions WHERE session_id = ?"
_SET_ENDED = "UPDATE sessions SET outcome = ?, view = ?, finished_at = ?, n_segments = ? WHERE sid = ?"

_NO_COUNTS = (0, 0, 0)
_NO_STEP = (None, 0, None, None)
Owned = SessionOpened | StepCommitted | RowsHeld | StepDiscarded | SessionFinalized | SessionDiscarded


class Prepared(NamedTuple):
    """An inner event ready to be stored."""

    seq: int
    offset: int
    inner: int
    event: Single
    data: bytes


def decode_items(payloads: Sequence[bytes], first: int, *, what: str) -> list[LogItem]:
    """Return the events of a sealed pack from number ``first`` on.

    Raises:
        IntegrityError: a payload is no event.
    """
    try:
        return [LogItem(seq, -1, _decode(payload)) for seq, payload in enumerate(payloads[first:], first)]
    except msgspec.DecodeError as error:
        raise IntegrityError(f"{what} has a record that is no event: {error}; restore it") from error


def prepare(items: Sequence[LogItem]) -> list[Prepared]:
    """Encode what the rows will hold; done before the transaction, which stays short and free of the caller's code."""
    ready = []
    for item in items:
        ready += [Prepared(item.seq, item.offset, n, part, _light(part)) for n, part in enumerate(parts(item.event))]
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

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.n_steps, self.n_new, self.n_generated, self.n_nonfinite

    def add(self, sign: int, n_new: int, n_generated: int, n_nonfinite: int) -> None:
        self.n_steps += sign
        self.n_new += sign * n_new
        self.n_generated += sign * n_generated
        self.n_nonfinite += sign * n_nonfinite


class Sessions:
    """What is known of sessions inside one transaction.

    Attributes:
        sids: their numbers.
        tops: by number, the highest index that anything is stored for.
        unended: those that surely have no ending.
        contested: those whose openings fork, as far as they were asked for.
    """

    def __init__(self) -> None:
        self.sids: dict[str, int] = {}
        self.tops: dict[int, int] = {}
        self.unended: set[int] = set()
        self.contested: set[int] = set()


class Ingest:
    """Applies the events of one pack's log inside the transaction of ``connection``."""

    def __init__(
        self, connection: apsw.Connection, log: int, stream: str, pack: int, uses: Uses, sessions: Sessions
    ) -> None:
        self._connection = connection
        self._log = log
        self._place = (stream, pack)
        self._uses = uses
        self._sids, self._tops, self._unended = sessions.sids, sessions.tops, sessions.unended
        self._contested = sessions.contested
        self._changes: dict[int, _Change] = {}
        self._waiting: list[tuple[Any, ...]] = []
        self._units: set[tuple[int, int, str]] = set()
        self._handlers: dict[type, Callable[[Prepared, Any], None]] = {
            SessionOpened: self._opened,
            StepCommitted: self._step,
            RowsHeld: self._held,
            ToolsStored: self._tools,
            StepDiscarded: self._withdrawn,
            SessionFinalized: self._finalized,
            SessionDiscarded: self._discarded,
            Annotated: self._late,
            Attached: self._late,
            Released: self._late,
            Checkpointed: self._checkpointed,
        }

    def apply(self, items: Iterable[Prepared]) -> None:
        """Store events."""
        handlers = self._handlers
        for item in items:
            handlers[type(item.event)](item, item.event)

    def finish(self) -> None:
        """Write what was collected: rows, and the sums of the touched sessions."""
        self._flush()
        self._uses.write(self._connection, self._log)
        self._connection.executemany(_ADD_UNIT, sorted(self._units))
        self._connection.executemany(
            _SUM,
            [
                (sid, *map(fold.fit, change.counts), change.last_at, change.last_index, change.reason)
                for sid, change in self._changes.items()
            ],
        )
        for sid, change in self._changes.items():
            if sid in self._contested:
                rivals.settle(self._connection, sid)
            elif change.relast:
                fold.last_step(self._connection, sid)

    # -- one kind of event each --------------------------------------------------------------------------------------

    def _opened(self, item: Prepared, event: SessionOpened) -> None:
        sid = self._known(event.session_id)
        if sid is None:
            values = (event.session_id, *fold.opening_values(event))
            sid = self._new(event.session_id, self._connection.execute(_ADD_OPENED, values).get)
            self._waiting.append(self._row(sid, OPEN, "open", 0, item, event))
        else:
            self._add(sid, OPEN, "open", item, event)
            fold.opening(self._connection, sid)
            if rivals.look(self._connection, sid):
                self._contested.add(sid)
                log.warning(
                    "session %r was recorded by two owners at once, as two nodes do that are given the same id; the "
                    "steps of one of them are listed",
                    event.session_id,
                )
        self._owned(sid, event)

    def _step(self, item: Prepared, event: StepCommitted) -> None:
        sid, index = self._sid(event.session_id), event.index
        change = self._owned(sid, event)
        n_bytes = self._uses.rows(sid, event.extents)
        if event.units:
            self._units.update((self._log, sid, key) for key in own_keys(event.units))
        counts = (event.n_tokens - event.base, event.n_tokens - event.n_prompt, event.n_nonfinite)
        top = self._tops.get(sid)
        if top is None:
            top = self._top(sid)
        fresh = index > top
        facts = (event.parent, n_bytes, *fold.versions(event.versions))
        self._waiting.append(self._row(sid, index, "step", int(fresh), item, event, counts, facts))
        if not fresh:
            self._settle(sid, index)
            return
        self._tops[sid] = index
        change.add(1, *counts)
        if index > change.last_index:
            change.last_index, change.reason = index, event.finish_reason

    def _held(self, _: Prepared, event: RowsHeld) -> None:
        self._owned(self._sid(event.session_id), event)

    def _withdrawn(self, item: Prepared, event: StepDiscarded) -> None:
        sid = self._sid(event.session_id)
        self._owned(sid, event)
        self._tops[sid] = max(self._top(sid), event.index)
        self._add(sid, event.index, "undo", item, event)
        self._settle(sid, event.index)

    def _settle(self, sid: int, index: int) -> None:
        self._flush()
        change = self._changes[sid]
        change.relast = True
        for sums in fold.settle(self._connection, sid, index):
            change.add(*sums)

    def _finalized(self, item: Prepared, event: SessionFinalized) -> None:
        sid = self._sid(event.session_id)
        self._owned(sid, event)
        if sid in self._unended:
            self._unended.discard(sid)
            self._waiting.append(self._row(sid, FINAL, "final", 0, item, event))
            fold.put_segments(self._connection, sid, event)
            n_segments = len({ref.index for ref in event.segments})
            self._connection.execute(_SET_ENDED, (event.outcome, event.view, event.at, n_segments, sid))
            return
        self._add(sid, FINAL, "final", item, event)
        own = self._connection.last_insert_rowid()
        of_view = fold.finals(self._connection, sid)[event.view]
        if of_view[0] != own:
            fold.set_event(self._connection, own, event)
        else:
            if len(of_view) > 1:
                fold.move_segments_out(self._connection, sid, of_view[1])
            fold.put_segments(self._connection, sid, event)
        fold.ending(self._connection, sid)

    def _discarded(self, item: Prepared, event: SessionDiscarded) -> None:
        sid = self._sid(event.session_id)
        self._change(sid, event.at)
        self._uses.event(sid, data=False)
        self._add(sid, DISCARD, "discard", item, event)
        self._connection.execute(
            "UPDATE sessions SET discarded_at = min(ifnull(discarded_at, ?1), ?1) WHERE sid = ?2", (event.at, sid)
        )

    def _late(self, item: Prepared, event: LateEvent) -> None:
        sid = self._sid(event.session_id)
        attached = isinstance(event, Attached)
        self._uses.event(sid, data=attached)
        if isinstance(event, Attached):
            self._uses.rows(sid, event.extents)
        self._add(sid, LATE, "late", item, event)
        late.apply(self._connection, sid, At(self._log, *self._place, item.seq, item.inner), event)

    def _checkpointed(self, _: Prepared, event: Checkpointed) -> None:
        self._connection.execute(
            "INSERT INTO checkpoints VALUES(?, ?, ?) ON CONFLICT DO UPDATE SET at = max(at, excluded.at)",
            (event.tag, self._log, event.at),
        )

    def _tools(self, item: Prepared, event: ToolsStored) -> None:
        self._connection.execute(
            "INSERT INTO tools VALUES(?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (event.key, self._log, item.seq, item.inner, item.offset),
        )

    # -- shared ------------------------------------------------------------------------------------------------------

    def _owned(self, sid: int, event: Owned) -> _Change:
        """Note an event of the session's owner."""
        self._uses.event(sid, data=True)
        return self._change(sid, event.at)

    def _change(self, sid: int, at: float) -> _Change:
        change = self._changes.get(sid)
        if change is None:
            change = self._changes[sid] = _Change()
        if change.last_at is None or at > change.last_at:
            change.last_at = at
        return change

    def _row(
        self,
        sid: int,
        slot: int,
        kind: str,
        live: int,
        item: Prepared,
        event: Owned | LateEvent,
        counts: tuple[int, int, int] = _NO_COUNTS,
        facts: tuple[Any, ...] = _NO_STEP,
    ) -> tuple[Any, ...]:
        place = self._log, item.seq, item.inner, item.offset
        return sid, slot, kind, live, event.at, *place, *map(fold.fit, (*counts, *facts)), item.data

    def _add(self, sid: int, slot: int, kind: str, item: Prepared, event: Owned | LateEvent) -> None:
        """Store an event at once; what waits goes first where it may be of the same slot."""
        if slot in (OPEN, FINAL):
            self._flush()
        self._connection.execute(_ADD, self._row(sid, slot, kind, 0, item, event))

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._connection.executemany(_ADD, waiting)

    def _top(self, sid: int) -> int:
        top = self._tops.get(sid)
        if top is None:
            found = self._connection.execute("SELECT max(slot) FROM events WHERE sid = ?", (sid,)).get
            top = self._tops[sid] = -1 if found is None else max(found, -1)
        return top

    def _sid(self, session_id: str) -> int:
        sid = self._known(session_id)
        if sid is None:
            sql = "INSERT INTO sessions(session_id) VALUES(?) RETURNING sid"
            sid = self._new(session_id, self._connection.execute(sql, (session_id,)).get)
        return sid

    def _known(self, session_id: str) -> int | None:
        sid = self._sids.get(session_id)
        if sid is None:
            found = self._connection.execute(_KNOWN, (session_id,)).fetchone()
            if found is not None:
                sid = self._sids[session_id] = found[0]
                if found[1]:
                    self._contested.add(found[0])
        return sid

    def _new(self, session_id: str, sid: int) -> int:
        self._sids[session_id], self._tops[sid] = sid, -1
        self._unended.add(sid)
        return sid
