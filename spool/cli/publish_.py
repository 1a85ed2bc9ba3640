"""``spool publish``."""

from __future__ import annotations

import time
from typing import Any

import click

from spool.cli.output import json_option, say, write_json
from spool.cli.places import find_refs, open_spool, reference_arguments, split_arguments


@click.command("publish")
@reference_arguments
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=600.0, show_default=True,
              help="Seconds to wait.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say which packs are not in the cold root yet.")
@json_option
def command(args: tuple[str, ...], timeout_s: float, dry_run: bool, as_json: bool) -> None:
    """Wait until all that references need is in the cold root.

    Writers that live are asked to seal what is missing, and a spiller is started where none works. Exits 4 where it is
    not done in time; nothing is lost, and it may be called again.
    """
    location, texts = split_arguments(args, "publish")
    began = time.monotonic()
    with open_spool(location, readonly=dry_run) as sp:
        refs = find_refs(sp, texts)
        missing = sorted(sp.unpublished(refs))
        if not dry_run:
            sp.publish(refs, timeout_s=timeout_s)
    facts: dict[str, Any] = {
        "refs": [ref.id for ref in refs],
        "waited_for": [{"stream": stream, "pack": pack} for stream, pack in missing],
        "seconds": round(time.monotonic() - began, 3),
        "dry_run": dry_run,
    }
    if as_json:
        write_json(facts)
        return
    if dry_run:
        say(f"{len(refs)} references need {len(missing)} packs that are not in the cold root yet")
    else:
        say(f"{len(refs)} references are in the cold root after {facts['seconds']} s")
