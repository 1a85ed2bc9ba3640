"""A line to type into, which is there only as long as it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input

if TYPE_CHECKING:
    from textual.widget import Widget


class LineInput(Input):
    """The line: hidden until `open`, and again after enter or escape."""

    DEFAULT_CSS = """
    LineInput { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
    LineInput.open, LineInput.open:focus { display: block; border: none; height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "cancel")]

    class Typed(Message):
        """Enter was pressed."""

        def __init__(self, line: LineInput, text: str) -> None:
            super().__init__()
            self.line, self.text = line, text

        @property
        def control(self) -> LineInput:
            """The line."""
            return self.line

    _before: Widget | None = None

    def open(self, hint: str) -> None:
        """Show the line, empty, and take what is typed."""
        self._before = self.screen.focused
        self.value, self.placeholder = "", hint
        self.add_class("open")
        self.focus()

    def action_close(self) -> None:
        """Hide the line and give the focus back."""
        self.remove_class("open")
        if self._before is not None:
            self._before.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Hand on what was typed."""
        event.stop()
        self.action_close()
        if event.value.strip():
            self.post_message(self.Typed(self, event.value.strip()))
