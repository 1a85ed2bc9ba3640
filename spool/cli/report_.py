"""``spool report``."""

from __future__ import annotations

import click

from spool.cli.output import json_option, say, write_json
from spool.cli.places import location_argument, open_spool
from spool.sizes import format_size


@click.command("report")
@location_argument
@click.option("-o", "--output", default="report.html", show_default=True, metavar="FILE", help="The file to write.")
@click.option("--where", help="Only the sessions that a filter chooses; bytes are of the whole spool.")
@click.option("--force", is_flag=True, help="Take the place of a file that is there.")
@json_option
def command(location: str | None, output: str, where: str | None, force: bool, as_json: bool) -> None:
    """Write a page of HTML with the shape of a run.

    Sessions and tokens over time, outcomes, rewards, lengths, staleness, bytes by field and tier, the load of experts
    of each layer (of a sample of segments), and the sessions that stand out. The page is one file that fetches nothing
    and runs no script; it follows the reader's choice of light or dark.

    Needs the extra report: pip install '.[report]' in a checkout, or pip install 'spool-store[report]'.
    """
    with open_spool(location) as sp:
        from spool.report.write import write_report

        if output == "-":
            raise click.UsageError("a report is a file that is there whole or not at all: name one with -o")
        n_bytes = write_report(sp, output, where, force=force)
    if as_json:
        write_json({"file": output, "n_bytes": n_bytes})
    else:
        say(f"{output} is written, {format_size(n_bytes)}")
