"""The events of a commit log. Each is one frame; a stream's state is the fold of its events.

Times are seconds since the epoch. Events are arrays on disk (msgpack, the tag first), so a field may be added at
the end of a struct, with a default, and never removed or moved.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from spool.model.fields import FieldSpec
from spool.model.refs import Extent, SegmentRef, Unit, VersionSpan


class SessionOpened(Struct, frozen=True, array_like=True, tag="open", gc=False):
    """A session began in this stream, or was resumed into it (then ``resumed`` is true).

    ``prefer``, ``trim`` and ``fields`` are fixed for the session's life. ``after`` is the opening before this one:
    its stream and its ``at``.
    """

    session_id: str
    at: float
    group_id: str | None = None
    sample_index: int | None = None
    rollout_step: int | None = None
    source: str | None = None
    prompt_id: str | None = None
    split: str | None = None
    attempt: int = 0
    prefer: str = "first"
    trim: int = 0
    idle_s: float | None = None
    fields: tuple[FieldSpec, ...] = ()
    metadata: dict[str, Any] = {}
    resumed: bool = False
    after: tuple[str, float] | None = None


class StepCommitted(Struct, frozen=True, array_like=True, tag="step", gc=False):
    """A step is committed.

    Attributes:
        index: order in the session.
        parent: index of the step whose chain it extends, or None.
        base: tokens taken over from the parent's chain (its length, less what ``trim`` left out; 0 without parent).
        n_prompt: tokens of the prompt.
        n_tokens: tokens of prompt and response.
        n_rows: rows of the forward they expand to.
        extents: by stored array: what this step adds over its parent's chain, its own rows and those it shares.
        versions: of the generated tokens, in absolute token positions.
        block_hashes: running digests of the tokens at multiples of 256 in ``(base, n_tokens]``, 16 bytes each.
        prompt_hash: running digest at ``n_prompt``.
        end_hashes: running digests at ``n_tokens``, ``n_tokens - 1``, ... down to ``n_tokens - trim``.
        signature: digest of the content, to recognise the same append again.
        inherited_messages: how many of the parent's full list of messages this step's begins with.
        messages: the rest, a JSON array; empty where no messages were given.
        tools_key: content key of the tool schemas, see `ToolsStored`.
        metadata: the caller's own JSON-able facts about the step.
        cleared: which generated tokens the loss mask cleared, see `spool.formats.masks`; empty where none, or where the
            mask is not stored.
    """

    session_id: str
    index: int
    step_id: str
    at: float
    parent: int | None
    base: int
    n_prompt: int
    n_tokens: int
    n_rows: int
    extents: dict[str, tuple[Extent, ...]]
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: str | None = None
    units: tuple[Unit, ...] = ()
    n_nonfinite: int = 0
    block_hashes: bytes = b""
    prompt_hash: bytes = b""
    end_hashes: bytes = b""
    signature: bytes = b""
    inherited_messages: int = 0
    messages: bytes = b""
    tools_key: str | None = None
    metadata: dict[str, Any] = {}
    cleared: bytes = b""


class RowsHeld(Struct, frozen=True, array_like=True, tag="held", gc=False):
    """The pack has rows of a session that an event in a later pack will name: of a transaction, or a large append.

    Until that is there nothing else says that they are needed; whether it ever is makes no difference to the rows.
    """

    session_id: str
    at: float


class ToolsStored(Struct, frozen=True, array_like=True, tag="tools", gc=False):
    """Tool schemas, stored once a pack by content."""

    key: str
    json: bytes


class StepDiscarded(Struct, frozen=True, array_like=True, tag="undo", gc=False):
    """A leaf step was withdrawn."""

    session_id: str
    index: int
    at: float


class SessionFinalized(Struct, frozen=True, array_like=True, tag="final", gc=False):
    """A session ended; ``segments`` are those of the view it was finalised with."""

    session_id: str
    at: float
    outcome: str
    view: str
    segments: tuple[SegmentRef, ...] = ()
    options: dict[str, Any] = {}


class SessionDiscarded(Struct, frozen=True, array_like=True, tag="discard", gc=False):
    """A session was withdrawn, alive or finalised."""

    session_id: str
    at: float


class Annotated(Struct, frozen=True, array_like=True, tag="note", gc=False):
    """Late facts about a session (``segment`` None) or one of its segments (`SegmentRef.key`); the last wins."""

    session_id: str
    at: float
    facts: dict[str, Any]
    segment: str | None = None


class Attached(Struct, frozen=True, array_like=True, tag="attach", gc=False):
    """A late array for a segment or a step, by its ``key``."""

    session_id: str
    at: float
    target: str
    field: FieldSpec
    extents: dict[str, tuple[Extent, ...]]


class Released(Struct, frozen=True, array_like=True, tag="release", gc=False):
    """Segments of a session, by their ``key``, are consumed, under a checkpoint tag or for good."""

    session_id: str
    at: float
    segments: tuple[str, ...]
    tag: str | None = None


class Checkpointed(Struct, frozen=True, array_like=True, tag="ckpt", gc=False):
    """What was released under ``tag`` is not needed by any restart."""

    tag: str
    at: float


Single = (
    SessionOpened
    | StepCommitted
    | RowsHeld
    | ToolsStored
    | StepDiscarded
    | SessionFinalized
    | SessionDiscarded
    | Annotated
    | Attached
    | Released
    | Checkpointed
)


class Transaction(Struct, frozen=True, array_like=True, tag="all", gc=False):
    """Events that hold together or not at all."""

    events: tuple[Single, ...]


Event = Single | Transaction
"""Any event of a commit log."""

_E = TypeVar("_E", bound=Event)


def parts(event: Event) -> tuple[Single, ...]:
    """Return the events that one record of a log holds: those of a transaction, or the event itself."""
    return event.events if isinstance(event, Transaction) else (event,)


def without_text(event: _E) -> _E:
    """Return an event without messages and tool schemas; the same object where it has none."""
    if isinstance(event, StepCommitted):
        return replace(event, messages=b"") if event.messages else event
    if isinstance(event, ToolsStored):
        return replace(event, json=b"") if event.json else event
    if isinstance(event, Transaction):
        kept = tuple(map(without_text, event.events))
        same = all(a is b for a, b in zip(kept, event.events, strict=True))
        return event if same else replace(event, events=kept)
    return event
