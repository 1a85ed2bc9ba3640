"""The charts of a report. Each returns its SVG; what it shows is said by the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from spool.report.svg import (
    BLUE,
    GREEN,
    GREY,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    bars,
    counted,
    drawing,
    label,
    power,
    short,
)
from spool.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from spool.catalog.shape import Bin, Histogram, RolloutPoint, Share, Staleness, Timeline
    from spool.look.routing import RoutingSummary
    from spool.report.gather import FieldBytes

_OUTCOMES = {
    None: BLUE, "completed": GREEN, "truncated": ORANGE, "context_overflow": ORANGE, "aborted": GREY, "failed": RED,
    "timeout": PURPLE,
}  # fmt: skip
WIDE = 13.2
"""Inches of a chart that takes the whole width of the page."""

_CALENDAR = (0.0, 4e9)
"""Seconds since the epoch that are shown as dates: to the year 2096."""

MOST_DRAWN = 1e100


def activity(number: int, timeline: Timeline) -> str:
    """Draw sessions that begin and end, and tokens, over time."""
    first, last = timeline.periods[0].at, timeline.periods[-1].at
    n = round((last - first) / timeline.period_s) + 1
    opened, finished, tokens = [0] * n, [0] * n, [0] * n
    for period in timeline.periods:
        place = round((period.at - first) / timeline.period_s)
        opened[place], finished[place], tokens[place] = period.n_opened, period.n_finished, period.n_tokens
    edges = [first + place * timeline.period_s for place in range(n + 1)]
    with drawing(number, WIDE, 3.1) as (figure, made):
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        above.stairs(opened, edges, color=BLUE, linewidth=1.5, label="opened")
        above.stairs(finished, edges, color=GREEN, linewidth=1.5, label="finished")
        above.legend(loc="upper left", ncols=2, bbox_to_anchor=(0, 1.24), borderaxespad=0)
        below.stairs(tokens, edges, color=PURPLE, fill=True, alpha=0.75)
        for axes, name in ((above, "sessions"), (below, "tokens")):
            counted(axes)
            axes.set_ylabel(name)
        below.set_xlim(edges[0], edges[-1])
        _times(below, edges[0], edges[-1])
    return made[0]


def _times(axes: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from spool.look.text import iso_time

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if not (_CALENDAR[0] <= low and high <= _CALENDAR[1]):
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at - low:.3g} s"))
        return
    span = high - low
    part = slice(5, 16) if span > 86_400 else slice(11, 16) if span > 600 else slice(11, 19)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: iso_time(at)[part].replace("T", " ")))


def outcomes(number: int, shares: Sequence[Share]) -> str:
    """Draw how many sessions ended how."""
    names = ["open" if share.name is None else label(share.name) for share in shares]
    values = [share.n_sessions for share in shares]
    total = sum(values)
    with drawing(number, 6.4, 0.6 + 0.36 * max(len(shares), 3)) as (figure, made):
        axes = figure.subplots()
        axes.barh(names, values, color=[_OUTCOMES.get(share.name, BLUE) for share in shares], height=0.7, linewidth=0)
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:,}  ({100 * value / total:.3g} %)", (value, place), (5, 0), textcoords="offset points",
                va="center",
            )  # fmt: skip
        _across(axes, max(values))
        axes.set_ylim(max(len(shares), 3) - 0.4, -0.6)
    return made[0]


def _across(axes: Axes, most: float, room: float = 1.32) -> None:
    """Make room for what is written behind bars, and take the axis away that they make needless."""
    axes.set_xlim(0, most * room or 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)


def rewards_by_rollout(number: int, points: Sequence[RolloutPoint]) -> str:
    """Draw the mean reward of each rollout step, its standard deviation, and the least and the most."""
    known = [point for point in points if point.reward is not None]
    steps = [(point.first + point.last) / 2 for point in known]
    means = [_drawable(point.reward) for point in known]
    spread = [_drawable(point.reward_std) for point in known]
    least, most = ([_drawable(getattr(point, name)) for point in known] for name in ("reward_low", "reward_high"))
    with drawing(number) as (figure, made):
        axes = figure.subplots()
        for ends in (least, most):
            axes.plot(steps, ends, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)))
        low = [max(mean - std, end) for mean, std, end in zip(means, spread, least, strict=True)]
        high = [min(mean + std, end) for mean, std, end in zip(means, spread, most, strict=True)]
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.18, linewidth=0)
        axes.plot(steps, means, color=BLUE, linewidth=1.8, marker="o" if len(known) < 40 else "", markersize=3.5)
        axes.grid(axis="y", linewidth=0.7)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("rollout step")
        _whole(axes)
    return made[0]


def _drawable(value: float | None) -> float:
    """Return a reward as a chart can have it: none has an axis for the largest numbers there are."""
    return max(-MOST_DRAWN, min(float(value or 0.0), MOST_DRAWN))


def _whole(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.margins(x=0.02)


def rewards(number: int, histogram: Histogram) -> str:
    """Draw how rewards are distributed."""
    with drawing(number) as (figure, made):
        axes = figure.subplots()
        lows = [_drawable(found.low) for found in histogram.bins]
        widths = [(_drawable(found.high) - low) or 1.0 for found, low in zip(histogram.bins, lows, strict=True)]
        axes.bar(lows, [found.n for found in histogram.bins], widths, align="edge", color=GREEN, linewidth=0, alpha=0.9)
        counted(axes)
        axes.set_xlabel("reward")
        axes.set_ylabel("sessions")
        if histogram.mean is not None:
            axes.axvline(histogram.mean, color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
            axes.annotate(
                f"mean {histogram.mean:.3g}", (histogram.mean, 1), (4, 2), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=MUTED,
            )  # fmt: skip
    return made[0]


def lengths(number: int, histogram: Histogram, what: str, colour: str = BLUE) -> str:
    """Draw a distribution in bins that double."""
    with drawing(number) as (figure, made):
        axes = figure.subplots()
        bars(axes, [power(found.low) for found in histogram.bins], [found.n for found in histogram.bins], colour)
        axes.set_xlabel(f"{what}, from ... to twice as many")
    return made[0]


def staleness(number: int, found: Staleness) -> str:
    """Draw how many versions segments are behind."""
    with drawing(number) as (figure, made):
        axes = figure.subplots()
        bars(axes, [_behind(part) for part in found.behind.bins], [part.n for part in found.behind.bins], ORANGE)
        axes.set_xlabel("versions behind")
        axes.set_ylabel("segments")
    return made[0]


def _behind(found: Bin) -> str:
    if found.low < 0:
        return "ahead"
    return f"{found.low:g}" if found.high - found.low <= 1 else f"{found.low:g}+"


def field_bytes(number: int, fields: Sequence[FieldBytes]) -> str:
    """Draw the bytes of fields: as engines send them, and in each tier."""
    kinds = [("as int32", GREY, "sent_bytes"), ("hot", BLUE, "hot_bytes"), ("cold", PURPLE, "cold_bytes")]
    kinds = [kind for kind in kinds if any(getattr(field, kind[2]) is not None for field in fields)]
    height = 0.8 / max(len(kinds), 1)
    with drawing(number, WIDE, 0.4 + (0.19 * len(kinds) + 0.12) * len(fields)) as (figure, made):
        axes = figure.subplots()
        most = max((getattr(field, name) or 0 for field in fields for _, _, name in kinds), default=0)
        for order, (name, colour, attribute) in enumerate(kinds):
            values = [getattr(field, attribute) for field in fields]
            places = [place + (order - (len(kinds) - 1) / 2) * height for place in range(len(fields))]
            axes.barh(places, [value or 0 for value in values], height * 0.88, color=colour, linewidth=0, label=name)
            for place, value in zip(places, values, strict=True):
                if value:
                    axes.annotate(
                        format_size(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8,
                        color=MUTED,
                    )  # fmt: skip
        axes.set_yticks(range(len(fields)), [label(field.field) for field in fields])
        axes.set_ylim(len(fields) - 0.4, -0.6)
        _across(axes, most, 1.12)
        axes.legend(loc="lower right", ncols=1)
    return made[0]


def expert_load(number: int, model: RoutingSummary) -> str:
    """Draw how often each expert of each layer is chosen, beside how often it would be if all were chosen alike."""
    load = model.share * model.num_experts
    most = max(2.0, float(_percentile(load)))
    n_layers = len(model.layers)
    with drawing(number, WIDE, min(max(1.1 + 0.16 * n_layers, 2.4), 7.0)) as (figure, made):
        axes = figure.subplots()
        image = axes.imshow(load, aspect="auto", interpolation="none", cmap="inferno", vmin=0, vmax=most)
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        every = max(-(-n_layers // 16), 1)
        axes.set_yticks(range(0, n_layers, every), [str(layer) for layer in model.layers[::every]])
        for spine in axes.spines.values():
            spine.set_visible(False)
        bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
        bar.outline.set_visible(False)
        bar.set_label(f"times the mean, up to {short(most)}")
    return made[0]


def _percentile(load: object) -> float:
    import numpy as np

    found = np.asarray(load, np.float64)
    found = found[~np.isnan(found)]
    return float(np.percentile(found, 99)) if found.size else math.nan


def layers(number: int, model: RoutingSummary) -> str:
    """Draw imbalance, entropy and overlap layer by layer."""
    with drawing(number, WIDE, 2.4) as (figure, made):
        parts = figure.subplots(1, 3)
        columns = (
            ("busiest expert, times the mean", model.imbalance, RED),
            ("entropy of the load (1: even)", model.entropy, BLUE),
            ("experts shared with the token before", model.overlap, GREEN),
        )
        for axes, (title, values, colour) in zip(parts, columns, strict=True):
            axes.plot(model.layers, values, color=colour, linewidth=1.6, marker="o", markersize=2.5)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel("layer")
            axes.grid(axis="y", linewidth=0.7)
            axes.spines["left"].set_visible(False)
            _whole(axes)
        parts[0].set_ylim(bottom=0)
        parts[1].set_ylim(0, 1.04)
        parts[2].set_ylim(0, 1.04)
    return made[0]
