"""SGLang: ``/generate`` and the OpenAI-compatible endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spool.engines.choices import check_count, choice_generated, matched, no_token_ids, pick_choice, usage_count
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
    from collections.abc import Mapping

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

    What was generated may be told thrice: ``output_ids``, ``output_token_logprobs`` and ``completion_tokens``. SGLang
    counts the token that ended the generation in all of them, so all that are there must agree, for an aborted request,
    too; ids that come without logprobs (or with an empty list of them) are a response without logprobs. One piece of a
    stream is not a response: join the pieces first.

    Args:
        response: of ``/generate``, ``/v1/completions`` or ``/v1/chat/completions``, or its JSON text.
        prompt_token_ids: what was sent as input; needed unless the request or the response holds it.
        experts: the model's shape; needed to tell the rows of a base64 payload apart.
        routed_experts_start: ``routed_experts_start_len`` of the request.
        request: the request's body, to take ``input_ids`` and ``routed_experts_start_len`` from.
        choice: which of the choices of an OpenAI-compatible response.

    Raises:
        PayloadError: a part of the response is malformed, or two of them tell of other tokens; says what was expected
            and what came. Or the server sent an error instead of a response.
        InputError: token ids are nowhere to be found, or the response is not one.
    """
    body, asked = as_response(response), mapping(request)
    part = pick_choice(body, choice) if "choices" in body else body
    meta, extra = mapping(part.get("meta_info")), mapping(first_given(part.get("sglext"), body.get("sglext")))
    outer = mapping(body.get("metadata"))
    finish_reason, finish_message = reason(first_given(meta.get("finish_reason"), part.get("finish_reason")))
    generated, logprobs = _generated(part, meta, _listed(part, extra, choice), finish_reason)
    check_count(generated, meta.get("completion_tokens"), said_as="meta_info.completion_tokens")
    check_count(generated, usage_count(body), said_as="usage.completion_tokens")
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
    part: Mapping[str, Any], meta: Mapping[str, Any], listed: Json, finish_reason: str | None
) -> tuple[Json, list[Any] | None]:
    """Return the generated ids and their logprobs; where both are sent they must be of the same tokens."""
    entries = meta.get("output_token_logprobs")
    if entries is None:
        ids, logprobs = choice_generated(part, listed)
    else:
        scored, values = (column(entries, index, what="output_token_logprobs") for index in (1, 0))
        ids, logprobs = matched(listed, scored, values, listed_as="output_ids", scored_as="output_token_logprobs")
    if ids is None:
        if logprobs or (finish_reason != "abort" and meta.get("completion_tokens") != 0):
            raise no_token_ids("SGLang", "ask for them with return_logprob=True")
        ids = ()
    return ids, logprobs


def _listed(part: Mapping[str, Any], extra: Mapping[str, Any], choice: int) -> Json:
    """Return the ids listed outside of the logprobs; ``sglext`` has a list of them, one a choice."""
    lists = extra.get("output_ids") or [None]
    try:
        return first_given(part.get("output_ids"), lists[choice if len(lists) > 1 else 0])
    except (IndexError, KeyError, TypeError) as error:
        raise PayloadError(
            f"sglext.output_ids has no list of ids for choice {choice}", field="response_token_ids"
        ) from error


def _prompt(body: Mapping[str, Any], meta: Mapping[str, Any], extra: Mapping[str, Any]) -> Json:
    listed = first_given(_first_of("prompt_token_ids", body, meta), extra.get("input_ids"))
    entries: Json = meta.get("input_token_logprobs")
    # The first prompt token has no logprob; a list that begins with one starts further in, and is not the whole prompt.
    whole = listed is None and bool(entries) and len(entries) == meta.get("prompt_tokens") and entries[0][0] is None
    return column(entries, 1, what="input_token_logprobs") if whole else listed
