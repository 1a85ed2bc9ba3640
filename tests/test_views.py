"""Views against a model over plain lists, and each of their rules alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_model import BY_NAME, FIELDS, Pair, below, forward, ids, plain
from test_state import runs, sessions, small_blocks  # noqa: F401

from spool.errors import InputError
from spool.model.events import SessionFinalized, SessionOpened, StepCommitted
from spool.model.fields import FieldSpec
from spool.model.refs import Inline, SegmentRef, ref_from_json
from spool.rollout.state import SessionState
from spool.rollout.views import head, segments

soak = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
choices = st.fixed_dictionaries(
    {
        "train_shared_prefix": st.sampled_from(["first", "all"]),
        "superseded": st.sampled_from(["drop", "keep"]),
        "trailing": st.sampled_from(["cut", "keep"]),
        "gaps": st.sampled_from(["cut", "keep"]),
    }
)


def check(pair, view, state=None, transaction=None, **options):
    """Compare a view with the model's and return its segments."""
    refs = segments(state or pair.state, view, transaction=transaction, **options)
    renamed = {"train" if k == "train_shared_prefix" else k: v for k, v in options.items()}
    expected = pair.model.segments(view, transaction=transaction, **renamed)
    pair.check_segments(refs, expected, view)
    return refs


@soak
@given(data=st.data(), options=choices, view=st.sampled_from(["lineage", "lineage", "timeline"]))
def test_any_view_of_any_session_is_that_of_the_model(small_blocks, data, options, view):  # noqa: F811
    pair = data.draw(sessions)
    data.draw(runs(pair))
    check(pair, view, **options)
    check(pair, view, transaction="A", **options)
    pair.settle("A")
    pair.rollback("B")
    refs = check(pair, view, **options)
    assert segments(pair.replayed(7), view, **options) == refs


@soak
@given(data=st.data(), view=st.sampled_from(["lineage", "timeline"]))
def test_a_head_is_every_field_cut_at_one_token(small_blocks, data, view):  # noqa: F811
    pair = data.draw(sessions)
    data.draw(runs(pair, transactions=(None,)))
    for ref, segment in zip(
        segments(pair.state, view, gaps="keep"), pair.model.segments(view, gaps="keep"), strict=True
    ):
        n = data.draw(st.integers(0, ref.n_tokens))
        leaf = next((s for s in reversed([pair.model.steps[i] for i in ref.steps]) if s.tokens), None)
        rows = forward(leaf.tokens, n) if leaf else 0
        part = head(ref, n, FIELDS)
        assert (part.n_tokens, part.cut_tokens) == (n, ref.cut_tokens + ref.n_tokens - n)
        assert (part.n_rows, part.response_start) == (rows + (n > 0), min(ref.response_start, n))
        assert (part.steps, part.view, part.count) == (ref.steps, ref.view, ref.count)
        assert [u.position for u in part.units] == [u.position for u in ref.units if u.position < n]
        marks = [s.step for s in part.spans for _ in range(s.start, s.stop)]
        assert marks == [author for author in segment["authors"][:n] if author is not None]
        assert all(s.stop <= n for s in part.versions)
        for spec in FIELDS:
            stop = {"forward": rows, "step": 99}.get(spec.align, n)
            assert pair.store.read(part.extents, spec) == below(segment["values"][spec.name], stop)


def test_a_head_cuts_inline_payload_and_steps_too():
    pair = Pair()
    pair.append(plain(1, 2, 3), plain(4, 5))
    inline = {
        "token_ids": Inline("int32", (5,), bytes(20)), "loss_mask": Inline("uint8", (5,), bytes([0, 0, 0, 1, 1])),
        "logprobs": Inline("float32", (2,), bytes(range(8))),
        "routed_experts": Inline("uint8", (4, 2, 2), bytes(range(16))), "score": Inline("float32", (1,), bytes(4)),
    }  # fmt: skip
    ref = msgspec.structs.replace(pair.state.ref(0), inline=inline)
    part = head(ref, 4, FIELDS)
    assert {name: (x.shape, x.data) for name, x in part.inline.items()} == {
        "token_ids": ((4,), bytes(16)), "loss_mask": ((4,), bytes([0, 0, 0, 1])), "logprobs": ((1,), bytes(range(4))),
        "routed_experts": ((3, 2, 2), bytes(range(12))), "score": ((1,), bytes(4)),
    }  # fmt: skip
    assert [(s.start, s.stop) for s in part.spans] == [(3, 4)]
    assert head(head(ref, 2, FIELDS), 0, FIELDS).inline["logprobs"].shape == (0,)
    assert head(ref, 5, FIELDS) is ref
    for n in (-1, 6):
        with pytest.raises(InputError):
            head(ref, n, FIELDS)
    with pytest.raises(InputError, match="score"):
        head(ref, 2, [spec for spec in FIELDS if spec.name != "score"])
    with pytest.raises(InputError, match="logprobs"):
        bare = msgspec.structs.replace(ref, extents={})
        head(bare, 2, [spec for spec in FIELDS if spec.name != "logprobs"])


# -------------------------------------------------------------------------------------------------- single rules


def spans(ref):
    return [(s.step, s.start, s.stop, s.trained) for s in ref.spans]


def test_timeline_is_one_segment_a_step_and_lineage_one_a_leaf():
    pair = Pair()
    pair.append(plain(1, 2), plain(3), versions=["7"], finish="stop")
    pair.append(plain(1, 2, 3, 4), plain(5), versions=["8"], finish="length")
    pair.append(plain(1, 2, 3, 9), plain(8), versions=["8"])
    timeline = check(pair, "timeline")
    assert [(r.steps, r.n_tokens, r.response_start, spans(r)) for r in timeline] == [
        ((0,), 3, 2, [(0, 2, 3, True)]), ((1,), 5, 4, [(1, 4, 5, True)]), ((2,), 5, 4, [(2, 4, 5, True)]),
    ]  # fmt: skip
    first, second = check(pair, "lineage")
    assert (first.steps, first.finish_reason, first.id) == ((0, 1), "length", "s@lineage/0")
    assert [(v.version, v.start, v.stop) for v in first.versions] == [("7", 2, 3), ("8", 4, 5)]
    assert spans(first) == [(0, 2, 3, True), (1, 4, 5, True)]
    assert spans(second) == [(0, 2, 3, False), (2, 4, 5, True)]
    assert (second.index, second.count, second.trainable_tokens, second.response_start) == (1, 2, 1, 2)
    every = check(pair, "lineage", train_shared_prefix="all")
    assert [r.trainable_tokens for r in every] == [2, 2]
    assert [ref_from_json(r.to_json()) for r in every] == every


def test_step_fields_are_numbered_along_the_path():
    pair = Pair()
    pair.append(plain(1), plain(2))
    pair.append(plain(5), plain(6))
    pair.append(plain(1, 2), plain(3))
    _, second = check(pair, "lineage")
    assert second.steps == (0, 2)
    assert pair.store.read(second.extents, BY_NAME["score"]) == {0: ("score", 0, 0), 1: ("score", 2, 0)}


def test_a_repeated_request_supersedes_the_leaf_that_answered_it():
    pair = Pair()
    pair.append(plain(1, 2), plain(3))
    pair.append(plain(1, 2, 3, 4), plain(5))
    pair.append(plain(1, 2, 3, 4), plain(6))
    pair.append(plain(1, 2, 3, 4, 6, 7), plain(8))
    (kept,) = check(pair, "lineage")
    assert (kept.steps, kept.trainable_tokens, kept.superseded) == ((0, 2, 3), 3, False)
    every = check(pair, "lineage", superseded="keep")
    assert [(r.steps, r.superseded, r.trainable_tokens) for r in every] == [((0, 1), True, 2), ((0, 2, 3), False, 2)]
    assert len(check(pair, "timeline")) == 4


def test_a_trimmed_token_is_trained_where_its_chain_still_has_it():
    pair = Pair(trim=1)
    pair.append(plain(1), plain(2, 3))
    pair.append(plain(1, 2, 5), plain(6))
    pair.append(plain(1, 2, 3, 7), plain(8))
    first, second = check(pair, "lineage")
    assert spans(first) == [(0, 1, 2, True), (1, 3, 4, True)]
    assert spans(second) == [(0, 1, 2, False), (0, 2, 3, True), (2, 4, 5, True)]
    assert first.trainable_tokens + second.trainable_tokens == 4


def test_a_response_that_is_trimmed_whole_leaves_no_span():
    pair = Pair(trim=1)
    pair.append(plain(1, 2), plain(3), versions=["7"])
    assert pair.append(plain(1, 2, 5), plain(6), versions=["8"]).parent == 0
    (ref,) = check(pair, "lineage")
    assert (ref.steps, ref.response_start, spans(ref)) == ((0, 1), 3, [(1, 3, 4, True)])


def test_a_segment_ends_at_its_last_generated_token():
    pair = Pair()
    pair.append(plain(1, 2), plain(3))
    pair.append(plain(1, 2, 3, 4, 5), [], finish="abort")
    (cut,) = check(pair, "lineage")
    assert (cut.n_tokens, cut.cut_tokens, cut.steps, cut.finish_reason) == (3, 2, (0, 1), "abort")
    (kept,) = check(pair, "lineage", trailing="keep")
    assert (kept.n_tokens, kept.cut_tokens, kept.response_length) == (5, 0, 3)


def test_a_segment_without_generated_tokens_comes_back_whole():
    pair = Pair()
    pair.append(plain(1, 2, 3), [], finish="abort")
    for view in ("lineage", "timeline"):
        (ref,) = check(pair, view)
        assert (ref.n_tokens, ref.response_start, ref.spans, ref.cut_tokens) == (3, 3, (), 0)


def test_a_segment_ends_before_a_routing_gap_at_a_generated_token():
    pair = Pair()
    pair.append(plain(1, 2), plain(3, 4, 5))
    pair.append(plain(1, 2, 3, 4, 5, 6), plain(7, 8), given={4, 6})
    (cut,) = check(pair, "lineage")
    assert (cut.n_tokens, cut.cut_tokens, cut.trainable_tokens) == (5, 3, 3)
    (kept,) = check(pair, "lineage", gaps="keep")
    assert (kept.n_tokens, kept.cut_tokens) == (8, 0)
    (trailing,) = check(pair, "lineage", trailing="keep")
    assert (trailing.n_tokens, trailing.cut_tokens) == (6, 2)
    assert [r.n_tokens for r in check(pair, "timeline", trailing="keep")] == [5]


def test_no_routing_at_all_is_no_gap_and_a_gap_before_all_that_was_generated_leaves_nothing():
    pair = Pair()
    pair.append(plain(1, 2), plain(3), given=[])
    assert [r.n_tokens for r in check(pair, "lineage")] == [3]
    pair.append(plain(5, 6), plain(7, 8), given={1, 2})
    assert [r.steps for r in check(pair, "lineage")] == [(0,)]
    assert [r.steps for r in check(pair, "lineage", gaps="keep")] == [(0,), (1,)]


def test_a_gap_inside_a_unit_ends_the_segment_before_its_token():
    pair = Pair()
    tokens = [(1, None), (9, ("k", 4)), (2, None)]
    pair.append(tokens, plain(3, 4), given={0, 1, 2, 3, 4, 5})
    (ref,) = check(pair, "lineage", gaps="keep")
    assert (ref.n_tokens, ref.n_rows) == (5, 8)
    (ref,) = check(pair, "lineage", trailing="keep")
    assert (ref.n_tokens, ref.n_rows) == (4, 7)
    pair = Pair()
    pair.append([], [(1, None), (9, ("k", 4)), (2, None)], given={0, 1, 2, 4})
    (ref,) = check(pair, "lineage")
    assert (ref.n_tokens, ref.n_rows) == (1, 1)


def test_message_only_steps_give_segments_without_tokens():
    state = SessionState("spool", SessionOpened("s", 1.0, fields=FIELDS))
    for index, parent in ((0, None), (1, 0)):
        state.commit(StepCommitted("s", index, str(index), 1.0, parent, 0, 0, 0, 0, {}))
    assert [(r.steps, r.n_tokens, r.n_rows, r.spans) for r in segments(state, "timeline")] == [
        ((0,), 0, 0, ()), ((1,), 0, 0, ()),
    ]  # fmt: skip
    assert [(r.steps, r.n_tokens, r.n_rows, r.extents) for r in segments(state, "lineage")] == [((0, 1), 0, 0, {})]


def test_a_message_only_leaf_has_the_tokens_of_its_chain():
    pair = Pair()
    pair.append(plain(1, 2), plain(3))
    pair.state.commit(StepCommitted("s", 1, "1", 1.0, 0, 0, 0, 0, 0, {}))
    (ref,) = segments(pair.state, "lineage")
    assert (ref.steps, ref.n_tokens, spans(ref)) == ((0, 1), 3, [(0, 2, 3, True)])
    assert [r.n_tokens for r in segments(pair.state, "timeline")] == [3, 0]


def test_an_empty_session_has_no_segments():
    state = SessionState("spool", SessionOpened("s", 1.0, fields=FIELDS))
    assert segments(state, "lineage") == segments(state, "timeline") == []


def test_identity_and_outcome_travel():
    opened = SessionOpened(
        "s", 1.0, group_id="g", sample_index=3, rollout_step=40, source="swe", prompt_id="p", split="train", attempt=2,
    )  # fmt: skip
    state = SessionState("spool", opened, roots=["file:///a"])
    plan = state.plan(ids(plain(1)), ids(plain(2)), given={})
    state.commit(
        StepCommitted(
            "s", 0, plan.step_id, 1.0, None, 0, 1, 2, 2, {}, prompt_hash=plan.prompt_hash, end_hashes=plan.end_hashes
        )
    )
    expected = SegmentRef(
        spool_id="spool", session_id="s", group_id="g", sample_index=3, rollout_step=40, source="swe", prompt_id="p",
        split="train", attempt=2, n_tokens=2, n_rows=2, response_start=1, spans=state.ref(0).spans, roots=("file:///a",),
        view="lineage", steps=(0,),
    )  # fmt: skip
    assert segments(state, "lineage") == [expected]
    assert segments(state, "lineage", outcome="failed")[0].outcome == "failed"
    state.finalize(SessionFinalized("s", 2.0, "truncated", "lineage"))
    assert segments(state, "lineage")[0].outcome == "truncated"


@pytest.mark.parametrize(
    "wrong",
    [{"view": "tree"}, {"trailing": "drop"}, {"gaps": None}, {"superseded": "cut"}, {"train_shared_prefix": "last"}],
)
def test_unknown_options_are_refused(wrong):
    state = SessionState("spool", SessionOpened("s", 1.0))
    with pytest.raises(InputError, match=next(iter(wrong))):
        segments(state, **wrong)


def test_a_field_added_on_resume_needs_no_rows_of_earlier_steps():
    pair = Pair()
    pair.append(plain(1, 2), plain(3))
    late = FieldSpec(name="late", dtype="uint8", align="forward")
    pair.state.resume(SessionOpened("s", 4.0, fields=(late,), resumed=True))
    assert [r.n_tokens for r in segments(pair.state, "lineage")] == [3]


def test_a_comb_of_many_leaves_trains_everything_once():
    pair = Pair()
    tokens = plain(1)
    for i in range(150):
        pair.append(tokens, plain(2, 3))
        pair.append([*tokens, *plain(2, 3, 100 + i)], plain(4))
        tokens = [*tokens, *plain(2, 3, 5)]
    refs = segments(pair.state, "lineage")
    assert [len(r.steps) for r in refs] == list(range(2, 152))
    assert sum(r.trainable_tokens for r in refs) == 150 * 3
