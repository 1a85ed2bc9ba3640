"""``spool du``."""

from __future__ import annotations

import click

from spool.cli.common import json_option, location_argument, open_spool, write_rows


@click.command("du")
@location_argument
@json_option
def command(location: str | None, as_json: bool) -> None:
    """Say where the bytes are: by stream and field, against the int32 arrays that engines send."""
    with open_spool(location) as sp:
        rows = sp.usage()
    write_rows(rows, ("stream", "field", "rows", "stored_bytes", "sent_bytes", "file_bytes"), as_json=as_json)
