"""``spool recover``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from spool.cli.exits import Exit
from spool.cli.output import Column, json_option, say, write_json, write_line, write_rows
from spool.cli.places import location_argument, open_spool
from spool.sizes import format_size

_COLUMNS = (
    Column("stream", "STREAM"),
    Column("packs", "PACKS"),
    Column("n_events", "EVENTS", "count"),
    Column("torn_bytes"),
    Column("damaged_bytes"),
    Column("rebuilt"),
    Column("removed"),
    Column("error"),
    Column("shortfalls"),
)


@click.command("recover")
@location_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
def command(location: str | None, dry_run: bool, as_json: bool) -> int:
    """Seal what dead writers left, and end idle sessions.

    A lost spool.json is written again, with the id that the streams keep and the cold root that packs were brought
    over to; that of a cold root, too, where streams of the hot one are in it. Ends of logs that were never finished are
    dropped. Live writers are left alone. Exits 5 where something that was recorded cannot be saved, 1 where a stream
    cannot be recovered.
    """
    if _restored(location, dry_run=dry_run) and dry_run:
        return Exit.OK
    with open_spool(location, readonly=dry_run) as sp:
        idle = [row.session_id for row in sp.sessions(f"state = 'open' and last_at + idle_s < {time.time():.3f}")]
        found = [msgspec.structs.asdict(item) for item in sp.recover(dry_run=dry_run)]
        ended = [name for name in idle if dry_run or (row := sp.find_session(name)) is None or row.state != "open"]
    rows = [{**row, "shortfalls": [msgspec.to_builtins(short) for short in row["shortfalls"]]} for row in found]
    if as_json:
        write_json({"streams": rows, "ended": ended})
    else:
        _print(rows, ended, dry_run=dry_run)
    if any(row["shortfalls"] or row["damaged_bytes"] for row in rows):
        return Exit.INTEGRITY
    return Exit.FAILED if any(row["error"] for row in rows) else Exit.OK


def _restored(location: str | None, *, dry_run: bool) -> bool:
    from spool.config import default_location, parse_uri
    from spool.root import restore_cold_identity, restore_identity

    if location is None and default_location() is None:
        return False
    config = parse_uri(location)
    if config.root is None:
        return False
    identity = restore_identity(config.root, dry_run=dry_run)
    url = restore_cold_identity(config.root, config, dry_run=dry_run)
    if url is not None:
        say(f"spool.json of the cold root {url} {'would be' if dry_run else 'is'} written again")
    if identity is None:
        return False
    cold = "" if identity.spill is None else f" and the cold root {identity.spill}"
    say(f"spool.json {'would be' if dry_run else 'is'} written again, with the id {identity.id}{cold}")
    if identity.spill is None and config.spill is None:
        say("no cold root is known any more: if the spool had one, open it once with ?spill=URL")
    return True


def _print(rows: list[dict[str, Any]], ended: list[str], *, dry_run: bool) -> None:
    import sys

    would = "would be " if dry_run else ""
    if not sys.stdout.isatty():
        write_rows(rows, _COLUMNS)
    else:
        for row in rows:
            write_line(f"{row['stream']}: {'; '.join(_said(row, would))}")
    for session_id in ended:
        say(f"idle session {session_id!r} {would or 'is '}ended as timeout")
    if not rows and not ended:
        say("nothing to recover")


def _said(row: Mapping[str, Any], would: str) -> list[str]:
    said = []
    if row["removed"]:
        said.append(f"was never finished, {would}removed")
    if row["packs"]:
        packs = ", ".join(map(str, row["packs"]))
        said.append(f"pack{'s' if len(row['packs']) > 1 else ''} {packs} {would}sealed with {row['n_events']} events")
    if row["rebuilt"]:
        said.append(f"{', '.join(row['rebuilt'])} {would}written anew")
    if row["torn_bytes"]:
        said.append(f"{row['torn_bytes']} bytes of an unfinished event {would}dropped, which nobody was promised")
    if row["damaged_bytes"]:
        said.append(f"LOST: {format_size(row['damaged_bytes'])} of damaged events in the log")
    for short in row["shortfalls"]:
        missing = format_size(short["expected_bytes"] - short["got_bytes"])
        said.append(f"LOST: {missing} of {short['array']} in pack {short['pack']}")
    return [*said, *([f"NOT RECOVERED: {row['error']}"] if row["error"] else [])]
