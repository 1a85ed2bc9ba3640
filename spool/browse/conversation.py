"""What was said, as rows: roles coloured, calls and results folded, long output a page at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from textual.binding import Binding, BindingType

from spool.browse.lines import Lines, Piece
from spool.browse.wrapping import n_lines, wrapped
from spool.look.conversation import Conversation, Place, occurrences, spelled
from spool.look.text import one_line, short

if TYPE_CHECKING:
    from spool.look.conversation import Block

PAGE_ROWS = 30
"""Rows of a text that are made at first."""

MORE_ROWS = 300
"""Rows that are made in addition when more are asked for."""

EARLIER_BLOCKS = 60
"""Blocks of earlier messages that are shown before what a step adds; so many more when they are asked for."""

LATER_BLOCKS = 300
"""Blocks that are shown in all."""

PREVIEW = 400
"""Characters of a folded text that are looked at."""

_TONES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_LABELS = {"text": "", "thought": "thinks", "call": "calls", "result": "", "raw": "raw"}


class _Row(NamedTuple):
    block: int
    pieces: tuple[Piece, ...]
    action: str = ""
    start: int | None = None
    """Place of its first character in the block's text; of a row that shows more, of the first one that is left."""

    @property
    def has_found(self) -> bool:
        return any(tone == "found" for _, tone in self.pieces)


class ConversationView(Lines):
    """The messages of a step or segment.

    Enter or space unfolds what is folded, or shows more of what is long.

    Attributes:
        wanted: a text that is set off wherever it stands; nothing for none.
    """

    KEPT = frozenset({"found"})
    DEFAULT_CSS = "ConversationView { overflow-y: scroll; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "unfold, more"),
        Binding("space", "choose", "unfold, more", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._blocks: Sequence[Block] = ()
        self._n_shared = 0
        self._adds = ""
        self._shown = (0, 0)
        self._open: set[int] = set()
        self._limits: dict[int, int] = {}
        self._rows: list[_Row] = []
        self._width = 0
        self.wanted = ""
        self._found: Place | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        """What is shown; it is never changed, only replaced."""
        return self._blocks

    @property
    def place(self) -> Place:
        """Where the cursor is: at what was found last, or before its row."""
        if self._found is not None and self._row_of(self._found) == self.cursor:
            return self._found
        row = next((row for row in self._rows[self.cursor :] if row.block >= 0), _Row(0, ()))
        return Place(row.block, (row.start or 0) - 1)

    def look_for(self, text: str) -> None:
        """Set a text off wherever it stands."""
        self.wanted = text
        self._again()

    def reveal_found(self, found: Place) -> None:
        """Unfold what holds a place, and set the cursor on it."""
        self._found = found
        row = self._row_of(found)
        if row is None or any(near.action == "more" for near in self._rows[row : row + 2]):  # it may go on there
            self._make_room_for(found)
            row = self._row_of(found)
        if row is not None:
            self.count(len(self._rows), cursor=row, first=max(row - self.room // 2, 0))

    def _row_of(self, place: Place) -> int | None:
        """Return the row where a place is, or that would show it; None where its block is folded or left out."""
        before = (
            number
            for number, row in enumerate(self._rows)
            if row.block == place.block and row.start is not None and row.start <= place.at
        )
        return max(before, default=None)

    def _make_room_for(self, place: Place) -> None:
        block, at = place
        self._shown = min(self._shown[0], block), max(self._shown[1], block + 1)
        if self._folds(block):
            self._open.add(block)
        before, _ = wrapped(spelled(self._blocks[block])[: at + 1], 0, self._width - 2, at + 1)
        self._limits[block] = max(self._limits.get(block, 0), len(before) + PAGE_ROWS)
        self._make()

    def show(self, found: Conversation, adds: str, empty: str) -> None:
        """Show messages, from those on that are not in the conversation before.

        Args:
            found: the messages.
            adds: what is said between those of before and the others.
            empty: what is said where there are none.
        """
        self._blocks, self._n_shared, self._adds = found.blocks, found.n_shared, adds
        self._open, self._limits, self._found = set(), {}, None
        new = self._first_new()
        self._shown = max(new - EARLIER_BLOCKS, 0), min(new + LATER_BLOCKS, len(self._blocks))
        self.empty = empty
        self._begin()

    def _begin(self) -> None:
        """Make the rows, and begin where what is new does."""
        self._make()
        new = self._first_new()
        at = next((number for number, row in enumerate(self._rows) if row.block >= new), 0)
        at -= bool(at and self._n_shared)
        self.count(len(self._rows), cursor=at, first=at)

    def clear(self, why: str) -> None:
        """Show nothing, and say why."""
        self.show(Conversation([], 0, 0), "", why)

    def row(self, number: int) -> Iterable[Piece]:
        """Return a row."""
        return self._rows[number].pieces

    @property
    def text(self) -> str:
        """All rows there are, as text."""
        return "\n".join("".join(text for text, _ in row.pieces) for row in self._rows)

    def on_resize(self) -> None:
        """Wrap again where the width is another one, and keep what is under the cursor."""
        if not self._width:
            self._begin()
        elif self.scrollable_content_region.width != self._width:
            self._again()
        else:
            super().on_resize()

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        """Unfold, fold, or show more."""
        message.stop()
        row = self._rows[self.cursor]
        first, last = self._shown
        if row.action == "earlier":
            self._shown = max(first - EARLIER_BLOCKS, 0), last
        elif row.action == "later":
            self._shown = first, min(last + LATER_BLOCKS, len(self._blocks))
        elif row.action == "more":
            self._limits[row.block] = self._limits.get(row.block, PAGE_ROWS) + MORE_ROWS
        elif row.block >= 0 and self._folds(row.block):
            self._open ^= {row.block}
        else:
            return
        self._again()

    def unfold(self) -> None:
        """Unfold all calls and results, or fold them."""
        folding = {number for number in range(*self._shown) if self._folds(number)}
        self._open = set() if folding <= self._open else folding
        self._again()

    def next_message(self, by: int) -> None:
        """Go to the next message, or to the one before where ``by`` is negative."""
        here = self._message_at(self.cursor)
        rows = range(self.cursor + 1, len(self._rows)) if by > 0 else range(self.cursor - 1, -1, -1)
        for number in rows:
            message = self._message_at(number)
            if message != here and message >= 0 and (number == 0 or self._message_at(number - 1) != message):
                self.move_to(number)
                return

    def _message_at(self, number: int) -> int:
        block = self._rows[number].block if self._rows else -1
        return self._blocks[block].message if block >= 0 else -1

    def _first_new(self) -> int:
        found = (at for at, block in enumerate(self._blocks) if block.message >= self._n_shared)
        return next(found, len(self._blocks))

    def _folds(self, number: int) -> bool:
        return self._blocks[number].kind in ("call", "result", "raw")

    def _again(self) -> None:
        """Make the rows anew, and stay at the block where the cursor is, on the same line of the screen."""
        row = self._rows[self.cursor] if self._rows else None
        within = 0
        while row is not None and within < self.cursor and self._rows[self.cursor - within - 1].block == row.block:
            within += 1
        on_screen = self.cursor - self.first
        self._make()
        at = 0
        if row is not None:
            at = next((n for n, made in enumerate(self._rows) if made.block == row.block), 0)
            if at + within < len(self._rows) and self._rows[at + within].block == row.block:
                at += within
        self.count(len(self._rows), cursor=at, first=max(at - on_screen, 0))

    # -- rows --------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        self._width = self.scrollable_content_region.width
        first, last = self._shown if self._width else (0, 0)
        rows: list[_Row] = []
        if first:
            rows.append(_Row(-1, ((f"▲ {first:,} earlier parts: enter shows more", "accent"),), "earlier"))
        new = self._first_new()
        for number in range(first, last):
            if number == new and self._n_shared:
                rows.append(_Row(-2, ((self._rule(self._adds), "accent"),)))
            rows += self._block(number)
        if new >= last and self._n_shared and self._blocks and self._width:
            rows.append(_Row(-2, ((self._rule(f"{self._adds} nothing"), "accent"),)))
        if last < len(self._blocks):
            left = len(self._blocks) - last
            rows.append(_Row(-3, ((f"▼ {left:,} later parts: enter shows more", "accent"),), "later"))
        self._rows = rows

    def _rule(self, text: str) -> str:
        return f"── {text} ".ljust(self._width, "─")

    def _block(self, number: int) -> Iterable[_Row]:
        block = self._blocks[number]
        tone = _TONES.get(block.role, "strong")
        is_first = number == 0 or self._blocks[number - 1].message != block.message
        if self._folds(number) and number not in self._open:
            yield _Row(number, self._folded(block, tone, is_first))
            return
        if is_first or block.kind != "text":
            yield _Row(number, self._heading(block, tone, is_first, "▾ " if self._folds(number) else ""))
        text = spelled(block)
        limit = self._limits.get(number, PAGE_ROWS)
        made, at = wrapped(text, 0, self._width - 2, limit)
        shade = "dim" if block.kind == "thought" or block.message < self._n_shared else ""
        for row in made:
            yield _Row(number, (("  ", ""), *self._marked(row.text, shade)), start=row.start)
        if at < len(text):
            left = (
                f"{short(n := n_lines(text, at))} more line{'' if n == 1 else 's'}, {short(len(text) - at)} characters"
            )
            yield _Row(number, ((f"  ▼ {left}", "accent"),), "more", at)

    def _marked(self, row: str, shade: str) -> Iterable[Piece]:
        """Yield a row with what is looked for set off."""
        at = 0
        for start, stop in occurrences(self.wanted, row) if self.wanted else ():
            yield row[at:start], shade
            yield row[start:stop], "found"
            at = stop
        yield row[at:], shade

    def _heading(self, block: Block, tone: str, is_first: bool, sign: str) -> tuple[Piece, ...]:
        role = (one_line(block.role[:40]) or "?") if is_first else ""
        said = " ".join(part for part in (_LABELS[block.kind], one_line(block.name[:80])) if part)
        return ((f"{sign}{role}", tone), (f"{' ' if role else ''}{said}", "dim"))

    def _folded(self, block: Block, tone: str, is_first: bool) -> tuple[Piece, ...]:
        preview = one_line(" ".join(block.text[:PREVIEW].split()))
        heading = self._heading(block, tone, is_first, "▸ ")
        size = _size(block.text)
        room = max(self._width - sum(cell_len(part) for part, _ in heading) - len(size) - 3, 0)
        if cell_len(preview) > room:
            preview = set_cell_size(preview, max(room - 1, 0)) + "…"
        return (*heading, (f" {preview}", "dim"), (f"  {size}" if size else "", "accent"))


def _size(text: str) -> str:
    """Return how much is folded away; nothing where it is seen."""
    lines = n_lines(text)
    if lines > 1:
        return f"{short(lines)} lines"
    return f"{short(len(text))} characters" if len(text) > 80 else ""
