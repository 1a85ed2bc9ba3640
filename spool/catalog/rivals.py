"""Sessions that two owners recorded at once, as two nodes do that were given the same id: the record of one counts.

An opening says after which one its owner went on, so the openings of a session are a chain. Where it forks, the branch
counts that has the first ending, else the first step; its steps are never mixed with those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import apsw

from spool.catalog import fold
from spool.catalog.fold import ORDER, decode_event
from spool.catalog.rows import Located
from spool.catalog.schema import LATE, OPEN
from spool.model.events import SessionFinalized, SessionOpened, StepCommitted

EVENTS = f"""
SELECT l.stream, l.pack, e.seq, e.inner, e.offset, e.event, e.id, e.slot, e.kind, e.live
FROM events e JOIN logs l ON l.id = e.log WHERE e.sid = ?1 AND e.slot > {LATE} ORDER BY {ORDER}"""  # noqa: S608
OPENINGS = f"""
SELECT l.stream, l.pack, e.seq, e.inner, e.offset, e.event
FROM events e JOIN logs l ON l.id = e.log WHERE e.sid = ?1 AND e.slot = {OPEN} ORDER BY {ORDER}"""  # noqa: S608

_ROOT = -1


def located(row: tuple[Any, ...]) -> Located:
    """Return the event of a row that begins with its place, in the order of `EVENTS`."""
    stream, pack, seq, inner, offset, event = row[:6]
    return Located(stream=stream, pack=pack, seq=seq, inner=inner, offset=offset, event=decode_event(event))


def chain(events: Sequence[Located]) -> tuple[list[int], set[int]]:
    """Return which of a session's events count.

    Args:
        events: of its owners, in the order of `spool.catalog.fold.ORDER`.

    Returns:
        The openings that count, one after the other, and all events that do not count, by their place in ``events``.
    """
    openings = [n for n, item in enumerate(events) if isinstance(item.event, SessionOpened)]
    after = _predecessors(events, openings)
    followers: dict[int, list[int]] = {}
    for n, before in after.items():
        followers.setdefault(before, []).append(n)
    if all(len(found) == 1 for found in followers.values()):
        return _walk(followers, min), set()
    owner = [_turn(item, events, openings) for item in events]
    kept = _walk(followers, lambda found: min(found, key=lambda n: _claim(n, followers, owner, events)))
    counts = {None, *kept}
    return kept, {n for n, turn in enumerate(owner) if turn not in counts}


def _predecessors(events: Sequence[Located], openings: Sequence[int]) -> dict[int, int]:
    """Return by opening the one it went on after; one whose predecessor is not known goes behind what is."""
    by_name = {(events[n].stream, _opened(events[n]).at): n for n in openings}
    after: dict[int, int] = {}
    orphans = []
    for n in openings:
        event = _opened(events[n])
        before = None if event.after is None else by_name.get(event.after)
        if before is not None and before != n:
            after[n] = before
        elif event.resumed:
            orphans.append(n)
        else:
            after[n] = _ROOT
    for n in orphans:
        after[n] = _end(after, n)
    return after


def _end(after: dict[int, int], orphan: int) -> int:
    """Return the end of the chain that begins first, but for what follows the orphan itself."""
    end = _ROOT
    while found := [n for n, before in after.items() if before == end and n != orphan]:
        end = min(found)
    return end


def _turn(item: Located, events: Sequence[Located], openings: Sequence[int]) -> int | None:
    """Return the opening whose owner recorded an event; None where that is not known any more."""
    own = [n for n in openings if events[n].stream == item.stream]
    before = [n for n in own if _order(events[n]) <= _order(item)]
    if before:
        return max(before, key=lambda n: _order(events[n]))
    return min(own, key=lambda n: _order(events[n])) if own else None


def _claim(
    opening: int, followers: dict[int, list[int]], owner: Sequence[int | None], events: Sequence[Located]
) -> tuple[int, int, int]:
    """Return what an opening's branch has first: an ending, a step, itself."""
    branch, left = set[int](), [opening]
    while left:
        branch.add(left[-1])
        left += followers.get(left.pop(), [])

    def first(kind: type) -> int:
        of_kind = (n for n, item in enumerate(events) if owner[n] in branch and isinstance(item.event, kind))
        return next(of_kind, len(events))

    return first(SessionFinalized), first(StepCommitted), opening


def _walk(followers: dict[int, list[int]], choose: Callable[[list[int]], int]) -> list[int]:
    found, at = [], _ROOT
    while at in followers:
        at = choose(followers[at])
        found.append(at)
    return found


def _order(item: Located) -> tuple[int, int, int]:
    """Return where an event is in its stream."""
    return item.pack, item.seq, item.inner


def _opened(item: Located) -> SessionOpened:
    return fold.as_kind(SessionOpened, item.event)


def look(connection: apsw.Connection, sid: int) -> bool:
    """Note whether the openings of a session fork, and return it."""
    rows = connection.execute(OPENINGS, (sid,)).fetchall()
    after = list(_predecessors([located(row) for row in rows], range(len(rows))).values())
    found = len(set(after)) < len(after)
    connection.execute("UPDATE sessions SET contested = ? WHERE sid = ?", (found, sid))
    return found


def settle(connection: apsw.Connection, sid: int) -> None:
    """Say again what a session is whose openings fork, or forked: its identity, and which of its steps count."""
    rows = connection.execute(EVENTS, (sid,)).fetchall()
    events = [located(row) for row in rows]
    openings, lost = chain(events)
    fold.set_opening(connection, sid, [_opened(events[n]) for n in openings])
    taken = {slot for n, (*_, slot, kind, _) in enumerate(rows) if kind == "undo" and n not in lost}
    for n, (*_, event_id, slot, kind, live) in enumerate(rows):
        if kind != "step":
            continue
        now = n not in lost and slot not in taken
        if now:
            taken.add(slot)
        if now != live:
            connection.execute("UPDATE events SET live = ? WHERE id = ?", (now, event_id))
    fold.sums(connection, [sid])
    fold.last_step(connection, sid)
