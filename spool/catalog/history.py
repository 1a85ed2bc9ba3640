"""The events of one session, in the order in which one owner would have recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from spool.catalog import rivals
from spool.catalog.database import Execute
from spool.catalog.fold import ORDER, decode_event, decode_ref
from spool.catalog.rows import Located
from spool.catalog.schema import LATE
from spool.model.events import (
    Annotated,
    Attached,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    Single,
    StepCommitted,
    StepDiscarded,
)

LATE_EVENTS = f"""
SELECT e.event FROM events e JOIN logs l ON l.id = e.log WHERE e.sid = ? AND e.slot = {LATE} ORDER BY {ORDER}"""  # noqa: S608


def session_events(run: Execute, sid: int) -> list[Located]:
    """Return what the owners of a session recorded, the same whatever the order in which it was ingested.

    Openings come first, each behind the one its owner went on after, then steps by index, whatever the clocks of
    several owners said, withdrawals, the first ending of each view, and a discard. What two owners recorded twice is
    returned once, as the first did: a step of an index, a withdrawal, a discard. Of owners that did not know of each
    other, one counts; see `spool.catalog.rivals`.
    """
    events = [rivals.located(row) for row in run(rivals.EVENTS, (sid,))]
    chain, lost = rivals.chain(events)
    kinds: dict[type[Single], dict[Any, Located]] = {}
    for n, item in enumerate(events):
        if n not in lost:
            kinds.setdefault(type(item.event), {}).setdefault(_key(item), item)

    def found(kind: type[Single]) -> list[Located]:
        return list(kinds.get(kind, {}).values())

    opened = [events[n] for n in chain]
    steps = sorted(found(StepCommitted), key=lambda item: getattr(item.event, "index", 0))
    finals = [_with_segments(run, sid, item) for item in found(SessionFinalized)]
    return [*opened, *steps, *found(StepDiscarded), *finals, *found(SessionDiscarded)]


def openings(run: Execute, sid: int) -> list[Located]:
    """Return all openings of a session, those of owners that do not count too."""
    return [rivals.located(row) for row in run(rivals.OPENINGS, (sid,))]


def _place(item: Located) -> tuple[str, int, int, int]:
    return item.stream, item.pack, item.seq, item.inner


def late_events(run: Execute, sid: int) -> list[Annotated | Attached]:
    """Return a session's annotations and late arrays, in the order in which the last wins."""
    events = [decode_event(row[-1]) for row in run(LATE_EVENTS, (sid,))]
    return [event for event in events if isinstance(event, Annotated | Attached)]


def _key(item: Located) -> object:
    event = item.event
    if isinstance(event, StepCommitted | StepDiscarded):
        return event.index
    if isinstance(event, SessionFinalized):
        return event.view
    return _place(item) if isinstance(event, SessionOpened) else None


def _with_segments(run: Execute, sid: int, item: Located) -> Located:
    event = item.event
    assert isinstance(event, SessionFinalized)
    stored: Sequence[tuple[bytes]] = run(
        "SELECT ref FROM segments WHERE sid = ? AND view = ? ORDER BY idx", (sid, event.view)
    )
    return replace(item, event=replace(event, segments=tuple(decode_ref(data) for (data,) in stored)))
