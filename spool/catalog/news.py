"""What was taken in lately: sessions that began and ended, and rewards, in the order in which they became known."""

# ruff: noqa: S608 - every part of these queries is a constant, or made by `where` from constants

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from spool.catalog.database import Execute
from spool.catalog.fold import decode_event
from spool.catalog.query import SESSION, session_rows
from spool.catalog.rows import SessionRow, as_reward
from spool.catalog.schema import DISCARD, FINAL, LATE, OPEN
from spool.catalog.where import compile_where
from spool.model.events import Annotated

MOST = 4096
"""Events that one call looks at."""

Happening = Literal["opened", "resumed", "finished", "discarded", "reward"]

_SINCE = f"""
SELECT e.id, e.sid, e.slot, e.at, CASE WHEN e.slot = {LATE} THEN e.event END,
    (SELECT min(o.id) FROM events o WHERE o.sid = e.sid AND o.slot = e.slot) = e.id
FROM events e WHERE e.id > ? AND e.id <= ? AND e.slot < 0 ORDER BY e.id"""
_SAID_BEFORE = f"SELECT 1 FROM events WHERE sid = ? AND slot = {LATE} AND id <= ? LIMIT 1"
_ORDER: tuple[Happening, ...] = ("opened", "resumed", "finished", "reward", "discarded")


class News(Struct, frozen=True, kw_only=True):
    """Something that happened to a session.

    Attributes:
        what: ``resumed`` is said where another process goes on with it.
        at: when, seconds since the epoch, by the clock of who did it.
        row: the session as it is known now.
        reward: of ``reward``, the one that was given; else the one that is known now.
    """

    what: Happening
    at: float
    row: SessionRow
    reward: float | None


def newest_mark(run: Execute) -> int:
    """Return the mark behind everything that is known."""
    return int(run("SELECT ifnull(max(id), 0) FROM events")[0][0])


def news(run: Execute, mark: int, where: str | None = None) -> tuple[list[News], int]:
    """Return what became known behind a mark, and the mark behind that; ask again until the mark stays.

    Args:
        run: runs a statement.
        mark: as `newest_mark` or the last call returned it.
        where: a filter of sessions, as they are now.

    Raises:
        InputError: the filter does not parse.
    """
    newest = newest_mark(run)
    # what was deleted, or an index that was made anew, may leave less than there was
    until = min(newest, mark + MOST)
    if newest <= mark:
        return [], newest
    found = [row for row in run(_SINCE, (mark, until)) if row[2] in (LATE, OPEN, FINAL, DISCARD)]
    rows = _rows(run, {row[1] for row in found}, where)
    told = [item for event in found if event[1] in rows for item in _told(run, event, rows[event[1]], mark)]
    # streams are taken in one after the other: what an annotator said may come before what it is about
    return sorted(told, key=lambda item: (item.at, _ORDER.index(item.what))), until


def _rows(run: Execute, sids: set[int], where: str | None) -> dict[int, SessionRow]:
    known, chosen = {}, sorted(sids)
    for sid in chosen:
        if where is not None:
            match = compile_where(where, SESSION)
            if not run(f"SELECT 1 FROM sessions s WHERE s.sid = ? AND {match.sql}", (sid, *match.values)):
                continue
        for row in session_rows(run, [sid]):
            known[sid] = row
    return known


def _told(run: Execute, event: tuple[Any, ...], row: SessionRow, mark: int) -> list[News]:
    _, sid, slot, at, data, first = event
    if slot == LATE:
        late = decode_event(data)
        if not isinstance(late, Annotated) or late.segment or "reward" not in late.facts:
            return []
        return [News(what="reward", at=at, row=row, reward=as_reward(late.facts["reward"]))]
    if slot != OPEN:
        return (
            [News(what="finished" if slot == FINAL else "discarded", at=at, row=row, reward=row.reward)]
            if first
            else []
        )
    told = [News(what="opened" if first else "resumed", at=at, row=row, reward=row.reward)]
    if first and row.reward is not None and run(_SAID_BEFORE, (sid, mark)):
        told.append(News(what="reward", at=at, row=row, reward=row.reward))
    return told
