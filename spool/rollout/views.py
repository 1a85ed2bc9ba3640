"""Views: the segments that a session's steps make, without reading payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from msgspec.structs import replace

from spool.errors import InputError
from spool.model.fields import LOSS_MASK
from spool.model.refs import Ref, SegmentRef, Span, VersionSpan, clipped, cut
from spool.model.rows import forward_rows, tokens_within
from spool.rollout.coverage import EMPTY, arrays
from spool.rollout.coverage import gaps as gaps_in

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from spool.model.events import StepCommitted
    from spool.model.fields import FieldSpec
    from spool.rollout.coverage import Cover
    from spool.rollout.state import SessionState

View = Literal["timeline", "lineage"]
"""``timeline``: one segment a step. ``lineage``: one segment a leaf of the tree, from its root."""


class _Options(NamedTuple):
    train_shared_prefix: str
    superseded: str
    trailing: str
    gaps: str


_DEFAULTS = _Options(train_shared_prefix="first", superseded="drop", trailing="cut", gaps="cut")._asdict()


def segments(
    state: SessionState,
    view: View = "lineage",
    *,
    train_shared_prefix: Literal["first", "all"] = "first",
    superseded: Literal["drop", "keep"] = "drop",
    trailing: Literal["cut", "keep"] = "cut",
    gaps: Literal["cut", "keep"] = "cut",
    outcome: str | None = None,
    transaction: Hashable | None = None,
) -> list[SegmentRef]:
    """Return the segments that a view makes of a session's steps.

    Args:
        state: the session.
        view: ``timeline``, in the order of the steps, or ``lineage``, in the order of the leaves.
        train_shared_prefix: whether generated tokens that several segments share are trained in the first of them or
            in all.
        superseded: whether a leaf whose request a later sibling repeats is left out of the lineage.
        trailing: whether a segment ends at its last generated token; one that has none stays whole.
        gaps: whether a segment ends before the first missing row of a forward field of which it has any. One that would
            lose all its generated tokens is left out.
        outcome: how the session ends; as it was finalised where None.
        transaction: an open transaction whose steps count too.

    Raises:
        InputError: a view or option is unknown.
    """
    options = _Options(train_shared_prefix, superseded, trailing, gaps)
    _check(view, options)
    if outcome is None and state.finalized is not None:
        outcome = state.finalized.outcome
    indexes = state.visible(transaction)
    drafts = _timeline(state, indexes) if view == "timeline" else _lineage(state, indexes, options)
    kept = [segment for draft in drafts if (segment := _cut(state, draft, options)) is not None]
    if view == "lineage" and train_shared_prefix == "first":
        kept = _trained_once(kept)
    if any(step.cleared for step in state.steps.values()):
        kept = [replace(segment, spans=state.with_cleared(segment.spans)) for segment in kept]
    return [replace(segment, index=i, count=len(kept), outcome=outcome) for i, segment in enumerate(kept)]


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a view, defaults filled in; refuse a name that is none.

    Raises:
        InputError: names the options.
    """
    unknown = options.keys() - set(_Options._fields)
    if unknown:
        raise InputError(
            f"{', '.join(sorted(unknown))} is no option of a view; these are: {', '.join(_Options._fields)}. Facts "
            "such as reward= go to Spool.annotate",
            options=sorted(unknown),
        )
    return {**_DEFAULTS, **options}


def _check(view: str, options: _Options) -> None:
    allowed = {"view": get_args(View), "train_shared_prefix": ("first", "all"), "superseded": ("drop", "keep")}
    for name, value in [("view", view), *zip(options._fields, options, strict=True)]:
        choices = allowed.get(name, ("cut", "keep"))
        if value not in choices:
            raise InputError(f"{name} is one of {', '.join(choices)}, not {value!r}", option=name, got=value)


def _timeline(state: SessionState, indexes: Iterable[int]) -> Iterator[SegmentRef]:
    for index in indexes:
        step = state.ref(index)
        common = {name: getattr(step, name) for name in Ref.__struct_fields__}
        yield SegmentRef(**common, view="timeline", steps=(index,))


def _lineage(state: SessionState, indexes: Sequence[int], options: _Options) -> Iterator[SegmentRef]:
    steps = [state.steps[index] for index in indexes]
    inner = {step.parent for step in steps}
    last_request = {_request(step): step.index for step in steps}
    for step in steps:
        repeated = last_request[_request(step)] > step.index
        if step.index not in inner and (options.superseded == "keep" or not repeated):
            yield _path_segment(state, step, superseded=repeated)


def _request(step: StepCommitted) -> tuple[int | None, int, bytes]:
    return step.parent, step.n_prompt, step.prompt_hash


def _path_segment(state: SessionState, leaf: StepCommitted, *, superseded: bool) -> SegmentRef:
    """Return the whole path from the root to ``leaf`` as a segment."""
    chain, path = state.chain(leaf.index), state.path(leaf.index)
    parts = _spoken(path)
    spans = tuple(Span(step.index, step.n_prompt, stop) for step, stop in parts)
    versions = [each for step, stop in parts for each in clipped(step.versions, stop)]
    return SegmentRef(
        **state.identity,
        view="lineage",
        steps=tuple(step.index for step in path),
        superseded=superseded,
        n_tokens=chain.n_tokens,
        n_rows=chain.n_rows,
        response_start=spans[0].start if spans else chain.n_tokens,
        spans=spans,
        versions=_joined(versions),
        finish_reason=leaf.finish_reason,
        extents={
            name: extents
            for spec in state.fields
            for name, extents in arrays(spec, chain.covers.get(spec.name, EMPTY)).items()
        },
        units=chain.units,
        n_nonfinite=sum(step.n_nonfinite for step, _ in parts),
    )


def _spoken(path: Sequence[StepCommitted]) -> list[tuple[StepCommitted, int]]:
    """Return the steps of a path of which generated tokens stay in its chain, and where those end."""
    parts: list[tuple[StepCommitted, int]] = []
    for step in (step for step in path if step.n_tokens):
        if parts and parts[-1][1] > step.base:
            last, _ = parts.pop()
            parts += [(last, step.base)] if step.base > last.n_prompt else []
        if step.n_tokens > step.n_prompt:
            parts.append((step, step.n_tokens))
    return parts


def _joined(versions: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    joined: list[VersionSpan] = []
    for each in versions:
        if joined and joined[-1].version == each.version and joined[-1].stop == each.start:
            joined[-1] = VersionSpan(each.version, joined[-1].start, each.stop)
        else:
            joined.append(each)
    return tuple(joined)


def _trained_once(kept: Iterable[SegmentRef]) -> list[SegmentRef]:
    """Leave every generated token to the first segment that has it.

    What one segment has of a step's tokens begins where the step's response does, but may end earlier than elsewhere: a
    span that goes on behind what is trained already is split there.
    """
    trained: dict[int, int] = {}
    result = []
    for segment in kept:
        spans: list[Span] = []
        for span in segment.spans:
            done = min(max(trained.get(span.step, 0), span.start), span.stop)
            if done > span.start:
                spans.append(Span(span.step, span.start, done, trained=False))
            if done < span.stop:
                spans.append(Span(span.step, done, span.stop))
            trained[span.step] = max(trained.get(span.step, 0), span.stop)
        result.append(replace(segment, spans=tuple(spans)))
    return result


def _cut(state: SessionState, segment: SegmentRef, options: _Options) -> SegmentRef | None:
    """Return what is left of a whole segment, or None where nothing that was generated is."""
    end = _last_generated(segment, segment.n_tokens) if options.trailing == "cut" else segment.n_tokens
    rows = forward_rows(segment.units, end)
    covered = rows
    if options.gaps == "cut":
        covered = _covered_rows(state.chain(segment.steps[-1]).covers, state.fields, rows)
    if covered < rows:
        end = tokens_within(segment.units, covered)
        if segment.spans and end <= segment.spans[0].start:
            return None
        end = _last_generated(segment, end) if options.trailing == "cut" else end
    left = head(segment, end, state.fields)
    n_nonfinite = sum(state.steps[step].n_nonfinite for step in {span.step for span in left.spans})
    return left if n_nonfinite == left.n_nonfinite else replace(left, n_nonfinite=n_nonfinite)


def _last_generated(segment: SegmentRef, end: int) -> int:
    return max((min(span.stop, end) for span in segment.spans if span.start < end), default=end)


def _covered_rows(covers: Mapping[str, Cover], fields: Iterable[FieldSpec], rows: int) -> int:
    """Return how many of the first ``rows`` are there, before the first gap, of every forward field that has any."""
    covered = rows
    for spec in fields:
        found = covers.get(spec.name, EMPTY)
        if spec.align == "forward" and found.extents and found.extents[0].position < rows:
            missing = gaps_in(found, 0, rows)
            covered = min(covered, missing[0].position) if missing else covered
    return covered


R = TypeVar("R", bound=Ref)


def head(ref: R, n_tokens: int, fields: Iterable[FieldSpec]) -> R:
    """Return the first ``n_tokens`` tokens of a step or segment, every field cut there.

    Steps, their own fields and ``n_nonfinite`` stay as they are; ``cut_tokens`` of a segment counts what is gone. What
    masks cleared is counted afterwards.

    Args:
        ref: the reference; inline payload is cut with it.
        n_tokens: at most its own.
        fields: specs of all fields in it.

    Raises:
        InputError: there are fewer tokens, or a field of unknown spec.
    """
    specs = list(fields)
    align = {spec.name: spec.align for spec in specs}
    unknown = ref.extents.keys() - {array.name for spec in specs for array in spec.arrays}
    unknown |= ref.inline.keys() - align.keys() - {LOSS_MASK.name}
    if unknown and n_tokens < ref.n_tokens:
        raise InputError(f"no spec says how to cut {sorted(unknown)}; pass those of all fields", fields=sorted(unknown))
    return cut(ref, n_tokens, align)
