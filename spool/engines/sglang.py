"""SGLang: ``/generate`` and the OpenAI-compatible endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spool.engines.choices import choice_logprobs, choice_token_ids, no_token_ids, pick_choice
from spool.engines.step import (
    EngineStep,
    Json,
    Response,
    as_response,
    column,
    first_given,
    make_step,
    mapping,
    reason,
    version,
)
from spool.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spool.model.moe import MoEShape


def from_sglang(
    response: Response,
    *,
    prompt_token_ids: Json = None,
    experts: MoEShape | None = None,
    routed_experts_start: int = 0,
    request: Mapping[str, Any] | None = None,
    choice: int = 0,
) -> EngineStep:
    """Read one SGLang response.

    Takes every form of routing that SGLang has sent: base64 of int32, of the dtype named in ``routed_experts_dtype``,
    and nested lists. A server may ignore the start it was asked for, so the number of rows is not judged here but by
    `Session.append`, which knows the tokens.

    Args:
        response: of ``/generate``, ``/v1/completions`` or ``/v1/chat/completions``, or its JSON text.
        prompt_token_ids: what was sent as input; needed unless the request or the response holds it.
        experts: the model's shape; needed to tell the rows of a base64 payload apart.
        routed_experts_start: ``routed_experts_start_len`` of the request.
        request: the request's body, to take ``input_ids`` and ``routed_experts_start_len`` from.
        choice: which of the choices of an OpenAI-compatible response.

    Raises:
        PayloadError: a part of the response is malformed; says what was expected and what came.
        InputError: token ids are nowhere to be found, or the response is not one.
    """
    body, asked = as_response(response), mapping(request)
    part = pick_choice(body, choice) if "choices" in body else body
    meta, extra = mapping(part.get("meta_info")), mapping(first_given(part.get("sglext"), body.get("sglext")))
    outer = mapping(body.get("metadata"))
    finish_reason, finish_message = reason(first_given(meta.get("finish_reason"), part.get("finish_reason")))
    generated, logprobs = _generated(part, meta, extra, finish_reason)
    return make_step(
        prompt=first_given(prompt_token_ids, asked.get("input_ids"), _prompt(body, meta, extra)),
        response=generated,
        logprobs=logprobs,
        routing=_first_of("routed_experts", meta, extra, part),
        routing_dtype=_first_of("routed_experts_dtype", meta, extra, part, body),
        start=routed_experts_start or asked.get("routed_experts_start_len") or 0,
        experts=experts,
        version=version(_first_of("weight_version", meta, outer), _first_of("weight_versions", meta, outer)),
        finish_reason=finish_reason,
        metadata={"cached_tokens": meta.get("cached_tokens"), "finish_message": finish_message},
    )


def _first_of(key: str, *places: Mapping[str, Any]) -> Json:
    return first_given(*(place.get(key) for place in places))


def _generated(
    part: Mapping[str, Any], meta: Mapping[str, Any], extra: Mapping[str, Any], finish_reason: str | None
) -> tuple[Sequence[int], Sequence[float] | None]:
    """Return the generated ids and their logprobs; scored ids win over ``output_ids``, maybe without stop token."""
    listed = first_given(part.get("output_ids"), next(iter(extra.get("output_ids") or ()), None))
    entries = meta.get("output_token_logprobs")
    if entries is None and "logprobs" in part:
        ids = first_given(choice_token_ids(part), listed)
        logprobs: Sequence[float] | None = choice_logprobs(part)
    elif entries is None:
        ids, logprobs = listed, None
    else:
        ids, logprobs = (column(entries, index, what="output_token_logprobs") for index in (1, 0))
        if listed is not None:
            _check_same(listed, ids)
    if ids is None:
        if finish_reason != "abort" and meta.get("completion_tokens") != 0:
            raise no_token_ids("SGLang", "ask for them with return_logprob=True")
        ids = ()
    return ids, logprobs


def _check_same(listed: Sequence[int], scored: Sequence[int]) -> None:
    n = min(len(listed), len(scored))
    if list(listed[:n]) != list(scored[:n]):
        token = next(i for i in range(n) if listed[i] != scored[i])
        raise PayloadError(
            f"output_ids and output_token_logprobs disagree at generated token {token}: "
            f"{listed[token]} and {scored[token]}",
            field="response_token_ids", token=token,
        )  # fmt: skip


def _prompt(body: Mapping[str, Any], meta: Mapping[str, Any], extra: Mapping[str, Any]) -> Json:
    listed = first_given(_first_of("prompt_token_ids", body, meta), extra.get("input_ids"))
    entries: Json = meta.get("input_token_logprobs")
    # The first prompt token has no logprob; a list that begins with one starts further in, and is not the whole prompt.
    whole = listed is None and bool(entries) and len(entries) == meta.get("prompt_tokens") and entries[0][0] is None
    return column(entries, 1, what="input_token_logprobs") if whole else listed
