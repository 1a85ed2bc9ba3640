"""``spool verify``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from spool.cli.exits import Exit
from spool.cli.output import Column, json_option, say, write_json, write_line, write_rows
from spool.cli.places import location_argument, open_spool
from spool.cli.progress import Progress

if TYPE_CHECKING:
    from spool.audit import Finding

_COLUMNS = tuple(map(Column, ("kind", "stream", "field", "rows", "file", "n_steps", "steps", "text", "tier")))


@click.command("verify")
@location_argument
@click.option("--deep", is_flag=True, help="Read everything again, check every checksum, and lint the routing.")
@json_option
def command(location: str | None, deep: bool, as_json: bool) -> int:
    """Check that everything recorded is there, multimodal units that live sessions name included.

    Findings go to stdout, the summary to stderr.

    Exits 5 where bytes are missing or altered, 1 where a killed writer left an unfinished event (`spool recover` drops
    it) or a killed spiller an unlisted pack, or where routing is implausible.
    """
    with open_spool(location) as sp, Progress("checked") as progress:
        report = sp.verify(deep=deep, progress=progress.update)
    if as_json:
        write_json(msgspec.to_builtins(report))
    elif sys.stdout.isatty():
        for finding in report.findings:
            _print(finding)
    elif report.findings:
        write_rows((msgspec.to_builtins(finding) for finding in report.findings), _COLUMNS)
    say(report.summary())
    if any(finding.kind == "integrity" for finding in report.findings):
        return Exit.INTEGRITY
    return Exit.FAILED if report.findings else Exit.OK


def _print(finding: Finding) -> None:
    rows = f" rows [{finding.rows[0]}, {finding.rows[1]})" if finding.rows else ""
    write_line(f"{finding.kind}: {finding.text}")
    of_stream = f" of stream {finding.stream}" if finding.stream is not None else ""
    write_line(f"  {finding.field or 'metadata'}{rows}{of_stream}")
    if finding.file:
        write_line(f"  {finding.file}")
    if finding.steps:
        more = f" and {finding.n_steps - len(finding.steps)} more" if finding.n_steps > len(finding.steps) else ""
        write_line(f"  recorded by {', '.join(finding.steps)}{more}")
