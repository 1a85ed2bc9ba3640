"""What goes into the catalog and what comes out: frozen structs."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from spool.model.events import Event, Single

State = Literal["open", "final", "discarded"]
PackState = Literal["open", "sealed", "spilled", "evicted", "gone"]


class LogItem(Struct, frozen=True, gc=False):
    """One frame of a pack's log.

    Attributes:
        seq: ordinal of the frame in its log, from 0; the row of the sealed records.
        offset: where the frame begins in the log; -1 where it was read from sealed records.
        event: what it holds.
    """

    seq: int
    offset: int
    event: Event


class LogState(Struct, frozen=True, gc=False):
    """How far the log of a pack is known.

    Attributes:
        offset: end of the last known frame in ``<n>.log``; 0 where nothing was read from it; -1 once the pack is
            read from its sealed records.
        n_events: frames known.
        sealed: the pack is sealed and known whole.
    """

    offset: int = 0
    n_events: int = 0
    sealed: bool = False


class Place(Struct, frozen=True, kw_only=True, gc=False):
    """Where an event is recorded.

    Attributes:
        stream: the stream's name.
        pack: number of the pack.
        seq: ordinal of the frame in the pack's log.
        offset: where the frame begins in the log; -1 where only the sealed records were seen.
        inner: ordinal inside the frame's transaction; 0 where it is none.
    """

    stream: str
    pack: int
    seq: int
    offset: int
    inner: int = 0


class Located(Place, frozen=True, kw_only=True):
    """An event (its ``messages`` left out) and its place."""

    event: Single


class Release(Struct, frozen=True, gc=False):
    """A segment was released.

    Attributes:
        segment: its `SegmentRef.key`.
        tag: the checkpoint that must be taken before its data may go; None for at once.
        at: the first release under that tag, seconds since the epoch.
        due: no tag, or the tag is checkpointed: the data may go.
    """

    segment: str
    tag: str | None
    at: float
    due: bool


class SessionRow(Struct, frozen=True, kw_only=True, gc=False):
    """A session as the index knows it.

    Attributes:
        session_id, group_id, sample_index, rollout_step, source, prompt_id, split, attempt: its identity.
        prefer, trim, idle_s, metadata: as it was opened.
        state: ``open``, ``final`` or ``discarded``.
        outcome: how it ended; None before.
        view: the one it was finalised with.
        finish_reason: of its last step.
        opened_at, last_at, finished_at: seconds since the epoch; ``last_at`` is the last event of its owner.
        n_steps: steps that were not withdrawn.
        n_tokens: tokens they add to their parents' chains.
        n_generated: response tokens.
        n_segments: segments of ``view``.
        n_nonfinite: NaN and infinite logprobs.
        facts: late facts of the session, ``reward`` among them.
    """

    session_id: str
    group_id: str | None
    sample_index: int | None
    rollout_step: int | None
    source: str | None
    prompt_id: str | None
    split: str | None
    attempt: int
    prefer: str
    trim: int
    idle_s: float | None
    metadata: dict[str, Any]
    state: State
    outcome: str | None
    view: str | None
    finish_reason: str | None
    opened_at: float
    last_at: float
    finished_at: float | None
    n_steps: int
    n_tokens: int
    n_generated: int
    n_segments: int
    n_nonfinite: int
    facts: dict[str, Any] = {}

    @property
    def reward(self) -> float | None:
        """The late fact ``reward``, where it is a number."""
        return as_reward(self.facts.get("reward"))


Tier = Literal["hot", "cold", "both", "mixed", "gone"]


class SessionLook(SessionRow, frozen=True, kw_only=True, gc=False):
    """A session with what is known of its steps, segments and packs at this moment.

    Attributes:
        number: order of arrival in this index; never used again.
        n_branches: leaves of its tree of steps.
        stored_bytes: what the rows that its steps add take in the hot tier; rows that a new chain shares count again.
        first_version, last_version: oldest and newest weight version; numbers where they are decimal.
        n_released: segments of ``view`` that are released, under whatever tag.
        tier: which tiers hold the packs that have its rows: all are in the ``hot`` one, in the ``cold`` one, or in
            ``both``, or it differs (``mixed``), or all are deleted (``gone``); None where it has none.
    """

    number: int
    n_branches: int
    stored_bytes: int
    first_version: int | float | str | None
    last_version: int | float | str | None
    n_released: int
    tier: Tier | None


class GroupLook(Struct, frozen=True, kw_only=True, gc=False):
    """The sessions of one group, withdrawn ones counted apart and left out of the rest.

    Attributes:
        group_id: the group; None for sessions without one.
        n_sessions, n_final, n_discarded: how many there are, are finalised, were withdrawn.
        n_rewards: sessions with a number as reward; the following are over these, None where there is none.
        reward_min, reward_mean, reward_max, reward_std: their spread, the deviation that of the whole group.
        n_steps, n_tokens: sums.
        opened_at, last_at: first opening and last event, seconds since the epoch.
    """

    group_id: str | None
    n_sessions: int
    n_final: int
    n_discarded: int
    n_rewards: int
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None
    reward_std: float | None
    n_steps: int
    n_tokens: int
    opened_at: float
    last_at: float


class PackRow(Struct, frozen=True, kw_only=True, gc=False):
    """A pack as the index knows it.

    Attributes:
        stream: the stream's name.
        pack: number of the pack.
        state: which tiers hold it; ``spilled`` is in both, ``evicted`` in the cold one only.
        hot_bytes: what it takes in the hot tier, or took there; None where that is not known.
        stored_bytes: what it takes in the cold tier; None where that is not known.
        opened_at: time of its first event that has one.
        sealed_at: when it was sealed; seconds since the epoch, like all times.
        gone_at, reason: when and why it was deleted.
        n_events: events of it that are known.
        known: all of them are known.
    """

    stream: str
    pack: int
    state: PackState
    hot_bytes: int | None = None
    stored_bytes: int | None = None
    opened_at: float | None = None
    sealed_at: float | None = None
    gone_at: float | None = None
    reason: str | None = None
    n_events: int = 0
    known: bool = False


class PackUse(Struct, frozen=True):
    """A pack that is not gone, and the sessions that it matters to.

    Attributes:
        row: the pack.
        data: ids of sessions that have rows in it, or events other than late facts.
        facts: ids of further sessions that it holds late facts, releases or a withdrawal of.
        tags: checkpoints that it says were taken.
    """

    row: PackRow
    data: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


class SessionEnd(Struct, frozen=True):
    """How far a session is from being over.

    Attributes:
        state: as `SessionRow.state`; ``unknown`` where no opening of it is known.
        outcome: how it ended; None before.
        ended_at: when it was finalised, seconds since the epoch.
        n_held: segments it was finalised with that are not released, or under a tag that is not checkpointed.
        tags: tags under which segments of it are released.
        last_at: its owner's last event, seconds since the epoch.
        contested: owners recorded it that did not know of each other: what one released the other may need.
    """

    state: Literal["open", "final", "discarded", "unknown"]
    outcome: str | None = None
    ended_at: float | None = None
    n_held: int = 0
    tags: tuple[str, ...] = ()
    last_at: float | None = None
    contested: bool = False


class Totals(Struct, frozen=True, kw_only=True):
    """Counts over the whole spool; sessions, steps and segments without the discarded ones."""

    n_streams: int
    n_packs: int
    n_sealed: int
    n_sessions: int
    n_open: int
    n_final: int
    n_discarded: int
    n_steps: int
    n_tokens: int
    n_generated: int
    n_segments: int


def as_reward(value: object) -> float | None:
    """Return the fact as a reward, or None where it is not a number."""
    return float(value) if isinstance(value, int | float) else None
