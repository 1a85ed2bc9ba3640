"""A session's tree of steps, and its segments, as lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType

from spool.browse.lines import Lines, Piece
from spool.look.text import one_line, short
from spool.look.tree import glyph, rails

if TYPE_CHECKING:
    from spool.look.session import SegmentLook
    from spool.look.tree import TreeRow

MOST_LEAD = 16
"""Cells for where a step hangs and its number; what hangs deeper moves the rest to the right."""

_FINISH = {"length": "warn", "abort": "bad", "error": "bad"}


class TreeView(Lines):
    """The tree. Steps of the current segment have a bar at their left; those that no segment has are dim.

    Attributes:
        rows: what is shown.
        segment: index of the current segment.
        follows: the cursor goes to each new step, until it is moved.
    """

    N_FIXED = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("end,G", "jump(-1)", "last, then follow new steps", show=False),
        Binding("left,h", "parent", "its parent", show=False),
        Binding("right,l", "child", "the step that goes on", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.rows: Sequence[TreeRow] = ()
        self.follows = False
        self.segment: int | None = None
        self._places: dict[int, int] = {}
        self._lead = 6

    def show(self, rows: Sequence[TreeRow], step: int | None) -> None:
        """Show a tree, with the cursor on a step, as far as there is that one."""
        self.rows = rows
        self._places = {row.step.index: place for place, row in enumerate(rows)}
        self._lead = min(max((len(_lead(row)) for row in rows), default=0), MOST_LEAD)
        self.count(len(rows), cursor=None if step is None else self._places.get(step))

    def move_to(self, row: int) -> None:
        """Set the cursor on a row, and follow no longer."""
        self.follows = False
        super().move_to(row)

    def action_jump(self, row: int) -> None:
        """Move the cursor to a row; at the last one, go on to each step that is recorded from now on."""
        super().action_jump(row)
        self.follows = row < 0
        self.post_message(self.Moved(self))

    @property
    def current(self) -> TreeRow | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if self.rows else None

    def go_to(self, step: int) -> None:
        """Set the cursor on a step."""
        if step in self._places:
            self.move_to(self._places[step])

    def action_parent(self) -> None:
        """Go to the parent."""
        row = self.current
        if row is not None and row.step.parent is not None:
            self.go_to(row.step.parent)

    def action_child(self) -> None:
        """Go to the step that goes on with the chain: it stands behind all side branches."""
        row = self.current
        below = () if row is None else self.rows[self.cursor + 1 :]
        for offset, other in enumerate(below, 1):
            if row is not None and other.step.parent == row.step.index and other.kind == "next":
                self.move_to(self.cursor + offset)
                return

    def fixed(self, number: int) -> Iterable[Piece]:  # noqa: ARG002
        """Return what the columns are."""
        return ((f" {'STEP':<{self._lead}}   +NEW   →GEN VER FINISH", ""),)

    def row(self, number: int) -> Iterable[Piece]:
        """Return a step: where it hangs, what it is, what it adds, its versions and how it ended."""
        row = self.rows[number]
        step = row.step
        unused = not row.segments
        tone = "bad" if row.superseded else "dim" if unused else "accent" if row.kind == "start" else ""
        yield ("▌" if self.segment in row.segments else " "), "accent"
        yield rails(row), "dim"
        yield _lead(row)[len(rails(row)) :], tone
        yield " " * (self._lead - len(_lead(row))), ""
        yield f"{'+' + short(step.n_new):>7}", "dim" if unused else "user"
        yield f"{'→' + short(step.n_response):>7}", "dim" if unused else "assistant"
        if step.versions:
            yield f" v{one_line('..'.join(dict.fromkeys((step.versions[0][:20], step.versions[-1][:20]))))}", "dim"
        yield from self._notes(row)
        if step.finish_reason:
            yield f" {one_line(step.finish_reason[:20])}", _FINISH.get(step.finish_reason, "dim")

    def _notes(self, row: TreeRow) -> Iterable[Piece]:
        if row.superseded:
            yield " retried", "bad"
        elif row.kind == "start" and row.step.index != self.rows[0].step.index:
            yield " new chain", "accent"
        elif not row.segments:
            yield " in no segment", "dim"
        if row.step.n_nonfinite:
            yield f" {short(row.step.n_nonfinite)} nan", "warn"


def _lead(row: TreeRow) -> str:
    return f"{rails(row)}{glyph(row)} {row.step.index}"


class SegmentList(Lines):
    """The segments that a view makes."""

    N_FIXED = 2

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.segments: Sequence[SegmentLook] = ()
        self.title = ""

    def show(self, segments: Sequence[SegmentLook], title: str) -> None:
        """Show segments."""
        self.segments, self.title = segments, title
        self.empty = "the view makes none: nothing was generated"
        self.count(len(segments))

    @property
    def current(self) -> SegmentLook | None:
        """The segment under the cursor."""
        return self.segments[self.cursor] if self.segments else None

    def fixed(self, number: int) -> Iterable[Piece]:
        """Return which view it is, and what the columns are."""
        return ((f" {self.title}" if number == 0 else "  # TOKENS TRAIN STEPS VER FINISH", ""),)

    def row(self, number: int) -> Iterable[Piece]:
        """Return a segment: its length, what is trained of it, versions, how it ended, what was cut."""
        segment = self.segments[number]
        yield f"{segment.index:>3} ", "strong"
        yield f"{short(segment.n_tokens):>6}", ""
        yield f"{short(segment.n_trained):>6}", "user" if segment.n_trained else "dim"
        yield f"{short(segment.n_steps):>6}", "dim"
        if segment.versions is not None:
            yield f" v{one_line('..'.join(dict.fromkeys(name[:20] for name in segment.versions)))}", "dim"
        if segment.finish_reason:
            yield f" {one_line(segment.finish_reason[:20])}", _FINISH.get(segment.finish_reason, "dim")
        if segment.reward is not None:
            yield f" r={segment.reward:.4g}", "good" if segment.reward > 0 else ""
        if segment.cut_tokens:
            yield f" cut {short(segment.cut_tokens)}", "warn"
