"""What the verbs share: locations, references, output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from spool.config import default_location
from spool.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
location_argument = click.argument("location", required=False)
arguments = click.argument("args", nargs=-1, metavar="[LOCATION] [REF]...")


def open_spool(location: str | None) -> Spool:
    """Open an existing spool for a verb.

    Raises:
        NotFoundError: there is none.
        UsageError: no location is given and SPOOL_URI is not set.
    """
    from spool.handle import open  # noqa: A004

    if location is None and default_location() is None:
        raise click.UsageError("no LOCATION given and SPOOL_URI is not set")
    return open(location, create=False)


def split_arguments(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the location, if the first argument is one, and the rest."""
    if args and is_location(args[0]):
        return args[0], list(args[1:])
    if args and default_location() is None:
        raise NotFoundError(f"{args[0]!r} is no spool (no spool.json there), and SPOOL_URI is not set")
    return None, list(args)


def is_location(text: str) -> bool:
    """Whether ``text`` is a URL or a directory that holds a spool."""
    path = text.partition("?")[0]
    return path.startswith("file://") or os.path.exists(os.path.join(path, "spool.json"))


def find_refs(sp: Spool, texts: Sequence[str]) -> list[StepRef | SegmentRef]:
    """Return the references that ``texts`` name; a session stands for the segments it was finalised with.

    Raises:
        NotFoundError: nothing is recorded under that name.
    """
    return [ref for text in texts for ref in find_ref(sp, text)]


def find_ref(sp: Spool, text: str) -> list[StepRef | SegmentRef]:
    """Return the references that one text names."""
    from spool.model.refs import ref_from_json

    if text.startswith("@") and os.path.exists(text[1:]):
        with open(text[1:], encoding="utf-8") as file:
            return [ref_from_json(file.read())]
    if text.startswith("{"):
        return [ref_from_json(text)]
    found = _step(sp, text) or _segment(sp, text)
    return found if found is not None else list(_session(sp, text))


def _step(sp: Spool, text: str) -> list[StepRef | SegmentRef] | None:
    session_id, separator, index = text.rpartition(":")
    if not separator or not index.isdecimal():
        return None
    try:
        steps = sp.steps(session_id)
    except NotFoundError:
        return None
    chosen = [step for step in steps if step.index == int(index)]
    if not chosen:
        raise NotFoundError(f"session {session_id!r} has {len(steps)} steps, none with index {index}")
    return list(chosen)


def _segment(sp: Spool, text: str) -> list[StepRef | SegmentRef] | None:
    session_id, separator, rest = text.rpartition("@")
    view, slash, index = rest.partition("/")
    if not separator or not slash or view not in ("lineage", "timeline") or not index.isdecimal():
        return None
    refs = sp.view(session_id, view)  # type: ignore[arg-type]
    if int(index) >= len(refs):
        raise NotFoundError(f"session {session_id!r} has {len(refs)} {view} segments, none with index {index}")
    return [refs[int(index)]]


def _session(sp: Spool, session_id: str) -> Sequence[SegmentRef]:
    return sp.final_segments(session_id)


def parse_range(text: str | None, option: str) -> slice | None:
    """Return the slice that ``START:STOP`` names."""
    if text is None:
        return None
    try:
        start, stop = (int(part) if part else None for part in text.split(":"))
    except ValueError as error:
        raise InputError(f"{option} takes START:STOP, got {text!r}") from error
    return slice(start, stop)


def write_json(value: object) -> None:
    """Print ``value`` as JSON; odd text is replaced so that the output is valid."""
    from spool.formats.messages import printable

    click.echo(json.dumps(printable(value), ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def write_rows(rows: Iterable[Mapping[str, object]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print rows: a JSON array, a table on a terminal, else tab-separated lines."""
    if as_json:
        write_json([dict(row) for row in rows])
    elif sys.stdout.isatty():
        _table(rows, columns)
    else:
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(_cell(row.get(name)) for name in columns))


def _table(rows: Iterable[Mapping[str, object]], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(row.get(name))) for name in columns))
    Console().print(table)


def _cell(value: object) -> str:
    """Return a value as one safe cell: no control characters, no lone surrogates."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return safe_text(str(value)).replace("\n", " ").replace("\t", " ")


def safe_text(text: str) -> str:
    """Return ``text`` for a terminal: escape sequences and lone surrogates cannot reach it."""
    from spool.formats.messages import printable

    shown = printable(text)
    return "".join(char if char in "\n\t" or char.isprintable() else repr(char)[1:-1] for char in shown)
