"""``spool recover``."""

from __future__ import annotations

import click
import msgspec

from spool.cli.common import json_option, location_argument, open_spool, write_rows
from spool.cli.exits import Exit


@click.command("recover")
@location_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
def command(location: str | None, dry_run: bool, as_json: bool) -> int:
    """Seal what dead writers left, drop torn ends, end idle sessions. Live writers are left alone."""
    with open_spool(location) as sp:
        found = sp.recover(dry_run=dry_run)
    rows = [msgspec.structs.asdict(item) for item in found]
    write_rows(rows, tuple(rows[0]) if rows else ("stream",), as_json=as_json)
    return Exit.INTEGRITY if any(row.get("shortfalls") for row in rows) else Exit.OK
