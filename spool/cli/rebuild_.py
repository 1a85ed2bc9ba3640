"""``spool rebuild``."""

from __future__ import annotations

import click

from spool.cli.exits import Exit
from spool.cli.output import json_option, say, write_facts, write_json
from spool.cli.places import location_argument, open_spool


@click.command("rebuild")
@location_argument
@click.option("--dry-run", is_flag=True, help="Only say what the catalog would hold.")
@json_option
def command(location: str | None, dry_run: bool, as_json: bool) -> int:
    """Make the catalog anew from the commit logs.

    Nothing else is touched. Exits 5 where logs or records are damaged: what they held is not in the catalog.
    """
    with open_spool(location, readonly=dry_run) as sp:
        facts = sp.rebuild()
    if as_json:
        write_json(facts)
    else:
        for problem in facts["problems"]:
            say(problem["message"])
        write_facts((name, value, "count") for name, value in facts.items() if name != "problems")
    lost = any(problem["kind"] != "torn" for problem in facts["problems"])
    return Exit.INTEGRITY if lost else Exit.OK
