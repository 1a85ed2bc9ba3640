"""``spool rebuild``."""

from __future__ import annotations

import click

from spool.cli.common import json_option, location_argument, open_spool, write_json


@click.command("rebuild")
@location_argument
@json_option
def command(location: str | None, as_json: bool) -> None:
    """Make the catalog anew from the commit logs; nothing else is touched."""
    with open_spool(location) as sp:
        facts = sp.rebuild()
    if as_json:
        write_json(facts)
    else:
        click.echo("  ".join(f"{name}: {value}" for name, value in facts.items()))
