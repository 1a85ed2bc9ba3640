"""``spool import``."""

from __future__ import annotations

import os

import click

from spool.cli.exits import Exit
from spool.cli.output import json_option, say, write_json, write_line
from spool.cli.places import check_hot
from spool.config import default_location
from spool.errors import NotFoundError

Facts = dict[str, dict[str, str]]
Dropped = dict[str, int]


@click.command("import")
@click.argument("source")
@click.argument("location", required=False)
@click.option("--form", help="The form of the runs; found by content where left out.")
@click.option("--dry-run", is_flag=True, help="Only parse; record nothing.")
@json_option
def command(source: str, location: str | None, form: str | None, dry_run: bool, as_json: bool) -> int:
    """Record runs from a file or a directory.

    Forms: routing archives (.npz), ATIF, OpenAI chat (JSON, JSONL), SWE-agent .traj, nebius, tau-bench, OpenHands. The
    spool at LOCATION is created where there is none. A run that cannot be imported is reported and the others are
    recorded; then the exit code is 1. Files of a folder that hold something else than runs are ignored, and said; one
    that SOURCE names itself is an error.

    A session's id is the last part of SOURCE (links resolved) and the path inside it, with #n where a file holds many
    runs; a file named itself counts as inside its folder. Importing the same again changes nothing, but the same data
    by another SOURCE (a copy, a folder above or below) has other ids, and is another import.

    Links to folders are not followed, and said. stderr also says how many sessions have messages only, since their
    source has no token ids.

    A routing archive has token_ids, routed_experts [tokens, layers, topk], and of each turn turn_role,
    turn_content_start and turn_content_end; logprobs where they are known. Tokens after the last assistant turn belong
    to no step and are not recorded; stderr says of which sessions, and how many.
    """
    if location is None and default_location() is None and not dry_run:
        raise click.UsageError("no LOCATION given, and SPOOL_URI is not set")
    if not os.path.exists(source):
        raise NotFoundError(f"there is no file or folder {source!r} to import", path=source)
    facts, dropped, bare = _parsed(source, form) if dry_run else _recorded(source, location, form)
    if as_json:
        write_json(facts)
    else:
        for verb in ("failed", "ignored"):
            for where, why in facts[verb].items():
                reason = why.removeprefix(where).removeprefix(":").strip()
                say(f"{verb}: {where}: {reason if verb == 'failed' else reason.partition('; known forms')[0]}")
        write_line(", ".join(f"{len(found)} {verb}" for verb, found in facts.items()))
    _say_dropped(dropped)
    if bare:
        n = sum(len(facts[verb]) for verb in ("imported", "unchanged", "parsed") if verb in facts)
        say(f"{bare} of {n} sessions have messages only: no token ids in the source")
    return Exit.FAILED if facts["failed"] else Exit.OK


def _say_dropped(dropped: Dropped) -> None:
    for session, n in dropped.items():
        say(f"dropped: {session}: {n} tokens after the last assistant turn")
    if dropped:
        say(f"dropped: {sum(dropped.values())} tokens of {len(dropped)} sessions are in no step")


def _recorded(source: str, location: str | None, form: str | None) -> tuple[Facts, Dropped, int]:
    from spool.handle import open  # noqa: A004
    from spool.importers import import_runs, read_runs

    check_hot(location)
    # what cannot be read at all leaves no empty spool behind
    next(read_runs(source, form=form), None)
    with open(location) as sp:
        report = import_runs(source, sp, form=form)
    facts = {
        "imported": dict.fromkeys(report.imported, ""),
        "unchanged": dict.fromkeys(report.unchanged, ""),
        "failed": {failure.where: str(failure.error) for failure in report.failed},
        "ignored": {found.where: found.reason for found in report.ignored},
    }
    return facts, report.dropped, len(report.messages_only)


def _parsed(source: str, form: str | None) -> tuple[Facts, Dropped, int]:
    from spool.importers import Failure, Ignored, read_runs

    facts: Facts = {"parsed": {}, "failed": {}, "ignored": {}}
    dropped: Dropped = {}
    bare = 0
    for found in read_runs(source, form=form):
        if isinstance(found, Failure):
            facts["failed"][found.where] = str(found.error)
        elif isinstance(found, Ignored):
            facts["ignored"][found.where] = found.reason
        else:
            bare += found.messages_only
            facts["parsed"][found.session_id] = f"{len(found.steps)} steps"
            if found.n_tokens_dropped:
                dropped[found.session_id] = found.n_tokens_dropped
    return facts, dropped, bare
