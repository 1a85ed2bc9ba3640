"""``spool gc``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from spool.cli.output import Column, json_option, say, write_json_rows, write_rows
from spool.cli.places import location_argument, open_spool
from spool.cli.progress import Progress
from spool.sizes import format_size

_SHOWN = 3
_COLUMNS = (
    Column("stream", "STREAM"),
    Column("pack", "PACK", "number"),
    Column("go", "GOES"),
    Column("why", "WHY"),
    Column("n_bytes", "BYTES", "size"),
    Column("held_by", "HELD BY"),
    Column("sessions"),
)


@click.command("gc")
@location_argument
@click.option("--dry-run", is_flag=True, help="Only say what would go, and why the rest stays.")
@json_option
def command(location: str | None, dry_run: bool, as_json: bool) -> None:
    """Delete the packs that retention lets go, in the hot and in the cold root.

    A pack goes when all sessions in it are over: released, discarded, failed long ago; or by its age, where the option
    ?retention= says so. Of a hot root its own packs are looked at; of a cold root all, by one process at a time. Each
    sealed pack is listed with the reason, with the sessions that hold it, and with its bytes in both tiers. Fact files
    that stay, the late facts of processes without a hot root, are only counted.

    A multimodal unit goes when no live session names it, and it was last put or named longer ago than ?units_age_s=;
    those that go are one line.

    Objects leave the cold root when ?grace_s= is over: run it again, or leave it to a spiller.
    """
    with open_spool(location, readonly=dry_run) as sp, Progress("deleted") as progress:
        decisions, spill = sp.gc(dry_run=dry_run, progress=progress.update), sp.config.spill
    rows: list[dict[str, Any]] = [
        {
            "stream": item.stream,
            "pack": item.pack,
            "n_bytes": item.n_bytes,
            "go": item.go,
            "why": item.why,
            "sessions": list(item.sessions),
        }
        for item in decisions
    ]
    if as_json:
        write_json_rows(rows)
        return
    from spool.logs.keys import is_fact_stream
    from spool.stores.units import ACCOUNT

    staying = [item for item in decisions if is_fact_stream(item.stream) and not item.go]
    listed = [row for row in rows if row["go"] or not is_fact_stream(row["stream"])]
    write_rows(({**row, "held_by": _few(row["sessions"])} for row in listed), _COLUMNS)
    going = [item for item in decisions if item.go]
    n_packs = sum(row["stream"] != ACCOUNT for row in listed)
    would = "would go" if dry_run else "went"
    packs = [item for item in going if item.stream != ACCOUNT]
    say(f"{len(packs)} of {n_packs} packs {would}, {format_size(sum(item.n_bytes for item in packs))}")
    for units in (item for item in going if item.stream == ACCOUNT):
        say(f"{units.pack:,} units {would}, {format_size(units.n_bytes)}")
    for why, n_files in Counter(item.why for item in staying).most_common():
        n_bytes = sum(item.n_bytes for item in staying if item.why == why)
        say(f"{n_files} fact files stay, {format_size(n_bytes)}: {why}")
    if going and spill is not None and not dry_run:
        say("their objects in the cold root go when grace_s is over: run it again then, or leave it to a spiller")


def _few(sessions: list[str]) -> list[str]:
    more = len(sessions) - _SHOWN
    return [*sessions[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
