"""The first screen: the spool is being opened."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from textual.content import Content
from textual.widgets import Static

from spool.browse.screen import SpoolScreen

if TYPE_CHECKING:
    from textual.app import ComposeResult


class OpeningScreen(SpoolScreen):
    """Opens the spool on a thread, and gives way to the sessions."""

    DEFAULT_CSS = "OpeningScreen #opening { height: 1fr; padding: 1 2; color: $text-muted; }"

    def content(self) -> ComposeResult:
        """Yield what says that something goes on."""
        yield Static(Content("opening the spool ..."), id="opening")

    def begin(self) -> None:
        """Begin, and say how long it takes."""
        self._began = time.monotonic()
        self.set_interval(1.0, self._tick)
        self.ask("open", self.browser.open_spool, self.browser.opened, self.browser.failed)

    def _tick(self) -> None:
        waited_s = time.monotonic() - self._began
        self.query_one("#opening", Static).update(Content(f"opening the spool ... {waited_s:.0f} s"))
