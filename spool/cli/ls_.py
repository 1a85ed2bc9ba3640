"""``spool ls``."""

from __future__ import annotations

import click

from spool.cli.common import json_option, location_argument, open_spool, write_rows

COLUMNS = (
    "session_id",
    "state",
    "outcome",
    "reward",
    "n_steps",
    "n_segments",
    "n_tokens",
    "group_id",
    "sample_index",
    "source",
)


@click.command("ls")
@location_argument
@click.option("--where", help="A filter such as \"reward > 0.5 and source = 'swe'\".")
@click.option("--all", "discarded", is_flag=True, help="List discarded sessions too.")
@click.option("--segments", is_flag=True, help="List segments instead of sessions.")
@click.option("--view", type=click.Choice(["lineage", "timeline"]), help="With --segments: of this view.")
@json_option
def command(
    location: str | None, where: str | None, discarded: bool, segments: bool, view: str | None, as_json: bool
) -> None:
    """List sessions, oldest first, or segments."""
    with open_spool(location) as sp:
        if segments or view:
            from spool.cli.facts import segment_facts

            found = (segment_facts(ref) for ref in sp.segments(where, view))  # type: ignore[arg-type]
            columns = ("id", "n_tokens", "response_length", "trainable_tokens", "reward", "outcome", "finish_reason")
            write_rows(found, columns, as_json=as_json)
        else:
            from spool.cli.facts import session_facts

            write_rows(
                (session_facts(row) for row in sp.sessions(where, discarded=discarded)), COLUMNS, as_json=as_json
            )
