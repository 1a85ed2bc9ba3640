"""Keys and what they do, as the screen underneath binds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from textual.app import ComposeResult
    from textual.dom import DOMNode

_NAMES = {"slash": "/", "question_mark": "?", "pageup": "page up", "pagedown": "page down", "up": "↑", "down": "↓",
          "left": "←", "right": "→", "comma": ",", "full_stop": ".", "left_square_bracket": "[",
          "right_square_bracket": "]"}  # fmt: skip


class HelpScreen(ModalScreen[None]):
    """The keys of a screen.

    Args:
        title: of the screen.
        bindings: keys that work there; of several with one meaning, all are shown.
    """

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 62; max-width: 100%; height: auto; max-height: 100%; border: round $primary; background: $surface;
        padding: 0 1;
    }
    HelpScreen Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "leave"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, title: str, bindings: Iterable[Binding]) -> None:
        super().__init__()
        self._titled, self._keys = title, list(bindings)

    def compose(self) -> ComposeResult:
        """Lay it out."""
        with VerticalScroll():
            yield Static(Content(self.text()))

    def text(self) -> str:
        """Return the keys, a meaning a line."""
        keys: dict[str, list[str]] = {}
        for binding in self._keys:
            if binding.description:
                keys.setdefault(binding.description, []).append(shown_key(binding.key))
        names = {what: ", ".join(dict.fromkeys(found)) for what, found in keys.items()}
        width = max(map(len, names.values()), default=0)
        lines = [f"{name:<{width}}  {what}" for what, name in names.items()]
        return "\n".join([self._titled, "", *lines, "", "A mouse clicks, double clicks and scrolls."])

    def action_scroll(self, by: int) -> None:
        """Scroll a line."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


def shown_key(key: str) -> str:
    """Return a key as it is on a keyboard."""
    return _NAMES.get(key, key.replace("ctrl+", "^"))


def bindings_of(node: DOMNode | None) -> Iterator[Binding]:
    """Yield the bindings that the browser has for a widget and for what it is in, from the inside."""
    while node is not None:
        for kind in type(node).__mro__:
            if kind.__module__.startswith("spool."):
                yield from Binding.make_bindings(vars(kind).get("BINDINGS", ()))
        node = node.parent
