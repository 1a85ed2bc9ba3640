"""Text of any length and any characters -> rows of a terminal, as few as are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from spool.look.text import one_line

TAB = "    "


class Wrapped(NamedTuple):
    """A row of a text.

    Attributes:
        text: as it is shown, safe to print.
        start: place in the text of its first character.
    """

    text: str
    start: int


def wrapped(text: str, start: int, width: int, n_rows: int) -> tuple[list[Wrapped], int]:
    """Return about ``n_rows`` rows of a text, and where the rest begins.

    No more of the text is looked at than the rows take. Where characters are shown as escapes there may be more rows.

    Args:
        text: any text.
        start: where the first row begins.
        width: cells of a row.
        n_rows: how many rows; 1 or more.
    """
    rows: list[Wrapped] = []
    at, width = start, max(width, 1)
    while at < len(text) and len(rows) < n_rows:
        most = at + width * (n_rows - len(rows))
        end = text.find("\n", at, most + 1)
        stop = min(most, len(text)) if end < 0 else end
        line = text[at : stop - 1 if end >= 0 and text.endswith("\r", at, stop) else stop]
        shown = _shown(line)
        ends = None if len(shown) == len(line) else list(accumulate(len(_shown(char)) for char in line))
        for place, row in _folded(shown, width):
            rows.append(Wrapped(row, at + (place if ends is None else bisect_right(ends, place))))
        at = stop if end < 0 else end + 1
    return rows, at


def _shown(line: str) -> str:
    return one_line(line.replace("\t", TAB))


def folded(line: str, width: int) -> Iterator[str]:
    """Yield the rows of one line, broken at spaces where there are some."""
    return (row for _, row in _folded(line, width))


def _folded(line: str, width: int) -> Iterator[tuple[int, str]]:
    """Yield the rows of one line, and where in it they begin."""
    if not line.isascii():
        yield from _folded_wide(line, width)
        return
    at = 0
    while len(line) - at > width:
        cut = line.rfind(" ", at + 1, at + width + 1)
        if cut < 0 or not line[at:cut].strip():
            cut = at + width
        yield at, line[at:cut]
        at = cut + (line[cut] == " ")
    yield at, line[at:]


def _folded_wide(line: str, width: int) -> Iterator[tuple[int, str]]:
    """Yield the rows of a line with characters that take no cell, or two."""
    sizes: dict[str, int] = {}
    start = used = 0
    space = -1
    for at, char in enumerate(line):
        size = sizes.get(char)
        if size is None:
            size = sizes[char] = cell_len(char)
        if used + size > width and at > start:
            cut = space if space > start else at
            yield start, line[start:cut]
            start = cut + (cut == space)
            used = sum(sizes[kept] for kept in line[start:at])
            space = -1
        if char == " ":
            space = at
        used += size
    yield start, line[start:]


def n_lines(text: str, start: int = 0) -> int:
    """Return how many lines of a text begin at ``start`` or after it."""
    return text.count("\n", start) + (start < len(text) and not text.endswith("\n"))


def elided(text: str, width: int) -> str:
    """Return text in at most ``width`` cells, without its middle where it is longer: ids differ in how they end."""
    if cell_len(text) <= width:
        return text
    tail = text[-(width // 2) :] if width > 1 else ""
    while cell_len(tail) > width // 2:
        tail = tail[1:]
    return set_cell_size(text, max(width - 1 - cell_len(tail), 0)) + "…" + tail


def number(n: int, what: str) -> str:
    """Return so many things in words: ``1 segment``, ``2 segments``."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
