"""Where two segments, steps or sessions differ first, and how: what the records say, then payload in windows."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, structs

from spool.errors import InputError
from spool.look.differing import first_of_fields
from spool.model.refs import SegmentRef, StepRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from spool.handle import Spool
    from spool.model.refs import Ref

_IDENTITY = ("group_id", "sample_index", "rollout_step", "source", "prompt_id", "split", "attempt")
_LENGTHS = ("n_tokens", "n_rows", "response_start", "response_length")
_OF_SEGMENT = ("view", "steps", "outcome", "superseded", "cut_tokens")
_STEP = ("parent", "n_tokens", "n_rows", "response_start", "finish_reason", "trainable_tokens")
_ROW = ("state", "outcome", "view", "prefer", "trim", "metadata")

EXCERPT = 48
"""Characters of a text that are shown around the first that differs."""


class Difference(Struct, frozen=True, kw_only=True):
    """The first place at which a part of two things differs.

    Attributes:
        part: ``identity``, ``steps``, ``lengths``, ``versions``, ``messages``, ``facts``, or a field's name, ...
        what: what differs there: an attribute, ``value``, ``gap``, ``dtype``, ``shape``.
        place: where, by ``step``, ``token``, ``row``, ``layer``, ``index``, ``message``, ``key``, ``character``, ...
        a, b: what is there; of long texts the part that differs.
        how: said where the values do not say it: zeros of different sign, NaNs of different bits.
    """

    part: str
    what: str
    place: dict[str, Any] = {}
    a: Any = None
    b: Any = None
    how: str = ""


class Comparison(Struct, frozen=True, kw_only=True):
    """What ``spool diff`` says.

    Attributes:
        a, b: what was compared, as it was named.
        equal: nothing differs.
        differences: the first place in each part; the first of them is the first of all.
    """

    a: str
    b: str
    equal: bool
    differences: tuple[Difference, ...] = ()


class Side(NamedTuple):
    """One of the two: where it is, and what it is.

    Attributes:
        sp: the spool.
        thing: a session's id, or a reference.
    """

    sp: Spool
    thing: str | StepRef | SegmentRef


def diff(a: Side, b: Side, fields: Sequence[str] | None = None) -> Iterator[Difference]:
    """Yield for each part in which two things differ the first place; nothing where they are equal.

    What the records say comes first: of things of one name their identity, then steps, lengths, versions, messages,
    and facts; then fields one after the other, compared as they are stored, bit for bit, as far as both go. Memory does
    not depend on their length.

    Args:
        a, b: two sessions, or two of segments and steps.
        fields: only these fields; all that either has where None.

    Raises:
        InputError: one is a session and the other is not, or neither has one of ``fields``.
        ReleasedError, IntegrityError, StorageError: something cannot be read.
    """
    if isinstance(a.thing, str) != isinstance(b.thing, str):
        raise InputError("a session is compared with a session, a segment or step with a segment or step")
    if isinstance(a.thing, str) and isinstance(b.thing, str):
        return _sessions(a.sp, a.thing, b.sp, b.thing, fields)
    assert not isinstance(a.thing, str) and not isinstance(b.thing, str)
    return _refs(a.sp, a.thing, b.sp, b.thing, fields)


# -- references ------------------------------------------------------------------------------------------------------


def _refs(
    sp_a: Spool, a: StepRef | SegmentRef, sp_b: Spool, b: StepRef | SegmentRef, fields: Sequence[str] | None
) -> Iterator[Difference]:
    if a.session_id == b.session_id:
        yield from _attributes("identity", a, b, _IDENTITY)
    if isinstance(a, SegmentRef) and isinstance(b, SegmentRef):
        yield from _attributes("segment", a, b, _OF_SEGMENT)
    yield from _attributes("lengths", a, b, _LENGTHS)
    yield from _attributes("finish", a, b, ("finish_reason",))
    yield from _lists("spans", a.spans, b.spans)
    yield from _lists("versions", a.versions, b.versions)
    yield from _lists("units", a.units, b.units)
    yield from _said(sp_a, a, sp_b, b)
    if isinstance(a, SegmentRef) and isinstance(b, SegmentRef):
        yield from _values("facts", {"reward": a.reward, **a.facts}, {"reward": b.reward, **b.facts})
    for found in first_of_fields(sp_a, a, sp_b, b, fields):
        yield Difference(**found._asdict())


def _attributes(
    part: str, a: object, b: object, names: Iterable[str], place: Mapping[str, Any] | None = None
) -> Iterator[Difference]:
    for name in names:
        one, other = getattr(a, name, None), getattr(b, name, None)
        if one != other:
            yield Difference(part=part, what=name, place=dict(place or {}), a=one, b=other)


def _lists(part: str, a: Sequence[Struct], b: Sequence[Struct]) -> Iterator[Difference]:
    for number, (one, other) in enumerate(zip_longest(a, b)):
        if one != other:
            some = one if one is not None else other
            assert some is not None
            facts = structs.asdict(some)
            place: dict[str, Any] = {"index": number}
            place |= {name: facts[name] for name in ("start", "position") if name in facts}
            shown = [None if item is None else structs.asdict(item) for item in (one, other)]
            yield Difference(part=part, what="entry", place=place, a=shown[0], b=shown[1])
            return


def _said(
    sp_a: Spool, a: StepRef | SegmentRef, sp_b: Spool, b: StepRef | SegmentRef, place: Mapping[str, Any] | None = None
) -> Iterator[Difference]:
    yield from _values("messages", sp_a.messages(a), sp_b.messages(b), place, named="message")
    yield from _values("tools", sp_a.tools(a), sp_b.tools(b), place, named="tool")


def _values(
    part: str, a: Any, b: Any, place: Mapping[str, Any] | None = None, *, named: str = "key"
) -> Iterator[Difference]:
    """Yield the first place at which two JSON values differ."""
    path: list[Any] = []
    found = _first(a, b, path)
    if found is None:
        return
    one, other = found
    where = dict(place or {})
    if path:
        where[named] = path[0]
    if path[1:]:
        where["at"] = path[1:]
    if isinstance(one, str) and isinstance(other, str):
        at = next(n for n, (x, y) in enumerate(zip_longest(one, other)) if x != y)
        where["character"] = at
        one, other = _excerpt(one, at), _excerpt(other, at)
    elif {type(one), type(other)} & {list, dict, str}:
        one, other = _short(one), _short(other)
    yield Difference(part=part, what="value", place=where, a=one, b=other)


def _first(a: Any, b: Any, path: list[Any]) -> tuple[Any, Any] | None:
    """Return the first two values that differ, and add where they are to ``path``."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        pairs = [(key, a.get(key, _ABSENT), b.get(key, _ABSENT)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list):
        pairs = [(n, x, y) for n, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT))]
    else:
        return None if _same(a, b) else (_shown(a), _shown(b))
    for key, one, other in pairs:
        path.append(key)
        found = _first(one, other, path)
        if found is not None:
            return found
        path.pop()
    return None


_ABSENT = object()


def _shown(value: Any) -> Any:
    return None if value is _ABSENT else value


def _same(a: Any, b: Any) -> bool:
    """Whether two JSON values are the same: 1, 1.0 and true are not, NaN is NaN, and 0.0 is not -0.0."""
    return type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else bool(a == b))


def _excerpt(text: str, at: int) -> str:
    low = max(at - EXCERPT // 3, 0)
    shown = text[low : low + EXCERPT]
    return ("..." if low else "") + shown + ("..." if low + EXCERPT < len(text) else "")


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else repr(value)
    return value if value is None or len(text) <= EXCERPT else text[:EXCERPT] + "..."


# -- sessions --------------------------------------------------------------------------------------------------------


def _sessions(sp_a: Spool, a: str, sp_b: Spool, b: str, fields: Sequence[str] | None) -> Iterator[Difference]:
    row_a, row_b = sp_a.find_session(a), sp_b.find_session(b)
    assert row_a is not None and row_b is not None
    if a == b:
        yield from _attributes("identity", row_a, row_b, _IDENTITY)
    yield from _attributes("session", row_a, row_b, _ROW)
    steps_a, steps_b = sp_a.steps(a), sp_b.steps(b)
    yield from _steps(steps_a, steps_b)
    yield from _segments(sp_a.final_segments(a), sp_b.final_segments(b))
    leaves = list(zip(_chains(sp_a, a), _chains(sp_b, b), strict=False))
    for one, other in leaves:
        found = list(_said(sp_a, one, sp_b, other, {"step": one.steps[-1]}))
        if found:
            yield from found
            break
    yield from _values("facts", row_a.facts, row_b.facts)
    yield from _payload(sp_a, sp_b, leaves, fields)


def _steps(a: Sequence[StepRef], b: Sequence[StepRef]) -> Iterator[Difference]:
    if len(a) != len(b):
        yield Difference(part="steps", what="n_steps", a=len(a), b=len(b))
    for one, other in zip(a, b, strict=False):
        found = list(_attributes("steps", one, other, _STEP, {"step": one.index}))
        if found:
            yield from found
            break
    for part in ("versions", "spans", "units"):
        for one, other in zip(a, b, strict=False):
            differs = list(_lists(part, getattr(one, part), getattr(other, part)))
            if differs:
                yield structs.replace(differs[0], place={"step": one.index, **differs[0].place})
                break


def _segments(a: Sequence[SegmentRef], b: Sequence[SegmentRef]) -> Iterator[Difference]:
    if len(a) != len(b):
        yield Difference(part="segments", what="n_segments", a=len(a), b=len(b))
    for one, other in zip(a, b, strict=False):
        names = (*_OF_SEGMENT, *_LENGTHS, "trainable_tokens")
        found = list(_attributes("segments", one, other, names, {"segment": one.index}))
        if found:
            yield from found
            return


def _chains(sp: Spool, session_id: str) -> list[SegmentRef]:
    """Return a segment for each step that no other goes on from, with all there is: together they hold every token."""
    return sp.view(session_id, superseded="keep", trailing="keep", gaps="keep", train_shared_prefix="all")


def _payload(
    sp_a: Spool, sp_b: Spool, leaves: Sequence[tuple[SegmentRef, SegmentRef]], fields: Sequence[str] | None
) -> Iterator[Difference]:
    """Yield the first difference of each field, leaf by leaf; prefixes whose rows were compared are passed over."""
    told: set[tuple[str, str]] = set()
    before: list[tuple[Ref, Ref]] = []
    for one, other in leaves:
        for found in first_of_fields(sp_a, one, sp_b, other, fields, before=before):
            if (found.part, found.what) not in told:
                told.add((found.part, found.what))
                difference = Difference(**found._asdict())
                yield structs.replace(difference, place={"chain_of_step": one.steps[-1], **difference.place})
        before.append((one, other))
