"""``spool checkpointed``."""

from __future__ import annotations

import click

from spool.cli.output import json_option, say, write_json
from spool.cli.places import is_location, open_spool


@click.command("checkpointed")
@click.argument("args", nargs=-1, metavar="[LOCATION] TAG")
@click.option("--dry-run", is_flag=True, help="Only say how many segments wait for the checkpoint.")
@json_option
def command(args: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Say that a checkpoint was taken: what was released under TAG may be deleted."""
    location = args[0] if args and is_location(args[0]) else None
    tags = args[1:] if location is not None else args
    if len(tags) != 1:
        raise click.UsageError(f"name one tag, as given to `spool release --tag`; got {len(tags)}")
    (tag,) = tags
    with open_spool(location, readonly=dry_run) as sp:
        n_segments = sp.checkpointed(tag, dry_run=dry_run)
    if as_json:
        write_json({"tag": tag, "n_segments": n_segments, "dry_run": dry_run})
    else:
        said = "1 segment is" if n_segments == 1 else f"{n_segments} segments are"
        say(f"{said} released under {tag!r}{'' if dry_run else ', and may go'}")
        if not n_segments:
            say("spool: warning: is the tag the one that was given to `spool release --tag`?")
