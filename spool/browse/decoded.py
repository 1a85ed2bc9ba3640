"""What a step without messages said: the text of its tokens, no more of it than is worth reading at once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from spool.look.conversation import Block, Conversation
from spool.look.references import refs_of
from spool.look.text import count
from spool.look.tokens import Tokens

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.look.tree import StepLook
    from spool.look.vocabulary import Vocabulary

MOST_TOKENS = 2048
"""Tokens that are decoded: the last ones of what a step adds to the prompt, the first ones of what it generated."""


@lru_cache(maxsize=1)
def vocabulary(path: str) -> Vocabulary:
    """Return a tokenizer's vocabulary, which is read once.

    Raises:
        NotFoundError, InputError, ConfigError: as `Vocabulary.load`.
    """
    from spool.look.vocabulary import Vocabulary

    return Vocabulary.load(path)


def decoded(sp: Spool, step: StepLook, tokenizer: str) -> Conversation:
    """Return what a step adds to the prompt and what it generated, as two messages that say that they are decoded.

    Args:
        sp: the spool.
        step: the step.
        tokenizer: path of a ``tokenizer.json``.

    Raises:
        NotFoundError, InputError, ConfigError: the tokenizer cannot be used.
        ReleasedError, IntegrityError, StorageError: the tokens cannot be read.
    """
    (ref,) = refs_of(sp, step.ref)
    tokens, answer = Tokens(sp, ref, vocabulary(tokenizer)), step.n_prompt
    parts = {
        "prompt": (max(answer - step.n_new, answer - MOST_TOKENS, 0), answer),
        "response": (answer, min(answer + step.n_response, answer + MOST_TOKENS)),
    }
    found = [
        Block(place, role, "text", tokens.text(start, stop), f"decoded from tokens {count(start)} to {count(stop - 1)}")
        for place, (role, (start, stop)) in enumerate(parts.items())
        if start < stop
    ]
    found = [block for block in found if block.text]
    return Conversation(found, len(found), 0)
