"""Which packs may go, and which leave the hot tier first. Pure: rows of the catalog in, decisions out.

A session is *over* when it was discarded; when it is final and every segment it was finalised with is released, under
no tag or a checkpointed one (one without segments at once); and, so that it never pins a pack, when it failed and
`Policy.failed_keep_s` passed since. An open session is never over: one that is idle beyond its limit and whose writer
is dead is first finalised as ``timeout``, by who expires sessions, and then counts like any other. A session of which
no opening is known holds its packs for `Policy.unknown_keep_s`: its first pack may not have arrived.

A pack of data goes when every session that it matters to is over. It may take the only word of an ending or release
with it while other packs of the session stay; such sessions are in `Decision.ends`, and a withdrawal of them is to be
recorded before the pack goes, or a rebuilt catalog would take them for open again. A pack of late facts alone outlives
the data that the facts are about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from spool.catalog.rows import PackUse, SessionEnd


class Policy(Struct, frozen=True, kw_only=True):
    """What may be deleted; with neither rule everything is kept.

    Attributes:
        released: packs whose sessions are over.
        age_s: packs that were sealed so long ago, whatever their sessions, but for open ones with a younger step.
        failed_keep_s: how long a session that failed counts as not released.
        unknown_keep_s: how long a pack is kept for sessions of which no opening is known.
    """

    released: bool = False
    age_s: float | None = None
    failed_keep_s: float = 3600.0
    unknown_keep_s: float = 86_400.0


class Decision(Struct, frozen=True, kw_only=True):
    """What happens to a pack.

    Attributes:
        stream: the stream's name; ``units`` for all multimodal units that go.
        pack: number of the pack; of units, how many they are.
        n_bytes: what it takes, in both tiers.
        go: it is to be deleted.
        why: in words.
        sessions: ids of those that hold it; empty where it goes.
        ends: ids of sessions that are over and keep other packs: their withdrawal is recorded before this one goes.
    """

    stream: str
    pack: int
    n_bytes: int
    go: bool
    why: str
    sessions: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


class Eviction(Struct, frozen=True):
    """A pack that leaves the hot tier; it is safe in the cold one.

    Attributes:
        stream: the stream's name.
        pack: number of the pack.
        n_bytes: what it takes in the hot tier.
        why: in words.
    """

    stream: str
    pack: int
    n_bytes: int
    why: str


def over(sessions: Mapping[str, SessionEnd], *, now: float, failed_keep_s: float = 3600.0) -> set[str]:
    """Return the sessions of which nothing is needed any more.

    Args:
        sessions: how far each is, by id.
        now: seconds since the epoch.
        failed_keep_s: how long after its end a failed session counts as not released.
    """
    return {session_id for session_id, end in sessions.items() if _is_over(end, now, failed_keep_s)}


def _is_over(end: SessionEnd, now: float, failed_keep_s: float) -> bool:
    if end.state == "discarded" or end.contested:
        return end.state == "discarded"
    failed = end.outcome == "failed" and end.ended_at is not None and now - end.ended_at >= failed_keep_s
    return end.state == "final" and (end.n_held == 0 or failed)


def decide(
    uses: Sequence[PackUse],
    sessions: Mapping[str, SessionEnd],
    policy: Policy,
    *,
    now: float,
    mine: Callable[[str], bool] = lambda _: True,
    has_cold: bool = True,
    disputed: Collection[tuple[str, int]] = (),
) -> list[Decision]:
    """Decide for every pack; to be carried out in the order returned: data first, then late facts, the oldest first.

    Args:
        uses: all packs that are not gone, open ones too.
        sessions: how far each session is, by id.
        policy: what may be deleted.
        now: seconds since the epoch.
        mine: whether a stream's packs are the caller's to delete; the others are taken to stay, so that a session that
            has some there is withdrawn before its ending is deleted here.
        has_cold: whether the cold root is known. Where it is not, a pack that is in it cannot be deleted there.
        disputed: packs that the cold root has with other records; they stay.
    """
    plan = _Plan(uses, sessions, policy, now, mine, has_cold, disputed)
    data = sorted((use for use in uses if use.data), key=_age_order)
    facts = sorted((use for use in uses if not use.data), key=_age_order)
    held = [(use, *plan.data(use)) for use in data]
    for use, why, _ in held:
        if why is None:
            plan.left.subtract(use.data)
    decided = [plan.decision(use, why, holders) for use, why, holders in held]
    return decided + [plan.decision(use, *plan.facts(use)) for use in facts]


def _age_order(use: PackUse) -> tuple[float, str, int]:
    return use.row.sealed_at or 0.0, use.row.stream, use.row.pack


class _Plan:
    """What is the same for all packs of one plan.

    Attributes:
        left: packs of data that each session has, less those that go.
    """

    def __init__(
        self,
        uses: Sequence[PackUse],
        sessions: Mapping[str, SessionEnd],
        policy: Policy,
        now: float,
        mine: Callable[[str], bool],
        has_cold: bool,
        disputed: Collection[tuple[str, int]],
    ) -> None:
        self._sessions, self._policy, self._now, self._mine = sessions, policy, now, mine
        self._has_cold, self._disputed = has_cold, disputed
        self._over = over(sessions, now=now, failed_keep_s=policy.failed_keep_s)
        self._ended: set[str] = set()
        self.left = Counter(session_id for use in uses for session_id in use.data)
        self._tagged: dict[str, list[str]] = {}
        for session_id, end in sessions.items():
            for tag in end.tags:
                self._tagged.setdefault(tag, []).append(session_id)

    def data(self, use: PackUse) -> tuple[str | None, list[str]]:
        """Return why a pack of data stays, None where it goes, and the sessions that hold it."""
        if why := self._fixed(use):
            return why, []
        age_s = self._age_s(use)
        if self._is_aged(age_s):
            young = [name for name in use.data if self._is_going_on(name)]
            return (f"{len(young)} of its sessions are open and go on" if young else None), young
        unknown_over = age_s >= self._policy.unknown_keep_s
        holders = [name for name in self._matters_to(use) if not self._lets_go(name, unknown_over)]
        if not self._policy.released:
            return "not old enough", []
        return (f"{len(holders)} of its sessions are not over" if holders else None), holders

    def facts(self, use: PackUse) -> tuple[str | None, list[str]]:
        """Return the same of a pack of late facts, after it is known which data goes."""
        if why := self._fixed(use):
            return why, []
        age_s = self._age_s(use)
        holders = [name for name in self._matters_to(use) if self.left[name] > 0]
        if holders:
            return f"it holds facts of {len(holders)} sessions that have data", holders
        if age_s < self._policy.unknown_keep_s:
            kept = f"{self._policy.unknown_keep_s / 3600:g} hours"
            return f"facts are kept for {kept}: data that they are about may still arrive", []
        return (None if self._policy.released or self._is_aged(age_s) else "not old enough"), []

    def decision(self, use: PackUse, why: str | None, holders: Sequence[str]) -> Decision:
        """Return the decision; to be called in order, once it is known which data goes."""
        row = use.row
        n_bytes = (row.hot_bytes or 0 if row.state != "evicted" else 0) + (row.stored_bytes or 0)
        if why is not None:
            return Decision(
                stream=row.stream, pack=row.pack, n_bytes=n_bytes, go=False, why=why, sessions=tuple(holders)
            )
        ends = [name for name in self._matters_to(use) if self.left[name] > 0 and self._has_ended(name)]
        ends = [name for name in ends if name not in self._ended]
        self._ended.update(ends)
        return Decision(
            stream=row.stream, pack=row.pack, n_bytes=n_bytes, go=True, why=self._reason(use), ends=tuple(ends)
        )

    def _fixed(self, use: PackUse) -> str | None:
        if not self._policy.released and self._policy.age_s is None:
            return "the policy keeps everything"
        if not self._mine(use.row.stream):
            return "it is another node's to delete"
        if use.row.state == "open":
            return "it is open"
        if use.row.state in ("spilled", "evicted") and not self._has_cold:
            return "it is in a cold root that is not known here: open the spool once with ?spill=URL"
        if (use.row.stream, use.row.pack) in self._disputed:
            return "the cold root has other records of this name: two copies of one hot root are in use"
        return None if use.row.known else "its events are not known"

    def _reason(self, use: PackUse) -> str:
        if self._is_aged(self._age_s(use)):
            return f"sealed {self._age_s(use):.0f} s ago"
        return "all its sessions are over" if use.data else "nothing is left that its facts are about"

    def _age_s(self, use: PackUse) -> float:
        return self._now - use.row.sealed_at if use.row.sealed_at is not None else 0.0

    def _is_going_on(self, session_id: str) -> bool:
        end, age_s = self._sessions.get(session_id), self._policy.age_s or 0.0
        return end is not None and end.state == "open" and end.last_at is not None and self._now - end.last_at < age_s

    def _is_aged(self, age_s: float) -> bool:
        return self._policy.age_s is not None and age_s >= self._policy.age_s

    def _matters_to(self, use: PackUse) -> Iterable[str]:
        """Return the sessions that a pack matters to, those that wait for a checkpoint it says was taken included."""
        tagged = [name for tag in use.tags for name in self._tagged.get(tag, ()) if self.left[name] > 0]
        return dict.fromkeys([*use.data, *use.facts, *tagged])

    def _lets_go(self, session_id: str, unknown_over: bool) -> bool:
        return session_id in self._over or (unknown_over and self._state(session_id) == "unknown")

    def _has_ended(self, session_id: str) -> bool:
        return session_id in self._over or self._state(session_id) == "final"

    def _state(self, session_id: str) -> str:
        end = self._sessions.get(session_id)
        return end.state if end is not None else "unknown"


def eviction_plan(
    uses: Sequence[PackUse], ended: Collection[str], *, used: int, high: int, low: int, limit: int
) -> list[Eviction]:
    """Choose packs that leave the hot tier: spilled ones, released first, then the oldest, until ``low`` is reached.

    Args:
        uses: all packs.
        ended: ids of the sessions that are over; see `over`.
        used: bytes that the hot tier takes.
        high: nothing is done up to so many.
        low: so many are to be left.
        limit: what the hot tier may take; for the words only.
    """
    plan: list[Eviction] = []
    if used <= high:
        return plan
    over_ids = frozenset(ended)
    spilled = [(not over_ids.issuperset((*use.data, *use.facts)), use) for use in uses if use.row.state == "spilled"]
    left = used
    for needed, use in sorted(spilled, key=lambda item: (item[0], _age_order(item[1]))):
        if left <= low:
            break
        n_bytes = use.row.hot_bytes or 0
        kind = "the oldest that is still needed" if needed else "released"
        plan.append(Eviction(use.row.stream, use.row.pack, n_bytes, f"{kind}; {left} of {limit} bytes are taken"))
        left -= n_bytes
    return plan


class StoredUnit(Struct, frozen=True):
    """A multimodal unit in a root.

    Attributes:
        key: the unit's.
        size: bytes of its file or object.
        used_at: when it was last put or named, as far as that root knows; seconds since the epoch.
    """

    key: str
    size: int
    used_at: float


def held_units(named: Mapping[str, Collection[str]], ended: Collection[str], policy: Policy) -> set[str]:
    """Return the units that are needed whatever their age.

    A session that is over needs none, unless what is over is kept all the same: then every record of it does.

    Args:
        named: ids of the sessions that name each unit.
        ended: ids of the sessions that are over; see `over`.
        policy: what may be deleted.
    """
    gone = frozenset(ended) if policy.released else frozenset()
    return {key for key, sessions in named.items() if not gone.issuperset(sessions)}


def aged_units(units: Iterable[StoredUnit], held: Collection[str], *, age_s: float, now: float) -> list[StoredUnit]:
    """Return the units that may go: nothing needs them, and they were put and named longer ago than ``age_s``."""
    return [unit for unit in units if unit.key not in held and now - unit.used_at >= age_s]


def unit_evictions(units: Iterable[StoredUnit], kept: Collection[str], *, used: int, low: int) -> list[StoredUnit]:
    """Choose units that leave the hot tier once they are safe in the cold one: the oldest, until ``low`` is reached.

    Args:
        units: those in the hot tier.
        kept: keys of those that stay: packs name them that are not in the cold tier yet.
        used: bytes that the hot tier takes.
        low: so many are to be left.
    """
    plan: list[StoredUnit] = []
    for unit in sorted(units, key=lambda unit: (unit.used_at, unit.key)):
        if used <= low:
            break
        if unit.key not in kept:
            plan.append(unit)
            used -= unit.size
    return plan
