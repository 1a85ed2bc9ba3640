"""Segments of a view that sessions were not finalised with: made from their steps, then filtered like recorded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import get_args

from spool.arguments import one_of
from spool.catalog import Catalog, LogItem, SessionRow
from spool.model.events import Annotated, Event, Released, SessionFinalized
from spool.model.refs import SegmentRef
from spool.rollout.state import SessionState
from spool.rollout.views import View, segments

PAGE = 256


def derived_segments(
    catalog: Catalog, recorded: Callable[[str], SessionState], where: str | None, view: View
) -> Iterator[SegmentRef]:
    """Iterate the segments of ``view`` of all finalised sessions, in the order they were finalised.

    A page of sessions at a time goes through a catalog in memory, so that a filter means what it always means.

    Args:
        catalog: the spool's.
        recorded: returns a session's state by id.
        where: a filter expression that was checked; see `Catalog.check_filter`.
        view: the view.

    Raises:
        InputError: there is no such view; raised by the call.
    """
    one_of("view", view, get_args(View))
    rows = catalog.sessions("state = 'final'", order=("finished_at",))
    return (ref for page in _pages(rows) for ref in _filtered(catalog, recorded, page, where, view))


def _pages(rows: Iterator[SessionRow]) -> Iterator[list[SessionRow]]:
    while page := list(islice(rows, PAGE)):
        yield page


def _filtered(
    catalog: Catalog, recorded: Callable[[str], SessionState], page: list[SessionRow], where: str | None, view: View
) -> Iterator[SegmentRef]:
    events = [event for row in page for event in _events(catalog, recorded(row.session_id), view)]
    scratch = Catalog.open("", readonly=True)
    scratch.ingest("derived", 0, start=0, end=1, items=[LogItem(seq, 0, event) for seq, event in enumerate(events)])
    yield from scratch.segments(where, view)
    scratch.close()


def _events(catalog: Catalog, state: SessionState, view: View) -> Iterator[Event]:
    """Yield what a session's log would say, had it been finalised with ``view``."""
    final, session_id = state.finalized, state.session_id
    assert final is not None
    made = final.segments if final.view == view else tuple(segments(state, view))
    yield state.opened
    yield SessionFinalized(session_id, final.at, final.outcome, view, made)
    if facts := catalog.facts(session_id):
        yield Annotated(session_id, final.at, facts)
    for ref in made:
        name = ref.key
        if own := catalog.facts(session_id, name):
            yield Annotated(session_id, final.at, own, name)
    yield from catalog.attachments(session_id)
    for release in catalog.released(session_id):
        yield Released(session_id, release.at, (release.segment,), None if release.due else release.tag)
