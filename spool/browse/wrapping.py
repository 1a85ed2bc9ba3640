"""Text of any length and any characters -> rows of a terminal, as few as are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len, set_cell_size

from spool.look.text import one_line

TAB = "    "


def wrapped(text: str, start: int, width: int, n_rows: int) -> tuple[list[str], int]:
    """Return about ``n_rows`` rows of a text, safe to print, and where the rest begins.

    No more of the text is looked at than the rows take. Where characters are shown as escapes there may be more rows.

    Args:
        text: any text.
        start: where the first row begins.
        width: cells of a row.
        n_rows: how many rows; 1 or more.
    """
    rows: list[str] = []
    at, width = start, max(width, 1)
    while at < len(text) and len(rows) < n_rows:
        most = at + width * (n_rows - len(rows))
        end = text.find("\n", at, most + 1)
        stop = min(most, len(text)) if end < 0 else end
        line = text[at:stop]
        rows += folded(one_line((line[:-1] if end >= 0 and line.endswith("\r") else line).replace("\t", TAB)), width)
        at = stop if end < 0 else end + 1
    return rows, at


def folded(line: str, width: int) -> Iterator[str]:
    """Yield the rows of one line, broken at spaces where there are some."""
    if not line.isascii():
        yield from _folded_wide(line, width)
        return
    at = 0
    while len(line) - at > width:
        cut = line.rfind(" ", at + 1, at + width + 1)
        if cut < 0 or not line[at:cut].strip():
            cut = at + width
        yield line[at:cut]
        at = cut + (line[cut] == " ")
    yield line[at:]


def _folded_wide(line: str, width: int) -> Iterator[str]:
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
            yield line[start:cut]
            start = cut + (cut == space)
            used = sum(sizes[kept] for kept in line[start:at])
            space = -1
        if char == " ":
            space = at
        used += size
    yield line[start:]


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
