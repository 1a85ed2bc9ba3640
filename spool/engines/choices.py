"""What the OpenAI-compatible endpoints of all engines share: choices, their token ids and logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spool.engines.step import Json, column, first_given, mapping
from spool.errors import InputError, PayloadError
from spool.formats.arrays import as_token_ids

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


def choice_generated(choice: Mapping[str, Any], listed: Json = None) -> tuple[Json, list[Any] | None]:
    """Return the generated token ids and their logprobs, each None where it is not there; see `matched`.

    Args:
        choice: one of the choices of a response.
        listed: ids that the response lists outside of the choice.
    """
    inside = first_given(choice.get("token_ids"), choice.get("output_token_ids"), choice.get("completion_token_ids"))
    return matched(
        first_given(inside, listed), _spelt_ids(choice), choice_logprobs(choice), listed_as="token_ids",
        scored_as="logprobs",
    )  # fmt: skip


def matched(
    listed: Json, scored: Sequence[int] | None, logprobs: list[Any] | None, *, listed_as: str, scored_as: str
) -> tuple[Json, list[Any] | None]:
    """Return the generated token ids and their logprobs, if the two places that tell of them tell the same.

    Every engine lists the token that ended the generation in both places, so a difference is a loss on the way: no
    token is dropped or taken over from the longer of the two.

    Args:
        listed: ids by themselves, or None.
        scored: ids that stand with the logprobs, or None.
        logprobs: none or an empty list where ids were not scored.
        listed_as, scored_as: name the two places in errors.

    Raises:
        PayloadError: their number differs, or an id; names both.
    """
    given = first_given(listed, scored)
    if given is None:
        return None, logprobs
    listed_as = scored_as if listed is None else listed_as
    ids = as_token_ids(given, what=listed_as)
    for other in filter(None, (scored, logprobs)):
        if len(other) != len(ids):
            raise PayloadError(
                f"{listed_as} has {len(ids)} generated tokens and {scored_as} has {len(other)}: some were lost on the "
                f"way, or this is one piece of a stream",
                field="response_token_ids", expected=len(ids), got=len(other),
            )  # fmt: skip
    if listed is not None and scored:
        _check_same(ids, as_token_ids(scored, what=scored_as), listed_as, scored_as)
    return ids, logprobs if logprobs or not len(ids) else None


def _check_same(listed: NDArray[np.int32], scored: NDArray[np.int32], listed_as: str, scored_as: str) -> None:
    differs = np.flatnonzero(listed != scored)
    if differs.size:
        token = int(differs[0])
        raise PayloadError(
            f"{listed_as} and {scored_as} disagree at generated token {token}: {listed[token]} and {scored[token]}",
            field="response_token_ids", token=token,
        )  # fmt: skip


def check_count(ids: Json, said: object, *, said_as: str) -> None:
    """Check the number of generated tokens against the one that the response states, if it does.

    Raises:
        PayloadError: they differ; names both.
    """
    if said is not None and said != len(ids):
        raise PayloadError(
            f"the response holds {len(ids)} generated tokens and {said_as} says {said}: some were lost on the way, or "
            f"this is one piece of a stream",
            field="response_token_ids", expected=said, got=len(ids),
        )  # fmt: skip


def usage_count(response: Mapping[str, Any]) -> Json:
    """Return how many tokens ``usage`` says were generated; None where it does not, or for several choices at once."""
    choices = response.get("choices")
    return mapping(response.get("usage")).get("completion_tokens") if choices and len(choices) == 1 else None


def _spelt_ids(choice: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the token ids spelt ``token_id:N`` in the logprobs, or None."""
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
