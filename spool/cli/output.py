"""What verbs print on stdout: JSON, tables on a terminal, tab-separated lines elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from spool.look.text import count, iso_time, json_text, one_line, safe_text, shortened
from spool.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Kind = Literal["text", "count", "size", "time", "number", "ratio"]
Row = Mapping[str, Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

WIDE = 40
"""Columns of a terminal that the first column of a table gets before others are left out."""

MOST_NAME = 32
"""Columns that the names of facts get before they are shortened, also where that is half a terminal and more."""

_LEFT_OUT = "spool.cli.output.left_out"


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        key: of the rows; the heading where lines are tab-separated.
        title: the heading on a terminal; empty for a column that is not shown there.
        kind: how its values are shown on a terminal.
    """

    key: str
    title: str = ""
    kind: Kind = "text"


def say(text: str) -> None:
    """Print a line for people on stderr."""
    click.echo(safe_text(text), err=True)


def write_line(text: str) -> None:
    """Print safe lines on stdout."""
    sys.stdout.write(safe_text(text) + "\n")


def write_json(value: object) -> None:
    """Print ``value`` as JSON: NaN and infinities as text, lone surrogates replaced, indented on a terminal."""
    sys.stdout.write(to_json(value, indent=2 if sys.stdout.isatty() else None) + "\n")


def write_json_rows(rows: Iterable[Row]) -> None:
    """Print a JSON array of ``rows``, one a line, while they come."""
    sys.stdout.write("[")
    for number, row in enumerate(rows):
        sys.stdout.write((",\n " if number else "") + to_json(row))
    sys.stdout.write("]\n")


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return ``value`` as valid JSON that is safe to print."""
    from spool.formats.messages import printable

    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    return json_text(json.dumps(printable(value), ensure_ascii=not unicode, indent=indent, allow_nan=False))


def write_rows(rows: Iterable[Row], columns: Sequence[Column], *, as_json: bool = False) -> None:
    """Print rows: a JSON array of all their facts, a table on a terminal, else tab-separated lines under a heading."""
    if as_json:
        write_json_rows(rows)
    elif sys.stdout.isatty():
        write_table(list(rows), columns)
    else:
        sys.stdout.write("\t".join(column.key for column in columns) + "\n")
        for row in rows:
            sys.stdout.write("\t".join(plain(row.get(column.key)) for column in columns) + "\n")


def plain(value: object) -> str:
    """Return a value exactly, in one line: numbers as digits, what has parts as JSON, ``-`` for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return one_line(value)
    return to_json(value)


def pretty(value: object, kind: Kind = "text") -> str:
    """Return a value as people read it, in one line; nothing for nothing."""
    if value is None or value in ((), [], {}):
        return ""
    if kind == "size" and isinstance(value, int):
        return format_size(value)
    if kind == "time" and isinstance(value, float):
        return iso_time(value)
    if isinstance(value, bool):
        return plain(value)
    if isinstance(value, list | tuple) and all(isinstance(item, str | int) for item in value):
        return ", ".join(map(plain, value))
    if kind in ("count", "number") and isinstance(value, int):
        return count(value)
    if kind == "ratio" and isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:.6g}" if isinstance(value, float) else plain(value)


def write_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print rows as a table that fits the terminal.

    The first column takes what is left and goes on over more lines where it must. Columns without any value are left
    out, and from the right as many as keep the first one from `WIDE` characters; which those are is said on stderr.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    cells = {column: [pretty(row.get(column.key), column.kind) for row in rows] for column in columns if column.title}
    first, *others = cells
    shown = [column for column in others if any(cells[column])]
    widths = {column: max(map(cell_len, (column.title, *found))) for column, found in cells.items()}
    left_out: list[str] = []
    while shown and min(widths[first], WIDE) + sum(widths[column] + 2 for column in shown) > console.width:
        left_out.insert(0, shown.pop().title)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first.title, overflow="fold", justify=_side(first))
    for column in shown:
        table.add_column(column.title, no_wrap=True, justify=_side(column))
    for number in range(len(rows)):
        table.add_row(*(Text(cells[column][number]) for column in (first, *shown)))
    _print(console, table)
    _tell_left_out(left_out)


def _tell_left_out(titles: Sequence[str]) -> None:
    """Say once, when the verb is done, which columns its tables had no room for."""
    context = click.get_current_context(silent=True)
    if not titles or context is None:
        return
    if _LEFT_OUT not in context.meta:
        context.meta[_LEFT_OUT] = {}
        context.call_on_close(lambda: say(_left_out_text(list(context.meta[_LEFT_OUT]))))
    context.meta[_LEFT_OUT].update(dict.fromkeys(titles))


def _left_out_text(titles: Sequence[str]) -> str:
    number = "1 column is" if len(titles) == 1 else f"{len(titles)} columns are"
    return f"{number} left out: {', '.join(titles)}; widen the terminal or use --json"


def _print(console: Console, table: Table) -> None:
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def _side(column: Column) -> Literal["left", "right"]:
    return "left" if column.kind in ("text", "time") else "right"


def write_facts(facts: Iterable[tuple[str, object, Kind]], *, short: bool = False) -> None:
    """Print names and values: side by side on a terminal, else tab-separated and exact.

    Args:
        facts: name, value, how it is shown; what is None or empty is left out.
        short: a terminal shows of each value what fits into its line.
    """
    found = [(name, value, kind) for name, value, kind in facts if value is not None and value not in ((), [], {}, "")]
    if not sys.stdout.isatty():
        for name, value, kind in found:
            exact = iso_time(value) if kind == "time" and isinstance(value, float) else plain(value)
            sys.stdout.write(f"{one_line(name)}\t{exact}\n")
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    widest = max((cell_len(one_line(name)) for name, _, _ in found), default=0)
    name_width = min(widest, max(console.width // 2, MOST_NAME), max(console.width - 10, 8))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=name_width, no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    room = max(console.width - name_width - 2, 8)
    for name, value, kind in found:
        shown = pretty(value, kind)
        grid.add_row(Text(shortened(one_line(name), name_width)), Text(shortened(shown, room) if short else shown))
    _print(console, grid)


def flat(name: str, value: object) -> Iterable[tuple[str, object, Kind]]:
    """Return nested mappings as facts with dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{name}.{key}", item)
    else:
        yield name, value, "text"
