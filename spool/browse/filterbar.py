"""The line where a filter is typed, and what is said of it underneath."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static

from spool.browse.filters import Typed as TypedFilter
from spool.browse.filters import read_typed
from spool.look.text import safe_text

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.timer import Timer

PAUSE_S = 0.25
"""How long nothing must be typed before the filter is tried."""

HINT = "reward > 0.5 and source = 'swe'   or a text in ids, groups and sources"


class FilterBar(Vertical):
    """A line to type in, out of sight until `begin`; what is typed is told once typing pauses."""

    DEFAULT_CSS = """
    FilterBar { height: auto; display: none; background: $panel; }
    FilterBar.open { display: block; }
    FilterBar Input, FilterBar Input:focus { border: none; height: 1; padding: 0 1; background: $panel; }
    FilterBar Static { height: auto; padding: 0 1; color: $text-muted; }
    FilterBar Static.failed { color: $text-error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "clear", "clear the filter"),
        Binding("down", "done", "to the table", show=False),
    ]

    class Typed(Message):
        """Another filter."""

        def __init__(self, typed: TypedFilter) -> None:
            super().__init__()
            self.typed = typed

    class Done(Message):
        """The filter is as it is meant to be."""

    def __init__(self) -> None:
        super().__init__()
        self._timer: Timer | None = None
        self._told = TypedFilter(None, "")

    def compose(self) -> ComposeResult:
        """Lay it out."""
        yield Input(placeholder=HINT, select_on_focus=False)
        yield Static(Content(), markup=False)

    def begin(self) -> None:
        """Show it and type in it."""
        self.add_class("open")
        self.query_one(Input).focus()

    def explain(self, problem: str) -> None:
        """Say what is wrong with the filter; with nothing, what it was taken for."""
        line = self.query_one(Static)
        line.set_class(bool(problem), "failed")
        line.update(Content(safe_text(problem or self._said())))

    def _said(self) -> str:
        kinds = {"expression": "an expression", "text": "no expression: text in ids, groups and sources"}
        return kinds.get(self._told.kind, "enter keeps the filter, escape clears it")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Wait until typing pauses."""
        event.stop()
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(PAUSE_S, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        typed = read_typed(self.query_one(Input).value)
        if typed != self._told:
            self._told = typed
            self.post_message(self.Typed(typed))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter; with nothing typed the line goes."""
        event.stop()
        self.action_done()

    def action_done(self) -> None:
        """Keep the filter and leave the line."""
        self._tell()
        self.set_class(bool(self.query_one(Input).value.strip()), "open")
        self.post_message(self.Done())

    def action_clear(self) -> None:
        """Take the filter away."""
        self.query_one(Input).value = ""
        self.action_done()
