"""A table of any number of rows, of which a window is held; columns that do not fit are reached sideways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from textual.binding import Binding, BindingType
from textual.message import Message

from spool.browse.lines import Lines, Piece

AHEAD = 200
"""Rows that are fetched before and behind those in sight."""


class Column(NamedTuple):
    """A column.

    Attributes:
        key: its name; of what can be sorted by it, the name that is sorted by.
        title: its heading.
        cell: makes text and tone of a row's struct; the text is safe to print.
        width: what it takes at least.
        most: what it takes at most; what is longer is cut.
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
        self._widths = {column.key: max(cell_len(column.title) + 1, column.width) for column in columns}
        self._asked: tuple[int, int] | None = None

    def put(self, start: int, rows: Sequence[Any]) -> None:
        """Hold the rows from ``start`` on, instead of those that were held; None for one that is gone."""
        self._start, self._rows, self._asked = start, rows, None
        for column in self.columns:
            longest = max((cell_len(column.cell(row)[0]) for row in rows if row is not None), default=0)
            self._widths[column.key] = max(self._widths[column.key], min(longest, column.most))
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
        for column in self._shown():
            at += self._widths[column.key] + 1
            if x < at:
                self.post_message(self.Headed(column))
                return

    def fixed(self, number: int) -> Iterator[Piece]:  # noqa: ARG002
        """Return the headings; the one that is sorted by has an arrow, and where more is to the right, so it says."""
        for column in self._shown():
            arrow = {column.key: "↑", f"-{column.key}": "↓"}.get(self.order[0] if self.order else "", "")
            yield self._fit(column, (f"{column.title}{arrow}", "")), ""
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
        for column in self._shown():
            cell = column.cell(held)
            yield self._fit(column, cell), cell[1]
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

    def _shown(self) -> list[Column]:
        """Return the first column, and of the others, from the leftmost in sight on, those that fit whole."""
        if not self.columns:
            return []
        room = self.scrollable_content_region.width - self._widths[self.columns[0].key] - 1
        shown = [self.columns[0]]
        for column in self.columns[self._left :]:
            room -= self._widths[column.key] + 1
            if room < -1:
                break
            shown.append(column)
        return shown

    def _fits(self, left: int) -> bool:
        """Whether all columns from ``left`` on are in sight."""
        keys = [self.columns[0].key, *(column.key for column in self.columns[left:])]
        return sum(self._widths[key] + 1 for key in keys) - 1 <= self.scrollable_content_region.width

    def _fit(self, column: Column, cell: Piece) -> str:
        text, width = cell[0], self._widths[column.key]
        length = cell_len(text)
        if length > width:
            return _elided(text, width)
        return " " * (width - length) + text if column.right else text + " " * (width - length)

    @property
    def hidden(self) -> tuple[int, int]:
        """How many columns are out of sight, to the left and to the right."""
        return self._left - 1, len(self.columns) - self._left - len(self._shown()) + 1


def _elided(text: str, width: int) -> str:
    """Return text that is too long without its middle: ids that begin alike differ in how they end."""
    tail = text[-(width // 2) :]
    while cell_len(tail) > width // 2:
        tail = tail[1:]
    return set_cell_size(text, width - 1 - cell_len(tail)) + "…" + tail
