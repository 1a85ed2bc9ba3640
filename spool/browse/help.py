"""Keys and what they do, as the screen underneath binds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from textual.app import ComposeResult
    from textual.screen import Screen
    from textual.widget import Widget

_NAMES = {"slash": "/", "question_mark": "?", "pageup": "page up", "pagedown": "page down", "up": "↑", "down": "↓",
          "left": "←", "right": "→", "comma": ",", "full_stop": ".", "left_square_bracket": "[",
          "right_square_bracket": "]", "circumflex_accent": "^", "dollar_sign": "$", "colon": ":"}  # fmt: skip


class Part(NamedTuple):
    """Keys of a screen, or of one part of it.

    Attributes:
        title: of the part; nothing for what works on the whole screen.
        bindings: the keys.
    """

    title: str
    bindings: Sequence[Binding]


class HelpScreen(ModalScreen[None]):
    """The keys of a screen.

    Args:
        title: of the screen.
        parts: keys that work there; of several with one meaning, all are shown.
        words: what is said on the screen, and what it means.
    """

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 76; max-width: 100%; height: auto; max-height: 100%; border: round $primary; background: $surface;
        padding: 0 1;
    }
    HelpScreen Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "leave"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, title: str, parts: Sequence[Part], words: Mapping[str, str]) -> None:
        super().__init__()
        self._titled, self._parts, self._words = title, parts, words

    def compose(self) -> ComposeResult:
        """Lay it out."""
        with VerticalScroll():
            yield Static(Content(self.text()))

    def text(self) -> str:
        """Return the keys, a meaning a line, part by part, and what words mean."""
        found = [(part.title, _meanings(part.bindings)) for part in self._parts]
        found += [("Words", dict(self._words))] if self._words else []
        width = max((len(name) for _, lines in found for name in lines), default=0)
        text = [self._titled]
        for title, lines in found:
            text += ["", *([title] if title else [])]
            text += [f"{name:<{width}}  {what}" for name, what in lines.items()]
        return "\n".join([*text, "", "A mouse clicks, double clicks and scrolls."])

    def action_scroll(self, by: int) -> None:
        """Scroll a line."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


def shown_key(key: str) -> str:
    """Return a key as it is on a keyboard."""
    return _NAMES.get(key, key.replace("ctrl+", "^"))


def _meanings(bindings: Iterable[Binding]) -> dict[str, str]:
    """Return what keys do, by the keys of one meaning."""
    keys: dict[str, list[str]] = {}
    for binding in bindings:
        keys.setdefault(binding.description, []).append(shown_key(binding.key))
    return {", ".join(dict.fromkeys(found)): what for what, found in keys.items()}


def parts_of(screen: Screen[Any], parts: Iterable[Widget]) -> Iterator[Part]:
    """Yield the keys of a screen: of the whole, of each part that takes keys of its own, and of all lists.

    What a part or the screen binds anew, or takes away, is not listed a second time.

    Args:
        screen: the screen.
        parts: its parts that can be in focus.
    """
    taken: set[str] = set()
    whole = list(_bound([*_own(type(screen)), *_own(type(screen.app))], taken, screen))
    shared: list[Binding] = []
    own: list[Part] = []
    for part in parts:
        kinds, seen = _own(type(part)), set[str]()
        own.append(Part((part.id or "").capitalize(), list(_bound(kinds[:-1], seen, screen))))
        shared += [binding for binding in _bound(kinds[-1:], seen, screen) if binding not in shared]
    yield Part("", whole)
    if len(own) == 1:
        yield Part("In the list", [*own[0].bindings, *shared])
        return
    yield from (part for part in own if part.bindings)
    yield Part("In all lists", shared)


def _bound(kinds: Iterable[type], taken: set[str], screen: Screen[Any]) -> Iterator[Binding]:
    """Yield the bindings of classes, of a key the first one; those without a description do nothing worth a line."""
    for kind in kinds:
        for binding in Binding.make_bindings(vars(kind).get("BINDINGS", ())):
            if binding.key in taken:
                continue
            taken.add(binding.key)
            if binding.description and screen.check_action(binding.action, ()):
                yield binding


def _own(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("spool.")]
