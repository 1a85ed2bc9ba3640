"""Layers by experts as a heat map, with the numbers of each layer beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from textual.binding import Binding, BindingType

from spool.browse.heat import HEAT_CSS, HEAT_TONES, SIDE_TONES, heat, side
from spool.browse.lines import Lines, Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_NUMBER_CELLS = 8


class Map(NamedTuple):
    """What is shown.

    Attributes:
        layers: absolute numbers of the layers [L].
        cells: float [L, E]: load over the layer's mean, or the difference of two of them.
        columns: numbers of each layer by heading: float [L] each.
        order: the column that layers are sorted by, largest first; by layer where None.
        is_difference: the cells are differences.
    """

    layers: tuple[int, ...]
    cells: NDArray[np.float64]
    columns: dict[str, NDArray[np.float64]]
    order: str | None = None
    is_difference: bool = False


class LayerMap(Lines):
    """The map; the cursor is on a layer, and on a bin of experts."""

    N_FIXED = 1
    KEPT: ClassVar[frozenset[str]] = frozenset((*HEAT_TONES, *SIDE_TONES))
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"lines--{tone}" for tone in (*HEAT_TONES, *SIDE_TONES)}
    DEFAULT_CSS = HEAT_CSS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "sideways(-1)", "experts to the left", show=False),
        Binding("right,l", "sideways(1)", "experts to the right", show=False),
        Binding("enter", "choose", show=False),
        Binding("circumflex_accent,0", "sideways(-100000)", "first experts", show=False),
        Binding("dollar_sign", "sideways(100000)", "last experts", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.empty = "reading"
        self._map: Map | None = None
        self._order: list[int] = []
        self._wanted = 0

    def show(self, shown: Map | None) -> None:
        """Show a map, the cursor on the layer where it was."""
        place = self.place
        self._map = shown
        self._order = [] if shown is None else _order(shown)
        kept = None if place is None or place not in self._order else self._order.index(place)
        self.count(len(self._order), cursor=kept)

    @property
    def place(self) -> int | None:
        """Place of the layer under the cursor among the map's layers."""
        return self._order[self.cursor] if self.cursor < len(self._order) else None

    @property
    def _bin(self) -> int:
        # it is drawn in a new size before anybody is told of it
        return min(self._wanted, max(self._n_bins - 1, 0))

    @property
    def experts(self) -> tuple[int, int]:
        """The experts of the bin under the cursor, half-open."""
        edges = self._edges
        return (edges[self._bin], edges[self._bin + 1]) if len(edges) > 1 else (0, 0)

    @property
    def is_plain(self) -> bool:
        """Whether there is no colour."""
        return self.app.no_color

    def action_sideways(self, by: int) -> None:
        """Move the cursor by bins."""
        at = max(min(self._bin + by, self._n_bins - 1), 0)
        if at != self._bin:
            self._wanted = at
            self.refresh()
            self.post_message(self.Moved(self))

    def on_click(self, event: object) -> None:
        """Set the cursor on the bin where the mouse is; on the layer, `Lines` does."""
        offset = event.get_content_offset(self) if hasattr(event, "get_content_offset") else None
        if offset is not None and offset.x >= self._left:
            self.action_sideways(offset.x - self._left - self._bin)

    def on_resize(self) -> None:
        """Bin anew."""
        super().on_resize()
        self.post_message(self.Moved(self))

    def fixed(self, number: int) -> Iterator[Piece]:  # noqa: ARG002
        """Return the headings; over the map, the experts where it begins and ends."""
        shown = self._map
        if shown is None:
            return
        yield f"{'LAYER' if shown.order is None else 'layer':>5}", ""
        for name in shown.columns:
            yield f"{name.upper() if name == shown.order else name:>{_NUMBER_CELLS}}", ""
        first, last = " 0", str(max(shown.cells.shape[1] - 1, 0))
        low, high = self.experts
        under = f"{low}" if high - low == 1 else f"{low}-{high - 1}"
        room = self._n_bins + 1 - len(first) - len(last)
        at = min(max(self._bin - len(under) // 2 - 1, 1), max(room - len(under) - 1, 0))
        if room > len(under) + 2:
            yield f"{first}{' ' * at}{under}{' ' * (room - at - len(under))}{last}", ""

    def row(self, number: int) -> Iterator[Piece]:
        """Return a layer: its number, its numbers, its experts."""
        shown, place = self._map, self._order[number]
        assert shown is not None
        yield f"{shown.layers[place]:>5}", "strong" if number == self.cursor else ""
        for values in shown.columns.values():
            value = float(values[place])
            yield f"{'-' if math.isnan(value) else _short(value):>{_NUMBER_CELLS}}", ""
        yield " ", ""
        make = side if shown.is_difference else heat
        for at, value in enumerate(self._binned(place)):
            text, tone = make(value, plain=self.is_plain)
            yield ("┃", "strong") if number == self.cursor and at == self._bin else (text, tone)

    def _binned(self, place: int) -> list[float]:
        """Return for each bin of a layer the value of its expert that is furthest from 0."""
        assert self._map is not None
        cells, edges = self._map.cells[place], self._edges
        if len(edges) < 2:
            return []
        values = np.maximum.reduceat(cells, edges[:-1])
        if self._map.is_difference:
            low = np.minimum.reduceat(cells, edges[:-1])
            values = np.where(values > -low, values, low)
        return list(map(float, values))

    @property
    def _left(self) -> int:
        return 6 + _NUMBER_CELLS * (len(self._map.columns) if self._map is not None else 0)

    @property
    def _n_bins(self) -> int:
        if self._map is None:
            return 0
        n_experts: int = self._map.cells.shape[1]
        return max(min(self.scrollable_content_region.width - self._left, n_experts), 1)

    @property
    def _edges(self) -> list[int]:
        """Experts where bins begin, and one past the last."""
        if self._map is None or not self._map.cells.shape[1]:
            return [0]
        n_experts, n_bins = self._map.cells.shape[1], self._n_bins
        return [number * n_experts // n_bins for number in range(n_bins + 1)]


def _order(shown: Map) -> list[int]:
    places = list(range(len(shown.layers)))
    if shown.order is None:
        return places
    values = np.nan_to_num(shown.columns[shown.order], nan=-np.inf)
    return sorted(places, key=lambda place: -values[place])


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 2 else f"{value:.3f}"
