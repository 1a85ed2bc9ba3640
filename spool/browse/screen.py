"""What all screens have in common: a heading, a line of status, and questions that are answered on a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

from rich.cells import cell_len
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Static

from spool.browse.asking import Asking
from spool.browse.wrapping import elided
from spool.errors import ReplacedError, SpoolError
from spool.look.text import one_line

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from spool.browse.app import Browser
    from spool.handle import Spool
    from spool.look.references import Thing

T = TypeVar("T")

LEAST_NAME = 24
"""Cells that a name keeps in a heading, however much else is said."""

EXPECTED = (SpoolError, OSError)
"""Failures that are the spool's, or its disk's: a line for whoever looks. Any other is a fault of the browser."""


def _kind(error: BaseException) -> str:
    return str(getattr(error, "kind", "storage" if isinstance(error, OSError) else f"fault, {type(error).__name__}"))


class _Question(NamedTuple):
    key: str
    then: Callable[[Any], None]
    failed: Callable[[BaseException], None] | None


class SpoolScreen(Screen[None]):
    """Base of all screens.

    A screen gives its widgets by `content`; the heading above, the status line and the footer below are the same on
    all. Whatever may wait for a disk or a network is asked by `ask`.
    """

    DEFAULT_CSS = """
    SpoolScreen #heading { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    SpoolScreen #status { height: 1; color: $text-muted; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    SpoolScreen #status.failed {
        color: $text-error; text-style: bold; height: auto; max-height: 4; text-wrap: wrap;
    }
    """

    WORDS: ClassVar[Mapping[str, str]] = {}
    """Words on the screen that the help explains."""

    class Answered(Message):
        """A thread has the answer to a question of this screen."""

        bubble = False

        def __init__(self, question: _Question, value: Any, error: BaseException | None) -> None:
            super().__init__()
            self.question, self.value, self.error = question, value, error

    def __init__(self) -> None:
        super().__init__()
        self._asking = Asking()
        self._failing: str | None = None
        self._headline = ("", "")

    @property
    def browser(self) -> Browser:
        """The application."""
        return cast("Browser", self.app)

    @property
    def spool(self) -> Spool:
        """The open spool."""
        return self.browser.spool

    def compose(self) -> ComposeResult:
        """Lay the screen out: heading, `content`, status, footer."""
        yield Static(Content(), id="heading")
        yield from self.content()
        yield Static(Content(), id="status")
        yield Footer(show_command_palette=False, compact=True)

    def content(self) -> ComposeResult:
        """Yield the widgets between heading and status."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Begin, unless the screen was left before it was laid out."""
        if self.is_open:
            self.begin()

    def begin(self) -> None:
        """Do what a screen does first, once its widgets are there."""

    def ask(
        self,
        key: str,
        call: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Run ``call`` on a thread and hand what it returns to ``then`` on the UI thread.

        Of one key one call runs at a time, and of those that wait meanwhile the latest wins: the others never run. What
        comes when a later one was asked is dropped. A failure of the spool becomes a line in the status, never a crash.

        Args:
            key: of the question, in this screen.
            call: may block; it touches no widget.
            then: called with the answer, unless the screen is gone.
            failed: called with the failure beside what the status line says.
        """
        question = _Question(key, then, failed)

        def answer(value: T | None, error: BaseException | None) -> None:
            self.post_message(self.Answered(question, value, error))

        self._asking.ask(key, question, call, answer)

    def on_spool_screen_answered(self, message: Answered) -> None:
        """Hand an answer on, unless a later question of its key was asked."""
        message.stop()
        question, error = message.question, message.error
        if not self._asking.settle(question.key, question) or not self.is_open:
            return
        if error is None:
            if self._failing == question.key:
                self.say("")
            question.then(message.value)
            return
        if isinstance(error, ReplacedError):
            self.browser.begin_anew()
            return
        if not isinstance(error, EXPECTED):
            self.browser.faults.append(error)
        self.fail(error)
        self._failing = question.key
        if question.failed is not None:
            question.failed(error)

    @property
    def is_open(self) -> bool:
        """Whether the screen was not left: one that was may lose its widgets at any moment."""
        return self in self.app.screen_stack

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still awaited."""
        return self._asking.is_busy

    def headline(self, text: str, name: str = "") -> None:
        """Say in the heading what the screen shows; where the spool is comes last, as far as there is room.

        Args:
            text: what is said.
            name: of the thing that is shown; it stands in front, without its middle where there is no room for all.
        """
        self._headline = name, text
        room = max(self.size.width - 2 - cell_len(text), LEAST_NAME)
        self._line("#heading", f"{elided(one_line(name), room)}{text}  {self.browser.place}")

    def on_resize(self) -> None:
        """Use the room that the heading has now."""
        name, text = self._headline
        if name and self.is_open and self.query("#heading"):
            self.headline(text, name)

    def say(self, text: str) -> None:
        """Say something in the status line."""
        self._failing = None
        self._line("#status", text).remove_class("failed")

    def fail(self, error: BaseException | str) -> None:
        """Say in the status line what went wrong; of an error its kind and its first line."""
        kind = "" if isinstance(error, str) else f"{_kind(error)}: "
        self._line("#status", f"{kind}{str(error).partition(chr(10))[0]}").add_class("failed")

    def _line(self, selector: str, text: str) -> Static:
        line = self.query_one(selector, Static)
        line.update(Content(one_line(text)))
        return line

    def refer(self) -> Thing | None:
        """Return the thing under the cursor; None for nothing.

        It is what is copied and exported, and whose bytes the screen of storage shows.
        """
        return None

    def selected(self) -> Sequence[Thing]:
        """Return all that is to be exported: what is marked, or else the thing under the cursor."""
        found = self.refer()
        return [] if found is None else [found]
