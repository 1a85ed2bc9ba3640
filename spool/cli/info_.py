"""``spool info``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spool.cli.output import json_option, write_facts, write_json
from spool.cli.places import location_argument, open_spool

if TYPE_CHECKING:
    from spool.cli.output import Kind


@click.command("info")
@location_argument
@json_option
def command(location: str | None, as_json: bool) -> None:
    """Say what the spool is, and how much it holds."""
    with open_spool(location) as sp:
        facts = sp.info()
    if as_json:
        write_json(facts)
    else:
        write_facts((name, value, _kind(name)) for name, value in facts.items())


def _kind(name: str) -> Kind:
    return "count" if name.startswith("n_") else "time" if name.endswith("_at") else "text"
