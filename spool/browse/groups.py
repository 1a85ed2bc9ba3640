"""The screen of groups, with the spread of their rewards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType

from spool.browse.columns import group_columns, has_equal_rewards
from spool.browse.pick import PickScreen
from spool.browse.screen import SpoolScreen
from spool.browse.sessions import REFRESH_S
from spool.browse.table import Table

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from spool.catalog import GroupLook

NEWEST = "-last_at"
REST = 10
"""After groups were looked at nobody looks for so many times as long as that took."""


class GroupsScreen(SpoolScreen):
    """A table of groups; enter opens the sessions of one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse the order", show=False),
        Binding("g", "app.leave", "sessions"),
        Binding("p", "pause", "pause"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._order = NEWEST
        self._paused = False
        self._wait_s = 0.0
        self._groups: list[GroupLook] = []

    def content(self) -> ComposeResult:
        """Yield the table."""
        yield Table(group_columns(0.0, 1.0), lambda row: row.group_id or "", id="groups")

    @property
    def table(self) -> Table:
        """The table."""
        return self.query_one(Table)

    def begin(self) -> None:
        """Look for the first time, and then as often as it is cheap."""
        self.table.empty = "looking ..."
        self.table.focus()
        self._look()
        self.set_interval(REFRESH_S, self._tick)

    def _tick(self) -> None:
        self._wait_s -= REFRESH_S
        if not self._paused and self.is_current and self._wait_s <= 0 and not self.is_busy:
            self._look()

    def _look(self) -> None:
        spool, order = self.spool, self._order

        def timed() -> tuple[list[GroupLook], float]:
            began = time.monotonic()
            return spool.groups(order=(order,)), time.monotonic() - began

        self.ask("groups", timed, self._seen)

    def _seen(self, found: tuple[list[GroupLook], float]) -> None:
        groups, took_s = found
        self._wait_s = took_s * REST
        table, row = self.table, self.table.current
        least = min((group.reward_min for group in groups if group.reward_min is not None), default=0.0)
        most = max((group.reward_max for group in groups if group.reward_max is not None), default=1.0)
        table.columns = group_columns(least, most)
        table.order = (self._order,)
        place = next((n for n, group in enumerate(groups) if row is not None and group.group_id == row.group_id), None)
        shift = 0 if place is None else place - table.cursor
        table.empty = "no sessions yet"
        table.put(0, groups)
        first = 0 if table.first == 0 and table.cursor + shift < table.room else table.first + shift
        table.count(len(groups), cursor=table.cursor + shift, first=first)
        self._groups = groups
        self._describe()

    def _describe(self) -> None:
        n_named = sum(group.group_id is not None for group in self._groups)
        parts = [f"groups: {n_named:,}{'' if n_named == len(self._groups) else ' and sessions without a group'}"]
        n_equal = sum(map(has_equal_rewards, self._groups))
        parts += [f"{n_equal:,} with equal rewards"] if n_equal else []
        parts += ["paused"] if self._paused else []
        parts += [self.table.hint] if self.table.hint else []
        self.headline(" · ".join(parts))

    def on_lines_moved(self) -> None:
        """Say what is in sight."""
        self._describe()

    def on_lines_chosen(self) -> None:
        """Open the sessions of a group."""
        row: GroupLook | None = self.table.current
        if row is not None:
            self.browser.open_sessions_of(row.group_id)

    def action_sort(self) -> None:
        """Choose what to sort by."""
        choices = [(column.key, column.title.lower()) for column in self.table.columns if column.sorts]
        self.browser.push_screen(PickScreen("sort by (again: the other way round)", choices), self._sort_by)

    def on_table_headed(self, message: Table.Headed) -> None:
        """Sort by a column that was clicked."""
        if message.column.sorts:
            self._sort_by(message.column.key)

    def _sort_by(self, key: str | None) -> None:
        if key is not None:
            self._order = key if self._order == f"-{key}" else f"-{key}"
            self._look()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self._order = self._order[1:] if self._order.startswith("-") else f"-{self._order}"
        self._look()

    def action_pause(self) -> None:
        """Stop following what comes, or go on."""
        self._paused = not self._paused
        self._look()
