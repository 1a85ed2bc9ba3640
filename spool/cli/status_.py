"""``spool status``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from spool.cli.output import Column, json_option, write_facts, write_json, write_line, write_rows
from spool.cli.places import location_argument, open_spool
from spool.sizes import format_size

if TYPE_CHECKING:
    from spool.cli.output import Kind
    from spool.status import HotTier, SpillerStatus, Status

    Fact = tuple[str, object, Kind]

_COLUMNS = (
    Column("state", "STATE"),
    Column("n_packs", "PACKS", "count"),
    Column("hot_bytes", "HOT", "size"),
    Column("cold_bytes", "COLD", "size"),
)


@click.command("status")
@location_argument
@json_option
def command(location: str | None, as_json: bool) -> None:
    """Say how the spool is doing.

    Packs and bytes by state and tier; the backlog, the packs that are sealed and not yet in the cold root; how full the
    hot root is, and where eviction begins and ends; what publishers wait for; and the spiller: whether it works, how
    fast, and what keeps it from working.
    """
    with open_spool(location) as sp:
        found = sp.status()
    if as_json:
        write_json(msgspec.to_builtins(found))
        return
    write_facts(_facts(found))
    if found.packs:
        write_line("")
        totals = ({"state": state, **msgspec.structs.asdict(total)} for state, total in found.packs.items())
        write_rows(totals, _COLUMNS)


def _facts(found: Status) -> Iterator[Fact]:
    yield "root", found.root, "text"
    yield "spill", found.spill, "text"
    yield "id", found.id, "text"
    if found.hot is not None:
        yield from _room(found.hot)
        yield "live_writers", found.n_live, "count"
    if found.spill is not None and found.spiller is not None:
        yield "backlog_packs", found.backlog.n_packs, "count"
        yield "backlog_bytes", found.backlog.n_bytes, "size"
        if found.backlog.oldest_at is not None:
            yield "oldest_unspilled", found.backlog.oldest_at, "time"
        yield "seal_requests", [f"{stream}/{pack}" for stream, pack in found.seal_requests.items()], "text"
        yield from _spiller(found.spiller)
    if found.units is not None:
        yield "units_hot", found.units.n_hot, "count"
        yield "units_hot_bytes", found.units.hot_bytes, "size"
        yield "units_cold", found.units.n_cold, "count"
        yield "units_cold_bytes", found.units.cold_bytes, "size"
    if found.facts.n_packs:
        yield "fact_files", found.facts.n_packs, "count"
        yield "fact_bytes", found.facts.cold_bytes, "size"


def _room(hot: HotTier) -> Iterator[Fact]:
    yield "hot_used_bytes", hot.used_bytes, "size"
    yield "hot_reserved_bytes", hot.reserved_bytes, "size"
    yield "hot_limit_bytes", hot.limit_bytes, "size"
    yield "evicts_above_bytes", hot.high_bytes, "size"
    yield "evicts_to_bytes", hot.low_bytes, "size"


def _spiller(spiller: SpillerStatus) -> Iterator[Fact]:
    from spool.spiller.status import SILENT_S

    known = "" if spiller.pid is None else f", pid {spiller.pid}"
    silent = spiller.at is not None and time.time() - spiller.at > SILENT_S
    yield "spiller", f"{'is silent' if silent else 'works'}{known}" if spiller.running else "does not run", "text"
    if spiller.at is None:
        return
    yield "spiller_said", f"{max(time.time() - spiller.at, 0):.0f} s ago", "text"
    did = f"{spiller.n_spilled:,} packs spilled, {spiller.n_evicted:,} evicted, {spiller.n_deleted:,} deleted"
    yield "since_its_start", did, "text"
    yield "spilled_bytes", spiller.spilled_bytes, "size"
    yield "throughput", f"{format_size(int(spiller.bytes_per_s))}/s", "text"
    yield "error", spiller.error, "text"
    for text in spiller.damaged:
        yield "damaged", text, "text"
