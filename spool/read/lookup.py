"""Which fields a reference has, what they are, and which rows of them are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from spool.errors import GapError, InputError, NotFoundError
from spool.model.fields import LOGPROBS, LOSS_MASK, TOKEN_IDS
from spool.model.rows import MOST
from spool.read.sample import Coverage
from spool.read.select import Gap, Range, Run, cover, inside_spans, n_steps, positions
from spool.read.sound import check_extents, check_reference, name_of
from spool.read.streams import FieldView, Streams, builtin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from spool.model.fields import FieldSpec
    from spool.model.refs import Extent, Ref

MASK = LOSS_MASK.name
_CHECKED_ROWS = 1 << 16
"""Of so many no room is made before each extent is known to lie inside of a shard; of fewer that is seen later."""

_BUILT_IN = {spec.name: builtin(spec) for spec in (TOKEN_IDS, LOGPROBS, LOSS_MASK)}


class Selection(NamedTuple):
    """The asked rows of one field of one reference.

    Attributes:
        view: the field.
        runs: stored rows.
        blanks: rows that are 0 by definition: observations, in a response field.
        gaps: rows that were never sent.
        n: rows together.
    """

    view: FieldView
    runs: list[Run]
    blanks: list[Gap]
    gaps: list[Gap]
    n: int


class Lookup:
    """The fields of the references of one call.

    Args:
        streams: the schemas.
        refs: all references of the call; they help each other out with specs.
        late: specs of arrays without rows, which no stream has.
    """

    def __init__(self, streams: Streams, refs: Sequence[Ref], late: Mapping[str, FieldSpec] | None = None) -> None:
        self._streams = streams
        self._refs = refs
        self._late = {} if late is None else {name: builtin(spec) for name, spec in late.items()}
        self._elsewhere: dict[str, FieldView | None] = {}

    def view(self, ref: Ref, name: str) -> FieldView | None:
        """Return what ``name`` is, from its rows, else from any schema at hand; None where no one knows."""
        extents = extents_of(ref, name)
        return self._streams.field(name, extents) if extents else self._unstored(ref, name)

    def _unstored(self, ref: Ref, name: str) -> FieldView | None:
        view = self._declared(ref, name)
        if view is not None:
            return view
        if name not in self._elsewhere:
            told = _BUILT_IN.get(name) or self._late.get(name)
            self._elsewhere[name] = next(filter(None, self._of_others(name)), told)
        return self._elsewhere[name]

    def _of_others(self, name: str) -> Iterable[FieldView]:
        for ref in self._refs:
            extents = extents_of(ref, name)
            if extents:
                yield self._streams.field(name, extents[:1])
        yield from filter(None, (self._declared(ref, name) for ref in self._refs))

    def _declared(self, ref: Ref, name: str) -> FieldView | None:
        """Return what the streams of a reference's other fields say that a field is."""
        for stream in dict.fromkeys(other[0].stream for other in ref.extents.values() if other):
            view = self._streams.fields(stream).get(name)
            if view is not None:
                return view
        return None

    def select(self, ref: Ref, name: str, ranges: Sequence[Range], *, sparse: bool) -> Selection | None:
        """Return the rows of ``name`` for the token ``ranges``; None where no one knows it and nothing is missing.

        Args:
            ref: the reference.
            name: the field.
            ranges: tokens.
            sparse: rows that were never sent, even all of them, are no error.

        Raises:
            GapError: some were never sent.
            NotFoundError: none was ever sent.
        """
        extents = extents_of(ref, name)
        view = self._streams.field(name, extents) if extents else self._unstored(ref, name)
        if view is None:
            if ref.n_tokens == 0 or name in ref.extents:  # attached, and there was no row to attach
                return None
            raise _not_found(ref, name, "or attach it")
        align = view.spec.align
        if extents:
            check_extents(ref, name, extents, n_steps(ref) if align == "step" else MOST)
        if not extents and not sparse:
            _, lost, _ = cover((), positions(align, ref, [(0, ref.n_tokens)]))
            if inside_spans(lost, ref) if align == "response" else any(gap.stop > gap.start for gap in lost):
                raise _not_found(ref, name, "attach it, or pass missing=<number> to have it filled")
        runs, blanks, n = cover(extents, positions(align, ref, ranges, extents))
        if n > _CHECKED_ROWS:  # before anybody makes room for so many
            for run in runs:
                (view.offsets or view.values)[run.extent.stream].locate(run.extent)
        gaps = inside_spans(blanks, ref) if align == "response" else blanks
        if gaps and not sparse:
            raise _gap(ref, view, gaps)
        return Selection(view, runs, blanks if align == "response" else [], gaps, n)

    def coverage(self, ref: Ref, names: Iterable[str]) -> dict[str, Coverage]:
        """Return by field what it is and which of its positions were never sent; nothing of one that no one knows.

        Raises:
            NotFoundError: no one knows a field, and rows of it are missing.
            IntegrityError: the reference is damaged.
        """
        check_reference(ref)
        found = {}
        for name in names:
            if name in ref.inline:
                view, gaps = self.view(ref, name), []
            else:
                selection = self.select(ref, name, [(0, ref.n_tokens)], sparse=True)
                view, gaps = (selection.view, selection.gaps) if selection is not None else (None, [])
            if view is not None:
                found[name] = Coverage(view.spec, tuple((gap.start, gap.stop) for gap in gaps if gap.stop > gap.start))
        return found


def extents_of(ref: Ref, name: str) -> tuple[Extent, ...]:
    """Return the extents that say which positions of a field there are; of a ragged field, those of its end offsets."""
    return ref.extents.get(name) or ref.extents.get(f"{name}.offsets") or ()


def names_of(ref: Ref, fields: Iterable[str] | None) -> list[str]:
    """Return the fields to read: those asked for, or all that the reference has and the loss mask.

    Raises:
        InputError: ``fields`` is a text.
    """
    if isinstance(fields, str):
        raise InputError(f"fields must be a list of names; write fields=[{fields!r}]")
    if fields is not None:
        return list(dict.fromkeys(fields))
    stored = [name.partition(".")[0] for name in (*ref.extents, *ref.inline)]
    if not ref.n_tokens:
        stored.append(TOKEN_IDS.name)
    return [name for name in dict.fromkeys(stored) if name != MASK] + [MASK]


def _not_found(ref: Ref, name: str, ways: str) -> NotFoundError:
    known = names_of(ref, None)
    return NotFoundError(
        f"{name_of(ref)} has no rows of {name}; it has {', '.join(known)}. Store the field (?fields=), {ways}",
        field=name, ref=name_of(ref), known=known,
    )  # fmt: skip


def _gap(ref: Ref, view: FieldView, gaps: Sequence[Gap]) -> GapError:
    what = {"token": "tokens", "response": "generated tokens", "forward": "forward rows", "step": "steps"}
    rows = [[gap.start, gap.stop] for gap in gaps[:16]]
    shown = ", ".join(f"[{start}, {stop})" for start, stop in rows[:3]) + (", ..." if len(gaps) > 3 else "")
    cut = ", or take the segment from view(gaps='cut')" if view.spec.align == "forward" else ""
    return GapError(
        f"{name_of(ref)}: {view.spec.name} was never sent for {what[view.spec.align]} {shown}; leave it out (fields=), "
        f"pass missing=<number> to have them filled{cut}",
        field=view.spec.name, ref=name_of(ref), rows=rows, n_gaps=len(gaps),
    )  # fmt: skip
