"""The text of token ids, by a ``tokenizer.json``: of each token for itself, bytes of split characters as bytes."""

from __future__ import annotations

import os
import re
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct

from spool.errors import ConfigError, InputError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

LOOK_BACK = 4
"""Tokens in front of a window that may hold the first bytes of its first character."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNKNOWN = "\ufffd".encode()
_LARGEST_ID = (1 << 32) - 1


class TokenText(Struct, frozen=True):
    r"""What a token stands for.

    Attributes:
        text: its characters; bytes that are not a whole character in this token as ``\xf0``. None: no such token.
        special: a mark that no text is made of, such as the end of a turn.
        completes: characters whose last bytes these are.
    """

    text: str | None
    special: bool = False
    completes: str = ""


class Vocabulary:
    """The vocabulary of one tokenizer; see `load`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = repr(tokenizer.decoder)
        self._tokenizer = tokenizer
        self._added = {
            number: (added.content.encode(errors="surrogatepass"), added.special)
            for number, added in tokenizer.get_added_tokens_decoder().items()
        }
        self._bytes = _byte_characters() if "ByteLevel" in decoder else None
        self._fallback = "ByteFallback" in decoder
        self._spaced = "Metaspace" in decoder or "▁" in decoder
        self._known: dict[int, tuple[bytes | None, bool]] = {}

    @staticmethod
    def load(path: str) -> Vocabulary:
        """Read a ``tokenizer.json``.

        Raises:
            NotFoundError: there is no such file.
            InputError: it is no tokenizer.
            ConfigError: the library ``tokenizers`` is not installed.
        """
        if not os.path.isfile(path):
            raise NotFoundError(f"there is no tokenizer file {path!r}")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                "text of tokens needs the library tokenizers: pip install '.[tui]' in a checkout, or "
                "pip install 'spool-store[tui]'"
            ) from error
        try:
            return Vocabulary(Tokenizer.from_file(path))
        except Exception as error:  # the library raises nothing more precise
            raise InputError(f"{path!r} is not a tokenizer.json: {error}", path=path) from error

    def texts(self, ids: Sequence[int | None]) -> list[TokenText]:
        """Return what each of successive tokens stands for; None is a token that is not known."""
        pieces = [(None, False) if number is None else self._piece(number) for number in ids]
        found: list[TokenText] = []
        run: list[bytes] = []
        for data, special in pieces:
            if data is not None and not special:
                run.append(data)
                continue
            found += _decoded(run)
            run = []
            found.append(TokenText(None if data is None else data.decode(errors="backslashreplace"), special))
        return found + _decoded(run)

    def text(self, ids: Sequence[int | None]) -> str:
        """Return the text of successive tokens as one; a token that is not known is a replacement character."""
        pieces = [None if number is None else self._piece(number)[0] for number in ids]
        whole = b"".join(_UNKNOWN if data is None else data for data in pieces)
        return whole.decode(errors="backslashreplace")

    def _piece(self, number: int) -> tuple[bytes | None, bool]:
        piece = self._known.get(number)
        if piece is None:
            piece = self._known[number] = self._added.get(number) or (self._data(number), False)
        return piece

    def _data(self, number: int) -> bytes | None:
        token = self._tokenizer.id_to_token(number) if 0 <= number <= _LARGEST_ID else None
        if token is None:
            return None
        if self._bytes is not None and all(char in self._bytes for char in token):
            return bytes(self._bytes[char] for char in token)
        match = _BYTE.fullmatch(token) if self._fallback else None
        if match is not None:
            return bytes((int(match[1], 16),))
        return (token.replace("▁", " ") if self._spaced else token).encode(errors="surrogatepass")


def _decoded(run: Sequence[bytes]) -> list[TokenText]:
    """Return the text of tokens that are pieces of one UTF-8 text."""
    texts, completes = [""] * len(run), [""] * len(run)
    ends = list(accumulate(map(len, run)))
    first = at = 0
    for char in b"".join(run).decode("utf-8", "surrogateescape"):
        stray = "\udc80" <= char <= "\udcff"
        data = bytes((ord(char) - 0xDC00,)) if stray else char.encode()
        while ends[first] <= at:
            first += 1
        if not stray and at + len(data) <= ends[first]:
            texts[first] += char
        else:
            for byte in data:
                while ends[first] <= at:
                    first += 1
                texts[first] += f"\\x{byte:02x}"
                at += 1
            at -= len(data)
            completes[first] += "" if stray else char
        at += len(data)
    return [TokenText(text, completes=whole) for text, whole in zip(texts, completes, strict=True)]


def _byte_characters() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for: printable ones for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}
