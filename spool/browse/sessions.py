"""The screen of all sessions, or of those that a filter or a group leaves: sorted, filtered, and kept up to date."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType

from spool.browse.columns import SESSIONS
from spool.browse.filterbar import FilterBar
from spool.browse.filters import Typed, explain
from spool.browse.lines import Lines
from spool.browse.pick import PickScreen
from spool.browse.screen import SpoolScreen
from spool.browse.sight import Sight, look
from spool.browse.table import Table
from spool.browse.wrapping import elided
from spool.errors import InputError
from spool.look.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from spool.catalog import SessionLook
    from spool.listing import Listing
    from spool.look.references import Thing

REFRESH_S = 1.0
NEWEST = "-number"
SHOWN_FILTER = 32
"""Cells of a filter in the heading."""


class SessionsScreen(SpoolScreen):
    """A table of sessions.

    Args:
        where: a filter that holds beside what is typed; None for all sessions.
        name: what the sessions of ``where`` are, for the heading.
        news: said in the status line once they are listed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter"),
        Binding("escape", "unfilter", "clear the filter, or back", show=False),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse the order", show=False),
        Binding("g", "groups", "groups"),
        Binding("space", "mark", "mark for copy and export", show=False),
        Binding("p", "pause", "pause"),
        Binding("r", "renew", "look again now", show=False),
    ]

    def __init__(self, where: str | None = None, name: str = "sessions", news: str = "") -> None:
        super().__init__()
        self._news = news
        self._base, self._called = where, name
        self._typed = self._applied = Typed(None, "")
        self._order = NEWEST
        self._listing: Listing | None = None
        self._paused = False

    def content(self) -> ComposeResult:
        """Yield the table and, where it is wanted, the filter."""
        yield Table(SESSIONS, lambda row: row.session_id, id="sessions")
        yield FilterBar()

    @property
    def table(self) -> Table:
        """The table."""
        return self.query_one(Table)

    def begin(self) -> None:
        """Look for the first time, and every second from then on."""
        self.table.empty = "looking ..."
        self.table.focus()
        self._list()
        self.set_interval(REFRESH_S, self._tick)

    # -- what is listed ----------------------------------------------------------------------------------------------

    def _list(self) -> None:
        base, typed = self._base, self._typed
        where = f"({base}) and ({typed.where})" if base and typed.where else typed.where or base
        order, spool = self._order, self.spool
        then = partial(self._listed, typed)
        self.say("looking ...")
        self.ask("list", lambda: spool.listing(where, order=(order,)), then, self._refused)

    def _listed(self, typed: Typed, listing: Listing) -> None:
        self._listing, self._applied = listing, typed
        self.query_one(FilterBar).explain("")
        self.table.order = (self._order,)
        self.table.put(0, [])
        self.table.count(len(listing), cursor=0, first=0)
        self.say(self._news)
        self._news = ""
        self._look(refresh=False)

    def _refused(self, error: BaseException) -> None:
        if isinstance(error, InputError):
            self.query_one(FilterBar).explain(explain(error))
            self.say("")

    def _tick(self) -> None:
        if not self._paused and self.is_current:
            self._look(refresh=True)

    def _look(self, *, refresh: bool) -> None:
        listing, table = self._listing, self.table
        if listing is None:
            return
        row, cursor, window = table.current, table.cursor, table.window
        number = None if row is None else row.number
        then = partial(self._seen, listing, number)
        self.ask("rows", lambda: look(listing, cursor, window, number, refresh=refresh), then)

    def _seen(self, listing: Listing, number: int | None, sight: Sight) -> None:
        if listing is not self._listing:
            return
        table = self.table
        row = table.current
        # who moved on meanwhile is on another session, which moved as far where all come in at the top
        shift = sight.shift if row is None or row.number == number or self._order == NEWEST else 0
        cursor, first = table.cursor + shift, table.first + shift
        if table.first == 0 and 0 <= cursor < table.room:
            first = 0
        table.put(sight.start, sight.rows)
        table.empty = "no session matches" if self._applied.where else "no sessions yet: they appear here as they come"
        table.count(sight.n_rows, cursor=cursor, first=first)
        self._describe()

    def _describe(self) -> None:
        parts = [f"{self._called}: {self.table.n_rows:,}"]
        if self._applied.where:
            parts.append(f"filter: {elided(one_line(self._applied.text), SHOWN_FILTER)}")
        if self.table.marks:
            parts.append(f"{len(self.table.marks)} marked")
        if self._paused:
            parts.append("paused")
        if hint := self.table.hint:
            parts.append(hint)
        self.headline(" · ".join(parts))

    def on_table_wanted(self) -> None:
        """Fetch rows that came into sight."""
        self._look(refresh=False)

    def on_lines_moved(self) -> None:
        """Say what is in sight."""
        self._describe()

    # -- keys --------------------------------------------------------------------------------------------------------

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        """Open a session."""
        message.stop()
        row: SessionLook | None = self.table.current
        if row is not None:
            self.browser.open_session(row.session_id)

    def action_filter(self) -> None:
        """Type a filter."""
        self.query_one(FilterBar).begin()

    def action_unfilter(self) -> None:
        """Take the filter away; where there is none, go back."""
        if self._typed.kind:
            self.query_one(FilterBar).action_clear()
        else:
            self.browser.action_step_back()

    def on_filter_bar_typed(self, message: FilterBar.Typed) -> None:
        """Filter by what was typed."""
        self._typed = message.typed
        self._list()

    def on_filter_bar_done(self) -> None:
        """Go on in the table."""
        self.table.focus()

    def action_sort(self) -> None:
        """Choose what to sort by."""
        choices = [(NEWEST, "order of arrival"), *((column.key, column.title.lower()) for column in SESSIONS)]
        self.browser.push_screen(PickScreen("sort by (again: the other way round)", choices), self._sort_by)

    def on_table_headed(self, message: Table.Headed) -> None:
        """Sort by a column that was clicked."""
        self._sort_by(message.column.key)

    def _sort_by(self, key: str | None) -> None:
        if key is not None:
            # what is large, late or good first
            self._order = key if self._order == f"-{key}" or key == NEWEST else f"-{key}"
            self._list()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self._order = self._order[1:] if self._order.startswith("-") else f"-{self._order}"
        self._list()

    def action_groups(self) -> None:
        """Show groups."""
        self.browser.open_groups()

    def action_mark(self) -> None:
        """Mark the session, or take its mark away, and go to the next."""
        row: SessionLook | None = self.table.current
        if row is not None:
            self.table.marks ^= {row.session_id}
            self.table.refresh()
            self.table.action_move(1)
            self._describe()

    def action_pause(self) -> None:
        """Stop following what comes, or go on."""
        self._paused = not self._paused
        self._describe()
        self._tick()

    def action_renew(self) -> None:
        """Look again, also while paused."""
        self._look(refresh=True)

    def on_screen_resume(self) -> None:
        """Be up to date when it is seen again."""
        if self._listing is not None:
            self._tick()

    def refer(self) -> str | None:
        """Return the id of the session under the cursor."""
        row: SessionLook | None = self.table.current
        return None if row is None else row.session_id

    def selected(self) -> Sequence[Thing]:
        """Return the ids of the marked sessions, or of the one under the cursor."""
        return sorted(self.table.marks) or super().selected()
