"""``spool stats``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from spool.cli.output import Column, json_option, say, write_facts, write_json, write_line, write_rows
from spool.cli.places import location_argument, open_spool

if TYPE_CHECKING:
    from spool.catalog.shape import Histogram, Share, Staleness, Summary
    from spool.cli.output import Kind
    from spool.look.stats import Stats

BAR = 24
"""Characters of the longest bar."""

_SHARES = (
    Column("share", "OF"),
    Column("name", "NAME"),
    Column("n_sessions", "SESSIONS", "count"),
    Column("n_tokens", "TOKENS", "count"),
    Column("reward", "MEAN REWARD", "number"),
    Column("n_rewards", "REWARDS", "count"),
)
_BINS = (
    Column("of", "HISTOGRAM"),
    Column("low", "FROM", "number"),
    Column("high", "TO", "number"),
    Column("n", "N", "count"),
    Column("bar", "SHARE"),
)
_LAYERS = (
    Column("model", "MODEL"),
    Column("layer", "LAYER", "number"),
    Column("imbalance", "IMBALANCE", "ratio"),
    Column("entropy", "ENTROPY", "ratio"),
    Column("overlap", "OVERLAP", "ratio"),
    Column("unused", "UNUSED", "ratio"),
)


class _Number(click.ParamType):  # type: ignore[type-arg]
    """A number of segments, or ``all``."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "all":
            return sys.maxsize
        if isinstance(value, str) and value.isdecimal() and value.isascii() and int(value) > 0:
            return min(int(value), sys.maxsize)
        return int(value) if isinstance(value, int) else self.fail(f"{value!r} is no number of segments", param, ctx)


@click.command("stats")
@location_argument
@click.option("--where", help="Only of the sessions that a filter chooses, such as \"source = 'swe'\".")
@click.option("--current-version", metavar="VERSION", help="The weights that staleness is counted from.")
@click.option(
    "--routing", type=_Number(), help="Count the routing too, of N segments spread over all, or of all of them."
)
@json_option
def command(
    location: str | None, where: str | None, current_version: str | None, routing: int | None, as_json: bool
) -> None:
    """Print the shape of a run.

    Totals; outcomes, sources and finish reasons; histograms of tokens and steps of sessions, rewards, tokens of
    segments, and staleness: how many versions the oldest weights of a segment are behind those that were newest when
    its session ended, or behind --current-version. Where versions are no numbers they count in the order in which they
    appeared. Discarded sessions are counted once and left out of all else; segments are those that sessions ended with.

    --routing reads payload. For each layer: how much more than the mean the busiest expert does, the entropy of the
    load (1: all are used alike), the part of its experts that a token shares with the one before it, and the part of
    experts that were never chosen.
    """
    with open_spool(location) as sp:
        from spool.look.stats import stats

        found = stats(sp, where, current_version=current_version, routing=routing)
    if as_json:
        write_json(msgspec.to_builtins(found))
        return
    _print(found)


def _print(found: Stats) -> None:
    summary = found.summary
    write_facts(_facts(summary))
    shares = [*_shares("outcome", summary.outcomes), *_shares("source", summary.sources)]
    rows = [*shares, *_shares("finish_reason", summary.finish_reasons)]
    bins = _BINS if sys.stdout.isatty() else _BINS[:-1]
    for table, columns in ((rows, _SHARES), (list(_shown_bins(summary)), bins), (list(_layers(found)), _LAYERS)):
        if table:
            write_line("")
            write_rows(table, columns)
    if found.n_sampled is not None and not found.routing:
        say("no routing is stored for these segments" if found.n_sampled else "there are no segments to sample")
    if found.n_released:
        say(f"{found.n_released} of {found.n_sampled} segments were deleted, and are left out of the routing")


def _facts(summary: Summary) -> Iterator[tuple[str, object, Kind]]:
    for name, value in msgspec.structs.asdict(summary.totals).items():
        yield name, value, "time" if name.endswith("_at") else "count"
    for name, histogram in _histograms(summary):
        if histogram.n:
            yield f"{name}.mean", histogram.mean, "number"
            yield f"{name}.least", histogram.low, "number"
            yield f"{name}.most", histogram.high, "number"
        if histogram.n_missing:
            yield f"{name}.missing", histogram.n_missing, "count"
    yield from _versions(summary.staleness)


def _versions(staleness: Staleness) -> Iterator[tuple[str, object, Kind]]:
    yield "n_versions", staleness.n_versions, "count"
    yield "newest_version", staleness.newest, "text"
    yield "current_version", staleness.against, "text"


def _histograms(summary: Summary) -> tuple[tuple[str, Histogram], ...]:
    return (
        ("session_tokens", summary.tokens),
        ("session_steps", summary.steps),
        ("reward", summary.rewards),
        ("segment_tokens", summary.segment_tokens),
        ("staleness", summary.staleness.behind),
    )


def _shares(of: str, shares: tuple[Share, ...]) -> Iterator[dict[str, Any]]:
    for share in shares:
        name = share.name if share.n_names == 1 else f"({share.n_names} others)"
        yield {**msgspec.structs.asdict(share), "share": of, "name": name}


def _bins(summary: Summary) -> Iterator[dict[str, Any]]:
    for name, histogram in _histograms(summary):
        most = max((found.n for found in histogram.bins), default=0)
        for found in histogram.bins:
            bar = "#" * max(round(BAR * found.n / most), int(found.n > 0)) if most else ""
            yield {"of": name, "low": _plain(found.low), "high": _plain(found.high), "n": found.n, "bar": bar}


def _shown_bins(summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield the bins that a terminal shows: those that hold something, with a mark where empty ones are left out."""
    if not sys.stdout.isatty():
        yield from _bins(summary)
        return
    empty = False
    for row in _bins(summary):
        if row["n"]:
            yield row
        elif not empty:
            yield {"of": row["of"], "bar": "..."}
        empty = row["n"] == 0


def _plain(value: float) -> float | int:
    # a whole number of more digits than a float tells apart is shorter as one
    return int(value) if abs(value) < 1e16 and value == int(value) else value


def _layers(found: Stats) -> Iterator[dict[str, Any]]:
    for model in found.routing:
        name = f"{len(model.layers)} layers, {model.num_experts} experts, top {model.topk}, {model.n_rows} rows"
        for layer in model.layers:
            yield {"model": name, **msgspec.structs.asdict(layer)}
