"""vLLM: ``/v1/completions``, ``/v1/chat/completions`` and ``/inference/v1/generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spool.engines.choices import check_count, choice_generated, no_token_ids, pick_choice, usage_count
from spool.engines.members import Json, Members, as_ids, first_given, first_ids, first_of
from spool.engines.step import EngineStep, Response, as_asked, as_response, make_step, reason, version
from spool.engines.wires import decode_routing
from spool.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from spool.model.moe import MoEShape


def from_vllm(
    response: Response,
    *,
    prompt_token_ids: Json = None,
    experts: MoEShape | str | None = None,
    routed_experts_start: int = 0,
    request: Mapping[str, Any] | None = None,
    choice: int = 0,
) -> EngineStep:
    """Read one choice of a vLLM response.

    0.22 and later send prompt and response in one ``.npy`` payload on the choice. 0.21 sends MoE layers only, the
    prompt's rows (``prompt_routed_experts``, -1 where they came from the cache) apart from the generated ones, whose
    first row is that of the first generated token: the two are put together here.

    Token ids and logprobs must be of the same tokens, and as many as ``usage`` says where there is one choice; ids that
    come without logprobs (or with an empty list of them) are a response without logprobs.

    Args:
        response: of any of the endpoints, or its JSON text; ask for ``return_token_ids`` and ``logprobs``.
        prompt_token_ids: what was sent as input, where neither request nor response holds it.
        experts: the model's shape, or its name, checked against the payload's.
        routed_experts_start: ``routed_experts_prompt_start`` of the request.
        request: the request's body, to take token ids and start from.
        choice: which of the choices.

    Raises:
        PayloadError: a part of the response is malformed, or two of them tell of other tokens; says what was expected
            and what came. Or the server sent an error instead of a response.
        InputError: token ids are nowhere to be found, or the response is not one.
    """
    body = as_response(response)
    asked = as_asked(request, routed_experts_start, experts, start_key="routed_experts_prompt_start")
    part = pick_choice(body, choice)
    finish_reason, _ = reason(part.get("finish_reason"), part.at("finish_reason"))
    ids, logprobs = choice_generated(part)
    if ids is None:
        if logprobs or finish_reason != "abort":
            raise no_token_ids("vLLM", "ask for them with return_token_ids=True")
        ids = np.empty(0, np.int32)
    check_count(ids, usage_count(body), said_as="usage.completion_tokens")
    prompt = first_given(as_ids(prompt_token_ids, "prompt_token_ids"), _sent_ids(asked.request))
    if prompt is None:
        prompt = first_ids((part, "prompt_token_ids"), (body, "prompt_token_ids"))
    n_prompt, start = 0 if prompt is None else len(prompt), asked.start
    routing: Json = first_of("routed_experts", part, part.members("message"))
    head = first_of("prompt_routed_experts", part, body)
    if head is not None:
        routing = _joined(head, routing, n_prompt, asked.experts)
    elif routing is not None:
        routing, said = decode_routing(routing, experts=asked.experts)
        start = _start_of(len(routing), start if said is None else said, n_prompt, len(ids))
    return make_step(
        prompt=prompt,
        response=ids,
        logprobs=logprobs,
        routing=routing,
        routing_dtype=None,
        start=start,
        experts=asked.experts,
        version=version((part, body, body.members("metadata"))),
        finish_reason=finish_reason,
        metadata={"cached_tokens": body.members("usage").members("prompt_tokens_details").get("cached_tokens")},
    )


def _sent_ids(request: Members) -> NDArray[np.int32] | None:
    prompt = request.get("prompt")
    spelt = request.get("token_ids") is None and isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
    return request.ids("prompt" if spelt else "token_ids")


def _start_of(n_rows: int, start: int, n_prompt: int, n_response: int) -> int:
    """Return where the rows begin: behind the prompt where only the generated rows were sent (0.21)."""
    n_tokens = n_prompt + n_response
    fits = n_rows in (n_tokens - 1 - start, n_tokens - 1, n_tokens - start, n_tokens)
    return n_prompt if not fits and n_response and n_rows in (n_response - 1, n_response) else start


def _joined(head: object, tail: object, n_prompt: int, experts: MoEShape | None) -> NDArray[Any]:
    """Return the prompt's rows followed by the generated tokens' rows; copies, in the wider of the two dtypes."""
    first = decode_routing(head, experts=experts, what="prompt_routed_experts").rows
    if len(first) != n_prompt:
        raise PayloadError(
            f"prompt_routed_experts has {len(first)} rows for {n_prompt} prompt tokens",
            field="routed_experts", expected=n_prompt, got=len(first),
        )  # fmt: skip
    if tail is None:
        return first
    rest = decode_routing(tail, experts=experts).rows
    if not len(rest):
        return first
    if rest.shape[1:] != first.shape[1:]:
        raise PayloadError(
            f"prompt_routed_experts has rows of {first.shape[1:]}, routed_experts of {rest.shape[1:]}",
            field="routed_experts",
        )
    return np.concatenate((first, rest))
