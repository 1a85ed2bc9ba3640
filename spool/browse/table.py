"""A table of any number of rows, of which a window is held; columns that do not fit are reached sideways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len
from textual.binding import Binding, BindingType
from textual.message import Message

from spool.browse.lines import Lines, Piece
from spool.browse.wrapping import elided

AHEAD = 200
"""Rows that are fetched before and behind those in sight."""


class Column(NamedTuple):
    """A column.

    Attributes:
        key: its name; of what can be sorted by it, the name that is sorted by.
        title: its heading.
        cell: makes text and tone of a row's struct; the text is safe to print.
        width: what it takes at least.
        most: what it takes at most; what is longer is cut. The first column may take a third of the table, and the room
            that the others leave.
        right: whether it stands at the right.
        sorts: whether it can be sorted by.
    """

    key: str
    title: str
    cell: Callable[[Any], Piece]
    width: int = 0
    most: int = 24
    right: bool = False
    sorts: bool = True


class Table(Lines):
    """The table. Rows come by `put`, as answer to `Wanted`.

    Args:
        columns: the first one stays where it is, the others move sideways.
        identity: of a row's struct, for `marks`.
        id: of the widget.

    Attributes:
        order: names that the rows are sorted by, as `Spool.listing` takes them.
        marks: identities of rows that are marked.
    """

    N_FIXED = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "sideways(1)", "columns to the right", show=False),
        Binding("left,h", "sideways(-1)", "columns to the left", show=False),
    ]

    class Wanted(Message):
        """Rows ``[start, stop)`` come into sight and are not held."""

        def __init__(self, start: int, stop: int) -> None:
            super().__init__()
            self.first, self.last = start, stop

    class Headed(Message):
        """The heading of a column was clicked."""

        def __init__(self, column: Column) -> None:
            super().__init__()
            self.column = column

    def __init__(
        self,
        columns: Sequence[Column],
        identity: Callable[[Any], str],
        *,
        id: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.identity = identity
        self.order: tuple[str, ...] = ()
        self.marks: set[str] = set()
        self._rows: Sequence[Any] = ()
        self._start = 0
        self._left = 1
        self._widths: dict[str, int] = {}
        self._longest = 0
        self._asked: tuple[int, int] | None = None

    def put(self, start: int, rows: Sequence[Any]) -> None:
        """Hold the rows from ``start`` on, instead of those that were held; None for one that is gone."""
        self._start, self._rows, self._asked = start, rows, None
        for number, column in enumerate(self.columns):
            longest = max((cell_len(column.cell(row)[0]) for row in rows if row is not None), default=0)
            least = max(cell_len(column.title) + 1, column.width)
            # columns do not shrink while someone reads, but for those that have nothing left to show
            wide = max(self._widths.get(column.key, 0), min(longest, column.most), least) if longest else least
            self._widths[column.key] = wide
            if not number:
                self._longest = longest
        self.refresh()

    def held(self, number: int) -> Any | None:
        """Return a row's struct, where it is held."""
        at = number - self._start
        return self._rows[at] if 0 <= at < len(self._rows) else None

    @property
    def current(self) -> Any | None:
        """The struct of the row under the cursor."""
        return self.held(self.cursor) if self.n_rows else None

    @property
    def window(self) -> tuple[int, int]:
        """The rows that are worth holding now."""
        return max(self.first - AHEAD, 0), min(self.first + self.room + AHEAD, self.n_rows)

    def action_sideways(self, by: int) -> None:
        """Move the columns sideways."""
        left = max(min(self._left + by, len(self.columns) - 1), 1)
        if by < 0 or not self._fits(self._left):
            self._left = left
            self.refresh()
            self.post_message(self.Moved(self))

    def on_heading(self, x: int) -> None:
        """Sort by the column whose heading is clicked."""
        at = 0
        for column, width in self._shown():
            at += width + 1
            if x < at:
                self.post_message(self.Headed(column))
                return

    def fixed(self, number: int) -> Iterator[Piece]:  # noqa: ARG002
        """Return the headings; the one that is sorted by has an arrow, and where more is to the right, so it says."""
        for column, width in self._shown():
            arrow = {column.key: "↑", f"-{column.key}": "↓"}.get(self.order[0] if self.order else "", "")
            yield _fit(column, f"{column.title}{arrow}", width), ""
            yield " ", ""

    def row(self, number: int) -> Iterator[Piece]:
        """Return the cells of a row; of one that is not here yet, that it is awaited."""
        held = self.held(number)
        if held is None:
            is_gone = 0 <= number - self._start < len(self._rows)
            yield "gone" if is_gone else "…", "dim"
            if not is_gone:
                self._want()
            return
        mark = "✓" if self.identity(held) in self.marks else " "
        for column, width in self._shown():
            text, tone = column.cell(held)
            yield _fit(column, text, width), tone
            yield mark, "accent"
            mark = " "

    def is_marked(self, number: int) -> bool:
        """Whether a row is among the marked ones."""
        held = self.held(number) if self.marks else None
        return held is not None and self.identity(held) in self.marks

    def _want(self) -> None:
        wanted = self.window
        if self._asked != wanted:
            self._asked = wanted
            self.post_message(self.Wanted(*wanted))

    def _shown(self) -> list[tuple[Column, int]]:
        """Return columns and widths: the first one, and those of the others, from where the table begins, that fit."""
        if not self.columns:
            return []
        lead = self._lead
        room = self.scrollable_content_region.width - lead - 1
        shown: list[tuple[Column, int]] = []
        for column in self.columns[self._left :]:
            width = self._width(column)
            if room - width < 0:
                break
            room -= width + 1
            shown.append((column, width))
        return [(self.columns[0], max(lead, min(self._longest, lead + room))), *shown]

    def _width(self, column: Column) -> int:
        return self._widths.get(column.key) or max(cell_len(column.title) + 1, column.width)

    @property
    def _lead(self) -> int:
        """What the first column takes where nothing is left over."""
        third = min(self._longest, self.scrollable_content_region.width // 3)
        return max(self._width(self.columns[0]), third)

    def _fits(self, left: int) -> bool:
        """Whether all columns from ``left`` on are in sight."""
        others = sum(self._width(column) + 1 for column in self.columns[left:])
        return self._lead + others <= self.scrollable_content_region.width

    @property
    def hidden(self) -> tuple[int, int]:
        """How many columns are out of sight, to the left and to the right."""
        return self._left - 1, len(self.columns) - self._left - len(self._shown()) + 1

    @property
    def hint(self) -> str:
        """How many columns are out of sight and where, for a heading; nothing where all are seen."""
        left, right = self.hidden
        more = "more column" if left + right == 1 else "more columns"
        return f"{'← ' if left else ''}{left + right} {more}{' →' if right else ''}" if left + right else ""


def _fit(column: Column, text: str, width: int) -> str:
    length = cell_len(text)
    if length > width:
        return elided(text, width)
    return " " * (width - length) + text if column.right else text + " " * (width - length)
