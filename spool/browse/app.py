"""The browser: which screens there are, and the keys that work on all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from spool.browse.screen import SpoolScreen
from spool.browse.wrapping import number
from spool.look.references import argument_of, name_of, refs_of
from spool.look.text import one_line
from spool.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spool.browse.export import Form
    from spool.export import Exported
    from spool.handle import Spool
    from spool.look.references import Thing
    from spool.model.refs import SegmentRef, StepRef

FIRST = 2
"""Screens in the stack when the first one of the browser is in front: below is one of textual's own."""


class Browser(App[BaseException]):
    """The terminal browser of one spool.

    It returns what kept it from opening the spool, if anything did.

    Args:
        opens: opens the spool; called on a thread, after the first paint.
        tokenizer: path of a ``tokenizer.json``, for the text of tokens.

    Attributes:
        tokenizer: the same.
        place: where the spool is, for headings.
        faults: what went wrong that is nobody's fault but the browser's.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "storage", "storage"),
        Binding("y", "copy", "copy"),
        Binding("e", "export", "export"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "leave", "back"),
        Binding("escape", "step_back", "back", show=False),
        Binding("ctrl+c", "quit", "quit at once", show=False, priority=True),
        Binding("tab", "app.focus_next", "the next part", show=False),
        Binding("shift+tab", "app.focus_previous", "the part before", show=False),
    ]

    def __init__(self, opens: Callable[[], Spool], *, tokenizer: str | None = None) -> None:
        super().__init__()
        self._opens = opens
        self._spool: Spool | None = None
        self.tokenizer = tokenizer
        self.place = ""
        self._news = ""
        self.faults: list[BaseException] = []

    @property
    def spool(self) -> Spool:
        """The open spool; there is none before it is open."""
        assert self._spool is not None
        return self._spool

    # -- opening and closing -----------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        """Show that the spool is being opened."""
        from spool.browse.opening import OpeningScreen

        self._end_on_signals()
        self.push_screen(OpeningScreen())

    def _end_on_signals(self) -> None:
        """Leave the terminal as it was, whoever ends the process."""
        loop = asyncio.get_running_loop()
        for which in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            with suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(which, partial(self.exit, return_code=128 + which))

    def open_spool(self) -> Spool:
        """Open the spool; for a thread."""
        return self._opens()

    def opened(self, spool: Spool) -> None:
        """Show the sessions."""
        from spool.browse.sessions import SessionsScreen

        self._spool = spool
        self.place = one_line(spool.config.url.removeprefix("file://"))
        self.switch_screen(SessionsScreen(news=self._news))

    def begin_anew(self) -> None:
        """Leave all screens, since another spool is where this one was, and open that."""
        from spool.browse.opening import OpeningScreen

        self._news = "the run was started anew: this is another spool, at the same place"
        if self._spool is not None:
            _let_go(self._spool)
            self._spool = None
        while len(self.screen_stack) >= FIRST:
            self.pop_screen()
        self.push_screen(OpeningScreen())

    def failed(self, error: BaseException) -> None:
        """Leave, since there is nothing to show."""
        self.exit(error)

    def close(self) -> None:
        """Let the spool go, unless that takes long: a call to a dead storage holds nobody up."""
        if self._spool is not None:
            _let_go(self._spool).join(timeout=1.0)

    # -- screens -----------------------------------------------------------------------------------------------------

    def open_sessions_of(self, group_id: str | None) -> None:
        """Show the sessions of one group, or those of none."""
        from spool.browse.sessions import SessionsScreen

        if group_id is None:
            self.push_screen(SessionsScreen("group_id is null", "sessions without a group"))
            return
        quoted = group_id.replace("'", "''")
        self.push_screen(SessionsScreen(f"group_id = '{quoted}'", f"group {one_line(group_id[:100])}"))

    def open_groups(self) -> None:
        """Show all groups."""
        from spool.browse.groups import GroupsScreen

        self.push_screen(GroupsScreen())

    def open_session(self, session_id: str) -> None:
        """Show one session: its steps, its segments, and what was said."""
        from spool.browse.session import SessionScreen

        self.push_screen(SessionScreen(session_id))

    def open_segment(self, ref: SegmentRef | StepRef) -> None:
        """Show the tokens of a segment or step."""
        from spool.browse.segment import SegmentScreen

        self.push_screen(SegmentScreen(ref))

    def open_routing(self, ref: SegmentRef | StepRef, other: SegmentRef | StepRef | None = None) -> None:
        """Show the routing of a segment or step, beside another's."""
        from spool.browse.routing import RoutingScreen

        self.push_screen(RoutingScreen(ref, other))

    def open_storage(self, thing: Thing | None = None) -> None:
        """Show where bytes are, of the whole spool and of one thing."""
        from spool.browse.storage import StorageScreen

        self.push_screen(StorageScreen(thing))

    # -- keys --------------------------------------------------------------------------------------------------------

    @property
    def front(self) -> SpoolScreen | None:
        """The screen in front, where it is one of a spool."""
        return self.screen if isinstance(self.screen, SpoolScreen) else None

    def action_step_back(self) -> None:
        """Go back to the screen before; from the first one there is nowhere to go."""
        if len(self.screen_stack) > FIRST:
            self.pop_screen()

    def action_leave(self) -> None:
        """Go back to the screen before, or leave."""
        if len(self.screen_stack) > FIRST:
            self.pop_screen()
        else:
            self.exit()

    def action_help(self) -> None:
        """Show the keys of the screen in front."""
        from spool.browse.help import HelpScreen, parts_of

        front = self.front
        if front is not None:
            self.push_screen(HelpScreen("Keys", list(parts_of(front, front.focus_chain)), front.WORDS))

    def action_storage(self) -> None:
        """Show where the bytes of the thing under the cursor are."""
        if self.front is not None and self._spool is not None:
            self.open_storage(self.front.refer())

    def _selected(self) -> tuple[SpoolScreen, Sequence[Thing]] | None:
        """Return the screen in front and what is selected there; where that is nothing the screen says so."""
        screen = self.front
        if screen is None:
            return None
        things = screen.selected()
        if not things:
            screen.say("there is no session, step or segment under the cursor")
        return (screen, things) if things else None

    def action_copy(self) -> None:
        """Copy the reference of the thing under the cursor, for a terminal that understands OSC 52."""
        chosen = self._selected()
        if chosen is None:
            return
        (screen, things), spool = chosen, self.spool

        def copy(names: list[str]) -> None:
            text = "\n".join(names)
            # a lone surrogate cannot be sent
            self.copy_to_clipboard(text.encode("utf-8", "backslashreplace").decode())
            screen.say(f"copied {text if len(text) < 200 else f'{len(text):,} characters'}")

        screen.ask("copy", lambda: [argument_of(spool, thing) for thing in things], copy)

    def action_export(self) -> None:
        """Ask where to export what is selected."""
        from spool.browse.export import ExportScreen

        chosen = self._selected()
        if chosen is None:
            return
        screen, things = chosen

        def begin(answer: tuple[str, Form] | None) -> None:
            if answer is not None:
                self._export(screen, things, *answer)

        self.push_screen(ExportScreen([name_of(thing) for thing in things]), begin)

    def _export(self, screen: SpoolScreen, things: Sequence[Thing], path: str, form: Form) -> None:
        spool = self.spool

        def export() -> Exported:
            refs = [ref for thing in things for ref in refs_of(spool, thing)]
            return spool.export(refs, os.path.expanduser(path), form)

        def done(made: Exported) -> None:
            size = format_size(made.file_bytes or 0)
            segments, sessions = number(made.n_segments, "segment"), number(made.n_sessions, "session")
            verb = "is" if made.n_segments == 1 else "are"
            screen.say(f"{segments} of {sessions} {verb} in {made.path}, {size}")

        screen.say(f"exporting to {path} ...")
        screen.ask("export", export, done)


def _let_go(spool: Spool) -> threading.Thread:
    """Close a spool on a thread of its own."""
    thread = threading.Thread(target=spool.close, name="spool-browse-close", daemon=True)
    thread.start()
    return thread
