"""``spool locate``."""

from __future__ import annotations

import click

from spool.cli.common import arguments, find_refs, json_option, open_spool, parse_range, split_arguments, write_rows


@click.command("locate")
@arguments
@click.option("--field", "fields", multiple=True, help="A field; may be repeated. All where left out.")
@click.option("--tokens", help="Only these tokens, START:STOP.")
@json_option
def command(args: tuple[str, ...], fields: tuple[str, ...], tokens: str | None, as_json: bool) -> None:
    """Print where the rows lie: file, offset and length, as dd takes them (iflag=skip_bytes,count_bytes)."""
    location, texts = split_arguments(args)
    if not texts:
        raise click.UsageError("name what to locate: a session, SESSION:STEP or SESSION@VIEW/INDEX")
    with open_spool(location) as sp:
        rows = [
            {"id": getattr(ref, "id", ref.session_id), **found._asdict()}
            for ref in find_refs(sp, texts)
            for found in sp.locate(ref, fields=list(fields) or None, tokens=parse_range(tokens, "--tokens"))
        ]
    write_rows(rows, ("field", "rows", "file", "offset", "length"), as_json=as_json)
