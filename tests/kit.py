"""What the tests of the public API send: a small model, routing and logprobs that depend on the tokens before them."""

from __future__ import annotations

import zlib

import numpy as np

from spool.model.moe import MoEShape

SHAPE = MoEShape(num_layers=3, num_experts=256, topk=2, moe_layers=(1, 2))


def prefix_hashes(tokens, salt=0) -> np.ndarray:
    """Return uint32 [len(tokens)]: the same for the same tokens up to here, other otherwise."""
    out, running = np.empty(len(tokens), np.uint32), salt
    for i, token in enumerate(np.asarray(tokens, np.int32)):
        running = zlib.crc32(token.tobytes(), running)
        out[i] = running
    return out


def routing(tokens, salt=0) -> np.ndarray:
    """Return int32 [T-1, 3, 2]: the forward over each token but the last; layer 0 is dense."""
    hashes = prefix_hashes(tokens, salt)[: max(len(tokens) - 1, 0)].astype(np.int64)
    out = np.zeros((len(hashes), 3, 2), np.int32)
    out[:, 1, 0], out[:, 2, 0] = hashes & 255, hashes >> 8 & 255
    out[:, 1, 1] = (out[:, 1, 0] + 1 + (hashes >> 16 & 127)) & 255
    out[:, 2, 1] = (out[:, 2, 0] + 1 + (hashes >> 24 & 127)) & 255
    return out


def probabilities(tokens, n_prompt, salt=0) -> np.ndarray:
    """Return float32 [T - n_prompt]: a logprob for each response token."""
    return -(prefix_hashes(tokens, salt + 1)[n_prompt:] % 4096 / np.float32(256)).astype(np.float32)


def session(sp, session_id="s", **more):
    """Return a session of the small model; of a random name where ``session_id`` is None."""
    return sp.session(session_id=session_id, experts=SHAPE, **more)


def add(s, prompt, response, **more):
    """Append a step with all its routing and logprobs, unless ``more`` says otherwise."""
    tokens = [*prompt, *response]
    step = {"logprobs": probabilities(tokens, len(prompt)), "routed_experts": routing(tokens), **more}
    return s.append(prompt_token_ids=list(prompt), response_token_ids=list(response), **step)


def counting(n, first=1000) -> list:
    """Return ``n`` distinct token ids from ``first`` on."""
    return list(range(first, first + n))
