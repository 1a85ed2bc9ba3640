"""Random lives of sessions against the oracle, and every array ever appended against a dict."""

from __future__ import annotations

import glob
import os
import tempfile

import numpy as np
from conftest import SOAK
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit import SHAPE, counting, prefix_hashes, probabilities, routing
from oracle import GAP, OracleSession, RefusedError

import spool

FILL = -9
LOOKS = [
    ("timeline", {"superseded": "keep", "trailing": "keep", "gaps": "keep"}),
    ("lineage", {}),
    ("lineage", {"superseded": "keep", "train_shared_prefix": "all"}),
    ("lineage", {"superseded": "keep", "gaps": "keep", "trailing": "keep"}),
]
TURNS = ["extend", "extend", "extend", "branch", "branch", "retry", "retry", "trim", "rewrite", "long", "abort"]
LONG = counting(600)
KEPT = spool.FieldSpec(name="kept", dtype="int32", align="token", ragged=True)
SEEN = spool.FieldSpec(name="seen", dtype="int64", align="token")
USER = (KEPT, SEEN)

token = st.integers(1, 4)
tokens = st.lists(token, max_size=5)
some_tokens = st.lists(token, min_size=1, max_size=5)
sending = st.sampled_from(["all", "all", "all", "own", "own", "late", "extra", "holes", "none"])
"""How much routing comes with a step: every row, those after its parent, fewer, T rows, rows of -1, nothing."""


class _Recorded:
    """A session in Spool and in the oracle, and what was sent, by step index."""

    def __init__(self, live, oracle, keywords):
        self.live = live
        self.oracle = oracle
        self.keywords = keywords
        self.refs = {}
        self.sent = {}
        self.reward = None
        self.final = None
        self.suspended = None


class SpoolMachine(RuleBasedStateMachine):
    """Everything a rollout worker may do to a few sessions, in any order."""

    @initialize(data=st.data())
    def begin(self, data):
        self.folder = tempfile.TemporaryDirectory()
        self.uri = f"file://{self.folder.name}/spool"
        self.sp = spool.open(self.uri)
        self.sessions = {}
        for prefer in ("first", "last"):
            self.open_session(prefer, data.draw(st.integers(0, 1), label="trim"))
            self.append(data, [1, 2], [3])

    def teardown(self):
        if hasattr(self, "sp"):
            try:
                self.check_everything()
                self.reopen()
                self.check_everything()
            finally:
                self.sp.close()
                self.folder.cleanup()

    # ---- choosing

    def pick(self, data, *, alive=True):
        names = [name for name, s in self.sessions.items() if not alive or s.final is None]
        return self.sessions[data.draw(st.sampled_from(sorted(names)), label="session")]

    def pick_step(self, data, session):
        return data.draw(st.sampled_from(session.oracle.live()), label="step")

    def alive(self):
        return any(s.final is None for s in self.sessions.values())

    def has_steps(self):
        return any(s.final is None and s.oracle.live() for s in self.sessions.values())

    def pick_with_steps(self, data):
        names = [name for name, s in self.sessions.items() if s.final is None and s.oracle.live()]
        return self.sessions[data.draw(st.sampled_from(sorted(names)), label="session")]

    # ---- appending

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(prefer=st.sampled_from(["first", "last"]), trim=st.integers(0, 1))
    def open_session(self, prefer, trim):
        name = f"session {len(self.sessions)}"
        keywords = {"prefer": prefer, "trim": trim, "experts": SHAPE, "fields": USER}
        live = self.sp.session(session_id=name, **keywords)
        self.sessions[name] = _Recorded(live, OracleSession(prefer=prefer, trim=trim), keywords)

    @precondition(has_steps)
    @rule(data=st.data(), turns=st.lists(st.sampled_from(TURNS), min_size=2, max_size=8))
    def rollout(self, data, turns):
        """Several turns of one session, as an agent takes them."""
        session = self.pick_with_steps(data)
        for turn in turns:
            last = session.oracle.live()[-1]
            observed, response = data.draw(some_tokens, label="observed"), data.draw(some_tokens, label="response")
            prompt = {
                "extend": [*last.tokens, *observed],
                "branch": [*self.pick_step(data, session).tokens, *observed],
                "retry": last.prompt,
                "trim": [*last.tokens[:-1], *observed],
                "rewrite": [*last.tokens[: len(last.tokens) * 2 // 3], 9, *observed],
                "long": [*last.tokens, *LONG[:300]],
                "abort": [*last.tokens, *observed],
            }[turn]
            self.send(data, session, prompt, [] if turn == "abort" else response)

    @precondition(alive)
    @rule(data=st.data(), prompt=tokens, response=tokens)
    def append(self, data, prompt, response):
        self.send(data, self.pick(data), prompt, response)

    @precondition(alive)
    @rule(data=st.data(), kept=st.integers(200, 600), response=tokens, tail=tokens)
    def append_long(self, data, kept, response, tail):
        self.send(data, self.pick(data), [*LONG[:kept], *tail], response)

    @precondition(has_steps)
    @rule(data=st.data(), observed=tokens, response=some_tokens)
    def branch_from_a_named_parent(self, data, observed, response):
        session = self.pick_with_steps(data)
        parent = self.pick_step(data, session)
        if parent.tokens:
            self.send(data, session, [*parent.tokens, *observed], response, parent=parent.index)

    @precondition(has_steps)
    @rule(data=st.data(), kind=st.sampled_from(["mask", "logprobs", "rows", "id", "version", "token", "parent"]))
    def refuse(self, data, kind):
        session = self.pick_with_steps(data)
        sent = {"prompt_token_ids": [1, 2, 3], "response_token_ids": [4, 5], "routed_experts": routing([1, 2, 3, 4, 5])}
        wrong = routing([1, 2, 3, 4, 5])
        wrong[2, 1, 0] = 256
        sent |= {
            "mask": {"loss_mask": [1, 1, 1]},
            "logprobs": {"logprobs": [0.0]},
            "rows": {"routed_experts": routing([1, 2, 3])},
            "id": {"routed_experts": wrong},
            "version": {"weight_version": [("1", 0, 3)]},
            "token": {"response_token_ids": [4, -5]},
            "parent": {"parent": "nobody"},
        }[kind]
        before = session.live.steps
        try:
            session.live.append(**sent)
        except (spool.InputError, spool.NotFoundError):
            assert session.live.steps == before
        else:
            raise AssertionError(f"{kind} was accepted")

    def send(self, data, session, prompt, response, parent=None):
        whole = [*prompt, *response]
        index = len(session.oracle.steps)
        salt = data.draw(st.sampled_from([0, 0, 0, 77]), label="salt") if session.oracle.prefer == "last" else 0
        payload, start, rows = self.draw_routing(data, session, whole, prompt, parent, salt)
        sent = {
            "logprobs": data.draw(st.sampled_from([probabilities(whole, len(prompt)), None]), label="logprobs"),
            "loss_mask": self.draw_mask(data, prompt, response),
            "weight_version": data.draw(st.sampled_from([None, "1", "2"]), label="version"),
            "finish_reason": data.draw(st.sampled_from([None, "stop", "length", "tool_calls"]), label="reason"),
            "messages": [{"role": "user", "content": str(t)} for t in whole[:40]],
            "step_id": data.draw(st.sampled_from([None, f"id-{index}"]), label="step_id"),
            "fields": {spec.name: user_rows(spec, whole) for spec in self.draw_fields(data)},
        }
        step = session.oracle.append(
            prompt, response, rows=rows, start=start, logprobs=sent["logprobs"], loss_mask=sent["loss_mask"],
            version=sent["weight_version"], step_id=sent["step_id"], parent=parent, messages=sent["messages"],
            finish_reason=sent["finish_reason"],
        )  # fmt: skip
        arguments = {
            "prompt_token_ids": list(prompt), "response_token_ids": np.array(response, np.int64),
            "routed_experts": payload, "routed_experts_start": start, "parent": parent, **sent,
        }  # fmt: skip
        ref = session.live.append(**arguments)
        assert (ref.parent, ref.index) == (step.parent, step.index)
        session.refs[step.index], session.sent[step.index] = ref, sent
        self.check_step(session, step)
        if sent["step_id"] is not None:
            assert session.live.append(**arguments) == ref

    def draw_routing(self, data, session, whole, prompt, parent, salt):
        """Return (payload, start, rows for the oracle)."""
        how = data.draw(sending, label="routing")
        array = routing(whole, salt)
        n = len(array)
        if how == "none":
            return None, 0, None
        start = 0
        if how in ("own", "late"):
            _, base = session.oracle.find_parent(list(prompt), parent)
            start = max(base - 1, 0) if how == "own" else data.draw(st.integers(0, n), label="start")
        if how == "extra" and whole:
            array = np.concatenate([array, np.full((1, *array.shape[1:]), 3, np.int32) * [[[0], [1], [1]]]])
        array = array[start:].astype(np.int32)
        if how == "holes":
            holes = data.draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=3), label="holes")
            array[[hole for hole in holes if hole < n]] = -1
        rows = [GAP if (row < 0).all() else row.tobytes() for row in array]
        return array, start, rows

    def draw_fields(self, data):
        """Return the user's fields that come with a step: what one leaves out, the next may send behind the hole."""
        return data.draw(st.sampled_from([(), (), USER, (KEPT,), (SEEN,)]), label="fields")

    def draw_mask(self, data, prompt, response):
        bits = data.draw(
            st.none() | st.lists(st.booleans(), min_size=len(response), max_size=len(response)), label="mask"
        )
        if bits is None:
            return None
        whole = data.draw(st.booleans(), label="whole mask")
        return [0] * len(prompt) * whole + [int(bit) for bit in bits]

    # ---- the rest of a session's life

    @precondition(has_steps)
    @rule(data=st.data())
    def discard(self, data):
        session = self.pick_with_steps(data)
        step = self.pick_step(data, session)
        try:
            session.oracle.discard(step.index)
        except RefusedError:
            try:
                session.live.discard(step.index)
            except spool.SessionStateError:
                return
            raise AssertionError(f"inner step {step.index} was discarded") from None
        session.live.discard(session.refs[step.index].step_id)

    @precondition(alive)
    @rule(
        data=st.data(), view=st.sampled_from(["lineage", "timeline"]), outcome=st.sampled_from(["completed", "aborted"])
    )
    def finalise(self, data, view, outcome):
        session = self.pick(data)
        segments = session.live.finalize(view=view, outcome=outcome)
        assert session.live.finalize(view=view, outcome=outcome) == segments
        session.final, session.oracle.finalized = (view, outcome), True
        assert {ref.outcome for ref in segments} <= {outcome}
        self.check_view(session, view, segments, {})
        try:
            session.live.append(prompt_token_ids=[1], response_token_ids=[2])
        except spool.SessionStateError:
            return
        raise AssertionError("a finalised session took a step")

    @precondition(has_steps)
    @rule(data=st.data(), reward=st.floats(-1, 1, width=32))
    def annotate(self, data, reward):
        session = self.pick_with_steps(data)
        self.sp.annotate(session.live.session_id, reward=reward, note=f"{reward}")
        session.reward = reward

    @rule(data=st.data(), how=st.sampled_from(["suspend", "reopen", "rebuild"]))
    def go_on(self, data, how):
        if how == "suspend" and self.alive():
            session = self.pick(data)
            session.live = self.sp.resume(session.live.suspend())
        else:
            self.reopen(rebuild=how == "rebuild")

    def reopen(self, *, rebuild=False):
        self.sp.close()
        for path in glob.glob(f"{glob.escape(self.folder.name)}/spool/catalog.sqlite*") if rebuild else ():
            os.unlink(path)
        self.sp = spool.open(self.uri)
        self.find_sessions_again()

    def find_sessions_again(self):
        for name, session in self.sessions.items():
            if session.final is None:
                session.live = self.sp.session(session_id=name, **session.keywords)

    # ---- reading

    @precondition(has_steps)
    @rule(data=st.data())
    def read_a_slice(self, data):
        session = self.pick_with_steps(data)
        step = self.pick_step(data, session)
        start = data.draw(st.integers(0, len(step.tokens)), label="start")
        stop = data.draw(st.integers(start, len(step.tokens)), label="stop")
        layers = data.draw(st.sampled_from([None, slice(0, 2), slice(1, 3), slice(2, 3)]), label="layers")
        sample = self.sp.read(session.refs[step.index], tokens=slice(start, stop), layers=layers, missing=FILL)
        assert sample["token_ids"].tolist() == step.tokens[start:stop]
        mask = [0] * step.n_prompt + step.mask
        assert sample["loss_mask"].tolist() == mask[start:stop]
        if "routed_experts" in sample:
            check_rows(sample["routed_experts"], step.rows[start:stop], layers)

    @precondition(has_steps)
    @rule(data=st.data())
    def read_many(self, data):
        session = self.pick_with_steps(data)
        steps = session.oracle.live()
        chosen = data.draw(st.lists(st.sampled_from(steps), max_size=6), label="steps")
        samples = self.sp.read([session.refs[step.index] for step in chosen], fields=["token_ids"])
        assert [sample["token_ids"].tolist() for sample in samples] == [step.tokens for step in chosen]
        assert [sample.ref.index for sample in samples] == [step.index for step in chosen]

    @precondition(has_steps)
    @rule(data=st.data(), options=st.fixed_dictionaries({}, optional={
        "train_shared_prefix": st.sampled_from(["first", "all"]),
        "superseded": st.sampled_from(["drop", "keep"]),
        "trailing": st.sampled_from(["cut", "keep"]),
        "gaps": st.sampled_from(["cut", "keep"]),
    }))  # fmt: skip
    def look(self, data, options):
        session = self.pick_with_steps(data)
        self.check_view(session, "lineage", session.live.view("lineage", **options), options)

    @invariant()
    def the_steps_are_those_of_the_oracle(self):
        for session in getattr(self, "sessions", {}).values():
            assert [ref.index for ref in session.live.steps] == [step.index for step in session.oracle.live()]
            assert len({ref.step_id for ref in session.live.steps}) == len(session.live.steps)

    # ---- checks

    def check_everything(self):
        for name, session in self.sessions.items():
            listed = self.sp.steps(name) if session.oracle.steps or session.final else []
            assert [ref.index for ref in listed] == [step.index for step in session.oracle.live()]
            for ref, step in zip(listed, session.oracle.live(), strict=True):
                session.refs[step.index] = ref
                self.check_step(session, step)
            if not session.oracle.live():
                continue
            for view, options in LOOKS:
                segments = self.sp.view(name, view, **options)
                self.check_view(session, view, segments, options)
                assert {ref.reward for ref in segments} <= {None, session.reward}
        rewards = {name: session.reward for name, session in self.sessions.items()}
        for ref in self.sp.segments():
            assert ref.reward == rewards[ref.session_id]

    def check_step(self, session, step):
        ref, sent = session.refs[step.index], session.sent[step.index]
        assert (ref.index, ref.parent) == (step.index, step.parent)
        assert ref.step_id == step.step_id or step.step_id is None
        assert (ref.n_tokens, ref.response_start, ref.finish_reason) == (
            len(step.tokens),
            step.n_prompt,
            step.finish_reason,
        )
        sample = self.sp.read(ref, missing=FILL)
        assert sample["token_ids"].tolist() == step.tokens
        assert sample["loss_mask"].tolist() == [0] * step.n_prompt + step.mask
        if sent["logprobs"] is None:
            assert "logprobs" not in sample
        elif step.mask:
            np.testing.assert_array_equal(sample["logprobs"], sent["logprobs"])
        check_rows(sample.get("routed_experts"), step.rows, None)
        for spec in USER:
            check_user_rows(sample.get(spec.name), user_rows(spec, step.tokens), sent=spec.name in sent["fields"])
        gaps = {GAP in row for row in step.rows if len(row) == 1}
        if True in gaps:
            try:
                self.sp.read(ref, fields=["routed_experts"])
            except (spool.GapError, spool.NotFoundError):
                pass
            else:
                raise AssertionError("a gap was read as data")
        elif step.rows and all(GAP not in row for row in step.rows):
            self.sp.read(ref, fields=["routed_experts"])
        assert self.sp.messages(ref) == step.messages

    def check_view(self, session, view, refs, options):
        if view == "timeline":
            check_timeline(session, refs)
            return
        by_leaf = {ref.steps[-1]: ref for ref in refs}
        assert len(by_leaf) == len(refs)
        expected = session.oracle.lineage(**options)
        assert set(by_leaf) <= {segment.steps[-1] for segment in expected}
        exact = all(segment.certain for segment in expected)
        if exact:
            assert [ref.steps for ref in refs] == [tuple(segment.steps) for segment in expected]
            assert [(ref.index, ref.count) for ref in refs] == [(i, len(refs)) for i in range(len(refs))]
        for segment in expected:
            ref = by_leaf.get(segment.steps[-1])
            if ref is None or not segment.certain:
                assert ref is not None or not segment.certain
                continue
            self.check_segment(ref, segment, exact)

    def check_segment(self, ref, segment, exact):
        assert (ref.n_tokens, ref.response_start) == (len(segment.tokens), segment.response_start)
        assert (ref.cut_tokens, ref.superseded) == (segment.cut_tokens, segment.superseded)
        sample = self.sp.read(ref, missing=FILL)
        assert sample["token_ids"].tolist() == segment.tokens
        if exact:
            assert sample["loss_mask"].tolist() == segment.mask
            assert ref.trainable_tokens == sum(segment.mask)
        logprobs = [FILL if value is GAP else value for value in segment.logprobs]
        if "logprobs" in sample:
            np.testing.assert_array_equal(sample["logprobs"], np.array(logprobs, np.float32))
        else:
            assert set(logprobs) <= {FILL, 0.0}
        check_rows(sample.get("routed_experts"), segment.rows, None)
        versions = [None] * ref.n_tokens
        for span in ref.versions:
            versions[span.start : span.stop] = [span.version] * (span.stop - span.start)
        assert versions[segment.response_start :] == segment.versions


def user_rows(spec, tokens):
    """Return rows of a user's field that depend on the tokens up to theirs; none is empty or `FILL`."""
    hashes = [int(each) & 0x7FFFFFFF for each in prefix_hashes(tokens)]
    return [list(range(each % 99991, each % 99991 + 1 + each % 3)) for each in hashes] if spec.ragged else hashes


def check_user_rows(got, expected, *, sent):
    """Rows are those of their tokens, or missing where the step did not send them; None where nobody sent any."""
    if got is None:
        assert not sent or not expected
        return
    rows = got.tolist() if isinstance(got, np.ndarray) else [part.tolist() for part in np.split(*got[:1], got[1][1:-1])]
    if len(expected) or rows != [[]]:
        for row, wanted in zip(rows, expected, strict=True):
            assert row == wanted or (not sent and row in ([], FILL))


def check_timeline(session, refs):
    """Only of whole steps do the rules say exactly what becomes of them."""
    by_step = {ref.steps: ref for ref in refs}
    assert len(by_step) == len(refs)
    assert list(by_step) == sorted(by_step)
    for step in session.oracle.live():
        if not step.mask or any(GAP in row for row in step.rows):
            continue
        ref = by_step[(step.index,)]
        assert (ref.n_tokens, ref.response_start) == (len(step.tokens), step.n_prompt)
        assert ref.trainable_tokens == sum(step.mask)


def check_rows(got, expected, layers):
    """``got`` is None where nothing of the field was ever sent."""
    if got is None:
        assert all(GAP in row for row in expected)
        return
    assert len(got) == len(expected)
    for row, allowed in zip(got, expected, strict=True):
        shapes = [
            np.full((3, 2), FILL, np.int32) if value is GAP else np.frombuffer(value, np.int32).reshape(3, 2)
            for value in allowed
        ]
        assert any(np.array_equal(row, shape if layers is None else shape[layers]) for shape in shapes)


assert len(set(prefix_hashes(counting(600)).tolist())) == 600

SpoolMachine.TestCase.settings = settings(
    max_examples=20 * SOAK,
    stateful_step_count=25,
    phases=[Phase.explicit, Phase.generate] + [Phase.shrink] * (SOAK > 1),  # shrinking takes minutes: ask for it
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class TestSpool(SpoolMachine.TestCase):
    """Runs the machine."""
