"""What the tests of the trainer's side record, and what stands for missing routing, in plain loops."""

from __future__ import annotations

import numpy as np
from kit import SHAPE, add, counting, session

N_LAYERS, N_EXPERTS, TOPK = SHAPE.num_layers, SHAPE.num_experts, SHAPE.topk


def plain_ids(row, layer, k):
    return (row * N_LAYERS * TOPK + layer * TOPK + k) % N_EXPERTS if layer else 0


def plain_rows(row):
    return [[plain_ids(row, layer, k) for k in range(TOPK)] for layer in range(N_LAYERS)]


def with_unit(sp, n_rows=4, at=2):
    rng = np.random.default_rng(5)
    n = 8 + n_rows - 1
    experts = np.zeros((n - 1, N_LAYERS, TOPK), np.int32)
    experts[:, 1:] = rng.permuted(np.tile(np.arange(256), (n - 1, 2, 1)), axis=2)[..., :TOPK]
    s = session(sp, None)
    s.append(
        prompt_token_ids=[1, 2, 99, 3, 4], response_token_ids=[7, 8, 9], routed_experts=experts,
        logprobs=[-1, -2, -3], units=[("image", at, n_rows)],
    )  # fmt: skip
    return s.finalize()[0], experts


def with_gap(sp, **more):
    s = session(sp, None)
    add(s, counting(3), [50, 51])
    add(s, [*counting(3), 50, 51, 60], [52, 53], routed_experts=None, **more)
    (ref,) = s.view(gaps="keep")
    return ref
