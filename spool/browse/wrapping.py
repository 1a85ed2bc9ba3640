"""Text of any length and any characters -> rows of a terminal, of the part that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from spool.look.text import each_shown, one_line

TAB = "    "


class Wrapped(NamedTuple):
    """A row of a text.

    Attributes:
        text: as it is shown, safe to print.
        start: place in the text of its first character.
        places: of each character of ``text``, the place in the text of the one that it shows; they ascend.
    """

    text: str
    start: int
    places: Sequence[int]


def wrapped(text: str, start: int, stop: int, width: int) -> Iterator[Wrapped]:
    """Yield the rows of ``text[start:stop]``; no more of the text is looked at.

    Args:
        text: any text.
        start: where the first row begins.
        stop: where the last row ends.
        width: cells of a row.
    """
    at = start
    while at < stop:
        end = text.find("\n", at, stop)
        line = text[at:stop] if end < 0 else text[at:end].removesuffix("\r")
        shown, places = _shown(line, at)
        for column, row in _folded(shown, max(width, 1)):
            here = places[column : column + len(row)]
            yield Wrapped(row, here[0] if here else at + len(line), here)
        at = stop if end < 0 else end + 1


def _shown(line: str, start: int) -> tuple[str, Sequence[int]]:
    """Return a line that is safe to print, and the places of what its characters show; the first is ``start``."""
    shown = one_line(line.replace("\t", TAB))
    if len(shown) == len(line):
        return shown, range(start, start + len(line))
    parts = (TAB if char == "\t" else part for char, part in zip(line, each_shown(line), strict=True))
    return shown, [at for at, part in enumerate(parts, start) for _ in part]


def place_after(text: str, at: int, width: int, n_rows: int) -> int:
    """Return a place about so many rows behind another one, or the end.

    It is right for characters of one cell in lines without breaks at spaces; where they take more there are more rows.
    """
    width = max(width, 1)
    while n_rows > 0 and at < len(text):
        most = at + width * n_rows
        end = text.find("\n", at, most + 1)
        if end < 0:
            return min(most, len(text))
        n_rows -= max(ceil((end - at) / width), 1)
        at = end + 1
    return at


def place_before(text: str, at: int, width: int, n_rows: int) -> int:
    """Return a place about so many rows before another one, or 0: where a line or a word begins, if one does there."""
    width = max(width, 1)
    while n_rows > 0 and at > 0:
        least = at - width * n_rows
        end = text.rfind("\n", max(least - 1, 0), at - 1)
        if end < 0:
            return text.find(" ", least, min(least + width, at)) + 1 or least if least > 0 else 0
        n_rows -= max(ceil((at - 1 - end) / width), 1)
        at = end + 1
    return at


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


def n_lines(text: str, start: int = 0, stop: int | None = None) -> int:
    """Return how many lines there are in ``text[start:stop]``; the first and the last may be there in part."""
    stop = len(text) if stop is None else stop
    return text.count("\n", start, stop) + (start < stop and not text.endswith("\n", start, stop))


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
