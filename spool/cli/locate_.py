"""``spool locate``."""

from __future__ import annotations

import shlex
from typing import Any
from urllib.parse import unquote

import click

from spool.cli.output import Column, json_option, write_line, write_rows
from spool.cli.places import find_refs, open_spool, parse_range, reference_arguments, split_arguments

_COLUMNS = (
    Column("file", "FILE"),
    Column("field", "FIELD"),
    Column("rows"),
    Column("n_rows", "ROWS", "count"),
    Column("offset", "OFFSET", "number"),
    Column("length", "LENGTH", "number"),
)


@click.command("locate")
@reference_arguments
@click.option("--field", "fields", multiple=True, help="A field; may be repeated. All where left out.")
@click.option("--tokens", help="Only these tokens, START:STOP; negative ones count from the end.")
@click.option("--dd", is_flag=True, help="Print commands that write the bytes to stdout.")
@json_option
def command(args: tuple[str, ...], fields: tuple[str, ...], tokens: str | None, dd: bool, as_json: bool) -> None:
    """Print which bytes of which files hold the rows.

    A row holds all stored layers. What is not sealed yet may move to another file when more is recorded.
    """
    location, texts = split_arguments(args, "locate")
    chosen = parse_range(tokens, "--tokens")
    with open_spool(location) as sp:
        from spool.look.places import joined

        rows = [
            {"id": ref.id, **found._asdict(), "n_rows": found.rows[1] - found.rows[0]}
            for ref in find_refs(sp, texts)
            for found in joined(sp.locate(ref, fields=list(fields) or None, tokens=chosen))
        ]
    if dd:
        if remote := next((row["file"] for row in rows if _path(row["file"]) is None), None):
            raise click.UsageError(
                f"--dd is for files, and rows lie in {remote}; take URL, offset and length from --json"
            )
        for row in rows:
            write_line(_dd(row))
    else:
        write_rows(rows, _COLUMNS, as_json=as_json)


def _dd(row: dict[str, Any]) -> str:
    place = f"skip={row['offset']} count={row['length']}"
    return f"dd if={shlex.quote(str(_path(row['file'])))} iflag=skip_bytes,count_bytes bs=1M status=none {place}"


def _path(file: str) -> str | None:
    """Return the path of a file that is named by path or URL; None where it is an object elsewhere."""
    if file.startswith("file://"):
        return unquote(file.removeprefix("file://"))
    return None if "://" in file else file
