"""``spool release``."""

from __future__ import annotations

import click

from spool.cli.output import json_option, say, write_json
from spool.cli.places import find_refs, open_spool, reference_arguments, split_arguments
from spool.errors import InputError


@click.command("release")
@reference_arguments
@click.option("--tag", help="Keep the data until `spool checkpointed TAG`.")
@click.option("--dry-run", is_flag=True, help="Only say which segments would be released.")
@json_option
def command(args: tuple[str, ...], tag: str | None, dry_run: bool, as_json: bool) -> None:
    """Say that segments are consumed: their data may be deleted.

    A session stands for the segments that it was finalised with. Twice is the same as once. `spool gc` or a spiller
    deletes a pack when all its sessions are over; there is no way back from then on.
    """
    location, texts = split_arguments(args, "release")
    with open_spool(location, readonly=dry_run) as sp:
        from spool.model.refs import SegmentRef

        refs = find_refs(sp, texts)
        segments = [ref for ref in refs if isinstance(ref, SegmentRef)]
        if len(segments) < len(refs):
            raise InputError("segments are released, not steps: name a session or SESSION@VIEW/INDEX")
        if not dry_run:
            sp.release(segments, tag)
    if as_json:
        write_json({"segments": [ref.id for ref in segments], "tag": tag, "dry_run": dry_run})
        return
    until = "" if tag is None else f", until {tag!r} is checkpointed"
    what, verb = ("segment", "is") if len(segments) == 1 else ("segments", "are")
    say(f"{len(segments)} {what} {'would be' if dry_run else verb} released{until}")
