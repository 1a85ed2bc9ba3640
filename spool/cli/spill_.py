"""``spool spill``."""

from __future__ import annotations

import signal
import threading

import click

from spool.cli.output import Column, json_option, write_rows
from spool.cli.places import location_argument, open_spool
from spool.spiller.elect import settle_in

_COLUMNS = (Column("stream", "STREAM"), Column("pack", "PACK", "count"))


@click.command("spill")
@location_argument
@click.option("--follow", is_flag=True, help="Go on until interrupted.")
@click.option("--until-idle", is_flag=True, help="With --follow: end when nothing needs a spiller.")
@click.option("--dry-run", is_flag=True, help="Only say what would be brought over.")
@click.option("--lock-fd", type=int, hidden=True)
@json_option
def command(
    location: str | None, follow: bool, until_idle: bool, dry_run: bool, lock_fd: int | None, as_json: bool
) -> None:
    """Bring sealed packs to the cold root, and evict, recover and collect on the way."""
    with open_spool(location, readonly=dry_run) as sp:
        if dry_run:
            found = [{"stream": stream, "pack": pack} for stream, packs in sp.backlog().items() for pack in packs]
            write_rows(found, _COLUMNS, as_json=as_json)
            return
        settle_in(beside=lock_fd is not None)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        sp.spill(until_idle=until_idle or not follow, stop=stop, lock_fd=lock_fd)
