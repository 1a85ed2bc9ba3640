"""Exporting what is selected: into which folder, in which form."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, RadioButton, RadioSet, Static

from spool.look.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

Form = Literal["parquet", "spool"]


class Choice(RadioButton):
    """A choice that says by a sign, not by a colour alone, whether it is taken."""

    BUTTON_LEFT = BUTTON_RIGHT = ""

    def watch_value(self) -> None:
        """Show the sign."""
        self._sign()
        super().watch_value()

    def on_mount(self) -> None:
        """Show the sign from the beginning."""
        self._sign()

    def _sign(self) -> None:
        self.BUTTON_INNER = "(x)" if self.value else "( )"
        self.refresh()


class ExportScreen(ModalScreen[tuple[str, Form] | None]):
    """Asks where to and as what; returns a path and a form, or None.

    Args:
        names: references of what is exported.
    """

    DEFAULT_CSS = """
    ExportScreen { align: center middle; }
    ExportScreen > Vertical {
        width: 72; max-width: 100%; height: auto; border: round $primary; background: $surface; padding: 0 1;
    }
    ExportScreen Static { height: auto; }
    ExportScreen .title { text-style: bold; }
    ExportScreen .hint { color: $text-muted; }
    ExportScreen RadioSet, ExportScreen RadioSet:focus {
        border: none; background: $surface; height: auto; layout: horizontal;
    }
    ExportScreen RadioSet > Choice > .toggle--button { color: $text; background: $surface; }
    ExportScreen Input, ExportScreen Input:focus {
        border: none; height: 1; padding: 0 1; margin: 1 0; background: $panel;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "leave")]

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._refs = names

    def compose(self) -> ComposeResult:
        """Lay it out."""
        many = f"{len(self._refs)} sessions" if len(self._refs) > 1 else one_line(self._refs[0][:200])
        with Vertical():
            yield Static(Content(f"Export {many}"), classes="title")
            yield Input(placeholder="path of a new folder")
            with RadioSet():
                yield Choice("Parquet, a row a segment", value=True)
                yield Choice("a spool, whole sessions")
            yield Static(Content("enter exports, tab: the form, escape leaves; nothing is overwritten"), classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return what was chosen."""
        event.stop()
        path = event.value.strip()
        if path:
            self.dismiss((path, "spool" if self.query_one(RadioSet).pressed_index == 1 else "parquet"))
