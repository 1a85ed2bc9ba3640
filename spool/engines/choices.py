"""What the OpenAI-compatible endpoints of all engines share: choices, their token ids and logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spool.engines.step import column, first_given, mapping
from spool.errors import InputError, PayloadError

_ID_PREFIX = "token_id:"  # what return_tokens_as_token_ids makes of tokens


def pick_choice(response: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return choice ``index`` of a response.

    Raises:
        InputError: there is none.
    """
    choices = response.get("choices")
    if not isinstance(choices, Sequence) or not -len(choices) <= index < len(choices):
        n = len(choices) if isinstance(choices, Sequence) else 0
        raise InputError(f"the response has no choice {index}; it has {n}", got=index, expected=n)
    return mapping(choices[index])


def choice_logprobs(choice: Mapping[str, Any]) -> list[Any] | None:
    """Return the logprobs of the generated tokens, chat form or completions form; None where none were asked for."""
    logprobs = mapping(choice.get("logprobs"))
    if logprobs.get("content") is not None:
        return column(logprobs["content"], "logprob", what="logprobs.content")
    values = logprobs.get("token_logprobs")
    return None if values is None else list(values)


def choice_token_ids(choice: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the generated token ids: listed, or spelt ``token_id:N`` in the logprobs; None where neither is there."""
    listed = first_given(choice.get("token_ids"), choice.get("output_token_ids"), choice.get("completion_token_ids"))
    if listed is not None:
        return listed  # type: ignore[no-any-return]
    logprobs = mapping(choice.get("logprobs"))
    if logprobs.get("content") is not None:
        names = column(logprobs["content"], "token", what="logprobs.content")
    else:
        names = logprobs.get("tokens") or []
    if not names or not all(isinstance(name, str) and name.startswith(_ID_PREFIX) for name in names):
        return None
    try:
        return [int(name[len(_ID_PREFIX) :]) for name in names]
    except ValueError as error:
        raise PayloadError(f"a token id in logprobs is no number: {error}", field="response_token_ids") from error


def no_token_ids(engine: str, how: str) -> InputError:
    """Return the error for a response without the ids of what was generated."""
    return InputError(f"the {engine} response does not hold the generated token ids: {how}")
