"""The screen of routing: load over experts, layer by layer, of one segment or of two beside each other."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from spool.browse.heat import heat_legend, side_legend
from spool.browse.layer_map import LayerMap, Map
from spool.browse.line_input import LineInput
from spool.browse.pick import PickScreen
from spool.browse.screen import SpoolScreen
from spool.browse.wrapping import number
from spool.look.routing import RoutingDifference, RoutingSummary, check_comparable, comparing
from spool.look.text import count, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from textual.app import ComposeResult

    from spool.browse.lines import Lines
    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef

    Ref = SegmentRef | StepRef

_EVERY_S = 0.1
_TYPE = "\0"
_MOST_CHOICES = 500


class Known(NamedTuple):
    """What is known so far.

    Attributes:
        a, b: of the segment, and of the other one.
        difference: once both were read.
        done, total: rows that were gone through, of those of what is being read.
    """

    a: RoutingSummary
    b: RoutingSummary | None = None
    difference: RoutingDifference | None = None
    done: int = 0
    total: int = 0


class RoutingScreen(SpoolScreen):
    """The routing of a segment or step; filled in while it is read, which ends when the screen is left.

    Args:
        ref: the segment or step.
        other: another one, to compare with.
    """

    DEFAULT_CSS = """
    RoutingScreen #map { height: 1fr; }
    RoutingScreen #numbers { height: 3; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    RoutingScreen #legend { height: 1; padding: 0 1; text-wrap: nowrap; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("c", "compare", "compare"),
        Binding("v", "side", "A, B, A-B"),
    ]

    WORDS: ClassVar[Mapping[str, str]] = {
        "imbal": "imbalance: load of the busiest expert over the mean load",
        "entropy": "how evenly a layer's load is spread: 1 even, 0 one expert",
        "overlap": "part of a row's experts that the row before chose as well",
        "unused": "part of the experts that were never chosen",
        "dist": "of two: part of the load that lies on other experts",
        "agree": "of two: part of the experts in common, row by row",
        "same": "of two: part of the rows with the same experts",
    }

    class Filled(Message):
        """More was read."""

        bubble = False

        def __init__(self, known: Known, stop: threading.Event) -> None:
            super().__init__()
            self.known, self.stop_event = known, stop

    def __init__(self, ref: Ref, other: Ref | None = None) -> None:
        super().__init__()
        self.ref, self.other = ref, other
        self._known = Known(RoutingSummary.none())
        self._stop = threading.Event()
        self._sort: str | None = None
        self._side = "A"

    def content(self) -> ComposeResult:
        """Yield the map, its legend, and numbers of what is under the cursor."""
        yield LayerMap(id="map")
        yield Static(Content(), id="legend")
        yield Static(Content(), id="numbers")
        yield LineInput(id="line")

    def on_mount(self) -> None:
        """Begin to read."""
        if not self.query(LayerMap):  # left before it was laid out
            return
        self.query_one(LayerMap).focus()
        self._read()

    def on_unmount(self) -> None:
        """Stop reading."""
        self._stop.set()

    def refer(self) -> Ref:
        """Return the segment or step."""
        return self.ref

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read from the beginning; a reading that is under way ends."""
        self._stop.set()
        self._stop = stop = threading.Event()
        self._known = Known(RoutingSummary.none())
        against = "" if self.other is None else f" (A) against {self.other.id} (B)"
        self.refresh_bindings()
        self.headline(f"routing of {self.ref.id}{against}")
        self._show()
        steps = _steps(self.spool, self.ref, self.other)
        self.ask("routing", partial(self._run, steps, stop), partial(self._fill, stop))

    def _run(self, steps: Iterator[Known], stop: threading.Event) -> Known:
        """Go on until all is read or nobody wants it; show what is known now and then."""
        known, shown = Known(RoutingSummary.none()), 0.0
        try:
            for known in steps:
                if stop.is_set():
                    break
                if time.monotonic() - shown > _EVERY_S:
                    self.post_message(self.Filled(known, stop))
                    shown = time.monotonic()
        finally:
            # what was read before something failed is worth showing
            self.post_message(self.Filled(known, stop))
        return known

    def on_routing_screen_filled(self, message: Filled) -> None:
        """Show what was read."""
        message.stop()
        self._fill(message.stop_event, message.known)

    def _fill(self, stop: threading.Event, known: Known) -> None:
        if stop is self._stop and not stop.is_set():
            self._known = known
            self._show()

    # -- showing -----------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        shown = self._map()
        table = self.query_one(LayerMap)
        table.show(shown)
        table.empty = "" if self._known.total > self._known.done else _nothing(self._known.a)
        plain = self.app.no_color
        pieces = side_legend(plain=plain) if shown is not None and shown.is_difference else heat_legend(plain=plain)
        styles = {tone: str(table.get_component_rich_style(f"lines--{tone}")) for _, tone in pieces if tone}
        self.query_one("#legend", Static).update(
            Content.assemble(*((text, styles.get(tone, "")) for text, tone in pieces))
        )
        self._numbers()
        self.say(self._state())

    @property
    def _shown(self) -> RoutingSummary:
        return self._known.b if self._side == "B" and self._known.b is not None else self._known.a

    def _map(self) -> Map | None:
        known, summary = self._known, self._shown
        if not summary.layers:
            return None
        difference = known.difference
        if self._side == "A-B" and difference is not None:
            cells = (difference.a.share - difference.b.share) * summary.num_experts
            columns = {"dist": difference.distance, "agree": difference.agreement, "same": difference.identical}
        else:
            cells = summary.share * summary.num_experts
            columns = {
                "imbal": summary.imbalance, "entropy": summary.entropy, "overlap": summary.overlap,
                "unused": summary.unused,
            }  # fmt: skip
        order = self._sort if self._sort in columns else None
        return Map(summary.layers, cells, columns, order, is_difference=self._side == "A-B" and difference is not None)

    def _state(self) -> str:
        known, summary = self._known, self._shown
        if known.done < known.total:
            return f"reading: {count(known.done)} of {count(known.total)} rows"
        if self._side == "A-B" and known.difference is not None and known.b is not None:
            rows = f"{count(known.a.n_rows)} and {count(known.b.n_rows)} rows"
            return f"A-B · {rows} · {count(known.difference.n_common)} in common"
        gaps = (
            f" · {count(summary.n_missing)} never sent, in {number(len(summary.gaps), 'gap')}" if summary.gaps else ""
        )
        return f"{'' if self.other is None else f'{self._side} · '}{count(summary.n_rows)} rows{gaps}"

    def on_lines_moved(self, message: Lines.Moved) -> None:
        """Tell the numbers of the bin that the cursor is on now."""
        message.stop()
        self._numbers()

    def _numbers(self) -> None:
        table = self.query_one(LayerMap)
        place = table.place
        text = "" if place is None else "\n".join(_lines(self._known, self._shown, place, table.experts))
        self.query_one("#numbers", Static).update(Content(text))

    # -- keys --------------------------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        """Sort by layer, or by one of the numbers in turn."""
        shown = self._map()
        if shown is not None:
            names = [None, *shown.columns]
            self._sort = names[(names.index(self._sort) + 1) % len(names)] if self._sort in names else None
            self._show()
            self.say(f"sorted by {self._sort or 'layer'}")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Offer sides only where there are two."""
        return action != "side" or self.other is not None

    def action_side(self) -> None:
        """Show the segment, the other one, or the difference of both."""
        sides = ["A", "B", "A-B"]
        self._side = sides[(sides.index(self._side) + 1) % 3]
        self._show()

    def action_compare(self) -> None:
        """Choose what to compare with."""
        self.ask("choices", partial(_choices, self.spool, self.ref), self._choose)

    def _choose(self, found: Sequence[Ref]) -> None:
        known = {str(number): ref for number, ref in enumerate(found)}
        choices = [(key, _label(ref)) for key, ref in known.items()]

        def chosen(key: str | None) -> None:
            if key == _TYPE:
                self.query_one(LineInput).open("SESSION, SESSION:STEP or SESSION@VIEW/INDEX")
            elif key is not None:
                self._against(known[key])

        self.app.push_screen(PickScreen("Compare with", [(_TYPE, "another: type it ..."), *choices]), chosen)

    def on_line_input_typed(self, message: LineInput.Typed) -> None:
        """Compare with what was typed."""
        message.stop()
        self.ask("find", partial(_find, self.spool, message.text), self._against)

    def _against(self, other: Ref) -> None:
        """Compare with another one; where that cannot be, what is shown stays, and the status says why."""
        spool, ref = self.spool, self.ref

        def check() -> Ref:
            first = [next(RoutingSummary.reading(spool, each))[0] for each in (ref, other)]
            check_comparable(*first)
            return other

        self.ask("check", check, self._compare)

    def _compare(self, other: Ref) -> None:
        self.other, self._side = other, "A-B"
        self._read()


def _steps(sp: Spool, ref: Ref, other: Ref | None) -> Iterator[Known]:
    """Read one reference, or two and what they have in common; give what is known after every read."""
    known = Known(RoutingSummary.none())
    for summary, done, total in RoutingSummary.reading(sp, ref):
        known = Known(summary, done=done, total=total)
        yield known
    if other is None:
        return
    for summary, done, total in RoutingSummary.reading(sp, other):
        known = Known(known.a, summary, done=done, total=total)
        yield known
    assert known.b is not None
    check_comparable(known.a, known.b)
    for difference, done, total in comparing(sp, ref, other, known.a, known.b):
        yield Known(known.a, known.b, difference, done, total)


def _choices(sp: Spool, ref: Ref) -> list[Ref]:
    """Return the other segments of the reference's session, of both views."""
    from spool.look.references import of_view

    found: list[Ref] = [*of_view(sp, ref.session_id, "lineage")[0], *of_view(sp, ref.session_id, "timeline")[0]]
    return [part for part in found if part.id != ref.id][:_MOST_CHOICES]


def _label(ref: Ref) -> str:
    part = ref.id.removeprefix(ref.session_id)[1:]
    return f"{one_line(part)} · {count(ref.n_tokens)} tokens"


def _find(sp: Spool, text: str) -> Ref:
    from spool.errors import NotFoundError
    from spool.look.references import find

    found = find(sp, text)
    if not found:
        raise NotFoundError(f"{text!r} has no segments")
    return found[0]


def _nothing(summary: RoutingSummary) -> str:
    if summary.layers:
        return ""
    return f"no routing was stored for its {count(summary.n_missing)} rows" if summary.n_missing else "no rows"


def _lines(known: Known, summary: RoutingSummary, place: int, experts: tuple[int, int]) -> Iterator[str]:
    low, high = experts
    where = f"layer {summary.layers[place]}, " + (
        f"expert {low}" if high - low == 1 else f"experts {low} to {high - 1}"
    )
    if known.b is not None and known.b.layers == known.a.layers:
        yield where
        for side, one in (("A", known.a), ("B", known.b)):
            yield f"{side} {_load(one, place, low, high)}, busiest {_busiest(one, place)}"
        return
    yield f"{where}: {_load(summary, place, low, high)}"
    yield f"busiest {_busiest(summary, place)}"
    if not summary.load[place].any():
        return
    unused = int(np.count_nonzero(summary.load[place] == 0))
    yield (
        f"imbalance {summary.imbalance[place]:.2f}, entropy {summary.entropy[place]:.3f}, {count(unused)} of "
        f"{count(summary.num_experts)} never used, overlap {summary.overlap[place]:.3f}"
    )


def _busiest(summary: RoutingSummary, place: int) -> str:
    busiest = np.argsort(-summary.load[place], kind="stable")[:6]
    return ", ".join(f"{e} {summary.share[place, e]:.1%}" for e in busiest if summary.load[place, e]) or "-"


def _load(summary: RoutingSummary, place: int, low: int, high: int) -> str:
    total, part = int(summary.load[place].sum()), int(summary.load[place, low:high].sum())
    if not total:
        return "nothing was counted"
    mean = part / total * summary.num_experts / max(high - low, 1)
    return f"{count(part)} ({part / total:.2%}, {mean:.2f} x mean)"
