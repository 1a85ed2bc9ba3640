"""The table of a segment's tokens, of which a window is held."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from textual.binding import Binding, BindingType
from textual.message import Message

from spool.browse.heat import BAR_CELLS, logprob_bar, logprob_tone
from spool.browse.lines import Lines, Piece
from spool.look.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spool.look.tokens import TokenRow

AHEAD = 200
"""Tokens that are read before and behind those in sight."""

_LONGEST = 200
_WIDE = 64


class TokenTable(Lines):
    """The tokens, one a line. Rows come by `put`, as answer to `Wanted`.

    Args:
        has_text: there is a vocabulary.
        id: of the widget.
    """

    N_FIXED = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "twice", "first (gg)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Wanted(Message):
        """Tokens ``[first, last)`` come into sight and are not held."""

        def __init__(self, first: int, last: int) -> None:
            super().__init__()
            self.first, self.last = first, last

    def __init__(self, *, has_text: bool, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.empty = "no tokens"
        self._has_text = has_text
        self._rows: Sequence[TokenRow] = ()
        self._start = 0
        self._asked: tuple[int, int] | None = None

    def put(self, start: int, rows: Sequence[TokenRow]) -> None:
        """Hold the tokens from ``start`` on, instead of those that were held."""
        self._start, self._rows, self._asked = start, rows, None
        self.refresh()

    def held(self, position: int) -> TokenRow | None:
        """Return a token, where it is held."""
        at = position - self._start
        return self._rows[at] if 0 <= at < len(self._rows) else None

    def go_to(self, token: int) -> None:
        """Set the cursor on a token, with what is around it in sight."""
        self.move_to(token)
        self.scroll_to(y=max(token - self.room // 2, 0), animate=False, immediate=True, force=True)

    def action_twice(self) -> None:
        """Go to the first token at the second g in a row."""
        if self._awaits_g:
            self.action_jump(0)
        self._awaits_g = not self._awaits_g

    _awaits_g = False

    def on_key(self, event: object) -> None:
        """Forget a g that another key followed."""
        if getattr(event, "key", "") != "g":
            self._awaits_g = False

    def fixed(self, number: int) -> Iterator[Piece]:  # noqa: ARG002
        """Return the headings."""
        position, wide = self._position_cells, self._is_wide
        yield f"{'TOKEN':>{position}}   {'ID':>7} ", ""
        if self._has_text:
            yield f"{'TEXT':<{self._text_cells}} ", ""
        yield "M ", ""
        if wide:
            yield f"{'LOGPROB':>8} ", ""
        yield f"{'SURPRISE':<{BAR_CELLS}}", ""
        if wide:
            yield f"{'STEP':>6} VERSION", ""

    def row(self, number: int) -> Iterator[Piece]:
        """Return one token; of one that is not here yet, its position."""
        yield f"{number:>{self._position_cells},} ", "dim"
        row = self.held(number)
        if row is None:
            self._want()
            yield "…", "dim"
            return
        yield _mark(row)
        yield ("      - " if row.token_id is None else f"{row.token_id:>8}"), ""
        yield " ", ""
        if self._has_text:
            yield from _text(row, self._text_cells)
            yield " ", ""
        yield ("1 ", "good") if row.mask else ("· ", "dim")
        if self._is_wide:
            yield _logprob(row.logprob)
        yield logprob_bar(row.logprob)
        if self._is_wide:
            yield (" " * 6 if row.step is None else f"{row.step:>6}"), "dim"
            yield " " + one_line((row.version or "")[:_LONGEST]), "warn" if row.new_version else "dim"

    def _want(self) -> None:
        wanted = max(self.first - AHEAD, 0), min(self.first + self.room + AHEAD, self.n_rows)
        if self._asked != wanted:
            self._asked = wanted
            self.post_message(self.Wanted(*wanted))

    def forget(self) -> None:
        """Ask again for what is not held: what was asked for could not be read."""
        self._asked = None

    @property
    def _position_cells(self) -> int:
        return max(len(f"{self.n_rows:,}"), 5)

    @property
    def _is_wide(self) -> bool:
        return self.scrollable_content_region.width >= _WIDE

    @property
    def _text_cells(self) -> int:
        others = self._position_cells + 12 + 3 + BAR_CELLS + (24 if self._is_wide else 0)
        return max(min(self.scrollable_content_region.width - others, 40), 6)


def _mark(row: TokenRow) -> Piece:
    """Return what begins at a token: another version, the response, a unit."""
    if row.new_version:
        return "V", "warn"
    if row.starts_response:
        return "R", "accent"
    return ("U", "accent") if row.unit is not None else (" ", "")


def _text(row: TokenRow, cells: int) -> Iterator[Piece]:
    """Return a token's text in so many cells: spaces visible, marks and bytes set off."""
    text = row.text
    if text is None or text.text is None:
        yield ("" if row.token_id is None else "unknown id").ljust(cells)[:cells], "bad"
        return
    pieces = [(visible(text.text), "accent" if text.special else "")]
    if text.completes:
        pieces.append((f" {one_line(text.completes)}", "strong"))
    used = sum(cell_len(piece) for piece, _ in pieces)
    if used > cells:
        yield set_cell_size("".join(piece for piece, _ in pieces), cells - 1) + "…", pieces[0][1]
        return
    yield from pieces
    yield " " * (cells - used), ""


def visible(text: str) -> str:
    """Return a token's text as one line in which spaces are seen."""
    return one_line(text[:_LONGEST]).replace(" ", "␣")


def _logprob(value: float | None) -> Piece:
    if value is None:
        return " " * 9, ""
    return f"{value:>8.3f} ", logprob_tone(value)
