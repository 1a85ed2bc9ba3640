"""Numbers as colours, and as characters where there are none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spool.browse.lines import Piece

_RAMP = ("#24164d", "#4a1079", "#7a1d81", "#a92e7d", "#d6456c", "#f4695c", "#fd9a6a", "#fed395")
_AGAINST = ("#3f8fe0", "#2f68a8", "#24466e", "#2a2a33", "#6e4a24", "#a86a2f", "#e0923f")

HEAT_TONES = tuple(f"heat{number}" for number in range(len(_RAMP)))
"""Tones from little to much; the brightness grows with them."""

SIDE_TONES = tuple(f"side{number}" for number in range(len(_AGAINST)))
"""Tones from much of the one to much of the other."""

HEAT_CSS = "\n".join(
    f"LayerMap > .lines--{tone} {{ background: {color}; color: {color}; }}"
    for tones, colors in ((HEAT_TONES, _RAMP), (SIDE_TONES, _AGAINST))
    for tone, color in zip(tones, colors, strict=True)
)

_DENSITY = ".:-=+*#@"
_SIDE_SIGNS = "<(- +)>"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STEPS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 8.0)

BAR_CELLS = 8
"""Cells of the bar of a logprob: one a nat."""


def heat(ratio: float, *, plain: bool) -> Piece:
    """Return one cell of a heat map.

    Args:
        ratio: load over the layer's mean; 0 is an expert that was never chosen, NaN one of which nothing is known.
        plain: without colour.
    """
    if math.isnan(ratio):
        return "?", "dim"
    if ratio <= 0:
        return " " if plain else "·", "dim"
    number = sum(ratio >= step for step in _STEPS)
    return (_DENSITY[number], "") if plain else (" ", HEAT_TONES[number])


def side(difference: float, *, plain: bool) -> Piece:
    """Return one cell of a map of two: on which side the load is larger, and by how much of the mean load."""
    if math.isnan(difference):
        return "?", "dim"
    size = sum(abs(difference) >= step for step in (0.25, 1.0, 3.0))
    number = 3 + (size if difference > 0 else -size)
    return (_SIDE_SIGNS[number], "") if plain else (" ", SIDE_TONES[number])


def heat_legend(*, plain: bool) -> list[Piece]:
    """Return what the cells of `heat` mean."""
    pieces: list[Piece] = [heat(0, plain=plain), (" never ", "dim")]
    for low, label in zip((0.1, *_STEPS), ("", *(f"{step:g}" for step in _STEPS)), strict=True):
        text, tone = heat(low, plain=plain)
        # a colour stands between its bounds, a sign before its lower one
        pieces += [(text, tone), (f" {label or 'less'}  ", "dim")] if plain else [(label, "dim"), (text * 2, tone)]
    return [*pieces, (" x mean, of the bin's busiest", "dim")]


def side_legend(*, plain: bool) -> list[Piece]:
    """Return what the cells of `side` mean."""
    cells = [side(value, plain=plain) for value in (4, 2, 0.5, 0, -0.5, -2, -4)]
    return [("more in A ", "dim"), *((text * 2, tone) for text, tone in cells), (" more in B", "dim"),
            (", by 0.25, 1, 3 x mean", "dim")]  # fmt: skip


def logprob_bar(logprob: float | None) -> Piece:
    """Return the bar of a logprob, as long as the token was unlikely; what is no logprob is told by its name."""
    if logprob is None:
        return " " * BAR_CELLS, ""
    if math.isnan(logprob):
        return "NaN".ljust(BAR_CELLS), "bad"
    if logprob == -math.inf:
        return "█" * (BAR_CELLS - 4) + "-inf", "bad"
    if logprob > 0:
        return f"{logprob:+.1g}"[:BAR_CELLS].ljust(BAR_CELLS), "bad"
    eighths = min(round(-logprob * 8), BAR_CELLS * 8)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    return bar.ljust(BAR_CELLS), logprob_tone(logprob)


def logprob_tone(logprob: float) -> str:
    """Return the tone of a logprob: of what was likely, possible, unlikely, most unlikely."""
    if not math.isfinite(logprob) or logprob > 0:
        return "bad"
    return "good" if logprob > -0.7 else "" if logprob > -2.3 else "warn" if logprob > -4.6 else "bad"
