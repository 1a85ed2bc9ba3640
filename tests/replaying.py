"""A recorded run for the tests of replay, and what a plain loop makes of it."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np

import spool

SHAPE = spool.MoEShape(num_layers=3, num_experts=300, topk=2, moe_layers=(1, 2))
FIELDS = (
    spool.FieldSpec(name="value", dtype="bfloat16", align="token", shape=(2,)),
    spool.FieldSpec(name="entropy", dtype="float32", align="response"),
    spool.FieldSpec(name="kept", dtype="int32", align="response", ragged=True),
    spool.FieldSpec(name="links", dtype="int16", align="token", ragged=True, positions=True, missing=-1),
    spool.FieldSpec(name="parent", dtype="int16", align="token", positions=True, missing=-1),
    spool.FieldSpec(name="kl", dtype="float32", align="step"),
)
WHERE = "outcome = 'completed' and reward > 0.5 and n_tokens < 32768"


def record(sp, session_id, *, n_steps=2, n_prompt=9, n_response=6, units=(), reward=1.0, seed=0, **identity):
    """Record a session with all kinds of fields; return its segments."""
    rng = np.random.default_rng(seed)
    session = sp.session(session_id, experts=SHAPE, fields=FIELDS, **identity)
    prompt = rng.integers(0, 5000, n_prompt).tolist()
    for _ in range(n_steps):
        response = rng.integers(0, 5000, n_response).tolist()
        n = len(prompt) + n_response
        counts = rng.integers(0, 4, n_response)
        session.append(
            prompt_token_ids=prompt,
            response_token_ids=response,
            logprobs=-rng.random(n_response, np.float32),
            routed_experts=routing(rng, n - 1 + sum(n_rows - 1 for _, _, n_rows in units)),
            units=list(units),
            weight_version="1",
            fields={
                "value": rng.standard_normal((n, 2)).astype(ml_dtypes.bfloat16),
                "entropy": rng.random(n_response, np.float32),
                "kept": [rng.integers(0, 99, count).tolist() for count in counts],
                "links": [[-1, *range(max(token - 2, 0), token)] for token in range(n)],
                "parent": np.arange(n, dtype=np.int16) - 1,
                "kl": float(rng.random()),
            },
        )
        prompt = [*prompt, *response, *rng.integers(0, 5000, 3).tolist()]
    segments = session.finalize(outcome="completed")
    sp.annotate(session_id, reward=reward)
    return segments


def routing(rng, n_rows):
    """Return int32 [n_rows, 3, 2]: distinct experts in a row, layer 0 dense."""
    rows = np.zeros((n_rows, 3, 2), np.int32)
    rows[:, 1:, 0] = rng.integers(0, 300, (n_rows, 2))
    rows[:, 1:, 1] = (rows[:, 1:, 0] + rng.integers(1, 300, (n_rows, 2))) % 300
    return rows


def record_run(sp):
    """Record groups whose sessions end in turn, some with images, one too long a prompt, one that failed."""
    for number in range(12):
        units = [("image", 2, 5), ("image", 4, 3)] if number % 4 == 3 else ()
        n_steps, n_response = 1 + number % 3, 3 + number % 5
        group = None if number == 7 else f"g{number % 4}"
        record(
            sp, f"s{number}", n_steps=n_steps, n_response=n_response, units=units, group_id=group, rollout_step=1,
            seed=number,
        )  # fmt: skip
    record(sp, "long", n_prompt=200, seed=100)
    record(sp, "poor", reward=0.0, seed=101)


def row_of(ref, token):
    """Return the first row that a token of a sequence expands to."""
    return int(token) + sum(unit.n_rows - 1 for unit in ref.units if unit.position < token)


def packed(samples, fill=-1):
    """Return what a batch of these samples must hold, row by row; its arrays, and its ragged fields as lists."""
    rows = {name: [] for name in ("token_ids", "loss_mask", "logprobs", "entropy", "routed_experts", "value", "parent")}
    kept, links, kl, cu, cu_steps, positions = [], [], [], [0], [0], []
    for sample in samples:
        ref, begin = sample.ref, cu[-1]
        sizes = {unit.position: unit.n_rows for unit in ref.units}
        for token in range(ref.n_tokens):
            answer = token - ref.response_start
            for _ in range(sizes.get(token, 1)):
                rows["token_ids"].append(sample["token_ids"][token])
                rows["loss_mask"].append(sample["loss_mask"][token])
                rows["value"].append(sample["value"][token])
                parent = sample["parent"][token]
                rows["parent"].append(row_of(ref, parent) + begin if parent >= 0 else parent)
                for name in ("logprobs", "entropy"):
                    rows[name].append(sample[name][answer] if answer >= 0 else 0)
                ends = sample["kept"].offsets[answer : answer + 2] if answer >= 0 else (0, 0)
                kept.append(sample["kept"].values[slice(*ends)].tolist())
                own = sample["links"].values[slice(*sample["links"].offsets[token : token + 2])].tolist()
                links.append([row_of(ref, position) + begin if position >= 0 else position for position in own])
        rows["routed_experts"] += [*sample["routed_experts"], np.full((3, 2), fill)]
        kl += sample["kl"].tolist()
        cu.append(begin + ref.n_rows)
        cu_steps.append(len(kl))
        positions += range(ref.n_rows)
    more = {"kl": kl, "cu_seqlens": cu, "cu_steps": cu_steps, "position_ids": positions}
    return {name: np.array(value) for name, value in {**rows, **more}.items()}, {"kept": kept, "links": links}


class Environment:
    """Sets the variables of the process that made it, in another: a fork server has those of when it was started."""

    def __init__(self):
        self._values = dict(os.environ)

    def __call__(self, _worker):
        os.environ.update(self._values)


def facts(batch):
    """Return a batch's segments and a digest of its arrays, from whichever process it comes."""
    return [ref.id for ref in batch.refs], int(batch["token_ids"].sum()), int(batch["routed_experts"].sum())
