"""What the OpenAI-compatible endpoints of all engines share: choices, their token ids and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spool.engines.members import Members, as_members, column, first_given, first_ids
from spool.errors import InputError, PayloadError
from spool.formats.arrays import as_token_ids

_ID_PREFIX = "token_id:"  # what return_tokens_as_token_ids makes of tokens


def pick_choice(body: Members, index: int) -> Members:
    """Return choice ``index`` of a response; the response itself where it has no choices.

    Raises:
        InputError: there is none.
        PayloadError: it is no object.
    """
    if "choices" not in body:
        return body
    choices = body.list("choices") or ()
    if isinstance(index, bool) or not isinstance(index, int) or not -len(choices) <= index < len(choices):
        raise InputError(f"the response has no choice {index!r:.80}; it has {len(choices)}", expected=len(choices))
    return as_members(choices[index], body.at(f"choices[{index}]"))


def choice_logprobs(choice: Members) -> list[Any] | None:
    """Return the logprobs of the generated tokens, chat form or completions form; None where none were asked for."""
    logprobs = choice.members("logprobs")
    content = logprobs.list("content")
    if content is not None:
        return column(content, "logprob", what=logprobs.at("content"))
    values = logprobs.list("token_logprobs")
    return None if values is None else list(values)


def choice_generated(
    choice: Members, listed: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.int32] | None, list[Any] | None]:
    """Return the generated token ids and their logprobs, each None where it is not there; see `matched`.

    Args:
        choice: one of the choices of a response.
        listed: ids that the response lists outside of the choice.
    """
    inside = first_ids(*((choice, key) for key in ("token_ids", "output_token_ids", "completion_token_ids")))
    return matched(
        first_given(inside, listed), _spelt_ids(choice), choice_logprobs(choice), listed_as="token_ids",
        scored_as="logprobs",
    )  # fmt: skip


def matched(
    listed: NDArray[np.int32] | None,
    scored: Sequence[int] | None,
    logprobs: list[Any] | None,
    *,
    listed_as: str,
    scored_as: str,
) -> tuple[NDArray[np.int32] | None, list[Any] | None]:
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
    if listed is None and scored is None:
        return None, logprobs
    listed_as = scored_as if listed is None else listed_as
    ids: NDArray[np.int32] = as_token_ids(scored, what=scored_as) if listed is None else listed
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


def check_count(ids: Sequence[int] | NDArray[np.int32], said: int | None, *, said_as: str) -> None:
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


def usage_count(body: Members) -> int | None:
    """Return how many tokens ``usage`` says were generated; None where it does not, or for several choices at once."""
    said = body.members("usage").count("completion_tokens")
    return said if len(body.list("choices") or ()) == 1 else None


def _spelt_ids(choice: Members) -> Sequence[int] | None:
    """Return the token ids spelt ``token_id:N`` in the logprobs, or None."""
    logprobs = choice.members("logprobs")
    content = logprobs.list("content")
    if content is not None:
        names: Sequence[Any] = column(content, "token", what=logprobs.at("content"))
    else:
        names = logprobs.list("tokens") or ()
    if not names or not all(isinstance(name, str) and name.startswith(_ID_PREFIX) for name in names):
        return None
    try:
        return [int(name[len(_ID_PREFIX) :]) for name in names]
    except ValueError as error:
        raise PayloadError(f"a token id in logprobs is no number: {error}", field="response_token_ids") from error


def no_token_ids(engine: str, how: str) -> InputError:
    """Return the error for a response without the ids of what was generated."""
    return InputError(f"the {engine} response does not hold the generated token ids: {how}")
