"""The rows that events name, and which steps name them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spool.model.events import Attached, Event, StepCommitted


class Whole(NamedTuple):
    """A whole extent: rows ``[row, row + n)`` of a stored array and their checksum."""

    stream: str
    array: str
    row: int
    n: int
    crc: int


class Named(NamedTuple):
    """What all events name.

    Attributes:
        n_sessions: how many sessions they are about.
        extents: the ids of the steps that name each extent.
    """

    n_sessions: int
    extents: dict[Whole, list[str]]


def named_rows(events: Iterable[Event]) -> Named:
    """Return what ``events`` name; an extent that several steps share, or cut, is there once."""
    sessions: set[str] = set()
    extents: dict[Whole, list[str]] = {}
    for event in events:
        sessions.add(getattr(event, "session_id", ""))
        if isinstance(event, StepCommitted | Attached):
            owner = f"{event.session_id}{_part(event)}"
            for array, runs in event.extents.items():
                for extent in runs:
                    if extent.n:
                        extents.setdefault(Whole(extent.stream, array, *extent.whole, extent.crc), []).append(owner)
    return Named(len(sessions - {""}), extents)


def _part(event: StepCommitted | Attached) -> str:
    if isinstance(event, StepCommitted):
        return f":{event.index}"
    return event.target if event.target.startswith(":") else f"@{event.target}"
