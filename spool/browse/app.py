"""The browser: which screens there are, and the keys that work on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from spool.browse.screen import SpoolScreen

if TYPE_CHECKING:
    from collections.abc import Callable

    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef


class Browser(App[BaseException]):
    """The terminal browser of one spool.

    It returns what kept it from opening the spool, if anything did.

    Args:
        open_spool: opens the spool; called on a thread, after the first paint.
        tokenizer: path of a ``tokenizer.json``, for the text of tokens.

    Attributes:
        tokenizer: the same.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "back"),
        Binding("escape", "leave", "back", show=False),
    ]

    def __init__(self, open_spool: Callable[[], Spool], *, tokenizer: str | None = None) -> None:
        super().__init__()
        self._open, self._spool = open_spool, None
        self.tokenizer = tokenizer

    @property
    def spool(self) -> Spool:
        """The open spool; there is none before it is open."""
        assert self._spool is not None
        return self._spool

    def open_segment(self, ref: SegmentRef | StepRef) -> None:
        """Show the tokens of a segment or step."""

    def open_routing(self, ref: SegmentRef | StepRef, other: SegmentRef | StepRef | None = None) -> None:
        """Show the routing of a segment or step, beside another's."""

    def open_storage(self, ref: str | None = None) -> None:
        """Show where bytes are, of the whole spool and of what ``ref`` names."""

    def action_leave(self) -> None:
        """Go back to the screen before, or leave."""
        if len(self.screen_stack) > 2:
            self.pop_screen()
        else:
            self.exit()


__all__ = ["Browser", "SpoolScreen"]
