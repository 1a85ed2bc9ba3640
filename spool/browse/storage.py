"""The screen of storage: tiers, packs, backlog, room, the spiller; and where the bytes of one thing are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType

from spool.browse.lines import Lines, Piece
from spool.browse.screen import SpoolScreen
from spool.look.places import Places, places
from spool.look.references import name_of
from spool.look.text import ago, count, one_line
from spool.sizes import format_size

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from spool.look.references import Thing
    from spool.status import HotTier, SpillerStatus, Status

REFRESH_S = 2.0
BAR_CELLS = 24
MOST = 50
"""References whose byte ranges are shown at once."""

Row = Sequence[Piece]


class FactList(Lines):
    """Lines of facts."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", show=False)]

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.rows: Sequence[Row] = ()

    def show(self, rows: Sequence[Row]) -> None:
        """Show lines."""
        self.rows = rows
        self.count(len(rows))

    def row(self, number: int) -> Iterable[Piece]:
        """Return a line."""
        return self.rows[number]


class StorageScreen(SpoolScreen):
    """Where bytes are.

    Args:
        thing: whose byte ranges are shown; None for the whole spool alone.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "app.leave", "back"),
        Binding("r", "renew", "look again"),
    ]

    def __init__(self, thing: Thing | None) -> None:
        super().__init__()
        self._thing = thing
        self._status: Status | None = None
        self._found: list[Places] = []
        self._n_left = 0

    def content(self) -> ComposeResult:
        """Yield the list."""
        yield FactList(id="facts")

    @property
    def facts(self) -> FactList:
        """The list."""
        return self.query_one(FactList)

    def begin(self) -> None:
        """Look for the first time, and then again and again."""
        self.headline("storage")
        self.facts.empty = "looking ..."
        self.facts.focus()
        self.action_renew()
        self.set_interval(REFRESH_S, self._tick)

    def _tick(self) -> None:
        if self.is_current and not self.is_busy:
            self._ask_status()

    def _ask_status(self) -> None:
        spool = self.spool
        self.ask("status", spool.status, self._seen)

    def action_renew(self) -> None:
        """Look again."""
        self._ask_status()
        thing, spool = self._thing, self.spool
        if thing is not None:
            self.ask("places", lambda: places(spool, thing, MOST), self._located, self._lost)

    def _seen(self, found: Status) -> None:
        self._status = found
        self._show()

    def _located(self, found: tuple[list[Places], int]) -> None:
        self._found, self._n_left = found
        self._show()

    def _lost(self, error: BaseException) -> None:
        self._found = [Places(ref=name_of(self._thing or ""), error=str(error).partition("\n")[0])]
        self._show()

    def _show(self) -> None:
        rows: list[Row] = []
        if self._status is not None:
            rows += status_rows(self._status)
        found = self._status
        roots = () if found is None else tuple(root for root in (found.root, found.spill) if root is not None)
        for place in self._found:
            rows += place_rows(place, roots)
        if self._n_left:
            rows += [(), _fact("", f"{self._n_left:,} more segments: choose one to see its bytes", "dim")]
        self.facts.show(rows)

    def refer(self) -> Thing | None:
        """Return what the screen was opened for."""
        return self._thing


def _heading(text: str) -> Row:
    return ((text, "heading"),)


def _fact(name: str, value: str, tone: str = "") -> Row:
    return ((f"  {name:<18}", "dim"), (value, tone))


def status_rows(found: Status) -> Iterator[Row]:
    """Yield the lines about the whole spool."""
    yield _heading("TIERS")
    yield _fact("hot", one_line(found.root) if found.hot is not None else "none here", "strong")
    yield _fact("cold", one_line(found.spill or (found.root if found.hot is None else "none: nothing is spilled")))
    if found.hot is not None:
        yield from _room(found.hot)
        yield _fact("live writers", count(found.n_live))
    yield ()
    yield _heading(f"PACKS      {'STATE':<10}{'PACKS':>9}{'HOT':>12}{'COLD':>12}")
    for state, total in found.packs.items():
        sizes = f"{format_size(total.hot_bytes):>12}{format_size(total.cold_bytes):>12}"
        yield ((f"{'':11}{state:<10}", "strong"), (f"{total.n_packs:>9,}{sizes}", ""))
    if not found.packs:
        yield _fact("", "none yet", "dim")
    yield ()
    yield from _waiting(found)
    if found.units is not None:
        hot, cold = found.units.hot_bytes, found.units.cold_bytes
        yield _fact("units hot", f"{found.units.n_hot or 0:,}, {format_size(hot or 0)}")
        yield _fact("units cold", f"{found.units.n_cold or 0:,}, {format_size(cold or 0)}")
    if found.facts.n_packs:
        yield _fact("fact files", f"{found.facts.n_packs:,}, {format_size(found.facts.cold_bytes)}")


def _room(hot: HotTier) -> Iterator[Row]:
    if hot.limit_bytes is None:
        yield _fact("used", f"{format_size(hot.used_bytes)}, no limit is set")
        return
    taken = hot.used_bytes if hot.reserved_bytes is None else hot.reserved_bytes
    share = min(taken / max(hot.limit_bytes, 1), 1.0)
    filled = round(share * BAR_CELLS)
    tone = "bad" if hot.high_bytes is not None and taken > hot.high_bytes else "bar"
    bar = "█" * filled + "░" * (BAR_CELLS - filled)
    text = f" {format_size(taken)} reserved of {format_size(hot.limit_bytes)}, {100 * share:.0f}%"
    yield ((f"  {'room':<18}", "dim"), (bar, tone), (text, ""))
    yield _fact("on disk", format_size(hot.used_bytes))
    if hot.high_bytes is not None and hot.low_bytes is not None:
        yield _fact("eviction", f"above {format_size(hot.high_bytes)}, down to {format_size(hot.low_bytes)}")


def _waiting(found: Status) -> Iterator[Row]:
    yield _heading("SPILLING")
    if found.spill is None or found.spiller is None:
        yield _fact("", "nothing is spilled from here", "dim")
        return
    backlog = found.backlog
    oldest = "" if backlog.oldest_at is None else f", the oldest sealed {ago(time.time() - backlog.oldest_at)} ago"
    yield _fact(
        "backlog",
        f"{backlog.n_packs:,} packs, {format_size(backlog.n_bytes)}{oldest}",
        "warn" if backlog.n_packs else "",
    )
    for stream, pack in found.seal_requests.items():
        yield _fact("publishers wait", one_line(f"{stream}/{pack}"), "warn")
    yield from _spiller(found.spiller)


def _spiller(spiller: SpillerStatus) -> Iterator[Row]:
    known = "" if spiller.pid is None else f", pid {spiller.pid}"
    said = "" if spiller.at is None else f", last heard of {ago(time.time() - spiller.at)} ago"
    yield _fact("spiller", f"{'runs' if spiller.running else 'does not run'}{known}{said}")
    if spiller.at is None:
        return
    did = (
        f"{spiller.n_spilled:,} packs, {format_size(spiller.spilled_bytes)}, {format_size(int(spiller.bytes_per_s))}/s"
    )
    yield _fact("spilled", did)
    yield _fact("evicted, deleted", f"{spiller.n_evicted:,}, {spiller.n_deleted:,}")
    if spiller.error:
        yield _fact("error", one_line(spiller.error), "bad")
    for text in spiller.damaged:
        yield _fact("damaged", one_line(text), "bad")


def place_rows(found: Places, roots: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the lines about one thing: its byte ranges by file, named as below one of the roots, and its gaps."""
    total = sum(part.length for part in found.ranges)
    yield ()
    yield _heading(f"BYTES OF {one_line(found.ref[:200])}: {format_size(total)} in {len(found.ranges):,} ranges")
    if found.error is not None:
        yield _fact("", one_line(found.error.partition("\n")[0]), "bad")
    file = ""
    for part in found.ranges:
        if part.file != file:
            file = part.file
            yield (
                (f"  {part.tier:<5}", "good" if part.tier == "hot" else "accent"),
                (one_line(_below(file, roots)), "dim"),
            )
        rows = f"rows {part.start:,}..{part.stop:,}"
        yield (
            (f"    {part.field:<20}", "strong"),
            (f"{rows:<26}", ""),
            (f"at {part.offset:,}, {part.length:,} bytes", ""),
        )
    for field, gaps in found.gaps.items():
        for start, stop in gaps:
            yield ((f"    {one_line(field):<20}", "strong"), (f"gap {start:,}..{stop:,}: never sent", "warn"))


def _below(file: str, roots: Sequence[str]) -> str:
    for root in roots:
        path = root.removeprefix("file://")
        if file.removeprefix("file://").startswith(f"{path}/"):
            return file.removeprefix("file://")[len(path) + 1 :]
    return file
