"""``spool tail``."""

from __future__ import annotations

import select
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from spool.cli.output import json_option, plain, pretty, to_json
from spool.cli.places import location_argument, open_spool
from spool.look.text import count, iso_time, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from spool.catalog.news import News
    from spool.handle import Spool

_NAMES = (
    "at", "what", "session_id", "state", "outcome", "reward", "n_steps", "n_tokens", "n_segments", "source", "group_id",
    "sample_index", "rollout_step",
)  # fmt: skip


MOST = 1_000_000
"""Sessions that are told of at once."""


@click.command("tail")
@location_argument
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens, until interrupted.")
@click.option("-n", "--lines", type=click.IntRange(0, MOST), default=10, show_default=True, help="So many sessions.")
@click.option("--where", help="Only of the sessions that a filter chooses, as they are then.")
@json_option
def command(location: str | None, follow: bool, lines: int, where: str | None, as_json: bool) -> None:
    """Print the newest sessions, a line each, oldest first.

    A line says when and what (opened, finished, discarded), the session, its outcome, steps, tokens, reward and source.

    With -f it goes on, with a line for each session that is opened, resumed by another process, finished or discarded,
    and for each reward that is given. What other nodes do is seen when they publish it. Where a run is started anew in
    the same folder, that is told, and the new one follows from its beginning. It ends when whoever reads it is gone, or
    with Ctrl-C, and exits 130 then.

    JSON is an object a line, with times in seconds since the epoch. Lines that are not for a terminal are tab-separated
    under a heading.
    """
    with ExitStack() as opened:
        from spool.look.follow import follow as following
        from spool.look.follow import newest

        def anew() -> Spool:
            return opened.enter_context(open_spool(location))

        sp = anew()
        show, found = _shower(as_json=as_json), newest(sp, lines, where)
        _, mark = sp.news()
        for item in found:
            show(item)
        sys.stdout.flush()
        for item in following(sp, mark, where, wait=_Listener(), anew=anew) if follow else ():
            show(item)
            sys.stdout.flush()


class _Listener:
    """Waits, and notices that whoever reads the output is gone, even while there is nothing to write."""

    def __init__(self) -> None:
        self._poll = select.poll()
        try:
            self._poll.register(sys.stdout.fileno(), 0)
        except (OSError, ValueError):
            self._poll = select.poll()

    def __call__(self, wait_s: float) -> bool:
        return any(event & (select.POLLERR | select.POLLNVAL) for _, event in self._poll.poll(wait_s * 1000))


def _shower(*, as_json: bool) -> Callable[[News], None]:
    if as_json:
        return lambda item: _write(to_json(_facts(item)))
    if sys.stdout.isatty():
        return lambda item: _write(_for_people(item))
    _write("\t".join(_NAMES))
    return lambda item: _write("\t".join(map(plain, (_facts(item) | {"at": iso_time(item.at)}).values())))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")


def _facts(item: News) -> dict[str, Any]:
    own = {"at": item.at, "what": item.what, "reward": item.reward}
    return {name: own[name] if name in own else getattr(item.row, name) for name in _NAMES}


def _for_people(item: News) -> str:
    row = item.row
    parts = [iso_time(item.at), f"{item.what:<9}", one_line(row.session_id)]
    if item.what in ("finished", "discarded") and row.outcome:
        parts.append(row.outcome)
    if row.n_steps:
        parts.append(f"{count(row.n_steps)} steps, {count(row.n_tokens)} tokens")
    if item.reward is not None or item.what == "reward":
        parts.append(f"reward {pretty(item.reward) or 'taken back'}")
    if row.source:
        parts.append(one_line(row.source))
    return "  ".join(parts)
