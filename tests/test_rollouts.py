"""The synthetic workload: it is what it says, and Spool gives back what it expects."""

from __future__ import annotations

import time

import numpy as np
import pytest
from kit import SHAPE
from numpy.testing import assert_array_equal
from oracle import OracleSession

import spool
from spool.testing.rollouts import Router, rollouts

SMALL = {"prompt_tokens": 300, "observation_tokens": 30, "response_tokens": 20}


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b", "glm-4.5", "qwen3-next-80b", "llama-4-maverick", "mixtral-8x7b"])
def test_rows_are_plausible_routing(model):
    shape = spool.models[model]
    rows = Router(shape).rows(np.random.default_rng(0), 400)
    assert (rows.shape, rows.dtype) == ((400, shape.num_layers, shape.topk), np.int32)
    layers = list(shape.moe_layers or range(shape.num_layers))
    assert (np.delete(rows, layers, axis=1) == 0).all()
    moe = rows[:, layers]
    assert (np.diff(np.sort(moe, axis=2), axis=2) > 0).all()
    assert 0 <= moe.min() <= moe.max() < shape.num_experts
    assert len(np.unique(moe)) > shape.num_experts * 0.9
    if shape.num_experts > 32:
        stays = (moe[1:, :, :, None] == moe[:-1, :, None, :]).any(axis=3).mean()
        strangers = (moe[200:, :, :, None] == moe[:-200, :, None, :]).any(axis=3).mean()
        assert stays > strangers + 0.1


def test_equal_arguments_yield_equal_steps_and_other_seeds_others():
    one, again, other = (list(rollouts(SHAPE, groups=1, samples=2, turns=5, seed=seed, **SMALL)) for seed in (1, 1, 2))
    for a, b in zip(one, again, strict=True):
        assert (a.session, a.kind, a.parent, a.last) == (b.session, b.kind, b.parent, b.last)
        for field, value in a.append.items():
            assert_array_equal(value, b.append[field])
    assert not np.array_equal(one[0].expected["token_ids"], other[0].expected["token_ids"])


def test_parents_are_those_of_the_rules_and_every_kind_occurs():
    kinds, sessions = set(), {}
    for step in rollouts(SHAPE, groups=2, samples=4, turns=10, **SMALL):
        kinds.add(step.kind)
        oracle = sessions.setdefault(step.session["session_id"], OracleSession())
        recorded = oracle.append(step.append["prompt_token_ids"].tolist(), step.append["response_token_ids"].tolist())
        assert (recorded.parent, recorded.index) == (step.parent, step.index)
        assert recorded.tokens == step.expected["token_ids"].tolist()
        assert step.last == (step.index == 9)
        retried = any(s.parent == step.parent and s.prompt == recorded.prompt for s in oracle.steps[:-1])
        assert retried == (step.kind == "retry")
    assert kinds == {"start", "extend", "branch", "retry", "rewrite"}
    assert len(sessions) == 8


def test_spool_gives_back_what_the_workload_expects(sp):
    refs, expected, open_sessions = [], [], set()
    for step in rollouts(SHAPE, groups=2, samples=3, turns=8, **SMALL):
        s = sp.session(experts=SHAPE, **step.session)
        open_sessions.add(s.session_id)
        refs.append(s.append(**step.append))
        expected.append(step)
        assert (refs[-1].parent, refs[-1].index) == (step.parent, step.index)
        if step.last:
            s.finalize()
    for ref, sample, step in zip(refs, sp.read(refs), expected, strict=True):
        for field, value in step.expected.items():
            assert_array_equal(sample[field], value)
        assert sp.messages(ref) == step.append["messages"]
    assert {ref.session_id for ref in sp.segments()} == open_sessions
    assert sp.verify(deep=True).findings == ()


def test_it_is_fast_enough_to_feed_a_benchmark():
    shape = spool.models["qwen3.6-35b-a3b"]
    began = time.process_time()
    n_bytes = sum(step.n_bytes for step in rollouts(shape, groups=2, samples=4, turns=6))
    took = time.process_time() - began
    raw = np.random.default_rng(0)
    began = time.process_time()
    raw.random(n_bytes // 8)
    assert took < 60 * (time.process_time() - began)


@pytest.mark.parametrize("bad", [{"turns": 0}, {"prompt_tokens": 0}, {"groups": -1}, {"response_tokens": -1}])
def test_counts_are_checked(bad):
    with pytest.raises(spool.InputError):
        next(rollouts(SHAPE, **bad))
