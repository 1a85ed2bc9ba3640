"""SGLang: ``/generate`` and the OpenAI-compatible endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spool.engines.choices import check_count, choice_generated, matched, no_token_ids, pick_choice, usage_count
from spool.engines.members import Json, Members, as_ids, as_list, column, first_given, first_ids, first_of
from spool.engines.step import EngineStep, Response, as_asked, as_response, make_step, reason, version
from spool.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from spool.model.moe import MoEShape


def from_sglang(
    response: Response,
    *,
    prompt_token_ids: Json = None,
    experts: MoEShape | str | None = None,
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
        experts: the model's shape, or its name; needed to tell the rows of a base64 payload apart.
        routed_experts_start: ``routed_experts_start_len`` of the request.
        request: the request's body, to take ``input_ids`` and ``routed_experts_start_len`` from.
        choice: which of the choices of an OpenAI-compatible response.

    Raises:
        PayloadError: a part of the response is malformed, or two of them tell of other tokens; says what was expected
            and what came. Or the server sent an error instead of a response.
        InputError: token ids are nowhere to be found, or the response is not one.
    """
    body = as_response(response)
    asked = as_asked(request, routed_experts_start, experts, start_key="routed_experts_start_len")
    part = pick_choice(body, choice)
    meta, outer = part.members("meta_info"), body.members("metadata")
    extra = (part if part.get("sglext") is not None else body).members("sglext")
    ended = meta if meta.get("finish_reason") is not None else part
    finish_reason, finish_message = reason(ended.get("finish_reason"), ended.at("finish_reason"))
    generated, logprobs = _generated(part, meta, _listed(part, extra, choice), finish_reason)
    check_count(generated, meta.count("completion_tokens"), said_as="meta_info.completion_tokens")
    check_count(generated, usage_count(body), said_as="usage.completion_tokens")
    prompt = first_given(as_ids(prompt_token_ids, "prompt_token_ids"), asked.request.ids("input_ids"))
    return make_step(
        prompt=_prompt(body, meta, extra) if prompt is None else prompt,
        response=generated,
        logprobs=logprobs,
        routing=first_of("routed_experts", meta, extra, part),
        routing_dtype=_first_text("routed_experts_dtype", meta, extra, part, body),
        start=asked.start,
        experts=asked.experts,
        version=version((meta, outer)),
        finish_reason=finish_reason,
        metadata={"cached_tokens": meta.get("cached_tokens"), "finish_message": finish_message},
    )


def _first_text(key: str, *places: Members) -> str | None:
    return next((text for text in (place.text(key) for place in places) if text is not None), None)


def _generated(
    part: Members, meta: Members, listed: NDArray[np.int32] | None, finish_reason: str | None
) -> tuple[NDArray[np.int32], list[Any] | None]:
    """Return the generated ids and their logprobs; where both are sent they must be of the same tokens."""
    entries = meta.list("output_token_logprobs")
    if entries is None:
        ids, logprobs = choice_generated(part, listed)
    else:
        scored, values = (column(entries, index, what=meta.at("output_token_logprobs")) for index in (1, 0))
        ids, logprobs = matched(listed, scored, values, listed_as="output_ids", scored_as="output_token_logprobs")
    if ids is None:
        if logprobs or (finish_reason != "abort" and meta.count("completion_tokens") != 0):
            raise no_token_ids("SGLang", "ask for them with return_logprob=True")
        ids = np.empty(0, np.int32)
    return ids, logprobs


def _listed(part: Members, extra: Members, choice: int) -> NDArray[np.int32] | None:
    """Return the ids listed outside of the logprobs; ``sglext`` has a list of them, one a choice."""
    lists, own = extra.list("output_ids") or [None], part.ids("output_ids")
    try:
        listed: Json = lists[choice if len(lists) > 1 else 0]
    except IndexError as error:
        raise PayloadError(
            f"sglext.output_ids has no list of ids for choice {choice}", field="response_token_ids"
        ) from error
    return as_ids(listed, extra.at(f"output_ids[{choice}]")) if own is None else own


def _prompt(body: Members, meta: Members, extra: Members) -> NDArray[np.int32] | None:
    listed = first_ids((body, "prompt_token_ids"), (meta, "prompt_token_ids"), (extra, "input_ids"))
    entries, path = meta.list("input_token_logprobs"), meta.at("input_token_logprobs")
    if listed is not None or not entries or len(entries) != meta.count("prompt_tokens"):
        return listed
    # The first prompt token has no logprob; a list that begins with one starts further in, and is not the whole prompt.
    first = as_list(entries[0], f"{path}[0]")
    return as_ids(column(entries, 1, what=path), path) if first and first[0] is None else None
