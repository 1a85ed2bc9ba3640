"""``spool ls``."""

from __future__ import annotations

import click

from spool.cli.output import json_option, write_rows
from spool.cli.places import location_argument, open_spool


@click.command("ls")
@location_argument
@click.option(
    "--where",
    help="A filter such as \"reward > 0.5 and source = 'swe'\".",
)
@click.option("--all", "discarded", is_flag=True, help="List discarded sessions too.")
@click.option("--segments", is_flag=True, help="List segments instead of sessions.")
@click.option("--view", type=click.Choice(["lineage", "timeline"]), help="List the segments of this view.")
@json_option
def command(
    location: str | None, where: str | None, discarded: bool, segments: bool, view: str | None, as_json: bool
) -> None:
    """List sessions, oldest first, or segments of finalised sessions.

    A terminal shows the columns that fit. Elsewhere lines are tab-separated, with all these columns; JSON has every
    fact. NaN and infinities are text in it.
    """
    with open_spool(location) as sp:
        from spool.cli.facts import SEGMENT_COLUMNS, SESSION_COLUMNS, segment_facts, session_facts

        if segments or view:
            found = (segment_facts(ref) for ref in sp.segments(where, view))  # type: ignore[arg-type]
            write_rows(found, SEGMENT_COLUMNS, as_json=as_json)
        else:
            rows = (session_facts(row) for row in sp.sessions(where, discarded=discarded))
            write_rows(rows, SESSION_COLUMNS, as_json=as_json)
