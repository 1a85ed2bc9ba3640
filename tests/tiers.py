"""Spools with a cold root, small enough for tests, and what was recorded in them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time

import numpy as np

import spool

SHAPE = spool.MoEShape(num_layers=6, num_experts=128, topk=4)
FIELDS = (
    spool.FieldSpec(name="kept", dtype="int32", align="token", ragged=True),
    spool.FieldSpec(name="value", dtype="bfloat16", align="response"),
)


def record(sp, session_id, *, n_steps=3, n_prompt=40, n_response=60, seed=None, final=True, **identity):
    """Record a session of steps that go on from each other; return its segments (or its step references)."""
    rng = np.random.default_rng(abs(hash(session_id)) % 2**32 if seed is None else seed)
    s = sp.session(session_id, experts=SHAPE, **identity)
    prompt, steps = rng.integers(0, 1000, n_prompt).tolist(), []
    for index in range(n_steps):
        response = rng.integers(0, 1000, n_response).tolist()
        n = len(prompt) + len(response)
        steps.append(
            s.append(
                prompt_token_ids=prompt,
                response_token_ids=response,
                logprobs=rng.standard_normal(n_response).astype("f4"),
                routed_experts=_experts(rng, n - 1),
                weight_version=str(index),
                messages=[{"role": "user", "content": f"{session_id}-{number}"} for number in range(index + 1)],
            )
        )
        prompt = prompt + response + rng.integers(0, 1000, 7).tolist()
    return s.finalize(outcome="completed") if final else steps


def _experts(rng, n):
    """Return routing of ``n`` tokens: different experts in a row, neighbours alike, so that it compresses a little."""
    order = np.argsort(rng.random((n, SHAPE.num_layers, 16)), axis=-1)[..., : SHAPE.topk]
    return (order * 8).astype("i4")


def assert_same(samples, wanted):
    """Compare samples bit for bit."""
    assert len(samples) == len(wanted)
    for got, want in zip(samples, wanted, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name].dtype == value.dtype, name
            assert got[name].tobytes() == value.tobytes(), name


def remove_root(path):
    """Remove a hot root of which a spiller may just be writing its status."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
        if not os.path.exists(path):
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} is filled again and again")


def wait_for(condition, *, timeout_s=30.0, what="it"):
    """Return the first true value of ``condition()``."""
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.02)
    return found
