"""References: small, picklable, JSON-able descriptions of steps and segments; no payload but ``inline``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spool.arguments import integer
from spool.errors import InputError
from spool.model.rows import forward_rows, row_at

if TYPE_CHECKING:
    from spool.model.fields import Align, FieldSpec

_BUILT_IN: dict[str, Align] = {
    "token_ids": "token", "logprobs": "response", "loss_mask": "response", "routed_experts": "forward",
}  # fmt: skip
_position = attrgetter("position")
_MOST_DIGITS = 300
"""Of a number that a float holds, and Python reads whatever its limit on digits is."""


class Extent(Struct, frozen=True, array_like=True, gc=False):
    """A run of rows of one stored array in one stream, and the position it stands for.

    Attributes:
        stream: the stream's name.
        row: first row in the array; the pack is ``row // R``. An extent never crosses a pack.
        n: number of rows.
        position: what row 0 of the run stands for: a token (token, response), a forward row (forward), the
            ordinal of a step (step), or the first value (ragged values: unused, 0).
        crc: crc32c of the stored bytes of the *whole* extent, ``[row - before, row + n + after)``.
        before: rows cut off in front.
        after: rows cut off behind.
    """

    stream: str
    row: int
    n: int
    position: int
    crc: int
    before: int = 0
    after: int = 0

    @property
    def whole(self) -> tuple[int, int]:
        """First row and number of rows of the whole extent, those that were cut off included."""
        return self.row - self.before, self.before + self.n + self.after

    def cut(self, start: int, stop: int) -> Extent:
        """Return the part that stands for positions ``[start, stop)``, which must lie inside."""
        head, tail = start - self.position, self.position + self.n - stop
        if head == 0 and tail == 0:
            return self
        row, before, after = self.row + head, self.before + head, self.after + tail
        return Extent(self.stream, row, stop - start, start, self.crc, before, after)

    def at(self, position: int) -> Extent:
        """Return the same rows standing for ``position`` on."""
        return Extent(self.stream, self.row, self.n, position, self.crc, self.before, self.after)


class Span(Struct, frozen=True, array_like=True, gc=False):
    """Tokens ``[start, stop)`` that one step generated.

    Attributes:
        step: the step's index in its session.
        start: first token, in the tokens of the reference.
        stop: one past the last.
        trained: loss mask before clearing: False where another segment trains this prefix.
        n_cleared: tokens that the step's loss mask cleared; where `Ref.head` cut the span, at least so many.
    """

    step: int
    start: int
    stop: int
    trained: bool = True
    n_cleared: int = 0


class VersionSpan(Struct, frozen=True, array_like=True, gc=False):
    """Generated tokens ``[start, stop)`` came from the weights ``version``."""

    version: str
    start: int
    stop: int


class Unit(Struct, frozen=True, array_like=True, gc=False):
    """A multimodal unit: the token at ``position`` stands for ``n_rows`` rows of the forward."""

    key: str
    position: int
    n_rows: int


class Inline(Struct, frozen=True, array_like=True):
    """Payload that travels inside a reference because the caller asked for it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Ref(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step's and a segment's reference have in common.

    Equal references describe the same data. Tokens are counted as the engine sent them; ``n_rows`` counts a
    multimodal placeholder as the rows it expands to, and ``forward`` fields have ``n_rows - 1`` rows.

    Attributes:
        spool_id: the spool that holds the data.
        session_id, group_id, sample_index, rollout_step, source, prompt_id, split, attempt: identity of the session.
        n_tokens: tokens of prompt and response.
        n_rows: rows of the forward they expand to.
        response_start: first generated token; the response region is ``[response_start, n_tokens)``.
        spans: who generated which tokens, ascending.
        versions: weight versions of the generated tokens, ascending.
        finish_reason: of the last step, as the engine gave it.
        extents: by stored array's name, ascending positions, never overlapping; what they leave out is a gap.
        units: multimodal units by position.
        n_nonfinite: NaN and infinite logprobs.
        roots: URLs where the spool was when this was made; hints only.
        inline: payload that the caller asked to carry along.
    """

    spool_id: str
    session_id: str
    group_id: str | None = None
    sample_index: int | None = None
    rollout_step: int | None = None
    source: str | None = None
    prompt_id: str | None = None
    split: str | None = None
    attempt: int = 0
    n_tokens: int = 0
    n_rows: int = 0
    response_start: int = 0
    spans: tuple[Span, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: str | None = None
    extents: dict[str, tuple[Extent, ...]] = {}
    units: tuple[Unit, ...] = ()
    n_nonfinite: int = 0
    roots: tuple[str, ...] = ()
    inline: dict[str, Inline] = {}

    @property
    def response_length(self) -> int:
        """Tokens of the response region."""
        return self.n_tokens - self.response_start

    @property
    def trainable_tokens(self) -> int:
        """Generated tokens that this reference trains: as many as its ``loss_mask`` has ones.

        Where `head` cut through a step that cleared some, at most so many: 0 is none in any case.
        """
        return sum(span.stop - span.start - span.n_cleared for span in self.spans if span.trained)

    @property
    def version_span(self) -> tuple[str, str] | None:
        """Oldest and newest weight version: by number if all are numbers, else by first appearance."""
        return version_span(self.versions)

    def head(self, n_tokens: int, fields: Iterable[FieldSpec] = ()) -> Self:
        """Return the first ``n_tokens`` tokens, every field cut there; no payload is read.

        Steps, their own fields and ``n_nonfinite`` stay as they are. ``n_cleared`` of the span that the cut goes
        through is what is cleared at least: how many of the tokens that are left are, only the ``loss_mask`` says.

        Args:
            n_tokens: at most its own.
            fields: specs of the user's fields; one of which none is given keeps the extents that it has, of which a
                read takes what the tokens ask for.

        Raises:
            InputError: there are fewer tokens, or payload of an unknown field is inline and nowhere else.
        """
        return cut(self, n_tokens, {**_BUILT_IN, **{spec.name: spec.align for spec in fields}})

    def to_json(self) -> str:
        """Return the reference as JSON; `spool.ref_from_json` reads it back.

        JSON has no NaN and no infinities: in ``reward`` and ``facts`` they become null. Pickle keeps them.
        """
        return msgspec.json.encode(self).decode()

    @property
    def id(self) -> str:
        """As the command line takes it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<spool.{type(self).__name__} {self.id}: {self.n_tokens} tokens>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickle, (type(self), msgspec.msgpack.encode(self)))

    def __hash__(self) -> int:
        return hash((self.spool_id, self.session_id, self.n_tokens, self.response_start))


class StepRef(Ref, frozen=True, kw_only=True, omit_defaults=True, tag="step"):
    """A step with its whole prompt and response; mask 1 on the response only.

    Attributes:
        step_id: the caller's id, or ``#`` and ``index``.
        index: order of append in the session, from 0.
        parent: index of the step whose chain this one extends; None where a new chain begins.
    """

    step_id: str
    index: int
    parent: int | None = None

    @property
    def key(self) -> str:
        """What late facts of the step are filed under, inside its session."""
        return f":{self.index}"

    @property
    def id(self) -> str:
        """``SESSION:INDEX``, as the command line takes it."""
        return f"{self.session_id}:{self.index}"


class SegmentRef(Ref, frozen=True, kw_only=True, omit_defaults=True, tag="segment"):
    """A trainable unit built from steps by a view.

    Attributes:
        view: ``timeline`` or ``lineage``.
        index: number of the segment among those of its session and view.
        count: how many there are.
        steps: indexes of its steps, root first.
        outcome: how the session ended; None while it lives.
        reward: from late facts, where known.
        facts: other late facts.
        cut_tokens: generated or observed tokens that the view or `head` cut off behind this segment.
        superseded: a client repeated the leaf's request.
        filed_tokens: tokens of the segment that `head` made this one of, whose late facts are its own; None where it
            is as the view made it.
    """

    view: str
    index: int = 0
    count: int = 1
    steps: tuple[int, ...] = ()
    outcome: str | None = None
    reward: float | None = None
    facts: dict[str, Any] = {}
    cut_tokens: int = 0
    superseded: bool = False
    filed_tokens: int | None = None

    @property
    def key(self) -> str:
        """What late facts of the segment are filed under, inside its session: its view, last step and tokens.

        Not its index, which depends on the options of the view and on the steps there were.
        """
        n_tokens = self.n_tokens if self.filed_tokens is None else self.filed_tokens
        return f"{self.view}:{self.steps[-1] if self.steps else ''}:{n_tokens}"

    def head(self, n_tokens: int, fields: Iterable[FieldSpec] = ()) -> Self:
        """See `Ref.head`."""
        part = super().head(n_tokens, fields)
        return part if part is self or self.filed_tokens is not None else replace(part, filed_tokens=self.n_tokens)

    @property
    def id(self) -> str:
        """``SESSION@VIEW/INDEX``, as the command line takes it."""
        return f"{self.session_id}@{self.view}/{self.index}"


R = TypeVar("R", bound=Ref)


def cut(ref: R, n_tokens: int, align: Mapping[str, Align]) -> R:
    """Return the first ``n_tokens`` tokens of a step or segment; see `Ref.head`.

    Args:
        ref: the reference.
        n_tokens: at most its own.
        align: what the rows of each field stand for; those of a field that is not named stay.

    Raises:
        InputError: there are fewer tokens, or payload of a field that is not named is inline and nowhere else.
    """
    if not 0 <= integer("n_tokens", n_tokens) <= ref.n_tokens:
        raise InputError(f"{n_tokens} tokens of a reference that has {ref.n_tokens} were asked for", tokens=n_tokens)
    if n_tokens == ref.n_tokens:
        return ref
    start, rows = min(ref.response_start, n_tokens), forward_rows(ref.units, n_tokens)
    stops = {name: rows if kind == "forward" else n_tokens for name, kind in align.items() if kind != "step"}
    changes: dict[str, Any] = {
        "n_tokens": n_tokens,
        "n_rows": row_at(ref.units, n_tokens),
        "response_start": start,
        "spans": tuple(_head_of(span, n_tokens) for span in ref.spans if span.start < n_tokens),
        "versions": clipped(ref.versions, n_tokens),
        "units": tuple(unit for unit in ref.units if unit.position < n_tokens),
        "extents": _cut_extents(ref.extents, stops),
        "inline": _cut_inline(ref, align, {"token": n_tokens, "response": n_tokens - start, "forward": rows}),
    }
    if isinstance(ref, SegmentRef):
        changes["cut_tokens"] = ref.cut_tokens + ref.n_tokens - n_tokens
    return replace(ref, **changes)


def version_span(spans: Iterable[VersionSpan]) -> tuple[str, str] | None:
    """Return the oldest and the newest weight version; see `Ref.version_span`."""
    names = list(dict.fromkeys(span.version for span in spans))
    if not names:
        return None
    numbers = numbered(names)
    if numbers is not None:
        names.sort(key=numbers.__getitem__)
    return names[0], names[-1]


def numbered(names: Iterable[str]) -> dict[str, int] | None:
    """Return the numbers that weight versions are; None where one of them is none, or too long to be one."""
    found = {name: int(name) for name in names if name.isdecimal() and len(name) <= _MOST_DIGITS}
    return found if all(name in found for name in names) else None


def clipped(spans: Iterable[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """Return the part of ascending spans that lies before token ``end``."""
    return tuple(span if span.stop <= end else replace(span, stop=end) for span in spans if span.start < end)


def _head_of(span: Span, end: int) -> Span:
    """Return the part before token ``end``; of tokens that were cleared as many as possible lie behind it."""
    behind = span.stop - end
    return span if behind <= 0 else replace(span, stop=end, n_cleared=max(span.n_cleared - behind, 0))


def _cut_extents(extents: Mapping[str, tuple[Extent, ...]], stops: Mapping[str, int]) -> dict[str, tuple[Extent, ...]]:
    kept: dict[str, tuple[Extent, ...]] = {}
    for array, own in extents.items():
        field, _, part = array.partition(".")
        if field not in stops:
            kept[array] = own
            continue
        if part == "values":  # cut with the end offsets that lead there
            continue
        found = _before(own, stops[field])
        if found:
            kept[array] = found
        if found and part:
            kept[f"{field}.values"] = extents.get(f"{field}.values", ())[: len(found)]
    return kept


def _before(extents: tuple[Extent, ...], stop: int) -> tuple[Extent, ...]:
    """Return the part of ascending extents that stands for positions before ``stop``."""
    n = bisect_left(extents, stop, key=_position)
    if not n or extents[n - 1].position + extents[n - 1].n <= stop:
        return extents[:n]
    return (*extents[: n - 1], extents[n - 1].cut(extents[n - 1].position, stop))


def _cut_inline(ref: Ref, align: Mapping[str, Align], counts: Mapping[str, int]) -> dict[str, Inline]:
    kept: dict[str, Inline] = {}
    for name, part in ref.inline.items():
        # Inline, the loss mask is the one that a reader gets: over all tokens.
        kind = "token" if name == "loss_mask" else align.get(name)
        if kind is None and not any(array.partition(".")[0] == name for array in ref.extents):
            raise InputError(f"no spec says how to cut inline {name!r}; pass those of all fields", fields=[name])
        if kind is not None:
            kept[name] = part if kind == "step" else _first_rows(part, counts[kind])
    return kept


def _first_rows(part: Inline, n: int) -> Inline:
    row_bytes = len(part.data) // max(part.shape[0], 1)
    return Inline(part.dtype, (n, *part.shape[1:]), part.data[: n * row_bytes])


def _unpickle(cls: type[R], data: bytes) -> R:
    return msgspec.msgpack.decode(data, type=cls)


def ref_from_json(text: str | bytes) -> StepRef | SegmentRef:
    """Read a reference back from JSON.

    Raises:
        InputError: the text is not a reference.
    """
    try:
        return msgspec.json.decode(text, type=StepRef | SegmentRef)
    except (msgspec.DecodeError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise InputError(f"this is not a reference, as to_json() and `spool show --ref` make them: {error}") from error
