"""A session's state against a model over plain lists: trees, sharing, rows sent again, transactions, replay."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_model import FIELDS, Pair, ids, plain, positions_of

from spool.errors import InputError, IntegrityError, NotFoundError, SessionStateError, StepConflictError
from spool.model.events import (
    Annotated,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    StepCommitted,
    StepDiscarded,
    Transaction,
)
from spool.model.fields import FieldSpec
from spool.model.refs import Extent, Unit
from spool.rollout import prefix
from spool.rollout.coverage import Range
from spool.rollout.state import SessionState

token = st.one_of(
    st.tuples(st.integers(1, 2), st.none()),
    st.tuples(st.just(9), st.one_of(st.none(), st.tuples(st.sampled_from("ab"), st.integers(1, 3)))),
)
few = st.lists(token, max_size=5)


@st.composite
def runs(draw, pair, transactions=(None, "A", "B")):
    """Drive ``pair`` by a random number of appends, discards and ends of transactions."""
    for _ in range(draw(st.integers(1, 9))):
        transaction = draw(st.sampled_from(transactions))
        seen = pair.model.seen(transaction)
        kind = draw(st.sampled_from(["append", "append", "append", "append", "discard", "settle", "rollback"]))
        if kind == "append":
            append(draw, pair, seen, transaction)
        elif kind == "discard":
            leaves = [s.index for s in seen if pair.model.leaf(s.index, transaction)]
            if leaves:
                pair.discard(draw(st.sampled_from(leaves)), transaction)
        elif transaction is not None:
            getattr(pair, kind)(transaction)
    return pair


def append(draw, pair, seen, transaction):
    prompt, extra, response = [], draw(few), draw(st.lists(st.tuples(st.integers(1, 2), st.none()), max_size=4))
    parent = None
    if seen and draw(st.integers(0, 5)):
        of = draw(st.sampled_from(seen))
        cut = draw(st.sampled_from(["whole", "trimmed", "prompt", "rewritten"]))
        keep = {
            "whole": len(of.tokens), "trimmed": max(len(of.tokens) - 1, 0), "prompt": of.n_prompt,
            "rewritten": draw(st.integers(0, len(of.tokens))),
        }[cut]  # fmt: skip
        prompt = of.tokens[:keep]
        if cut == "prompt":
            extra = []
        if cut == "whole" and of.tokens and draw(st.booleans()):
            parent = of.index
    prompt = [*prompt, *extra]
    sent = draw(
        st.one_of(st.none(), st.sets(st.integers(0, 40)), st.integers(0, 12).map(lambda start: range(start, 99)))
    )
    versions = [draw(st.sampled_from(["7", "8"]))] * len(response) if draw(st.booleans()) else None
    pair.append(
        prompt, response, given=sent, transaction=transaction, parent=parent, versions=versions,
        finish=draw(st.sampled_from([None, "stop"])),
    )  # fmt: skip


sessions = st.builds(
    Pair, prefer=st.sampled_from(["first", "last"]), trim=st.integers(0, 2), pack=st.sampled_from([3, 5, 1000])
)
soak = settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def small_blocks(monkeypatch):
    """Digests every 4 tokens, so that short sessions have many blocks."""
    monkeypatch.setattr(prefix, "BLOCK", 4)


@soak
@given(data=st.data())
def test_any_session_is_that_of_the_model(small_blocks, data):
    pair = data.draw(sessions)
    data.draw(runs(pair))
    for transaction in (None, "A", "B"):
        pair.check_steps(transaction=transaction)
    for transaction in ("A", "B"):
        pair.settle(transaction) if data.draw(st.booleans()) else pair.rollback(transaction)
    pair.check_steps()
    assert pair.state.next_index == pair.model.next_index
    assert sorted(pair.state.steps) == [s.index for s in pair.model.seen()]


@soak
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_state_is_rebuilt_from_its_log_in_any_order_and_goes_on_alike(small_blocks, data, seed):
    pair = data.draw(sessions)
    data.draw(runs(pair))
    pair.settle("A")
    pair.rollback("B")
    again = pair.replayed(seed)
    pair.check_steps(again)
    pair.state = again
    pair.model.next_index = again.next_index
    data.draw(runs(pair, transactions=(None,)))
    pair.check_steps()
    pair.check_steps(pair.replayed(seed))


# -------------------------------------------------------------------------------------------------- single rules


def counting(n, first=1000):
    return plain(*range(first, first + n))


def test_plan_changes_nothing_and_says_what_is_written():
    pair = Pair()
    pair.append(counting(5), plain(1, 2))
    before = pair.state.ref(0)
    for _ in range(2):
        plan = pair.state.plan(
            ids([*counting(5), *plain(1, 2, 3)]), ids(plain(4)),
            given={"routed_experts": [Range(0, 8)], "token_ids": [Range(0, 9)], "logprobs": [Range(8, 1)]},
        )  # fmt: skip
        assert (plan.index, plan.step_id, plan.parent, plan.base, plan.n_prompt) == (1, "#1", 0, 7, 8)
        assert plan.store == {"routed_experts": (Range(6, 2),), "token_ids": (Range(7, 2),), "logprobs": (Range(8, 1),)}
        assert (plan.shared, plan.donor, plan.n_shared) == ({}, 0, 7)
    assert pair.state.ref(0) == before
    assert pair.state.next_index == 1


def test_prefer_last_stores_all_and_shadows_for_its_descendants_only():
    pair = Pair(prefer="last")
    pair.append(counting(5), plain(1))
    pair.append([*counting(5), *plain(1, 2)], plain(3))
    pair.append([*counting(5), *plain(1, 4)], plain(5), given=[])
    rows = [pair.store.read(pair.state.ref(i).extents, FIELDS[1]) for i in range(3)]
    assert {v[1] for v in rows[0].values()} == {0}
    assert {v[1] for v in rows[1].values()} == {1}
    assert {p: v[1] for p, v in rows[2].items()} == dict.fromkeys(range(5), 0)


def test_rows_sent_again_fill_gaps_under_first():
    pair = Pair()
    pair.append(counting(5), plain(1), given=[0, 1, 4])
    plan = pair.state.plan(ids([*counting(5), *plain(1)]), ids(plain(2)), given={"routed_experts": [Range(0, 6)]})
    assert plan.store["routed_experts"] == (Range(2, 2), Range(5, 1))


def test_trimmed_chains_keep_the_row_of_their_last_token_unless_it_is_sent():
    pair = Pair(trim=1)
    pair.append(counting(5), plain(1, 2))
    step = pair.append([*counting(5), *plain(1, 3)], plain(4), given=range(6, 9))
    assert step.base == 6
    rows = pair.store.read(pair.state.ref(1).extents, FIELDS[1])
    assert {p: v[1] for p, v in rows.items()} == {**dict.fromkeys(range(6), 0), 6: 1}
    pair.append([*counting(5), *plain(1, 5)], plain(4), given=range(5, 9))
    rows = pair.store.read(pair.state.ref(2).extents, FIELDS[1])
    assert {p: v[1] for p, v in rows.items()} == {**dict.fromkeys(range(5), 0), 5: 2, 6: 2}


def test_a_new_chain_shares_whole_blocks_of_any_step():
    pair = Pair()
    old = counting(1100)
    pair.append(old[:700], old[700:])
    for shared in (255, 256, 600, 699, 700, 701, 1023, 1024, 1100):
        plan = pair.state.plan(
            ids([*old[:shared], *plain(1, 2)][: 1101 if shared == 1100 else None]), ids(plain(3)),
            given={"token_ids": [Range(0, shared + 2 + (shared < 1100))]},
        )  # fmt: skip
        expected = {1100: 1100}.get(shared, max(n for n in (0, 256, 512, 700, 768, 1024) if n <= shared))
        assert plan.n_shared == expected
        if shared < 1100:
            assert sum(e.n for e in plan.shared.get("token_ids", ())) == expected
            assert sum(e.n for e in plan.shared.get("routed_experts", ())) == expected


def test_the_same_placeholder_with_another_unit_is_another_prefix():
    pair = Pair()
    image = lambda key: [(9, None), (9, (key, 4)), (9, None)]  # noqa: E731
    pair.append(image("a"), plain(1))
    assert pair.append([*image("a"), *plain(1, 2)], plain(3)).parent == 0
    assert pair.append([*image("b"), *plain(1, 2)], plain(3)).parent is None
    assert pair.append([*plain(9, 9, 9), *plain(1, 2)], plain(3)).parent is None
    assert [pair.state.ref(i).n_rows for i in range(4)] == [7, 9, 9, 6]
    pair.check_steps()


def test_units_of_the_parent_may_be_named_again_by_an_event():
    pair = Pair()
    tokens = [(9, ("k", 3)), (1, None)]
    pair.append(tokens, plain(2))
    plan = pair.state.plan(
        ids([*tokens, *plain(2, 9)]), ids(plain(4)), given={}, units=[Unit("k", 0, 3), Unit("l", 3, 2)]
    )
    assert plan.units == (Unit("l", 3, 2),)
    event = pair.event_of(plan, [], None)
    pair.state.commit(msgspec.structs.replace(event, units=(Unit("k", 0, 3), Unit("l", 3, 2))))
    assert pair.state.ref(1).units == (Unit("k", 0, 3), Unit("l", 3, 2))


def test_equal_chains_the_untrimmed_wins_then_the_latest():
    pair = Pair(trim=1)
    pair.append(plain(1, 2), plain(3))
    pair.append(plain(1), plain(2, 3, 4))
    pair.append(plain(1), plain(2, 3))
    assert pair.append(plain(1, 2, 3, 9), plain(5)).parent == 2


def test_named_parents():
    pair = Pair()
    pair.append(counting(600), plain(1), step_id="a")
    pair.append([*counting(600), *plain(1, 2)], plain(3), step_id="b")
    plan = pair.state.plan(ids([*counting(600), *plain(1, 2, 3, 4)]), ids(plain(5)), given={}, parent="a")
    assert (plan.parent, plan.base) == (0, 601)
    with pytest.raises(NotFoundError, match="nobody"):
        pair.state.plan(ids(plain(1)), ids([]), given={}, parent="nobody")
    wrong = [*counting(300), *plain(5), *counting(400, 2000)]
    with pytest.raises(InputError, match="between tokens 256 and 512") as error:
        pair.state.plan(ids(wrong), ids([]), given={}, parent="b")
    assert (error.value.details["same_tokens"], error.value.details["differ_before"]) == (256, 512)
    with pytest.raises(InputError, match="between tokens 512 and 600"):
        pair.state.plan(ids([*counting(599), *counting(99)]), ids([]), given={}, parent=1)
    with pytest.raises(InputError, match="shorter"):
        pair.state.plan(ids(counting(590)), ids([]), given={}, parent=0)


def test_steps_without_tokens_extend_only_whom_they_name():
    pair = Pair()
    state = pair.state
    pair.append(plain(1, 2), plain(3))

    def message_only(index, parent):
        plan = state.plan(ids([]), ids([]), given={"score": [Range(0, 1)]}, parent=parent)
        assert (plan.index, plan.parent, plan.base, plan.n_tokens, plan.n_rows) == (index, parent, 0, 0, 0)
        state.commit(pair.event_of(plan, [], None))

    message_only(1, None)
    message_only(2, 0)
    message_only(3, 2)
    ref = state.ref(3)
    assert (ref.n_tokens, ref.spans, ref.parent) == (0, (), 2)
    assert set(ref.extents) == {"score"}
    plan = state.plan(ids(plain(1, 2, 3, 4)), ids(plain(5)), given={"token_ids": [Range(0, 5)]}, parent=3)
    assert (plan.parent, plan.base) == (3, 3)
    state.commit(pair.event_of(plan, [], None))
    assert pair.store.read(state.ref(4).extents, FIELDS[0]) == {
        **{p: ("token_ids", 0, p) for p in range(3)}, 3: ("token_ids", 4, 3), 4: ("token_ids", 4, 4),
    }  # fmt: skip
    plan = state.plan(ids(plain(7)), ids(plain(8)), given={}, parent=1)
    assert (plan.parent, plan.base) == (1, 0)


def test_what_does_not_fit_is_refused():
    pair = Pair()
    pair.append(plain(1, 2), plain(3), step_id="a")
    state = pair.state
    for refused in (
        {"given": {"nope": [Range(0, 1)]}},
        {"given": {"routed_experts": [Range(0, 3)]}},
        {"given": {"logprobs": [Range(0, 1)]}},
        {"given": {"score": [Range(0, 2)]}},
        {"given": {"token_ids": [Range(-1, 2)]}},
        {"given": {}, "units": [Unit("k", 3, 2)]},
        {"given": {}, "units": [Unit("k", 0, 0)]},
        {"given": {}, "units": [Unit("k", 0, 2), Unit("l", 0, 2)]},
    ):
        with pytest.raises(InputError):
            state.plan(ids(plain(5, 6)), ids(plain(7)), **refused)
    with pytest.raises(StepConflictError, match="'a'"):
        state.plan(ids(plain(5)), ids([]), given={}, step_id="a")
    assert state.find("a") == state.steps[0]
    assert state.find("b") is None


def test_discard_takes_leaves_only_and_frees_the_id():
    pair = Pair()
    pair.append(plain(1, 2), plain(3), step_id="a")
    pair.append(plain(1, 2, 3, 4), plain(5), step_id="b")
    with pytest.raises(SessionStateError, match=r"\[1\]") as error:
        pair.state.discard(StepDiscarded("s", 0, 1.0))
    assert error.value.details["kind"] == "inner_step"
    pair.discard(1)
    with pytest.raises(NotFoundError):
        pair.state.check_discard(1)
    step = pair.append(plain(1, 2, 3, 4), plain(6), step_id="b")
    assert (step.index, step.parent) == (2, 0)
    pair.check_steps()
    again = pair.replayed()
    pair.check_steps(again)
    assert again.next_index == 3


def test_an_ended_session_takes_no_more():
    pair = Pair()
    pair.append(plain(1), plain(2))
    final = SessionFinalized("s", 9.0, "truncated", "lineage")
    pair.state.finalize(final)
    pair.state.finalize(SessionFinalized("s", 10.0, "failed", "lineage"))
    assert pair.state.finalized == final
    with pytest.raises(SessionStateError, match="finalised as truncated") as error:
        pair.state.plan(ids(plain(1)), ids([]), given={})
    assert (error.value.details["kind"], error.value.details["outcome"]) == ("finalized", "truncated")
    with pytest.raises(SessionStateError):
        pair.state.check_discard(0)
    pair.state.abandon(SessionDiscarded("s", 11.0))
    with pytest.raises(SessionStateError, match="discarded"):
        pair.state.check_open()
    again = SessionState.from_events(
        "spool", [final, pair.opened, SessionDiscarded("s", 11.0), *pair.log, Annotated("s", 12.0, {"reward": 1.0})]
    )
    assert again.ended
    assert (again.finalized, again.discarded.at) == (final, 11.0)


def test_transactions_hide_roll_back_and_settle():
    pair = Pair()
    pair.append(plain(1), plain(2), step_id="a")
    pair.append(plain(1, 2, 3), plain(4), transaction="T", step_id="x")
    assert pair.append(plain(1, 2, 3, 4), plain(5)).parent == 0
    assert (pair.state.visible(), pair.state.visible("T")) == ([0, 2], [0, 1, 2])
    assert pair.state.find("x") is None
    assert pair.state.find("x", "T").index == 1
    with pytest.raises(StepConflictError):
        pair.state.plan(ids(plain(9)), ids([]), given={}, step_id="x")
    with pytest.raises(NotFoundError):
        pair.state.plan(ids(plain(1, 2, 3, 4, 5)), ids([]), given={}, parent=1)
    with pytest.raises(SessionStateError):
        pair.state.check_discard(0)
    assert pair.append(plain(1, 2, 3, 4, 6), plain(5), transaction="T").parent == 1
    pair.rollback("T")
    assert pair.state.visible("T") == [0, 2]
    assert pair.append(plain(1, 2, 3, 4), plain(7)).index == 4
    pair.append(plain(8), plain(9), transaction="U")
    pair.settle("U")
    assert pair.state.visible() == [0, 2, 4, 5]
    pair.check_steps(pair.replayed())


def test_a_discard_in_a_transaction_is_given_back_or_made_final():
    for end in ("rollback", "settle"):
        pair = Pair()
        pair.append(plain(1), plain(2), step_id="a")
        pair.append(plain(1, 2), plain(3), step_id="b")
        pair.discard(1, "T")
        pair.discard(0, "T")
        assert pair.state.visible() == []
        with pytest.raises(StepConflictError):
            pair.state.plan(ids(plain(1)), ids([]), given={}, step_id="a")
        assert pair.append(plain(1, 2, 3), plain(4), transaction="T", step_id="a").parent is None
        getattr(pair, end)("T")
        pair.check_steps()
        assert pair.state.visible() == ([0, 1] if end == "rollback" else [2])
        assert pair.state.find("a").index == (0 if end == "rollback" else 2)
        assert pair.append(plain(1, 2, 3, 5), plain(4)).parent == (1 if end == "rollback" else None)
        pair.check_steps(pair.replayed())


def committed(index, parent, *, step_id=None, session="s", n=2, base=0, extents=None, blocks=b"", ends=None):
    digests = prefix.Digests(np.arange(n, dtype=np.int32))
    return StepCommitted(
        session, index, step_id or f"id{index}", 1.0, parent, base, n, n, n, extents or {}, block_hashes=blocks,
        prompt_hash=digests.at(n), end_hashes=digests.ends(n) if ends is None else ends,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("events", "names"),
    [
        ([committed(1, 0)], "id1.*parent 0, which is missing"),
        ([committed(0, 0)], "id0.*not earlier"),
        ([committed(0, 1), committed(1, 0)], "id0.*parent 1.*not earlier"),
        ([committed(0, None), committed(0, None, step_id="twin")], "twin.*in use"),
        ([committed(0, None, step_id="x"), committed(1, None, step_id="x")], "'x'.*index 0"),
        ([committed(-1, None)], "negative"),
        ([committed(0, None, session="other")], "other"),
        ([committed(0, None), StepDiscarded("s", 3, 1.0)], r"\[3\]"),
        ([committed(0, None), committed(1, 0, n=3, base=2), StepDiscarded("s", 0, 1.0)], "id1.*parent 0"),
        ([committed(0, None, base=1)], "takes 1 tokens"),
        ([committed(0, None), committed(1, 0, n=9, base=3)], "takes 3 tokens"),
        ([committed(0, None, blocks=b"x" * 16)], "digests"),
        ([committed(0, None, ends=b"")], "digests"),
        ([committed(0, None, extents={"ghost": (Extent("st", 0, 1, 0, 1),)})], "ghost"),
        ([SessionOpened("t", 5.0, resumed=True)], "'t'"),
    ],
)  # fmt: skip
def test_a_log_that_does_not_fit_is_an_integrity_error_naming_ids(events, names):
    opened = SessionOpened("s", 1.0, fields=FIELDS)
    with pytest.raises(IntegrityError, match=names):
        SessionState.from_events("spool", [opened, *events])
    with pytest.raises(IntegrityError, match=names):
        SessionState.from_events("spool", [Transaction(tuple(events)), opened])


def test_a_log_without_an_opening_is_an_integrity_error():
    with pytest.raises(IntegrityError, match="opens"):
        SessionState.from_events("spool", [committed(0, None)])


def test_a_resumed_session_keeps_its_identity_and_may_add_fields():
    more = FieldSpec(name="extra", dtype="float32", align="token")
    first = SessionOpened("s", 1.0, group_id="g", trim=1, fields=FIELDS)
    again = SessionOpened("s", 0.5, group_id="other", fields=(FIELDS[0], more), resumed=True)
    state = SessionState.from_events("spool", [again, first])
    assert (state.opened, state.fields) == (first, (*FIELDS, more))
    only = SessionState.from_events("spool", [again])
    assert only.opened == again
    clash = FieldSpec(name="score", dtype="int32", align="step")
    with pytest.raises(IntegrityError, match="score"):
        state.resume(SessionOpened("s", 2.0, fields=(clash,), resumed=True))


def test_donors_are_never_steps_that_are_gone():
    pair = Pair()
    old = counting(600)
    pair.append(old, plain(1))
    pair.discard(0)
    plan = pair.state.plan(ids(old), ids(plain(2)), given={"token_ids": [Range(0, 601)]})
    assert (plan.donor, plan.shared, positions_of(plan.store["token_ids"])) == (None, {}, set(range(601)))


# ------------------------------------------------------------------------------------------------- long sessions


def chain_of(n, n_each):
    """Return a state with a chain of ``n`` steps, its events and its tokens."""
    spec = tuple(FIELDS[:3])
    opened = SessionOpened("s", 1.0, fields=spec)
    state, events, tokens = SessionState("spool", opened), [opened], np.arange(n * n_each, dtype=np.int32)
    slowest = []
    for i in range(n):
        stop = (i + 1) * n_each
        start = time.perf_counter()
        plan = state.plan(
            tokens[: stop - 10], tokens[stop - 10 : stop],
            given={
                "token_ids": [Range(0, stop)], "routed_experts": [Range(0, stop - 1)],
                "logprobs": [Range(stop - 10, 10)],
            },
        )  # fmt: skip
        extents = {
            name: tuple(Extent("st", r.position, r.n, r.position, i) for r in ranges)
            for name, ranges in plan.store.items()
        }
        event = StepCommitted(
            "s", i, plan.step_id, 1.0, plan.parent, plan.base, plan.n_prompt, plan.n_tokens, plan.n_rows, extents,
            block_hashes=plan.block_hashes, prompt_hash=plan.prompt_hash, end_hashes=plan.end_hashes,
        )  # fmt: skip
        state.commit(event)
        state.ref(i)
        slowest.append(time.perf_counter() - start)
        events.append(event)
    return state, events, tokens, slowest


def test_a_chain_of_5000_steps():
    state, events, tokens, seconds = chain_of(5000, 30)
    assert [state.steps[i].parent for i in range(5000)] == [None, *range(4999)]
    hashing = best(lambda: prefix.Digests(tokens))
    assert np.median(seconds[-100:]) < 10 * hashing
    again = SessionState.from_events("spool", reversed(events))
    assert again.ref(4999) == state.ref(4999)
    ref = again.ref(4999)
    assert [e.position for e in ref.extents["token_ids"]] == [0, *range(30, 150_000, 30)]
    assert sum(e.n for e in ref.extents["routed_experts"]) == ref.n_rows - 1 == 149_999


def best(call, n=5):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
