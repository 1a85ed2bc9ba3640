"""What may be deleted, and what leaves the hot tier: against a slow, independent reading of the rules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spool import retention
from spool.catalog import PackRow, PackUse, SessionEnd
from spool.retention import Policy, decide, eviction_plan, over

DAY = 86_400.0
RELEASED = Policy(released=True)
OVER = SessionEnd("final", "completed", 10.0, 0)
HELD = SessionEnd("final", "completed", 10.0, 2)
OPEN = SessionEnd("open")


def use(
    pack, data="", facts="", *, tags=(), state="sealed", sealed_at=0.0, known=True, stream="s", hot=10, stored=None
):
    row = PackRow(
        stream=stream, pack=pack, state=state, sealed_at=sealed_at, known=known, hot_bytes=hot, stored_bytes=stored
    )
    return PackUse(row, tuple(data), tuple(facts), tuple(tags))


def going(plan):
    return [(decision.stream, decision.pack) for decision in plan if decision.go]


def one(plan, pack, stream="s"):
    return next(decision for decision in plan if (decision.stream, decision.pack) == (stream, pack))


# -- rule by rule ----------------------------------------------------------------------------------------------------


def test_when_a_session_is_over():
    sessions = {
        "released": OVER,
        "held": HELD,
        "open": OPEN,
        "discarded": SessionEnd("discarded", None, None, 3),
        "unknown": SessionEnd("unknown"),
        "contested": SessionEnd("final", "failed", 100.0, 0, contested=True),
        "contested, discarded": SessionEnd("discarded", contested=True),
        "failed": SessionEnd("final", "failed", 100.0, 1),
        "failed, released": SessionEnd("final", "failed", 100.0, 0),
        "timeout": SessionEnd("final", "timeout", 100.0, 1),
    }
    early = {"released", "discarded", "contested, discarded", "failed, released"}
    assert over(sessions, now=3699.0) == early
    assert over(sessions, now=3700.0) == {*early, "failed"}
    assert "failed" in over(sessions, now=101.0, failed_keep_s=1.0)


def test_a_pack_goes_when_all_its_sessions_are_over():
    uses = [use(0, "ab"), use(1, "bc"), use(2, "c", state="open"), use(3, "a", known=False), use(4, "a", "c")]
    plan = decide(uses, {"a": OVER, "b": OVER, "c": HELD}, RELEASED, now=DAY)
    assert going(plan) == [("s", 0)]
    assert (one(plan, 1).sessions, one(plan, 4).sessions) == (("c",), ("c",))
    assert "1 of its sessions are not over" in one(plan, 1).why
    assert (one(plan, 2).why, one(plan, 3).why) == ("it is open", "its events are not known")
    assert one(plan, 0).ends == ("a", "b")  # a keeps 3 and 4, b keeps 1


def test_a_session_that_goes_whole_needs_no_withdrawal():
    plan = decide([use(0, "a"), use(1, "ab")], {"a": OVER, "b": OVER}, RELEASED, now=DAY)
    assert going(plan) == [("s", 0), ("s", 1)]
    assert [decision.ends for decision in plan] == [(), ()]


def test_a_withdrawal_is_asked_for_once():
    uses = [use(0, "a"), use(1, "a"), use(2, "ab")]
    plan = decide(uses, {"a": OVER, "b": OPEN}, RELEASED, now=DAY)
    assert [(decision.pack, decision.go, decision.ends) for decision in plan] == [
        (0, True, ("a",)),
        (1, True, ()),
        (2, False, ()),
    ]


def test_facts_outlive_the_data_that_they_are_about():
    uses = [use(0, facts="ab", stream="f"), use(0, "a"), use(1, "b", sealed_at=5.0)]
    plan = decide(uses, {"a": OVER, "b": HELD}, RELEASED, now=2 * DAY)
    assert going(plan) == [("s", 0)]
    assert one(plan, 0, "f").sessions == ("b",)
    plan = decide(uses, {"a": OVER, "b": OVER}, RELEASED, now=2 * DAY)
    assert going(plan) == [("s", 0), ("s", 1), ("f", 0)]


def test_facts_about_what_never_arrived_are_kept_for_a_day():
    uses = [use(0, facts="a", sealed_at=0.0)]
    assert going(decide(uses, {"a": SessionEnd("unknown")}, RELEASED, now=DAY - 1)) == []
    assert going(decide(uses, {"a": SessionEnd("unknown")}, RELEASED, now=DAY)) == [("s", 0)]


def test_a_session_of_no_known_opening_holds_for_a_day():
    uses = [use(0, "a", sealed_at=0.0)]
    assert going(decide(uses, {"a": SessionEnd("unknown")}, RELEASED, now=DAY - 1)) == []
    assert going(decide(uses, {}, RELEASED, now=DAY)) == [("s", 0)]


def test_a_checkpoint_is_needed_while_what_it_released_has_data():
    tagged = SessionEnd("final", "completed", 1.0, 0, ("t",))
    uses = [use(0, tags=("t",), stream="f"), use(0, "a"), use(1, "ab")]
    plan = decide(uses, {"a": tagged, "b": OPEN}, RELEASED, now=2 * DAY)
    assert (going(plan), one(plan, 0, "f").sessions) == ([("s", 0)], ("a",))
    assert going(decide(uses, {"a": tagged, "b": OVER}, RELEASED, now=2 * DAY))[-1] == ("f", 0)
    # beside data: what is over because of it is withdrawn, what is not yet over holds it
    uses = [use(0, "c", tags=("t",)), use(1, "ab")]
    assert one(decide(uses, {"a": tagged, "b": OPEN, "c": OVER}, RELEASED, now=DAY), 0).ends == ("a",)
    waiting = replace(tagged, n_held=1)
    assert one(decide(uses, {"a": waiting, "b": OPEN, "c": OVER}, RELEASED, now=DAY), 0).sessions == ("a",)


def test_age_takes_everything_sealed():
    uses = [use(0, "a", sealed_at=0.0), use(1, "a", sealed_at=60.0), use(2, "a", state="open"), use(3, sealed_at=None)]
    plan = decide(uses, {"a": OPEN}, Policy(age_s=100.0, unknown_keep_s=0.0), now=100.0)
    assert going(plan) == [("s", 0)]
    assert (one(plan, 0).why, one(plan, 1).why) == ("sealed 100 s ago", "not old enough")
    assert one(plan, 0).ends == ()  # an open session is not ended by the loss of a part
    assert one(decide(uses, {"a": HELD}, Policy(age_s=100.0), now=100.0), 0).ends == ("a",)


def test_keep_keeps_everything():
    plan = decide([use(0, "a"), use(1, facts="a")], {"a": OVER}, Policy(), now=100 * DAY)
    assert going(plan) == []
    assert {decision.why for decision in plan} == {"the policy keeps everything"}


def test_bytes_are_those_that_are_there():
    uses = [use(n, "a", state=state, hot=10, stored=7) for n, state in enumerate(("spilled", "evicted"))]
    uses += [use(2, "a", hot=10), use(3, "a", hot=None)]
    assert [decision.n_bytes for decision in decide(uses, {"a": OVER}, RELEASED, now=DAY)] == [17, 7, 10, 0]


# -- all together ----------------------------------------------------------------------------------------------------

_NAMES = "abcd"
_SOME = st.sets(st.sampled_from(_NAMES), max_size=3)
_ENDS = st.builds(
    SessionEnd,
    st.sampled_from(["open", "final", "discarded", "unknown"]),
    st.sampled_from(["completed", "failed"]),
    st.sampled_from([0.0, 90.0]),
    st.integers(0, 1),
    st.sampled_from([(), ("t",), ("t", "w")]),
)
_USES = st.lists(
    st.builds(
        lambda data, facts, tags, state, sealed_at, known: (
            sorted(data),
            sorted(facts - data),
            tags,
            state,
            sealed_at,
            known,
        ),
        _SOME,
        _SOME,
        st.sampled_from([(), ("t",), ("w",)]),
        st.sampled_from(["open", "sealed", "spilled", "evicted"]),
        st.sampled_from([None, 0.0, 40.0, 80.0]),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=6,
)
_POLICIES = st.builds(
    lambda released, age: Policy(released=released, age_s=age, failed_keep_s=50.0, unknown_keep_s=30.0),
    st.booleans(),
    st.sampled_from([None, 50.0, 95.0]),
)


def _oracle(uses, sessions, policy, now):
    """Return the packs that go, by one pass over the sentences of the rules for each pack."""

    def is_over(name):
        end = sessions.get(name, SessionEnd("unknown"))
        if end.state == "final" and end.outcome == "failed" and now - end.ended_at >= policy.failed_keep_s:
            return True
        return end.state == "discarded" or (end.state == "final" and not end.n_held)

    def age(item):
        return 0.0 if item.row.sealed_at is None else now - item.row.sealed_at

    def waits_for(item):
        return {n for n, end in sessions.items() if set(end.tags) & set(item.tags) and any(n in u.data for u in uses)}

    def allowed(item, names):
        if item.row.state == "open" or not item.row.known:
            return False
        by_age = policy.age_s is not None and age(item) >= policy.age_s
        return by_age or (policy.released and not names)

    gone = set()
    for item in uses:
        if item.data:
            late = age(item) >= policy.unknown_keep_s
            names = {*item.data, *item.facts, *waits_for(item)}
            unknown = {n for n in names if sessions.get(n, SessionEnd("unknown")).state == "unknown"}
            if allowed(item, {n for n in names if not is_over(n)} - (unknown if late else set())):
                gone.add(item.row.pack)
    kept = {name for item in uses if item.data and item.row.pack not in gone for name in item.data}
    for item in uses:
        about = {*item.facts, *waits_for(item)}
        if not item.data and not about & kept and age(item) >= policy.unknown_keep_s and allowed(item, set()):
            gone.add(item.row.pack)
    return gone, kept


@settings(max_examples=500)
@given(rows=_USES, sessions=st.dictionaries(st.sampled_from(_NAMES), _ENDS), policy=_POLICIES)
def test_decisions_are_those_of_the_rules(rows, sessions, policy):
    now = 100.0
    uses = [
        use(n, data, facts, tags=tags, state=state, sealed_at=at, known=known)
        for n, (data, facts, tags, state, at, known) in enumerate(rows)
    ]
    plan = decide(uses, sessions, policy, now=now)
    expected, kept = _oracle(uses, sessions, policy, now)
    assert {pack for _, pack in going(plan)} == expected
    assert sorted(decision.pack for decision in plan) == list(range(len(uses)))
    order = [(not uses[d.pack].data, uses[d.pack].row.sealed_at or 0.0, d.pack) for d in plan]
    assert order == sorted(order)
    ends = [name for decision in plan for name in decision.ends]
    assert len(ends) == len(set(ends))
    assert set(ends) <= kept
    for decision in plan:
        item = uses[decision.pack]
        assert decision.why
        assert decision.go or not decision.ends
        assert not (decision.go and decision.sessions)
        ended = {n for n in (*item.data, *item.facts) if sessions.get(n, OPEN).state in ("final", "discarded")}
        if decision.go and item.data:
            assert ended & kept <= set(ends)


@given(rows=_USES, sessions=st.dictionaries(st.sampled_from(_NAMES), _ENDS), policy=_POLICIES)
def test_carried_out_a_plan_leaves_nothing_to_do(rows, sessions, policy):
    uses = [
        use(n, data, facts, tags=tags, state=state, sealed_at=at, known=known)
        for n, (data, facts, tags, state, at, known) in enumerate(rows)
    ]
    plan = decide(uses, sessions, policy, now=100.0)
    withdrawn = {name: replace(sessions[name], state="discarded") for d in plan for name in d.ends}
    left = [item for item in uses if ("s", item.row.pack) not in going(plan)]
    again = decide(left, {**sessions, **withdrawn}, policy, now=100.0)
    # what only the withdrawn held may go now; all else was seen at once
    new = {pack for _, pack in going(again)}
    for pack in new:
        assert set(uses[pack].data + uses[pack].facts) & withdrawn.keys() or uses[pack].tags


# -- eviction --------------------------------------------------------------------------------------------------------


def test_nothing_is_evicted_up_to_the_high_mark():
    assert eviction_plan([use(0, "a", state="spilled")], {"a"}, used=80, high=80, low=60, limit=100) == []


def test_released_packs_leave_first_then_the_oldest():
    uses = [
        use(0, "a", state="spilled", sealed_at=1.0),
        use(1, "b", state="spilled", sealed_at=2.0),
        use(2, "b", state="spilled", sealed_at=1.5),
        use(3, "b", "a", state="spilled", sealed_at=0.0),
        use(4, "b", state="sealed"),
        use(5, "b", state="evicted"),
        use(6, "b", state="open"),
    ]
    plan = eviction_plan(uses, {"b"}, used=100, high=80, low=0, limit=100)
    assert [item.pack for item in plan] == [2, 1, 3, 0]
    assert plan[0].why == "released; 100 of 100 bytes are taken"
    assert plan[-1].why.startswith("the oldest that is still needed; 70 of 100")


@given(
    rows=st.lists(st.tuples(st.sampled_from(["spilled", "sealed", "evicted"]), st.integers(0, 30), _SOME), max_size=8),
    ended=_SOME,
    used=st.integers(0, 120),
)
def test_no_more_is_evicted_than_needed(rows, ended, used):
    uses = [use(n, sorted(data), state=state, hot=hot) for n, (state, hot, data) in enumerate(rows)]
    plan = eviction_plan(uses, ended, used=used, high=80, low=60, limit=100)
    spilled = {n: hot for n, (state, hot, _) in enumerate(rows) if state == "spilled"}
    assert {item.pack: item.n_bytes for item in plan}.items() <= spilled.items()
    freed = sum(item.n_bytes for item in plan)
    if used <= 80:
        assert plan == []
    else:
        assert used - freed <= 60 or len(plan) == len(spilled)
        assert not plan or used - (freed - plan[-1].n_bytes) > 60
    first = [set(rows[item.pack][2]) <= ended for item in plan]
    assert first == sorted(first, reverse=True)


def test_it_does_no_io():
    assert not {"os", "time", "apsw"} & set(vars(retention))
