"""The first screen: the spool is being opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.widgets import LoadingIndicator

from spool.browse.screen import SpoolScreen

if TYPE_CHECKING:
    from textual.app import ComposeResult


class OpeningScreen(SpoolScreen):
    """Opens the spool on a thread, takes in what is new, and gives way to the sessions."""

    DEFAULT_CSS = "OpeningScreen LoadingIndicator { height: 1fr; }"

    def content(self) -> ComposeResult:
        """Yield what shows that something goes on."""
        yield LoadingIndicator()

    def begin(self) -> None:
        """Begin."""
        self.headline("opening the spool ...")
        self.ask("open", self.browser.open_spool, self.browser.opened, self.browser.failed)
