"""``spool spill``."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import click

from spool.cli.exits import Exit
from spool.cli.output import Column, json_option, say, write_json, write_rows
from spool.cli.places import location_argument, open_spool
from spool.cli.progress import Progress
from spool.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.catalog import PackRow

_COLUMNS = (
    Column("stream", "STREAM"),
    Column("pack", "PACK", "number"),
    Column("state", "STATE"),
    Column("hot_bytes", "HOT", "size"),
    Column("stored_bytes", "COLD", "size"),
    Column("sealed_at", "SEALED", "time"),
)


@click.command("spill")
@location_argument
@click.option("--follow", is_flag=True, help="Go on until interrupted.")
@click.option("--until-idle", is_flag=True, hidden=True)
@click.option("--dry-run", is_flag=True, help="Only say what would be brought over.")
@click.option("--lock-fd", type=int, hidden=True)
@json_option
def command(
    location: str | None, follow: bool, until_idle: bool, dry_run: bool, lock_fd: int | None, as_json: bool
) -> int:
    """Bring over to the cold root what is sealed now, then end.

    On the way dead writers' packs are sealed, idle sessions end, and what retention lets go is deleted. One process
    at a time does this for a hot root: where a spiller works already, it will bring everything over by itself.

    Exits 5 where a pack is not as it was recorded; it stays in the hot root.
    """
    goes_on = (follow or until_idle) and not dry_run
    stop = threading.Event()
    if goes_on:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    if goes_on:
        from spool.spiller.elect import settle_in

        settle_in(beside=lock_fd is not None)
    with open_spool(location, readonly=dry_run) as sp, Progress("brought over") as progress:
        packs = sp.spill(
            follow=follow,
            until_idle=until_idle,
            dry_run=dry_run,
            stop=stop,
            lock_fd=lock_fd,
            progress=progress.update,
        )
    if goes_on:
        return Exit.OK
    left = [] if dry_run else [row for row in packs if row.state == "sealed"]
    _print(packs, len(left), dry_run=dry_run, as_json=as_json)
    return Exit.INTEGRITY if left else Exit.OK


def _print(packs: Sequence[PackRow], n_left: int, *, dry_run: bool, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [{column.key: getattr(row, column.key) for column in _COLUMNS} for row in packs]
    if as_json:
        write_json({"dry_run": dry_run, "packs": rows})
        return
    if rows:
        write_rows(rows, _COLUMNS)
    n_bytes = sum(row.hot_bytes or 0 for row in packs)
    would = "would be" if dry_run else "were"
    say(f"{len(packs) - n_left} packs, {format_size(n_bytes)} in the hot root, {would} brought over")
    if n_left:
        say(f"{n_left} packs are damaged and stay in the hot root: `spool verify --deep` says where")
