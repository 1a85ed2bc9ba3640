"""Names of sessions, steps and segments -> references."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from spool.errors import NotFoundError
from spool.model.refs import SegmentRef, StepRef, ref_from_json

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.rollout.views import View

Found = StepRef | SegmentRef
Thing = str | StepRef | SegmentRef
"""What is looked at: a session, by its id; a step, by a reference that need not have all its extents; a segment."""

_INDEX = re.compile(r"[0-9]{1,18}")
_VIEWS: tuple[View, ...] = ("lineage", "timeline")


def named(sp: Spool, text: str) -> list[Found] | None:
    """Return the references that a text names, or None where it names nothing here.

    In this order: the session of exactly this id (its final segments, those of ``lineage`` while it lives); a step,
    ``SESSION:INDEX``; a segment, ``SESSION@VIEW/INDEX``, of those that `of_view` returns; a reference as JSON.

    Raises:
        NotFoundError: the session is recorded, and has no such step, view or segment.
        InputError: it is JSON and not a reference.
    """
    if is_session(sp, text):
        return list(sp.final_segments(text))
    if part := _step(sp, text) or _segment(sp, text):
        return part
    return parsed(text) if text.startswith("{") else None


def refs_of(sp: Spool, thing: Thing) -> list[Found]:
    """Return the references of a thing: of a session its final segments, see `Spool.final_segments`.

    A text is a session's id here and nothing else, and a step or segment is found whatever other sessions are called.

    Raises:
        NotFoundError: it is not recorded.
        ReleasedError: it was discarded, or deleted.
    """
    if isinstance(thing, str):
        return list(sp.final_segments(thing))
    return [thing] if isinstance(thing, SegmentRef) else _steps(sp, thing.session_id, thing.index, discarded=True)


def name_of(thing: Thing) -> str:
    """Return what a thing is called: the session's id, ``SESSION:INDEX``, or ``SESSION@VIEW/INDEX``."""
    return thing if isinstance(thing, str) else thing.id


def argument_of(sp: Spool, thing: Thing) -> str:
    """Return how the command line names a thing: its name, or where a session has that very id, its reference."""
    name = name_of(thing)
    if isinstance(thing, str) or not is_session(sp, name):
        return name
    return refs_of(sp, thing)[0].to_json()


def is_session(sp: Spool, text: str) -> bool:
    """Whether a session of exactly this id is recorded."""
    return bool(text) and not any("\ud800" <= char <= "\udfff" for char in text) and sp.find_session(text) is not None


def parsed(text: str) -> list[Found]:
    """Read one reference as JSON, or one a line, as ``spool show --ref`` prints them.

    Raises:
        InputError: it is something else.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > 1 and all(line.lstrip().startswith('{"type"') for line in lines):
        return [ref_from_json(line) for line in lines]
    return [ref_from_json(text)]


def _step(sp: Spool, text: str) -> list[Found]:
    session_id, _, index = text.rpartition(":")
    if not _INDEX.fullmatch(index) or not is_session(sp, session_id):
        return []
    return _steps(sp, session_id, int(index))


def _steps(sp: Spool, session_id: str, index: int, *, discarded: bool = False) -> list[Found]:
    steps = sp.steps(session_id, discarded=discarded)
    chosen: list[Found] = [step for step in steps if step.index == index]
    if not chosen:
        raise NotFoundError(
            f"session {session_id!r} has no step {index}; its steps: {_indexes(s.index for s in steps)}"
        )
    return chosen


def _segment(sp: Spool, text: str) -> list[Found]:
    session_id, _, rest = text.rpartition("@")
    name, _, index = rest.partition("/")
    view = next((view for view in _VIEWS if view == name), None)
    if view is None and _INDEX.fullmatch(index) and is_session(sp, session_id):
        raise NotFoundError(f"session {session_id!r} has no view {name!r}; views are {', '.join(_VIEWS)}", ref=text)
    if view is None or not _INDEX.fullmatch(index) or not is_session(sp, session_id):
        return []
    segments, _ = of_view(sp, session_id, view)
    chosen: list[Found] = [ref for ref in segments if ref.index == int(index)]
    if not chosen:
        shown = _indexes(ref.index for ref in segments)
        raise NotFoundError(f"session {session_id!r} has no {view} segment {index}; it has {shown}")
    return chosen


def of_view(sp: Spool, session_id: str, view: View, *, discarded: bool = False) -> tuple[list[SegmentRef], bool]:
    """Return the segments of a session by a view, and whether it was finalised with them.

    They are those that it was finalised with, whatever the options, where that was with this view; else those that the
    view makes of its steps by default.

    Args:
        sp: the spool.
        session_id: the session; it is recorded.
        view: the view.
        discarded: of a discarded session too, to look at it.

    Raises:
        ReleasedError: it was discarded, and that was not asked for; or it was deleted.
    """
    row = sp.find_session(session_id)
    if row is not None and row.finished_at is not None and row.view == view:
        return sp.final_segments(session_id, discarded=discarded), True
    return sp.view(session_id, view, discarded=discarded), False


def _indexes(found: Iterable[int]) -> str:
    shown = [str(index) for index in found]
    return ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "") if shown else "none"


def find(sp: Spool, text: str) -> list[Found]:
    """Return the references that a text names; see `named`.

    Raises:
        NotFoundError: it names nothing here.
        InputError: it is JSON and not a reference.
    """
    found = named(sp, text)
    if found is None:
        raise NotFoundError(f"no session, step or segment {text!r} in {sp.config.url}", ref=text)
    return found
