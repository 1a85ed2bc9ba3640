"""``spool info``."""

from __future__ import annotations

import click

from spool.cli.common import json_option, location_argument, open_spool, write_json


@click.command("info")
@location_argument
@json_option
def command(location: str | None, as_json: bool) -> None:
    """Say what the spool is: id, format, streams, sessions, fields, bytes."""
    with open_spool(location) as sp:
        facts = sp.info()
    if as_json:
        write_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name}: {value}")
