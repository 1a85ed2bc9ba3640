"""What an export asks of the spool that it is made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from spool.catalog import Located, Place, SessionRow
from spool.model.events import Annotated, Attached, Single
from spool.model.fields import Schema
from spool.model.refs import Ref, SegmentRef, StepRef

if TYPE_CHECKING:
    from spool.read.lookup import Selection
    from spool.read.sample import Sample

DtypeChoice = Literal["train", "stored"]


class Source(NamedTuple):
    """A spool, as functions.

    Attributes:
        spool_id: its identity.
        read: returns the arrays of references; 0 stands for what was never sent.
        select: returns which rows of a field a reference has, and which were never sent.
        messages, tools: of a step, or of a segment's last step.
        session: a session's row.
        schema: the fields of a stream.
        events: a session's openings, steps, withdrawals and endings.
        late: its late facts and arrays.
        tools_at: where tool schemas are stored.
        whole: returns events with their messages.
        unit: returns the file of a multimodal unit; None where it is in no tier.
    """

    spool_id: str
    read: Callable[[Sequence[Ref], DtypeChoice, Sequence[slice] | None], list[Sample]]
    select: Callable[[Ref, str], Selection | None]
    messages: Callable[[StepRef | SegmentRef], list[Any]]
    tools: Callable[[StepRef | SegmentRef], list[Any]]
    session: Callable[[str], SessionRow | None]
    schema: Callable[[str], Schema]
    events: Callable[[str], list[Located]]
    late: Callable[[str], list[Annotated | Attached]]
    tools_at: Callable[[str], Place | None]
    whole: Callable[[Sequence[Place]], list[Single]]
    unit: Callable[[str], bytes | bytearray | None]
