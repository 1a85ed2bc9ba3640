"""The screen of one session: its tree of steps, the segments of a view, and the conversation of the step in focus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from spool.browse.conversation import ConversationView
from spool.browse.decoded import decoded
from spool.browse.line_input import LineInput
from spool.browse.lines import Lines
from spool.browse.screen import SpoolScreen
from spool.browse.tree import SegmentList, TreeView
from spool.browse.wrapping import number
from spool.look.conversation import Messages, search, step_before
from spool.look.references import refs_of
from spool.look.session import look_at
from spool.look.text import ago, one_line, short

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.timer import Timer

    from spool.catalog import SessionRow
    from spool.look.conversation import Conversation, Place
    from spool.look.session import SessionView
    from spool.model.refs import SegmentRef, StepRef
    from spool.rollout.views import View

REFRESH_S = 1.0
SETTLE_S = 0.08
"""How long the cursor rests on a step before its messages are fetched."""


class SessionScreen(SpoolScreen):
    """One session.

    Args:
        session_id: the session.
    """

    DEFAULT_CSS = """
    SessionScreen #left { width: 45%; min-width: 36; max-width: 64; border-right: solid $panel; }
    SessionScreen #tree { height: 2fr; }
    SessionScreen #segments { height: 1fr; min-height: 4; }
    SessionScreen #conversation { width: 1fr; padding: 0 0 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "view", "view"),
        Binding("slash", "find", "find", key_display="/"),
        Binding("u", "unfold", "unfold or fold all", show=False),
        Binding("right_square_bracket", "message(1)", "the next message", show=False),
        Binding("left_square_bracket", "message(-1)", "the message before", show=False),
        Binding("n", "find_next(1)", "the next place that has it", show=False),
        Binding("N", "find_next(-1)", "the place before that has it", show=False),
        Binding("r", "routing", "routing"),
        Binding("m", "remember", "keep for a comparison of routing", show=False),
    ]

    def __init__(self, session_id: str) -> None:
        super().__init__()
        self._session_id = session_id
        self._view: View | None = None
        self._found: SessionView | None = None
        self._known: SessionRow | None = None
        self._messages: Messages | None = None
        self._spoken: int | None = None
        self._other: SegmentRef | StepRef | None = None
        self._settling: Timer | None = None
        self._following = False

    def content(self) -> ComposeResult:
        """Yield tree and segments, and the conversation beside them."""
        with Horizontal():
            with Vertical(id="left"):
                yield TreeView(id="tree")
                yield SegmentList(id="segments")
            yield ConversationView(id="conversation")
        yield LineInput(id="line")

    @property
    def steps(self) -> TreeView:
        """The tree."""
        return self.query_one(TreeView)

    @property
    def segments(self) -> SegmentList:
        """The segments."""
        return self.query_one(SegmentList)

    @property
    def conversation(self) -> ConversationView:
        """The conversation."""
        return self.query_one(ConversationView)

    def begin(self) -> None:
        """Look for the first time, and every second whether something is new."""
        self._messages = Messages(self.spool)
        for part in (self.steps, self.segments, self.conversation):
            part.empty = "looking ..."
        self.headline("", self._session_id)
        self.steps.focus()
        self._look()
        self.set_interval(REFRESH_S, self._tick)

    # -- what is shown -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.is_current and not self.is_busy:
            self.ask("row", lambda: self.spool.find_session(self._session_id), self._compared)

    def _compared(self, row: SessionRow | None) -> None:
        if row is not None and row != self._known:
            self._known = row
            self._describe(row)
            self._look()

    def _look(self) -> None:
        spool, session_id, view = self.spool, self._session_id, self._view
        self.ask("session", lambda: look_at(spool, session_id, view), self._seen, self._missing)

    def _seen(self, found: SessionView) -> None:
        self._found, self._known, self._view = found, found.row, found.view
        row = self.steps.current
        self.steps.empty = "no steps"
        is_longer = row is not None and len(found.rows) > len(self.steps.rows)
        step = None if row is None else row.step.index
        if self.steps.follows and is_longer:
            step = max(each.step.index for each in found.rows)
        self.steps.show(found.rows, step)
        final = ", as finalised" if found.is_final else ""
        self.segments.show(found.segments, f"{found.view}: {number(len(found.segments), 'segment')}{final}")
        self._bar()
        self._describe(found.row)
        if not found.rows:
            self.conversation.clear("no steps")
        self._speak()
        self._say_following()

    def _missing(self, error: BaseException) -> None:
        if self._found is None:
            for part in (self.steps, self.segments):
                part.empty = ""
                part.refresh()
            self.conversation.clear(f"nothing is here: {one_line(str(error).partition(chr(10))[0])}")

    def _describe(self, row: SessionRow) -> None:
        reward = "pending" if row.reward is None else f"{row.reward:.4g}"
        parts = [
            "",
            (row.outcome or "") if row.state == "final" else row.state,
            f"reward {reward}",
            f"{short(row.n_steps)} {'step' if row.n_steps == 1 else 'steps'}",
            f"{short(row.n_tokens)} tokens",
            f"{ago(time.time() - row.last_at)} ago",
        ]
        parts += [f"group {row.group_id[:40]}"] if row.group_id is not None else []
        self.headline(" · ".join(parts), row.session_id)

    def _speak(self) -> None:
        """Fetch the messages of the step under the cursor, once it rests there."""
        if self._settling is not None:
            self._settling.stop()
        self._settling = self.set_timer(SETTLE_S, self._fetch)

    def _fetch(self) -> None:
        row, messages, found = self.steps.current, self._messages, self._found
        if row is None or messages is None or found is None or row.step.index == self._spoken:
            return
        step, steps = row.step, found.steps
        self._spoken = step.index

        spool, tokenizer = self.spool, self.browser.tokenizer

        def fetch() -> Conversation:
            said = messages.conversation(step, step_before(step, steps))
            return said if said.n_messages or tokenizer is None else decoded(spool, step, tokenizer)

        self.ask("messages", fetch, lambda said: self._said(step.index, said), self._silent)

    def _said(self, index: int, said: Conversation) -> None:
        known = "" if self.browser.tokenizer is not None else "; --tokenizer FILE shows its text"
        self.conversation.show(said, f"step {index} adds", f"no messages were recorded{known}")

    def _silent(self, error: BaseException) -> None:
        self._spoken = None
        self.conversation.clear(one_line(str(error).partition("\n")[0]))

    def _bar(self) -> None:
        segment = self.segments.current
        self.steps.segment = None if segment is None else segment.index
        self.steps.refresh()

    def on_lines_moved(self, message: Lines.Moved) -> None:
        """Show what belongs to what is under the cursor now."""
        if message.lines is self.steps:
            self._speak()
            self._say_following()
        elif message.lines is self.segments:
            self._bar()
            segment = self.segments.current
            if segment is not None and segment.last_step is not None:
                self.steps.go_to(segment.last_step)

    def _say_following(self) -> None:
        """Say that the cursor goes on by itself, where something may come."""
        follows = self.steps.follows and self._known is not None and self._known.state == "open"
        if follows != self._following:
            self._following = follows
            self.say("the cursor follows new steps until it is moved" if follows else "")

    # -- keys --------------------------------------------------------------------------------------------------------

    def action_view(self) -> None:
        """Show the segments of the other view."""
        self._view = "timeline" if self._view == "lineage" else "lineage"
        self._look()

    def action_unfold(self) -> None:
        """Unfold all calls and results of the conversation, or fold them."""
        self.conversation.unfold()

    def action_message(self, by: int) -> None:
        """Go to the next message of the conversation, or to the one before."""
        self.conversation.next_message(by)

    def action_find(self) -> None:
        """Ask for a text to look for in the conversation."""
        self.query_one(LineInput).open("a text in this conversation; n and N go on from it")

    def on_line_input_typed(self, message: LineInput.Typed) -> None:
        """Go to the next place that has what was typed."""
        message.stop()
        self.conversation.focus()
        self.conversation.look_for(message.text)
        self.action_find_next(1)

    def action_find_next(self, by: int) -> None:
        """Go to the next place that has what was looked for last, or to the one before."""
        blocks, start, wanted = self.conversation.blocks, self.conversation.place(by), self.conversation.wanted
        if not wanted:
            self.say("/ looks for a text in the conversation")
            return

        def found(place: Place | None) -> None:
            if self.conversation.blocks is not blocks:
                return
            if place is None:
                self.fail(f"{wanted!r} is nowhere in this conversation")
            else:
                self.say("")
                self.conversation.reveal_found(place)

        self.ask("find", lambda: search(blocks, wanted, start, by), found)

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        """Show the tokens of the step or segment."""
        message.stop()
        if (thing := self.refer()) is not None:
            spool = self.spool
            self.ask("reference", lambda: refs_of(spool, thing)[0], self.browser.open_segment)

    def action_routing(self) -> None:
        """Show the routing of the step or segment under the cursor, beside the one that was kept for it."""
        thing, other, spool = self.refer(), self._other, self.spool
        if thing is not None:
            things = [thing] if other is None or other.id == thing.id else [thing, other]
            refs = lambda: [refs_of(spool, each)[0] for each in things]  # noqa: E731
            self.ask("reference", refs, lambda found: self.browser.open_routing(*found))

    def action_remember(self) -> None:
        """Keep the step or segment under the cursor: the next routing is compared with it."""
        self._other = self.refer()
        self.say("" if self._other is None else f"routing is compared with {self._other.id[:100]} now")

    def refer(self) -> SegmentRef | StepRef | None:
        """Return the segment under the cursor where the segments have the focus, else the step."""
        if self.segments.has_focus:
            segment = self.segments.current
            return None if segment is None else segment.ref
        row = self.steps.current
        return None if row is None else row.step.ref
