"""Figures of matplotlib as SVG that belongs in a page: its colours and fonts are the page's, its ids its own."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spool.errors import ConfigError
from spool.look.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# stand-ins that no chart uses otherwise, and the variables of the page that take their place
TEXT, MUTED, GRID, CARD = "#010101", "#010102", "#010103", "#010104"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#010105", "#010106", "#010107", "#010108", "#010109", "#01010a"
_VARIABLES = {
    TEXT: "text", MUTED: "muted", GRID: "grid", CARD: "card", BLUE: "blue", ORANGE: "orange", GREEN: "green",
    RED: "red", PURPLE: "purple", GREY: "grey",
}  # fmt: skip

MOST_LABEL = 28
_PAGE_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@contextmanager
def drawing(number: int, width: float = 6.4, height: float = 2.7) -> Iterator[tuple[Figure, list[str]]]:
    """Lend a figure, and a list that its SVG is put into when the block ends.

    Args:
        number: of the figure in its page; makes its ids differ from others'.
        width, height: inches; the page scales it to its column.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "a report needs matplotlib: pip install '.[report]' in a checkout, or pip install 'spool-store[report]'"
        ) from None
    made: list[str] = []
    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": f"spool-{number}", "font.size": 9.0, "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED, "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED,
        "ytick.color": MUTED, "text.color": TEXT, "grid.color": GRID, "axes.facecolor": "none", "axes.axisbelow": True,
        "xtick.major.size": 0.0, "ytick.major.size": 0.0, "xtick.minor.size": 0.0, "ytick.minor.size": 0.0,
        "legend.frameon": False, "legend.fontsize": 8.5, "legend.labelcolor": TEXT,
        "axes.formatter.use_mathtext": False, "text.parse_math": False, "axes.unicode_minus": True,
    }  # fmt: skip
    with mpl.rc_context(settings), warnings.catch_warnings():
        # glyphs that its font lacks the page's may have
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, made
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    made.append(_as_part(out.getvalue(), number))


def _as_part(svg: str, number: int) -> str:
    """Return the element alone, sized by its page, without what the page says already."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg[^>]*?viewBox="([^"]*)"[^>]*>', _opened, svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="f{number}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>f{number}-", svg)
    svg = re.sub(r"font(-family)?: ?([\d.]+px )?[^;\"]*?sans-serif", _font, svg)
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.strip()


def _opened(match: re.Match[str]) -> str:
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="{match[1]}" aria-hidden="true" focusable="false">'


def _font(match: re.Match[str]) -> str:
    return f"font{match[1] or ''}: {match[2] or ''}{_PAGE_FONT}"


def label(text: str) -> str:
    """Return a text as a label of a chart: in one line, and not too long."""
    shown = one_line(text)
    return shown if len(shown) <= MOST_LABEL else shown[: MOST_LABEL - 1] + "…"


def bars(axes: Axes, labels: list[str], values: list[float], colour: str = BLUE) -> None:
    """Draw upright bars side by side, with as many labels below as there is room for."""
    axes.bar(range(len(values)), values, width=0.86, color=colour, linewidth=0)
    every = max(-(-len(labels) // 12), 1)
    axes.set_xticks(range(0, len(labels), every), labels[::every])
    axes.set_xlim(-0.7, max(len(labels), 6) - 0.3)
    counted(axes)


def counted(axes: Axes) -> None:
    """Show numbers from 0 up on the upright axis, with lines across."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.grid(axis="y", linewidth=0.7)
    axes.spines["left"].set_visible(False)


def short(value: float) -> str:
    """Return a number in few characters: 1.5K, 32M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def power(value: float) -> str:
    """Return a power of two as people name it: 512, 4Ki, 1Mi."""
    for unit, size in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
