"""What happens in a spool, as it happens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spool.catalog.news import News
from spool.errors import ReplacedError, SpoolError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spool.catalog import SessionRow
    from spool.handle import Spool

log = logging.getLogger("spool.look")

SHORTEST_S = 0.1
LONGEST_S, LONGEST_COLD_S = 1.0, 5.0
"""How long the next look waits: shortly after something happened, ever longer while nothing does."""


def newest(sp: Spool, n: int, where: str | None = None) -> list[News]:
    """Return the sessions that came last, oldest first, and how each stands, discarded ones included.

    Args:
        sp: the spool.
        n: how many.
        where: a filter of sessions.

    Raises:
        InputError: the filter does not parse.
    """
    return [_as_it_is(row) for row in reversed(sp.listing(where, limit=n).rows(0, n))]


def _as_it_is(row: SessionRow) -> News:
    if row.state == "discarded":
        return News(what="discarded", at=row.last_at, row=row, reward=row.reward)
    if row.finished_at is not None:
        return News(what="finished", at=row.finished_at, row=row, reward=row.reward)
    return News(what="opened", at=row.opened_at, row=row, reward=row.reward)


def follow(
    sp: Spool, mark: int, where: str | None, *, wait: Callable[[float], bool], anew: Callable[[], Spool]
) -> Iterator[News]:
    """Yield what happens behind a mark, as it becomes known; go on until ``wait`` says that nobody listens any more.

    A root that cannot be read is logged once, and asked again. Where another spool is in its place, as of a run that
    was started anew, that is logged, and it goes on with that one from its beginning.

    Args:
        sp: the spool.
        mark: as `Spool.news` returned it.
        where: a filter of sessions, as they are when something happens.
        wait: waits for so many seconds; returns true to end.
        anew: opens what is at the spool's place now; who calls closes it.
    """
    longest_s = LONGEST_S if sp.config.spill is None and sp.config.root is not None else LONGEST_COLD_S
    pause_s, failed = SHORTEST_S, False
    while True:
        before = mark
        try:
            found, mark = sp.news(mark, where)
            failed = False
        except ReplacedError:
            found, there = [], _opened(anew)
            sp, mark = (sp, mark) if there is None else (there, 0)
        except StorageError as error:
            if not failed:
                log.warning("%s; it is tried again", error)
            found, failed = [], True
        yield from found
        pause_s = SHORTEST_S if mark != before else min(pause_s * 1.5, longest_s)
        if wait(0.0 if found else pause_s):
            return


def _opened(anew: Callable[[], Spool]) -> Spool | None:
    """Open the spool that is there now; None where it is not to be opened yet, or was removed again."""
    try:
        sp = anew()
    except SpoolError:
        return None
    log.warning(
        "another spool is at %s now, as of a run that was started anew: it follows from its beginning", sp.config.url
    )
    return sp
