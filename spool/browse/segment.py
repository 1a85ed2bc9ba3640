"""The screen of one segment or step: its tokens, and what is known of the one under the cursor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from spool.browse.decoded import vocabulary
from spool.browse.line_input import LineInput
from spool.browse.screen import SpoolScreen
from spool.browse.token_pane import TokenFacts, TokenPane
from spool.browse.tokens import TokenTable
from spool.look.text import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import ComposeResult

    from spool.browse.lines import Lines
    from spool.look.tokens import TokenRow, Tokens
    from spool.model.refs import SegmentRef, StepRef


class SegmentScreen(SpoolScreen):
    """The tokens of a segment or step.

    Args:
        ref: the segment or step.
    """

    TITLE = "tokens"
    DEFAULT_CSS = """
    SegmentScreen #tokens { width: 1fr; }
    SegmentScreen.-narrow TokenPane { display: none; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-wide")]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "edge(1)", "next edge"),
        Binding("p", "edge(-1)", "previous edge", show=False),
        Binding("colon", "ask_token", "go to", key_display=":"),
        Binding("r", "routing", "routing"),
    ]

    WORDS: ClassVar[Mapping[str, str]] = {
        "surprise": "how unlikely the token was: -logprob, one cell a nat",
        "M": "the loss mask: 1 where the token is trained",
        "edge": "a token where the loss mask or the weight version changes",
        "V, R, U": "before an id: a new version, the response, a unit begins",
    }

    def __init__(self, ref: SegmentRef | StepRef) -> None:
        super().__init__()
        self.ref = ref
        self._tokens: Tokens | None = None
        self._edges: Sequence[int] | None = None
        self._wanted = (0, 0)

    def content(self) -> ComposeResult:
        """Yield the table, the pane beside it, and the line to type a token into."""
        with Horizontal():
            yield TokenTable(has_text=self.browser.tokenizer is not None, id="tokens")
            yield TokenPane(id="token")
        yield LineInput(id="line")

    def on_mount(self) -> None:
        """Say what the screen shows, and have the schemas read."""
        if not self.query(TokenTable):  # left before it was laid out
            return
        ref, span = self.ref, self.ref.version_span
        versions = "" if span is None else f" · version {span[0]}" + ("" if span[0] == span[1] else f"..{span[1]}")
        self.headline(
            f" · {count(ref.n_tokens)} tokens · response from {count(ref.response_start)}"
            f" · {count(ref.trainable_tokens)} trained{versions}",
            ref.id,
        )
        table = self.query_one(TokenTable)
        table.count(ref.n_tokens, cursor=0)
        table.focus()
        self.ask("open", self._open, self._opened)

    def refer(self) -> SegmentRef | StepRef:
        """Return the segment or step."""
        return self.ref

    def _open(self) -> tuple[Tokens, str | None]:
        from spool.errors import InputError, NotFoundError
        from spool.look.tokens import Tokens

        known, problem = None, None
        if self.browser.tokenizer is not None:
            try:
                known = vocabulary(self.browser.tokenizer)
            except (InputError, NotFoundError) as error:
                problem = str(error)
        return Tokens(self.spool, self.ref, known), problem

    def _opened(self, found: tuple[Tokens, str | None]) -> None:
        self._tokens, problem = found
        self._read_rows()
        self._look()
        if problem is not None:
            self.fail(problem)
        self.ask("edges", lambda: self._reader.edges().tolist(), self._take_edges)

    @property
    def _reader(self) -> Tokens:
        assert self._tokens is not None
        return self._tokens

    def on_token_table_wanted(self, message: TokenTable.Wanted) -> None:
        """Read the tokens that come into sight."""
        message.stop()
        self._wanted = message.first, message.last
        self._read_rows()

    def _read_rows(self) -> None:
        start, stop = self._wanted
        if self._tokens is not None and stop > start:
            table = self.query_one(TokenTable)
            self.ask(
                "rows", partial(self._tokens.rows, start, stop), partial(self._put, start), lambda _: table.forget()
            )

    def _put(self, start: int, rows: Sequence[TokenRow]) -> None:
        self.query_one(TokenTable).put(start, rows)

    def on_lines_moved(self, message: Lines.Moved) -> None:
        """Show what is known of the token that the cursor is on now."""
        message.stop()
        self._look()

    def _look(self) -> None:
        token, edges = self.query_one(TokenTable).cursor, self._edges or ()
        at = bisect_left(edges, token)
        edge = f" · edge {count(at + 1)} of {count(len(edges))}" if at < len(edges) and edges[at] == token else ""
        self.say(f"token {count(token)} of {count(self.ref.n_tokens)}{edge}" if self.ref.n_tokens else "")
        if self._tokens is not None and token < self.ref.n_tokens:
            self.ask("token", partial(_facts, self._tokens, token), self.query_one(TokenPane).show)

    def _take_edges(self, edges: Sequence[int]) -> None:
        self._edges = edges

    def action_edge(self, by: int) -> None:
        """Go to the next or previous token where the loss mask or the version changes."""
        table = self.query_one(TokenTable)
        if self._edges is None:
            self.say("the loss mask is still being read")
            return
        at = bisect_right(self._edges, table.cursor) if by > 0 else bisect_left(self._edges, table.cursor) - 1
        if 0 <= at < len(self._edges):
            table.go_to(self._edges[at])
        else:
            self.say(f"no edge {'behind' if by > 0 else 'before'} this token, of {count(len(self._edges))}")

    def action_ask_token(self) -> None:
        """Ask which token to go to."""
        self.query_one(LineInput).open("token, from the end if negative, or a part such as 50%; r for the response")

    def on_line_input_typed(self, message: LineInput.Typed) -> None:
        """Go to the token that was typed."""
        message.stop()
        token = parse_token(message.text, self.ref)
        if token is None:
            self.fail(f"there is no token {message.text!r} among {count(self.ref.n_tokens)}")
        else:
            self.query_one(TokenTable).go_to(token)
        self.query_one(TokenTable).focus()

    def action_routing(self) -> None:
        """Show the routing of the segment."""
        self.browser.open_routing(self.ref)


def parse_token(text: str, ref: SegmentRef | StepRef) -> int | None:
    """Return the token that ``text`` names in a reference; None where it has no such token."""
    text = text.replace(",", "").replace("_", "")
    if text == "r":
        token = ref.response_start
    elif text.endswith("%") and text[:-1].isdecimal():
        token = min(ref.n_tokens * int(text[:-1][:4]) // 100, ref.n_tokens - 1)
    elif text.removeprefix("-").isdecimal():
        token = int(text[:20]) + (ref.n_tokens if text.startswith("-") else 0)
    else:
        return None
    return token if 0 <= token < ref.n_tokens else None


def _facts(tokens: Tokens, token: int) -> TokenFacts:
    (row,) = tokens.rows(token, token + 1)
    return TokenFacts(row, tokens.experts(token), tokens.values(token))
