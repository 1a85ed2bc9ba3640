"""``spool import``."""

from __future__ import annotations

import click

from spool.cli.common import json_option, safe_text, write_json
from spool.cli.exits import Exit


@click.command("import")
@click.argument("source", type=click.Path(exists=True))
@click.argument("location", required=False)
@click.option("--form", help="The form of the runs; found by content where left out.")
@click.option("--dry-run", is_flag=True, help="Only parse; record nothing.")
@json_option
def command(source: str, location: str | None, form: str | None, dry_run: bool, as_json: bool) -> int:
    """Record runs from files: routing archives (.npz), ATIF, OpenAI chat (JSON, JSONL), SWE-agent .traj, OpenHands.

    SOURCE is a file or a directory. A run that cannot be imported is reported and the others are recorded; then the
    exit code is 1.
    """
    facts = _parsed(source, form) if dry_run else _recorded(source, location, form)
    if as_json:
        write_json(facts)
    else:
        for verb in ("failed", "ignored"):
            for where, why in facts[verb].items():
                click.echo(safe_text(f"{verb}: {where}: {why}"), err=True)
        counts = ", ".join(f"{len(found)} {verb}" for verb, found in facts.items())
        click.echo(counts)
    return Exit.FAILED if facts["failed"] else Exit.OK


def _recorded(source: str, location: str | None, form: str | None) -> dict[str, dict[str, str]]:
    from spool.handle import open  # noqa: A004
    from spool.importers import import_runs

    with open(location) as sp:
        report = import_runs(source, sp, form=form)
    return {
        "imported": dict.fromkeys(report.imported, ""),
        "unchanged": dict.fromkeys(report.unchanged, ""),
        "failed": {failure.where: str(failure.error) for failure in report.failed},
        "ignored": {found.where: found.reason for found in report.ignored},
    }


def _parsed(source: str, form: str | None) -> dict[str, dict[str, str]]:
    from spool.importers import Failure, Ignored, read_runs

    facts: dict[str, dict[str, str]] = {"parsed": {}, "failed": {}, "ignored": {}}
    for found in read_runs(source, form=form):
        if isinstance(found, Failure):
            facts["failed"][found.where] = str(found.error)
        elif isinstance(found, Ignored):
            facts["ignored"][found.where] = found.reason
        else:
            facts["parsed"][found.session_id] = f"{len(found.steps)} steps"
    return facts
