"""``spool verify``."""

from __future__ import annotations

import sys

import click
import msgspec

from spool.cli.common import json_option, location_argument, open_spool, safe_text, write_json
from spool.cli.exits import Exit


@click.command("verify")
@location_argument
@click.option("--deep", is_flag=True, help="Re-read everything, check every checksum, and lint the routing.")
@json_option
def command(location: str | None, deep: bool, as_json: bool) -> int:
    """Check that everything recorded is there. Exits 5 where bytes are missing or altered, 1 on lint alone."""
    with open_spool(location) as sp:
        report = sp.verify(deep=deep, progress=_progress if sys.stderr.isatty() else None)
    if as_json:
        write_json(msgspec.to_builtins(report))
    else:
        for finding in report.findings:
            click.echo(safe_text(f"{finding.kind}: {finding.where}: {finding.text}"))
        click.echo(report.summary())
    if any(finding.kind == "integrity" for finding in report.findings):
        return Exit.INTEGRITY
    return Exit.FAILED if report.findings else Exit.OK


def _progress(done_bytes: int, total_bytes: int) -> None:
    click.echo(f"\r{done_bytes >> 20} of {total_bytes >> 20} MiB", err=True, nl=done_bytes == total_bytes)
