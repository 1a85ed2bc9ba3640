"""Runs the browser without a terminal: presses keys, waits until nothing is awaited, and says what is on the screen."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager

import spool
from spool.browse.app import Browser

SHAPE = spool.MoEShape(num_layers=4, num_experts=16, topk=2)
NAMES = {" ": "space", "'": "apostrophe", ">": "greater_than_sign", "<": "less_than_sign", "=": "equals_sign",
         ".": "full_stop", "/": "slash", "-": "minus", "_": "underscore", "?": "question_mark", "%": "percent_sign",
         "(": "left_parenthesis"}  # fmt: skip


class Driven:
    """A browser that runs, and the keys that are pressed in it."""

    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    @property
    def screen(self):
        return self.app.screen

    @property
    def lines(self):
        """What is on the screen, a text a line."""
        width, height = self.app.size
        return [strip.text.ljust(width) for strip in self.app.screen._compositor.render_strips()][:height]

    @property
    def text(self):
        return "\n".join(self.lines)

    def part(self, selector):
        """What is in one widget, a text a line."""
        widget = self.screen.query_one(selector)
        return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]

    def line(self, text):
        """The first line that has a text."""
        found = [line for line in self.lines if text in line]
        assert found, f"{text!r} is not on the screen:\n{self.text}"
        return found[0].rstrip()

    async def press(self, *keys):
        for key in keys:
            await self.pilot.press(NAMES.get(key, key))
        await self.settle()

    async def type(self, text):
        for char in text:
            await self.pilot.press(NAMES.get(char, char))
        await self.settle(0.6)

    async def settle(self, least_s=0.0):
        """Wait until no screen awaits anything, for a little while."""
        until, calm = time.monotonic() + 30, 0
        begin = time.monotonic() + least_s
        while calm < 4 or time.monotonic() < begin:
            assert time.monotonic() < until, f"still busy:\n{self.text}"
            await self.pilot.pause(0.03)
            busy = any(getattr(screen, "is_busy", False) for screen in self.app.screen_stack)
            calm = 0 if busy or self.app._spool is None else calm + 1
        assert not self.app.faults, self.app.faults

    async def until(self, condition, what="it"):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.text}"
            await self.pilot.pause(0.05)


@asynccontextmanager
async def browsing(location, *, size=(80, 24), tokenizer=None):
    """A browser on a spool that is opened to read only."""
    app = Browser(lambda: spool.open(location, readonly=True, create=False), tokenizer=tokenizer)
    async with app.run_test(size=size) as pilot:
        driven = Driven(app, pilot)
        await driven.settle()
        yield driven
        assert not app.faults, app.faults
    app.close()


def ids(driven, selector="#sessions"):
    """The first word of each row of a table."""
    return [line.split()[0].rstrip("✓") for line in driven.part(selector)[1:] if line.strip()]


def session(sp, session_id, n_steps=1, *, outcome="completed", reward=None, view="lineage", **facts):
    """Record a session that is one chain."""
    s = sp.session(session_id, **facts)
    tokens = []
    for index in range(n_steps):
        tokens = [*tokens, 3 + index, 4, 5]
        s.append(
            prompt_token_ids=tokens,
            response_token_ids=[7, 8],
            logprobs=[-0.5, -0.25],
            messages=[
                {"role": "user", "content": f"question {index}"},
                {"role": "assistant", "content": f"answer {index}"},
            ],
            weight_version=str(10 + index),
            finish_reason="stop",
        )
        tokens = [*tokens, 7, 8]
    if outcome is not None:
        s.finalize(view=view, outcome=outcome)
    if reward is not None:
        sp.annotate(session_id, reward=reward)
    return s


def tree(sp, session_id="tree"):
    """Record a session with a retry, a branch, and a chain that begins anew.

    ::

        0 -+- 1 (superseded: 2 repeats its request)
           `- 2 -+- 3 - 5
                 `- 4
        6
    """
    s = sp.session(session_id, group_id="g", source="swe")
    said = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": "Fix [bold]it[/bold]."}]

    def append(prompt, response, messages, version="1", finish="stop"):
        s.append(
            prompt_token_ids=prompt, response_token_ids=response, messages=messages, weight_version=version,
            finish_reason=finish, logprobs=[-0.1] * len(response),
        )  # fmt: skip
        return [*prompt, *response]

    call = {"function": {"name": "bash", "arguments": '{"command": "ls\\ncat x", "timeout": 3}'}}
    first = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    chain = append([1, 2, 3], [4, 5], [*said, first], finish="tool_calls")
    output = {"role": "tool", "name": "bash", "content": "\n".join(f"line {n}" for n in range(500))}
    told = [*said, first, output]
    append([*chain, 6, 7], [8], [*told, {"role": "assistant", "content": "cut"}], finish="abort")
    second = {"role": "assistant", "content": "Second."}
    chain = append([*chain, 6, 7], [9, 10], [*told, second], "2", "tool_calls")
    told = [*told, second]
    third = {"role": "assistant", "content": "Third."}
    left = append([*chain, 11], [12, 13], [*told, {"role": "user", "content": "go on"}, third], "2")
    append([*chain, 14], [15], [*told, {"role": "user", "content": "or so"}], "2", "length")
    append(
        [*left, 16], [17], [*told, {"role": "user", "content": "go on"}, third, {"role": "user", "content": "end"}], "3"
    )
    append([20, 21], [22], [said[0], {"role": "user", "content": "a summary"}], "3")
    return s
