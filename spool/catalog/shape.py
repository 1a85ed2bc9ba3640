"""The shape of a run, as counted: totals, shares, distributions, series."""

from __future__ import annotations

from msgspec import Struct


class Bin(Struct, frozen=True, gc=False):
    """How many values lie in ``[low, high)``; in the last bin of a distribution of fractions ``high`` is one too."""

    low: float
    high: float
    n: int


class Histogram(Struct, frozen=True, kw_only=True):
    """A distribution.

    Attributes:
        n: values.
        n_missing: of how many there is none.
        low, high, mean: of the values; None where there are none.
        total: their sum.
        bins: ascending, without those before the first value and behind the last.
    """

    n: int = 0
    n_missing: int = 0
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    total: float = 0.0
    bins: tuple[Bin, ...] = ()


class Share(Struct, frozen=True, kw_only=True):
    """What sessions of one outcome, source or finish reason come to.

    Attributes:
        name: it; None where there is none, or of the `rest`.
        n_sessions, n_tokens: of them.
        reward: mean of the rewards that are known.
        n_rewards: how many that are.
        n_names: how many names are counted here; more than 1 only of the last line, which is all the rest.
    """

    name: str | None
    n_sessions: int
    n_tokens: int
    n_rewards: int
    reward: float | None
    n_names: int = 1


class RolloutPoint(Struct, frozen=True, kw_only=True):
    """The sessions of rollout steps ``[first, last]``; rewards are of those that are known.

    Attributes:
        first, last: rollout steps; the same where there are few enough of them.
        n_sessions, n_tokens, n_rewards: counted.
        reward, reward_std, reward_low, reward_high: None where no reward is known.
    """

    first: int
    last: int
    n_sessions: int
    n_tokens: int
    n_rewards: int
    reward: float | None
    reward_std: float | None
    reward_low: float | None
    reward_high: float | None


class Period(Struct, frozen=True, kw_only=True):
    """What happened in a stretch of time.

    Attributes:
        at: its begin, seconds since the epoch.
        n_opened, n_finished: sessions.
        n_tokens: tokens of the sessions whose last event lies in it.
    """

    at: float
    n_opened: int = 0
    n_finished: int = 0
    n_tokens: int = 0


class Timeline(Struct, frozen=True):
    """Periods of ``period_s`` seconds; those in which nothing happened are left out."""

    period_s: float
    periods: tuple[Period, ...] = ()


class Staleness(Struct, frozen=True, kw_only=True):
    """How far the oldest weights of segments are behind.

    Attributes:
        behind: of segments, versions between their oldest one and ``against``, or the newest one there was when their
            session ended. Missing are those without a version.
        against: the version that was given; None for the newest at the time.
        newest: the newest version of the segments.
        n_versions: different ones among the oldest and the newest ones of each segment.
        ordered: all versions there are are numbers; else they count in the order in which they appeared.
    """

    behind: Histogram
    against: str | None = None
    newest: str | None = None
    n_versions: int = 0
    ordered: bool = True


class Counts(Struct, frozen=True, kw_only=True):
    """Counts of sessions, without the discarded ones but for ``n_discarded``, and of the segments they ended with.

    Attributes:
        n_equal_groups: groups of two and more rewards that are all the same: no advantage comes of them.
    """

    n_sessions: int = 0
    n_open: int = 0
    n_final: int = 0
    n_discarded: int = 0
    n_groups: int = 0
    n_equal_groups: int = 0
    n_steps: int = 0
    n_tokens: int = 0
    n_generated: int = 0
    n_nonfinite: int = 0
    n_segments: int = 0
    n_segment_tokens: int = 0
    n_trainable: int = 0
    n_cut: int = 0
    opened_at: float | None = None
    last_at: float | None = None


class Summary(Struct, frozen=True, kw_only=True):
    """The shape of a run.

    Attributes:
        where: the filter of sessions; None for all.
        totals: counts.
        outcomes, sources, finish_reasons: shares, largest first; of sessions that live the outcome is None.
        tokens, steps: distribution over sessions.
        rewards: over sessions; missing are those without one.
        segment_tokens: over segments.
        staleness: over segments.
        rollout: by rollout step.
        timeline: by time.
    """

    where: str | None
    totals: Counts
    outcomes: tuple[Share, ...]
    sources: tuple[Share, ...]
    finish_reasons: tuple[Share, ...]
    tokens: Histogram
    steps: Histogram
    rewards: Histogram
    segment_tokens: Histogram
    staleness: Staleness
    rollout: tuple[RolloutPoint, ...]
    timeline: Timeline
