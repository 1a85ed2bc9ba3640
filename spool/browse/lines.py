"""A list of any number of lines of which only those in sight are made; with a cursor, keys and a mouse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from spool.browse.wrapping import folded

if TYPE_CHECKING:
    from textual import events

Piece = tuple[str, str]
"""Text that is safe to print, and the tone it is shown in: a name of `TONES`, or nothing for plain."""

TONES = (
    "dim", "strong", "good", "bad", "warn", "accent", "heading", "system", "user", "assistant", "tool", "bar", "found",
)  # fmt: skip


class Lines(ScrollView, can_focus=True):
    """Base of all lists. A child says how many rows there are (`count`) and what is in one (`row`).

    Attributes:
        cursor: row under the cursor; 0 where there is none.
        n_rows: how many there are.
        empty: what is said where there are none.
    """

    N_FIXED: ClassVar[int] = 0
    """Lines at the top that do not scroll: `fixed` makes them."""

    KEPT: ClassVar[frozenset[str]] = frozenset()
    """Tones that stay what they are under the cursor."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"lines--{tone}" for tone in TONES} | {
        "lines--cursor",
        "lines--marked",
        "lines--unfocused",
    }
    DEFAULT_CSS = """
    Lines { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; background: $background; }
    Lines > .lines--dim { color: $text-muted; }
    Lines > .lines--strong { text-style: bold; }
    Lines > .lines--good { color: $text-success; }
    Lines > .lines--bad { color: $text-error; text-style: bold; }
    Lines > .lines--warn { color: $text-warning; }
    Lines > .lines--accent { color: $text-accent; }
    Lines > .lines--heading { text-style: bold; background: $panel; }
    Lines > .lines--system { color: $text-muted; text-style: bold underline; }
    Lines > .lines--user { color: $text-success; text-style: bold; }
    Lines > .lines--assistant { color: $text-primary; text-style: bold; }
    Lines > .lines--tool { color: $text-warning; text-style: bold; }
    Lines > .lines--bar { color: $text-primary; }
    Lines > .lines--found { color: $text-warning; text-style: reverse bold; }
    Lines > .lines--cursor { background: $primary; color: $text; text-style: bold; }
    Lines > .lines--unfocused { background: $primary-muted; }
    Lines > .lines--marked { background: $secondary-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "a page up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "a page down", show=False),
        Binding("ctrl+u", "page(-0.5)", "half a page up", show=False),
        Binding("ctrl+d", "page(0.5)", "half a page down", show=False),
        Binding("home", "jump(0)", "first", show=False),
        Binding("end,G", "jump(-1)", "last", show=False),
        Binding("enter", "choose", "open"),
    ]

    cursor: reactive[int] = reactive(0, repaint=False)

    class Moved(Message):
        """The cursor is on another row, or another thing is under it."""

        def __init__(self, lines: Lines) -> None:
            super().__init__()
            self.lines = lines

        @property
        def control(self) -> Lines:
            """The list."""
            return self.lines

    class Chosen(Moved):
        """Enter, or a double click, on the row under the cursor."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.n_rows = 0
        self.empty = ""

    def row(self, number: int) -> Iterable[Piece]:
        """Return what is in a row, from the left."""
        raise NotImplementedError

    def fixed(self, number: int) -> Iterable[Piece]:
        """Return a line that does not scroll."""
        raise NotImplementedError

    def is_marked(self, number: int) -> bool:  # noqa: ARG002
        """Whether a row is set off from the others."""
        return False

    @property
    def room(self) -> int:
        """How many rows are in sight."""
        return max(self.scrollable_content_region.height - self.N_FIXED, 1)

    @property
    def first(self) -> int:
        """The first row in sight."""
        return int(self.scroll_offset.y)

    def count(self, n_rows: int, *, cursor: int | None = None, first: int | None = None) -> None:
        """Say how many rows there are; they, or what is in them, are others than before.

        Args:
            n_rows: how many.
            cursor: the row under the cursor; the same, as far as there is one, where None.
            first: the first row in sight; the same, or what keeps the cursor in sight, where None.
        """
        self.n_rows = n_rows
        self.virtual_size = Size(self.scrollable_content_region.width, n_rows + self.N_FIXED)
        wanted = self.cursor if cursor is None else cursor
        self.set_reactive(Lines.cursor, max(min(wanted, n_rows - 1), 0))
        if first is not None:
            self.scroll_to(y=first, animate=False, immediate=True)
        self.reveal()
        self.refresh()

    def reveal(self) -> None:
        """Scroll so that the cursor is in sight."""
        first = min(self.cursor, max(self.first, self.cursor - self.room + 1))
        if first != self.first:
            self.scroll_to(y=first, animate=False, immediate=True, force=True)

    def move_to(self, row: int) -> None:
        """Set the cursor on a row, or on the nearest there is."""
        row = max(min(row, self.n_rows - 1), 0)
        if row != self.cursor:
            self.cursor = row
            self.reveal()
            self.refresh()
            self.post_message(self.Moved(self))

    def action_move(self, by: int) -> None:
        """Move the cursor by rows."""
        self.move_to(self.cursor + by)

    def action_page(self, by: float) -> None:
        """Move the cursor by pages."""
        self.action_move(int(by * max(self.room - 1, 1)))

    def action_jump(self, row: int) -> None:
        """Move the cursor to a row; to the last one where it is negative."""
        self.move_to(self.n_rows - 1 if row < 0 else row)

    def action_choose(self) -> None:
        """Open what is under the cursor."""
        if self.n_rows:
            self.post_message(self.Chosen(self))

    def on_resize(self) -> None:
        """Keep the cursor in sight."""
        self.count(self.n_rows)

    def on_click(self, event: events.Click) -> None:
        """Set the cursor where the mouse is; open it at a double click."""
        line = event.get_content_offset(self)
        if line is None:
            return
        if line.y < self.N_FIXED:
            self.on_heading(line.x)
        elif (row := self.first + line.y - self.N_FIXED) < self.n_rows:
            self.move_to(row)
            if event.chain == 2:
                self.action_choose()

    def on_heading(self, x: int) -> None:
        """Do what a click into the lines that do not scroll asks for."""

    def render_line(self, y: int) -> Strip:
        """Make one line that is in sight."""
        width = self.scrollable_content_region.width
        if y < self.N_FIXED:
            return self._strip(self.fixed(y), width, self.get_component_rich_style("lines--heading"))
        number = self.first + y - self.N_FIXED
        if number >= self.n_rows:
            said = [] if self.n_rows else list(folded(self.empty, max(width - 2, 1)))
            return self._strip(((f" {line}", "dim") for line in said[number : number + 1]), width, None)
        over = None
        if number == self.cursor:
            over = self.get_component_rich_style("lines--cursor" if self.has_focus else "lines--unfocused")
        elif self.is_marked(number):
            over = self.get_component_rich_style("lines--marked")
        return self._strip(self.row(number), width, over)

    def _strip(self, pieces: Iterable[Piece], width: int, over: Style | None) -> Strip:
        plain = self.rich_style if over is None else self.rich_style + over
        segments: list[Segment] = []
        used = 0
        for text, tone in pieces:
            if used >= width:
                break
            style = self.rich_style + self.get_component_rich_style(f"lines--{tone}") if tone else self.rich_style
            if over is not None and tone not in self.KEPT:
                style = style + over if self.has_focus else style + Style(bgcolor=over.bgcolor)
            segments.append(Segment(text, style))
            used += cell_len(text)
        return Strip(segments).adjust_cell_length(width, plain)
