"""A choice of one among some."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult


class PickScreen(ModalScreen[str | None]):
    """Asks for one of some choices, and returns its key, or None.

    Args:
        title: what is asked.
        choices: key and text of each.
    """

    DEFAULT_CSS = """
    PickScreen { align: center middle; }
    PickScreen > Vertical { width: 44; height: auto; max-height: 90%; border: round $primary; background: $surface; }
    PickScreen Static { padding: 0 1; text-style: bold; }
    PickScreen OptionList, PickScreen OptionList:focus {
        height: auto; max-height: 100%; border: none; padding: 0; background: $surface; scrollbar-size-vertical: 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "leave"),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
    ]

    def __init__(self, title: str, choices: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._asked, self._choices = title, choices

    def compose(self) -> ComposeResult:
        """Lay it out."""
        with Vertical():
            yield Static(Content(self._asked))
            yield OptionList(*(Option(Content(text), id=key) for key, text in self._choices))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the choice."""
        self.dismiss(event.option.id)

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        options = self.query_one(OptionList)
        options.action_cursor_down() if by > 0 else options.action_cursor_up()
