"""What late facts are said of: only what is recorded, never what a rollback took, and the last word is the last."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from kit import add, counting, session

import spool
from spool import InputError, NotFoundError, SessionStateError
from spool.write.stream import StreamWriter


class BackError(Exception):
    """Rolls a transaction back."""


def verbs(sp, ref):
    """Return what takes a step's reference."""
    return [
        lambda: sp.attach(ref, teacher=np.zeros(ref.n_tokens, np.float32)),
        lambda: sp.messages(ref),
        lambda: sp.tools(ref),
        lambda: sp.read(ref),
        lambda: sp.locate(ref),
    ]


def rolled_back(s, prompt, response):
    """Return the reference of a step that was rolled back."""
    with pytest.raises(BackError), s.transaction():
        ref = add(s, prompt, response)
        raise BackError
    return ref


def test_nothing_is_said_of_a_step_of_an_open_transaction(sp):
    s = session(sp)
    add(s, [1, 2], [3])
    with s.transaction():
        ref = add(s, [1, 2, 3, 4], [5])
        began = time.monotonic()
        for verb in verbs(sp, ref):
            with pytest.raises(SessionStateError, match="open transaction"):
                verb()
        assert time.monotonic() - began < 0.9, "nobody waits for a writer that does not come"
    for verb in verbs(sp, ref):
        verb()


def test_what_is_said_of_a_step_is_never_inherited_by_another(sp, open_spool):
    s = session(sp)
    add(s, [1, 2], [3])
    gone = rolled_back(s, [1, 2, 3, 4], [5])
    kept = add(s, [1, 2, 3, 4], [5])
    assert kept.index > gone.index
    for verb in verbs(sp, gone)[:3]:
        with pytest.raises(NotFoundError, match="rolled back"):
            verb()
    sp.attach(kept, teacher=np.arange(5, dtype=np.float32))
    s.discard(kept)
    after = add(s, [1, 2, 3, 4], [6])
    assert after.index > kept.index
    assert all(late.target != after.key for late in sp._catalog.attachments("s"))


def test_a_reference_that_was_rolled_back_in_a_process_that_died_is_no_other_step(open_spool):
    first = open_spool()
    s = session(first)
    add(s, [1, 2], [3])
    gone = rolled_back(s, [1, 2, 3, 4], [5])
    first.close()
    again = open_spool()
    taken = add(session(again), [1, 2, 3, 4], [5])
    assert taken.index == gone.index, "nothing says that the index was given out"
    with pytest.raises(NotFoundError, match="another step"):
        again.attach(gone, teacher=np.zeros(5, np.float32))


@pytest.mark.parametrize("segment", [False, True])
def test_the_last_fact_wins_whatever_the_clock_says(sp, open_spool, monkeypatch, segment):
    s = session(sp)
    add(s, [1, 2], [3])
    (ref,) = s.finalize()
    more = {"segment": ref} if segment else {}
    now = time.time()
    for i, at in enumerate([now, now - 3600, now - 7200, now + 60, now + 60]):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        sp.annotate("s", reward=float(i), **more)
        sp.attach(ref, teacher=np.full(3, i, np.float32))
    (got,) = sp.segments()
    assert got.reward == 4.0
    assert sp.read(got, fields=["teacher"])["teacher"].tolist() == [4, 4, 4]
    sp.close()
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    other = open_spool()
    other.annotate("s", reward=9.0, **more)
    (got,) = other.segments()
    assert got.reward == 9.0


REWARDS = {f"s{n}": {"reward": float(n % 2), "judge": "rm"} for n in range(40)}


def recorded(sp):
    for name in REWARDS:
        add(session(sp, name), [1, 2], [3])
        session(sp, name).finalize()


def test_facts_of_many_sessions_are_one_commit(sp, open_spool, monkeypatch):
    recorded(sp)
    commits, real = [], StreamWriter.commit
    monkeypatch.setattr(StreamWriter, "commit", lambda self, data: (commits.append(data), real(self, data)))
    sp.annotate_many({"s0": {"reward": 9.0}})
    sp.annotate_many(REWARDS)
    sp.annotate_many({})
    assert len(commits) == 2
    for each in (sp, open_spool()):
        assert {row.session_id: row.facts for row in each.sessions()} == REWARDS
        assert len(list(each.segments("reward = 1 and judge = 'rm'"))) == 20
    sp.rebuild()
    assert {row.session_id: row.facts for row in sp.sessions()} == REWARDS


def test_facts_of_many_sessions_are_one_file_where_there_is_no_hot_root(tmp_path):
    cold = tmp_path / "cold"
    with spool.open(f"file://{tmp_path}/hot?spill=file://{cold}&publish_interval_s=0.1") as sp:
        recorded(sp)
        sp.publish(list(sp.segments()), timeout_s=60)
        with spool.open(f"file://{cold}") as there:
            there.annotate_many(REWARDS)
            with pytest.raises(NotFoundError):
                there.annotate_many({"s0": {"reward": 5.0}, "nobody": {}})
            assert len(list((cold / "facts").iterdir())) == 1
        for each in (sp, spool.open(f"file://{cold}")):
            assert {row.session_id: row.facts for row in each.sessions()} == REWARDS


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"nobody": {"reward": 1.0}}, NotFoundError, "no session 'nobody'"),
        ({"nobody": {"reward": 1.0}, "nor they": {}}, NotFoundError, "no session 'nobody' .* nor 1 others"),
        ({"s1": {"reward": float("nan")}}, InputError, "reward of session 's1' is nan"),
        ({"s1": {"reward": "high"}}, InputError, "reward of session 's1' must be a number"),
        ({"s1": {"n_tokens": 3}}, InputError, "'n_tokens' cannot name a fact"),
        ({"s1": {3: 3}}, InputError, "3 cannot name a fact"),
        ({"s1": {"judge": object()}}, InputError, "'judge' in facts of session 's1'"),
        ({"s1": {"a": 1, "judge": "\ud800"}}, InputError, "'judge' in facts of session 's1' .* surrogates"),
        ({"s1": {"a": 1, "judge": [{"b": 2**70}]}}, InputError, "'judge' in facts of session 's1' .* 64 bits"),
        ({"s1": 1.0}, InputError, "facts of session 's1' must be a mapping of names to values, got float 1.0"),
        ({1: {"reward": 1.0}}, InputError, "a session id must be text"),
        ([("s1", {"reward": 1.0})], InputError, "facts must be a mapping of session ids to facts"),
    ],
)
def test_where_one_fact_cannot_be_taken_nothing_is_said_of_any(sp, wrong, error, said):
    recorded(sp)
    with pytest.raises(error, match=said):
        sp.annotate_many({"s0": {"reward": 1.0}, **wrong} if isinstance(wrong, dict) else wrong)
    assert all(not row.facts for row in sp.sessions())


def test_references_of_another_spool_are_refused_by_every_verb(sp, tmp_path):
    with spool.open(tmp_path / "other") as other:
        for each in (sp, other):
            add(session(each), [1, 2], [3])
        step, (segment,) = other.steps("s")[0], session(other).finalize()
        for call in [
            *(lambda verb=verb: verb(step) for verb in (sp.messages, sp.tools, sp.attach)),
            lambda: sp.annotate("s", segment=segment, reward=1.0),
            lambda: sp.release([segment]),
        ]:
            with pytest.raises(InputError, match="of spool"):
                call()


def test_segments_of_another_view_than_the_final_one_are_not_released(sp):
    s = session(sp, "a")
    add(s, [1], [2])
    add(s, [1, 2, 3], [4])
    timeline = s.view("timeline")
    (final,) = s.finalize()
    with pytest.raises(InputError, match=r"a@timeline/0 is of view timeline, .* finalised with view lineage"):
        sp.release([final, *timeline])
    assert sp.find_session("a").state == "final" and list(sp.sessions("n_released > 0")) == []
    sp.release(final)
    assert [row.session_id for row in sp.sessions("n_released = 1")] == ["a"]
    sp.discard("a")
    sp.release(timeline)  # nothing waits for it any more


def test_a_release_of_an_unknown_session_is_refused(sp, tmp_path):
    add(session(sp), [1, 2], [3])
    (segment,) = session(sp).finalize()
    stranger = spool.ref_from_json(json.dumps({**json.loads(segment.to_json()), "session_id": "nobody"}))
    with pytest.raises(NotFoundError, match="nobody"):
        sp.release([stranger])


def test_a_session_that_has_nothing_recorded_is_no_session_yet(sp):
    s = session(sp, "ghost")
    with pytest.raises(NotFoundError, match="ghost"):
        sp.annotate("ghost", reward=1.0)
    with pytest.raises(NotFoundError, match="ghost"):
        sp.discard("ghost")
    add(s, [1], [2])
    sp.annotate("ghost", reward=1.0)
    assert sp.find_session("ghost").facts["reward"] == 1.0


def test_a_token_that_is_stale_does_not_spoil_the_session(open_spool):
    sp = open_spool()
    s = session(sp)
    add(s, [1, 2], [3])
    token = s.suspend()
    add(sp.resume(token), [1, 2, 3, 4], [5])
    sp.close()
    again = open_spool()
    stale = again.resume(token)
    for _ in range(2):
        with pytest.raises(SessionStateError, match="another process"):
            add(stale, [1, 2, 3, 4], [6])
    assert [ref.index for ref in session(again).steps] == [0, 1]
    assert add(session(again), [1, 2, 3, 4, 5, 6], [7]).index == 2
    with pytest.raises(SessionStateError, match="another process"):
        add(stale, [1, 2, 3, 4], [6])


def test_other_identity_does_not_spoil_the_session(open_spool):
    sp = open_spool()
    add(session(sp, group_id="g"), [1, 2], [3])
    sp.close()
    again = open_spool()
    with pytest.raises(SessionStateError, match="group_id"):
        add(session(again, group_id="h"), [1, 2], [3])
    assert len(session(again).steps) == 1


def test_a_session_that_another_process_records_can_be_discarded_after_a_look(sp, spool_uri):
    s = session(sp)
    add(s, counting(5), counting(3))
    with spool.open(spool_uri) as other:
        with pytest.raises(spool.LockedError):
            session(other).steps  # noqa: B018
        other.discard("s")
        assert other.find_session("s").state == "discarded"
