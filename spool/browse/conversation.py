"""What was said, as rows: roles coloured, calls and results folded, long output a page at a time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from textual.binding import Binding, BindingType

from spool.browse.lines import Lines, Piece
from spool.browse.wrapping import Wrapped, n_lines, place_after, place_before, wrapped
from spool.look.conversation import Conversation, Place, occurrences, spelled
from spool.look.text import one_line, short

if TYPE_CHECKING:
    from spool.look.conversation import Block

PAGE_ROWS = 30
"""Rows of a text that are made at first, and before and behind what was found in it."""

MORE_ROWS = 300
"""Rows that are made in addition when more are asked for."""

EARLIER_BLOCKS = 60
"""Blocks that are shown before what a step adds, or what was found; so many more when they are asked for."""

LATER_BLOCKS = 300
"""Blocks that are shown from there on; so many more when they are asked for."""

PREVIEW = 400
"""Characters of a folded text that are looked at."""

_TONES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_LABELS = {"text": "", "thought": "thinks", "call": "calls", "result": "", "raw": "raw"}


class _Row(NamedTuple):
    block: int
    pieces: tuple[Piece, ...]
    action: str = ""
    start: int | None = None
    """Place of its first character in the block's text; of a row that shows more, of the nearest it shows."""

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
        self._windows: dict[int, tuple[int, int]] = {}
        self._rows: list[_Row] = []
        self._width = 0
        self.wanted = ""
        self._found: Place | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        """What is shown; it is never changed, only replaced."""
        return self._blocks

    def place(self, by: int) -> Place:
        """Return where the cursor is, for a search forward (1) or back: at what was found last, or before its row."""
        if self._found is not None and self._row_of(self._found) == self.cursor:
            return self._found
        row = next((row for row in self._rows[self.cursor :] if row.block >= 0), _Row(self._shown[1], ()))
        return Place(row.block, (row.start or 0) - (by > 0))

    def look_for(self, text: str) -> None:
        """Set a text off wherever it stands."""
        self.wanted = text
        self._again()

    def reveal_found(self, found: Place) -> None:
        """Unfold what holds a place, and set the cursor on it."""
        self._found = found
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
        """Show what is around a place, where it is not shown: of the conversation, and of the text."""
        block, at = place
        text = spelled(self._blocks[block])
        start, stop = self._window(block, text)
        end = min(at + len(self.wanted), len(text))
        is_there, is_unfolded = start <= at and end <= stop, block in self._open or not self._folds(block)
        if not is_there:
            start = place_before(text, at, self._width - 2, PAGE_ROWS)
            stop = place_after(text, end, self._width - 2, PAGE_ROWS)
        self._windows[block] = start, stop  # kept in another width, too
        if is_there and is_unfolded and block in range(*self._shown):
            return
        if block not in range(*self._shown):
            self._shown = max(block - EARLIER_BLOCKS, 0), min(block + LATER_BLOCKS, len(self._blocks))
        self._open |= set() if is_unfolded else {block}
        self._make()

    def _window(self, number: int, text: str) -> tuple[int, int]:
        """Return the part of a block's text that is shown."""
        return self._windows.get(number) or (0, place_after(text, 0, self._width - 2, PAGE_ROWS))

    def show(self, found: Conversation, adds: str, empty: str) -> None:
        """Show messages, from those on that are not in the conversation before.

        Args:
            found: the messages.
            adds: what is said between those of before and the others.
            empty: what is said where there are none.
        """
        self._blocks, self._n_shared, self._adds = found.blocks, found.n_shared, adds
        self._open, self._windows, self._found = set(), {}, None
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
        elif row.action in ("before", "more"):
            self._widen(row)
            return
        elif row.block >= 0 and self._folds(row.block):
            self._open ^= {row.block}
        else:
            return
        self._again()

    def action_move(self, by: int) -> None:
        """Move the cursor by rows; where it passes what is left out before a text's rows, they are made."""
        passed = reversed(self._rows[max(self.cursor + by, 0) : self.cursor])
        row = next((row for row in passed if row.action == "before"), None)
        if row is not None:
            self._widen(row)
        super().action_move(by)

    def _widen(self, row: _Row) -> None:
        """Show more of a text, as a row offers, with the cursor on what is nearest to it of that."""
        text = spelled(self._blocks[row.block])
        start, stop = self._window(row.block, text)
        if row.action == "before":
            self._windows[row.block] = place_before(text, start, self._width - 2, MORE_ROWS), stop
        else:
            self._windows[row.block] = start, place_after(text, stop, self._width - 2, MORE_ROWS)
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
        """Make the rows anew, and stay at what is under the cursor, on the same line of the screen."""
        row = self._rows[self.cursor] if self._rows else None
        on_screen = self.cursor - self.first
        self._make()
        at = 0
        if row is not None:
            found = None if row.start is None else self._row_of(Place(row.block, row.start))
            of_block = (number for number, made in enumerate(self._rows) if made.block == row.block)
            at = next(of_block, 0) if found is None else found
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
        if new == last == len(self._blocks) and self._n_shared and self._blocks and self._width:
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
        yield from self._text(number, "dim" if block.kind == "thought" or block.message < self._n_shared else "")

    def _text(self, number: int, shade: str) -> Iterator[_Row]:
        """Yield the rows of the part of a text that is shown, and what is left out before it and behind it."""
        text = spelled(self._blocks[number])
        start, stop = self._window(number, text)
        if start:
            yield _Row(number, ((f"  ▲ {_left(text, 0, start, 'earlier')}", "accent"),), "before", start - 1)
        spans = self._spans(text, start, stop)
        for row in wrapped(text, start, stop, self._width - 2):
            yield _Row(number, (("  ", ""), *_marked(row, spans, shade)), start=row.start)
        if stop < len(text):
            yield _Row(number, ((f"  ▼ {_left(text, stop, len(text), 'more')}", "accent"),), "more", stop)

    def _spans(self, text: str, start: int, stop: int) -> list[tuple[int, int]]:
        """Return where a part of a text has what is looked for, or some of it."""
        beside = len(self.wanted)
        first = max(start - beside, 0)
        near = text[first : stop + beside] if beside else ""
        return [(first + at, first + end) for at, end in occurrences(self.wanted, near)] if near else []

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


def _left(text: str, start: int, stop: int, which: str) -> str:
    """Return how much of a text is left out."""
    lines = n_lines(text, start, stop)
    return f"{short(lines)} {which} line{'' if lines == 1 else 's'}, {short(stop - start)} characters"


def _marked(row: Wrapped, spans: Sequence[tuple[int, int]], shade: str) -> Iterator[Piece]:
    """Yield a row with what it shows of some ranges of its text set off."""
    at, places = 0, row.places
    for start, stop in spans[bisect_right(spans, row.start, key=itemgetter(1)) :] if places else ():
        if start > places[-1]:
            break
        first, last = bisect_left(places, start), bisect_left(places, stop)
        yield row.text[at:first], shade
        yield row.text[first:last], "found"
        at = last
    yield row.text[at:], shade


def _size(text: str) -> str:
    """Return how much is folded away; nothing where it is seen."""
    lines = n_lines(text)
    if lines > 1:
        return f"{short(lines)} lines"
    return f"{short(len(text))} characters" if len(text) > 80 else ""
