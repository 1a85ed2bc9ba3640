"""The terminal browser: keys are pressed, and what is on the screen is compared with what was recorded."""

import asyncio
import os
import re
import shutil
import sys
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from browsing import SHAPE, Driven, browsing, ids, session, tree
from shell import HOSTILE, SCRIPT, environment, run
from textual.app import App

import spool
from spool.browse.app import Browser
from spool.browse.conversation import ConversationView
from spool.browse.lines import Lines
from spool.errors import StorageError
from spool.look.conversation import Conversation, blocks, search
from spool.look.references import parsed
from spool.testing.rollouts import rollouts

pytestmark = pytest.mark.asyncio


@pytest.fixture
def many(sp):
    """30 sessions, s00 the oldest; every third pending, every second of source ``swe``."""
    for number in range(30):
        reward = None if number % 3 == 2 else number / 10
        session(
            sp, f"s{number:02}", 1 + number % 3, group_id=f"g{number // 5}", sample_index=number % 5, reward=reward,
            rollout_step=7, source=("swe", "math")[number % 2], outcome="timeout" if number == 4 else "completed",
        )  # fmt: skip
    return sp


# -- sessions ---------------------------------------------------------------------------------------------------------


async def test_sessions_are_listed_newest_first_with_all_their_facts(many, spool_uri):
    many.release(list(many.segments("session_id = 's03'")))
    many.discard("s28")
    async with browsing(spool_uri, size=(200, 40)) as at:
        assert ids(at) == [f"s{number:02}" for number in reversed(range(30))]
        heading = at.part("#sessions")[0]
        for title in ("SESSION", "GROUP", "SAMPLE", "ROLLOUT", "ATTEMPT", "SOURCE", "OUTCOME", "REWARD", "STEPS",
                      "BRANCHES", "SEGMENTS", "TOKENS", "BYTES", "TIER", "VERSIONS", "AGE", "STATE"):  # fmt: skip
            assert title in heading
        assert at.line("s27").split() == [
            "s27", "completed", "2.7", "1", "5", at.line("s27").split()[5], "g5", "2", "7", "0", "math", "1", "1", "28",
            "B", "hot", "10",
        ]  # fmt: skip
        assert "pending" in at.line("s29")
        assert "discarded" in at.line("s28")
        assert "expired" in at.line("s04")
        assert "released" in at.line("s03")
        assert "10..12" in at.line("s29")
        assert "sessions: 30" in at.lines[0]


async def test_a_small_terminal_shows_the_columns_that_fit_and_the_others_sideways(many, spool_uri):
    async with browsing(spool_uri) as at:
        assert all(len(line) <= 80 for line in at.lines)
        heading = at.part("#sessions")[0]
        assert "REWARD" in heading and "VERSIONS" not in heading and "columns →" in at.lines[0]
        await at.press(*["right"] * 30)
        assert "VERSIONS" in (heading := at.part("#sessions")[0]) and heading.startswith("SESSION")
        assert "OUTCOME" not in heading and "← " in at.lines[0]
        await at.press(*["h"] * 30)
        assert "OUTCOME" in at.part("#sessions")[0]


LONG_ID = "rollout-2026-11-30T12:00:07-swe-gym-django__django-00019-sample-3"


async def test_a_wide_terminal_has_room_for_long_ids_and_a_narrow_one_cuts_them_in_the_middle(sp, spool_uri):
    for number in range(4):
        session(sp, f"{LONG_ID}-{number}", reward=0.5)
    async with browsing(spool_uri, size=(160, 30)) as at:
        heading = at.part("#sessions")[0]
        assert at.screen.table._shown()[0][1] >= 160 // 3 and "ATTEMPT SOURCE" in heading
        await at.pilot.resize_terminal(240, 30)
        await at.settle()
        assert ids(at)[0] == f"{LONG_ID}-3"
        await at.press("enter")
        await at.pilot.resize_terminal(80, 24)
        await at.settle()
        assert at.lines[0].startswith(" rollout-202…") and "sample-3-3 · completed · reward 0.5" in at.lines[0]
        await at.press("enter")
        assert "…" in at.lines[0] and "@" not in at.lines[0] and "-3:0 · 5 tokens" in at.lines[0]
        await at.press("q", "q")
        assert ids(at)[0].startswith("rollout-") and ids(at)[0].endswith("sample-3-3") and "…" in ids(at)[0]


async def test_a_column_that_has_nothing_left_to_show_is_narrow_again(sp, spool_uri):
    session(sp, "a", group_id="g" * 24)
    session(sp, "b")
    async with browsing(spool_uri, size=(120, 24)) as at:
        wide = at.part("#sessions")[0]
        await at.press("/")
        await at.type("session_id = 'b'")
        assert wide.index("SAMPLE") - at.part("#sessions")[0].index("SAMPLE") == 24 - len("GROUP") - 1


async def test_keys_of_vi_and_arrows_move_the_cursor_and_the_table(many, spool_uri):
    async with browsing(spool_uri) as at:
        table = at.screen.table
        await at.press("j", "j", "down", "k")
        assert table.cursor == 2 and at.screen.refer() == "s27"
        await at.press("G")
        assert at.screen.refer() == "s00" and "s00" in at.text and "s29" not in at.text
        await at.press("home")
        assert at.screen.refer() == "s29" and "s29" in at.text
        await at.press("pagedown", "ctrl+f")
        assert table.cursor == 29
        await at.press("ctrl+u")
        assert 15 < table.cursor < 29


async def test_a_mouse_moves_opens_and_sorts(many, spool_uri):
    async with browsing(spool_uri) as at:
        await at.pilot.click("#sessions", offset=(3, 4))
        await at.settle()
        assert at.screen.refer() == "s26"
        await at.pilot.click("#sessions", offset=(at.part("#sessions")[0].index("REWARD"), 0))
        await at.settle()
        assert ids(at)[0] == "s28" and "REWARD↓" in at.part("#sessions")[0]
        await at.pilot.click("#sessions", offset=(3, 2), times=2)
        await at.settle()
        assert "s27" in at.lines[0] and at.screen.query("#conversation")


@pytest.mark.parametrize(
    ("typed", "said", "found"),
    [
        ("reward > 2.5 and source = 'swe'", "an expression", ["s28"]),
        ("SWE", "no expression", [f"s{number:02}" for number in range(28, -1, -2)]),
        ("g5", "no expression", ["s29", "s28", "s27", "s26", "s25"]),
        ("s0_", "no expression", [f"s{number:02}" for number in range(9, -1, -1)]),
        ("it's", "no expression", []),
    ],
)
async def test_a_filter_is_an_expression_or_a_text(many, spool_uri, typed, said, found):
    async with browsing(spool_uri) as at:
        await at.press("/")
        await at.type(typed)
        assert said in at.text
        assert ids(at) == found[: len(ids(at))] or (not found and "no session matches" in at.text)
        assert f"sessions: {len(found)}" in at.lines[0]
        await at.press("enter")
        assert isinstance(at.app.focused, Lines) and f"filter: {typed}" in at.lines[0]
        await at.press("escape")
        assert "sessions: 30" in at.lines[0] and not at.screen.query(".open")
        await at.press("escape")
        assert at.app.is_running


async def test_a_wrong_expression_is_explained_while_the_old_rows_stay(many, spool_uri):
    async with browsing(spool_uri) as at:
        await at.press("/")
        at.screen.query_one("Input").value = "rewrd > 1"
        await at.settle(0.6)
        assert "mean reward?" in at.text and "^" in at.text
        assert "sessions: 30" in at.lines[0] and ids(at)[0] == "s29"
        await at.press(*["backspace"] * 9)
        await at.type("reward > 2.75")
        assert ids(at) == ["s28"] and "mean reward?" not in at.text


async def test_sorting_by_a_choice_and_the_other_way_round(many, spool_uri):
    async with browsing(spool_uri) as at:
        await at.press("s", "down", "down", "down", "enter")
        assert ids(at)[:3] == ["s28", "s27", "s25"]
        await at.press("S")
        assert "REWARD↑" in at.part("#sessions")[0]
        await at.press("G")
        assert at.screen.refer() == "s28"
        await at.press("s", "q")
        assert at.screen.refer() == "s28"


async def test_new_sessions_arrive_and_the_cursor_stays_on_its_session(many, spool_uri):
    async with browsing(spool_uri) as at:
        await at.press("j", "j")
        assert at.screen.refer() == "s27"
        session(many, "new1")
        many.annotate("s29", reward=77)
        await at.until(lambda: "new1" in at.text and "77" in at.line("s29"), "the new session")
        assert at.screen.refer() == "s27" and at.screen.table.cursor == 3
        await at.press("G", "p")
        assert "paused" in at.lines[0]
        session(many, "new2")
        await asyncio.sleep(1.5)
        await at.settle()
        assert "sessions: 31" in at.lines[0] and at.screen.refer() == "s00"
        before = at.part("#sessions")
        await at.press("p")
        await at.until(lambda: "sessions: 32" in at.lines[0], "the other session")
        await at.settle()
        assert at.screen.refer() == "s00"
        assert [line[:9] for line in at.part("#sessions")] == [line[:9] for line in before]


async def test_groups_show_the_spread_of_rewards_and_open(many, spool_uri):
    session(many, "alone")
    async with browsing(spool_uri, size=(120, 24)) as at:
        await at.press("g")
        assert ids(at, "#groups")[:3] == ["(no", "g5", "g4"]
        assert "groups: 6 and sessions without a group" in at.lines[0] and "columns" not in at.lines[0]
        row = at.line("g0")
        assert row.split()[:6] == ["g0", "5/5", "0.2", "0.1581", "0", "0.4"]
        assert "●" in row and "━" in row
        await at.press("down", "enter")
        assert "group g5: 5" in at.lines[0] and ids(at) == ["s29", "s28", "s27", "s26", "s25"]
        await at.press("q", "up", "enter")
        assert "sessions without a group: 1" in at.lines[0] and ids(at) == ["alone"]
        await at.press("q", "s", "down", "down", "enter")
        assert ids(at, "#groups")[0] == "g5"
        await at.press("q")
        assert "sessions: 31" in at.lines[0]


@pytest.mark.parametrize(
    "rewards",
    [[0.0, 1e308], [-1e308, 1e308], [-sys.float_info.max] * 2 + [1.0], [1e200, 2e200], [5e-324, 1e-323], [0.0, 5e-324],
     [-sys.float_info.max, sys.float_info.max], [1.0, 1.0 + 2**-52]],
)  # fmt: skip
async def test_the_spread_of_rewards_of_any_size_is_drawn(sp, spool_uri, rewards):
    for number, reward in enumerate(rewards):
        session(sp, f"s{number}", group_id="g", reward=reward)
    async with browsing(spool_uri, size=(160, 24)) as at:
        await at.press("g")
        assert re.search("[●━]{12}", at.line(f"{len(rewards)}/{len(rewards)}"))


async def test_groups_whose_rewards_are_all_equal_are_pointed_out(many, spool_uri):
    for number, rewards in (("equal", (0.5, 0.5)), ("single", (0.5,)), ("other", (0.5, 0.25))):
        for index, reward in enumerate(rewards):
            session(many, f"{number}-{index}", group_id=number, reward=reward)
    async with browsing(spool_uri, size=(160, 24)) as at:
        await at.press("g")
        marked = [name for name in ("equal", "single", "other", "g0") if "equal" in at.line(f"{name} ")[15:]]
        assert marked == ["equal"] and "1 with equal rewards" in at.lines[0]


async def test_groups_tell_discarded_sessions_and_columns_that_do_not_fit(many, spool_uri):
    many.discard("s00")
    async with browsing(spool_uri) as at:
        await at.press("g")
        assert at.line("g0").split()[1:4] == ["4/4", "+1", "discarded"] and at.line("g1").split()[1] == "5/5"
        assert "groups: 6 · " in at.lines[0] and "more columns →" in at.lines[0]
        await at.press("right")
        assert "← " in at.lines[0] and "FINAL" not in at.part("#groups")[0]


async def test_only_what_is_in_sight_is_fetched_and_made(sp, spool_uri, monkeypatch):
    for number in range(700):
        sp.session(f"n{number:03}").append(prompt_token_ids=[1], response_token_ids=[2])
    fetched, made = [], []
    rows, row = spool.listing.Listing.rows, spool.browse.table.Table.row
    monkeypatch.setattr(spool.listing.Listing, "rows", lambda self, a, b: (fetched.append(b - a), rows(self, a, b))[1])
    monkeypatch.setattr(
        spool.browse.table.Table, "row", lambda self, number: (made.append(number), row(self, number))[1]
    )
    async with browsing(spool_uri) as at:
        assert max(made) < 25
        await at.press("G")
        assert at.screen.refer() == "n000"
        assert max(fetched) < 450
        assert not set(made) & set(range(100, 600))


# -- one session ------------------------------------------------------------------------------------------------------


async def test_a_tree_tells_branches_boundaries_and_retries_by_sign(sp, spool_uri):
    tree(sp).finalize(outcome="completed")
    sp.annotate("tree", reward=0.5)
    async with browsing(spool_uri, size=(160, 48)) as at:
        await at.press("enter")
        rows = [line.lstrip("▌ ").split() for line in at.part("#tree")[1:8]]
        assert [row[:2] for row in rows] == [
            ["◆", "0"], ["├─✗", "1"], ["●", "2"], ["├─■", "4"], ["●", "3"], ["■", "5"], ["◆", "6"],
        ]  # fmt: skip
        assert rows[0][2:] == ["+3", "→2", "v1", "tool_calls"]
        assert rows[1][2:] == ["+2", "→1", "v1", "retried", "abort"]
        assert rows[3][2:] == ["+1", "→1", "v2", "length"]
        assert rows[6][2:] == ["+2", "→1", "v3", "new", "chain", "stop"]
        assert "completed · reward 0.5 · 7 steps" in at.lines[0]


async def test_both_views_give_their_segments(sp, spool_uri):
    tree(sp).finalize(outcome="completed")
    async with browsing(spool_uri, size=(120, 40)) as at:
        await at.press("enter")
        for view, final in (("lineage", True), ("timeline", False)):
            title, _, *rows = (line for line in at.part("#segments") if line.strip())
            assert f"{view}: " in title and ("as finalised" in title) == final
            wanted = sp.view("tree", view)
            assert [tuple(row.split()[:4]) for row in rows[: len(wanted)]] == [
                (str(ref.index), str(ref.n_tokens), str(ref.trainable_tokens), str(len(ref.steps))) for ref in wanted
            ]
            await at.press("v")
        assert "lineage: " in at.part("#segments")[0]


async def test_the_segment_under_the_cursor_marks_its_steps(sp, spool_uri):
    tree(sp).finalize(outcome="completed")
    async with browsing(spool_uri, size=(120, 40)) as at:
        await at.press("enter", "tab")
        for ref in sp.final_segments("tree"):
            marked = [line.split()[1] for line in at.part("#tree")[1:8] if line.startswith("▌")]
            assert sorted(map(int, marked)) == sorted(ref.steps)
            assert at.screen.refer().id == ref.id
            await at.press("down")


async def test_a_session_that_lives_shows_what_it_adds(sp, spool_uri):
    s = session(sp, "live", 2, outcome=None)
    async with browsing(spool_uri) as at:
        await at.press("enter")
        assert len([line for line in at.part("#tree")[1:] if line.strip()]) == 2 and "open" in at.lines[0]
        s.append(prompt_token_ids=[99], response_token_ids=[1], weight_version="13")
        await at.until(lambda: "v13" in at.text, "the new step")
        s.finalize(outcome="failed")
        await at.until(lambda: "failed" in at.lines[0], "the end")


async def test_after_end_the_cursor_follows_new_steps_until_it_is_moved(sp, spool_uri):
    s = session(sp, "live", 2, outcome=None)
    async with browsing(spool_uri) as at:
        await at.press("enter", "end")
        assert "the cursor follows new steps" in at.text
        s.append(prompt_token_ids=[99], response_token_ids=[1], weight_version="13")
        await at.until(lambda: at.screen.refer().id == "live:2", "the new step")
        assert "the cursor follows new steps" in at.text
        await at.press("k")
        assert "the cursor follows" not in at.text and at.screen.refer().id == "live:1"
        s.append(prompt_token_ids=[98], response_token_ids=[1], weight_version="14")
        await at.until(lambda: "v14" in at.text, "another step")
        assert at.screen.refer().id == "live:1"
        await at.press("G")
        assert "the cursor follows new steps" in at.text
        s.finalize(outcome="completed")
        await at.until(lambda: "the cursor follows" not in at.text, "the end")


async def test_a_result_has_the_name_of_the_tool_that_was_called(sp, spool_uri):
    call = {"id": "call_7", "function": {"name": "bash", "arguments": "{}"}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call, "odd"]},
        {"role": "tool", "tool_call_id": "call_7", "content": "done"},
        {"role": "tool", "tool_call_id": "call_8", "content": "lost"},
    ]
    sp.session("s").append(prompt_token_ids=[1], response_token_ids=[2], messages=said)
    async with browsing(spool_uri, size=(120, 24)) as at:
        await at.press("enter")
        assert "▸ tool bash done" in at.text and "▸ tool call_8 lost" in at.text


async def test_a_step_without_messages_has_the_text_of_its_tokens(sp, spool_uri, tmp_path, monkeypatch):
    from tokenizers import Tokenizer, decoders, models

    words = {word: number for number, word in enumerate(["Fix", "Ġit", "Ċ", "ð", "Ł", "Ļ", "Ĥ", "done", "\x1b[31m"])}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    s = sp.session("s")
    s.append(prompt_token_ids=[0, 1, 2, 0, 77], response_token_ids=[3, 4, 5, 6, 7, 8])
    s.append(prompt_token_ids=[0, 1, 2, 0, 77, 3, 4, 5, 6, 7, 8, 7, 7], response_token_ids=[1] * 9)
    async with browsing(spool_uri, size=(120, 30), tokenizer=str(tmp_path / "tokenizer.json")) as at:
        await at.press("enter")
        assert [line.strip() for line in at.screen.conversation.text.split("\n")] == [
            "prompt decoded from tokens 0 to 4", "Fix it", "Fix\ufffd", "response decoded from tokens 5 to 10",
            "🙂done\\x1b[31m",
        ]  # fmt: skip
        monkeypatch.setattr("spool.browse.decoded.MOST_TOKENS", 1)
        await at.press("j")
        assert "prompt decoded from tokens 12 to 12" in at.text and "from tokens 13 to 13" in at.text
    async with browsing(spool_uri) as at:
        await at.press("enter")
        assert "no messages were recorded" in at.text and "--tokenizer" in at.text


async def test_the_conversation_says_what_a_step_adds_with_calls_and_results_folded(sp, spool_uri):
    tree(sp)
    async with browsing(spool_uri, size=(120, 40)) as at:
        await at.press("enter")
        said = at.part("#conversation")
        assert [line.strip() for line in said[:8]] == [
            "system", "Be careful.", "user", "Fix [bold]it[/bold].", "assistant thinks", "Hm.", "I look.",
            '▸ calls bash {"command": "ls\\ncat x", "timeout": 3}',
        ]  # fmt: skip
        await at.press("j", "j")
        said = at.part("#conversation")
        rule = next(number for number, line in enumerate(said) if "step 2 adds" in line)
        assert said[rule + 1].strip().startswith("▸ tool bash line 0 line 1") and said[rule + 1].endswith("500 lines")
        assert said[rule + 2 : rule + 4] == ["assistant", "  Second."]
        await at.press("u")  # from the tree
        said = at.screen.conversation.text
        assert "▾ calls bash\n  command:\n  ls\n  cat x\n  timeout: 3\n" in said
        assert "▾ tool bash\n  line 0\n" in said and "line 29\n  ▼ 470 more lines" in said and "line 30" not in said
        await at.press("u")
        assert "▾" not in at.screen.conversation.text


async def test_long_output_comes_a_page_at_a_time(sp, spool_uri):
    tree(sp)
    async with browsing(spool_uri, size=(120, 40)) as at:
        await at.press("enter", "j", "tab", "tab", "j", "space")
        view = at.screen.conversation
        assert view.text.count("  line ") == 30
        for wanted in (330, 500):
            at_more = next(number for number, row in enumerate(view._rows) if row.action == "more")
            view.move_to(at_more)
            await at.press("enter")
            assert view.text.count("  line ") == wanted
            assert view._rows[view.cursor].block == 5
        assert "▼" not in view.text
        await at.press("home", "]", "]")
        assert "assistant" in view._rows[view.cursor].pieces[0][0]


async def test_a_chain_of_5000_steps_and_a_tree_of_200_leaves_stay_flat_and_quick(sp, spool_uri, monkeypatch):
    deep, wide = sp.session("deep"), sp.session("wide")
    tokens = []
    for index in range(5000):
        tokens += [index % 97 + 3, 7]
        deep.append(prompt_token_ids=tokens, response_token_ids=[11], weight_version=str(index // 500))
        tokens.append(11)
    wide.append(prompt_token_ids=[1], response_token_ids=[2])
    for index in range(200):
        wide.append(prompt_token_ids=[1, 2, 3 + index], response_token_ids=[4], finish_reason="stop")
    made = []
    row = spool.browse.tree.TreeView.row
    monkeypatch.setattr(
        spool.browse.tree.TreeView, "row", lambda self, number: (made.append(number), row(self, number))[1]
    )
    async with browsing(spool_uri) as at:
        await at.press("down", "enter")
        assert "5,000 steps" in at.lines[0]
        await at.press("end")
        assert "4999" in at.part("#tree")[-1] and "■" in at.part("#tree")[-1]
        assert at.part("#tree")[-2].index("4998") == at.part("#tree")[-1].index("4999")
        assert not set(made) & set(range(100, 4900))
        await at.press("q", "up", "enter", "end")
        assert at.part("#tree")[-2].lstrip("▌ ").startswith("├─■ 199")
        assert at.part("#tree")[-1].lstrip("▌ ").startswith("■ 200")


async def test_a_very_long_conversation_is_shown_in_part_and_on_demand(sp, spool_uri):
    s = sp.session("talk")
    said = [{"role": "user", "content": f"message {number}"} for number in range(1000)]
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=said)
    s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[2], messages=[*said, {"role": "user", "content": "more"}])
    async with browsing(spool_uri) as at:
        await at.press("enter")
        view = at.screen.conversation
        assert "message 299" in view.text and "message 300" not in view.text and "700 later parts" in view.text
        await at.press("tab", "tab", "end", "enter")
        assert "message 599" in view.text and "message 600" not in view.text
        await at.press("tab", "j")
        assert "step 1 adds" in at.text and "940 earlier parts" in view.text and "  more" in at.text
        await at.press("tab", "tab", "home", "enter")
        assert "880 earlier parts" in view.text and "message 880" in view.text


async def test_a_text_is_found_in_what_is_folded_and_far_down(sp, spool_uri):
    tree(sp)
    async with browsing(spool_uri, size=(120, 40)) as at:
        await at.press("enter", "j", "j")
        view = at.screen.conversation

        def here():
            return "".join(text for text, _ in view._rows[view.cursor].pieces).strip()

        await at.press("/")
        await at.type("LINE 25")
        await at.press("enter")
        assert view.has_focus and here() == "line 25"
        assert ("line 25", "found") in view._rows[view.cursor].pieces
        await at.press("n")
        assert here() == "line 250"
        await at.press(*["n"] * 9)
        assert here() == "line 259"
        await at.press("n")
        assert here() == "line 25"
        await at.press("N")
        assert here() == "line 259"
        await at.press("/")
        await at.type("second.")
        await at.press("enter")
        assert here() == "Second." and at.part("#conversation")[view.cursor - view.first].strip() == "Second."
        await at.press("/")
        await at.type("nobody said")
        await at.press("enter")
        assert "'nobody said' is nowhere in this conversation" in at.lines[-2] and here() == "Second."
        assert not any(row.has_found for row in view._rows)
        await at.press("/", "escape")
        assert view.has_focus
        await at.press("shift+tab", "shift+tab", "k", "k", "N")  # the first step has other messages
        assert "'nobody said' is nowhere" in at.text


async def test_each_place_of_a_paragraph_is_found_on_its_row_from_the_cursor_on(sp, spool_uri):
    words = " ".join(f"w{n} some error{n} here" for n in range(12)) + "\t漢字 " * 20 + "error12"
    said = [{"role": "user", "content": f"old error {n}"} for n in range(100)]
    new = [*said, {"role": "assistant", "content": words}]
    s = sp.session("a")
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=said)
    s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4], messages=new)
    async with browsing(spool_uri, size=(100, 30)) as at:
        await at.press("enter", "j")
        view = at.screen.conversation

        def rows(number):
            return " ".join("".join(text for text, _ in row.pieces) for row in view._rows[number : number + 2])

        await at.press("/")
        await at.type("error")
        await at.press("enter")
        for number in range(13):
            assert view._rows[view.cursor].has_found and re.search(rf"error{number}\b", rows(view.cursor)), number
            await at.press("n")
        assert "old error 0" in rows(view.cursor)
        view.move_to(len(view._rows) - 4)
        await at.press("N")
        assert len(view._rows) - 30 < view.cursor < len(view._rows) - 4
        await at.pilot.resize_terminal(30, 10)
        await at.press("n", "N")
        assert at.app.is_running


async def test_a_step_that_is_withdrawn_leaves_nothing_to_look_for(sp, spool_uri):
    s = session(sp, "one", outcome=None)
    async with browsing(spool_uri) as at:
        await at.press("enter")
        assert "question 0" in at.text
        s.discard(0)
        await at.until(lambda: "no steps" in "".join(at.part("#conversation")), "the withdrawal")
        await at.press("u", "]", "/")
        await at.type("question")
        await at.press("enter")
        assert "'question' is nowhere in this conversation" in at.text
        await at.pilot.resize_terminal(100, 30)
        await at.settle()
        assert "no steps" in "".join(at.part("#conversation"))


async def test_a_text_is_found_in_parts_that_are_not_shown_yet(sp, spool_uri):
    s = sp.session("talk")
    said = [{"role": "user", "content": f"message {number} " + "x y " * 300 + f"end {number}"} for number in range(900)]
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=said)
    async with browsing(spool_uri) as at:
        await at.press("enter", "n")
        assert "/ looks for a text" in at.lines[-2]
        await at.press("/")
        await at.type("end 850")
        await at.press("enter")
        view = at.screen.conversation
        assert "end 850" in at.part("#conversation")[view.cursor - view.first]
        await at.press("/")
        await at.type("end 850")
        await at.press("enter")
        assert "end 850" in at.part("#conversation")[view.cursor - view.first]


async def look_for(at, text):
    """Look for a text, and return the row that the cursor is on then."""
    await at.press("/")
    await at.type(text)
    await at.press("enter")
    view = at.screen.conversation
    return "".join(text for text, _ in view._rows[view.cursor].pieces).strip()


@pytest.mark.parametrize("n", [60, 300])
async def test_a_text_behind_joined_emoji_and_escapes_is_found_on_its_row(sp, spool_uri, n):
    s = sp.session("one")
    line = "\t" + "👨‍👩‍👧 word " * n + "needle " + "more text " * 200
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=[{"role": "user", "content": line}])
    async with browsing(spool_uri, size=(100, 24)) as at:
        await at.press("enter")
        assert "needle" in await look_for(at, "NEEDLE")
        view = at.screen.conversation
        assert ("needle", "found") in view._rows[view.cursor].pieces and "needle" in "\n".join(at.part("#conversation"))


async def test_only_what_was_recorded_is_set_off_not_how_it_is_shown(sp, spool_uri):
    s = sp.session("one")
    said = [{"role": "user", "content": "red \x1b[31m here"}, {"role": "user", "content": "a\tb " + "x" * 50 + " x1b"}]
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=said[:1])
    s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4], messages=said)
    async with browsing(spool_uri) as at:
        await at.press("enter")
        await look_for(at, "x1b")
        view = at.screen.conversation
        assert "'x1b' is nowhere in this conversation" in at.text and "\\x1b[31m" in view.text
        assert not any(row.has_found for row in view._rows)
        await look_for(at, "[31m")
        assert ("[31m", "found") in view._rows[view.cursor].pieces
        await at.press("shift+tab", "shift+tab", "j")
        assert "x1b" in await look_for(at, "x1b") and view._rows[view.cursor].has_found
        assert sum(row.has_found for row in view._rows) == 1


class Alone(App):
    """A conversation and nothing else."""

    def compose(self):
        yield ConversationView()


async def test_a_search_goes_on_from_where_the_cursor_is_in_either_direction():
    app = Alone()
    async with app.run_test(size=(60, 20)):
        view = app.query_one(ConversationView)

        def go(by):
            view.reveal_found(search(view.blocks, view.wanted, view.place(by), by))
            return view._found

        view.show(
            Conversation(blocks([{"role": "user", "content": f"needle {n}"} for n in range(500)]), 500, 0), "", ""
        )
        view.look_for("needle")
        view.action_jump(-1)
        last = view._rows[view.cursor - 1].block
        assert view._rows[view.cursor].action == "later" and last < 499
        assert go(1) == (last + 1, 0)
        at = 3 * (view._width - 2) - 1  # the last cell of a row
        text = "a" * at + "XY" + "a" * 200
        view.show(
            Conversation(blocks([{"role": "user", "content": text}, {"role": "user", "content": "XY"}]), 2, 0), "", ""
        )
        view.look_for("XY")
        view.move_to(next(number for number, row in enumerate(view._rows) if row.start == at + 1))
        assert go(-1) == (0, at)


async def test_what_is_found_in_a_long_text_is_shown_with_few_rows_and_the_way_up(sp, spool_uri, monkeypatch):
    lines = [f"row {number}" for number in range(400_000)]
    said = [{"role": "user", "content": "first"}] * 2000
    s = sp.session("one")
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=said)
    long = {"role": "user", "content": "\n".join([*lines, "needle"])}
    s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4], messages=[*said, long])
    made = []
    wrapped = spool.browse.conversation.wrapped
    monkeypatch.setattr(
        spool.browse.conversation, "wrapped", lambda *args: (made.append(1) or row for row in wrapped(*args))
    )
    async with browsing(spool_uri, size=(100, 24)) as at:
        await at.press("enter", "j")
        view = at.screen.conversation
        assert await look_for(at, "needle") == "needle"
        assert "▲ 400K earlier lines, " in view.text and "▼" not in view.text
        await at.press("u", "n")
        await at.pilot.resize_terminal(60, 20)
        await at.settle()
        assert view.n_rows < 300 and len(made) < 3000
        assert "needle" in "".join(text for text, _ in view._rows[view.cursor].pieces)

        def rows():
            shown = ("".join(text for text, _ in row.pieces).strip() for row in view._rows)
            return [row for row in shown if row.startswith("row ")]

        assert rows() == lines[-30:]
        view.move_to(view.cursor - 30)
        assert rows() == lines[-30:] and view._rows[view.cursor].pieces[1][0] == lines[-30]
        await at.press("k")
        assert rows() == lines[-330:] and view._rows[view.cursor].pieces[1][0] == lines[-31]
        for _ in range(20):
            await at.pilot.press("pageup")
        await at.settle()
        here = int(view._rows[view.cursor].pieces[1][0].split()[1])
        assert here == 399_969 - 20 * (view.room - 1)
        assert rows() == lines[-len(rows()) :] and len(rows()) < 1000
        before = next(number for number, row in enumerate(view._rows) if row.action == "before")
        view.move_to(before)
        n = len(rows())
        await at.press("enter")
        assert rows() == lines[-n - 300 :] and view._rows[view.cursor].pieces[1][0] == lines[-n - 1]
        await look_for(at, "row 200000")
        assert rows() == lines[199_970:200_030] and "▼" in view.text
        assert await look_for(at, "first") == "first" and view.n_rows < 1000


# -- hostile content --------------------------------------------------------------------------------------------------

NASTY = (
    "a\x1b[31mred\x1b]52;c;aGk=\x07 \x00nul \x9b2J \u202eevil\u2066 z\u200bw "
    "\ud800 [bold]x[/] 日本語 👩‍💻 e\u0301 \r\n\tend"
)


async def test_nothing_that_was_recorded_reaches_the_terminal_as_a_command(sp, spool_uri):
    text = NASTY.replace("\ud800", "")
    s = sp.session(f"id {text}"[:200], group_id=text, source=text, metadata={"x": text}, experts=SHAPE)
    call = {"function": {"name": NASTY, "arguments": NASTY}}
    said = [
        {"role": NASTY, "content": NASTY, "name": NASTY},
        {"role": "tool", "content": "y" * 50_000 + NASTY, "name": NASTY},
        {"role": "assistant", "content": [{"type": "image", NASTY: NASTY}, NASTY, 7, None],
         "tool_calls": [call, NASTY, 3]},
        {"role": "user", "content": {"a": NASTY}},
    ]  # fmt: skip
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=said, finish_reason=text, weight_version=text)
    s.finalize(outcome="completed")
    async with browsing(spool_uri, size=(160, 60)) as at:

        def check():
            assert not any(char in at.text for char in HOSTILE), ascii(at.text)
            assert "\ud800" not in at.text and "\x1b" not in at.text

        check()
        assert "\\x1b[31mred" in at.text
        await at.press("g")
        check()
        await at.press("q", "enter")
        check()
        await at.press("tab", "tab", "u")
        for _ in range(6):
            check()
            await at.press("pagedown")
        assert "[bold]x[/]" in at.screen.conversation.text and "日本語" in at.screen.conversation.text
        await at.press("b")
        check()
        await at.press("y", "?")
        check()


async def test_a_session_id_of_1024_bytes_and_a_line_of_a_megabyte(sp, spool_uri):
    s = sp.session("x" * 1024)
    s.append(prompt_token_ids=[1], response_token_ids=[2], messages=[{"role": "user", "content": "é" * (1 << 20)}])
    async with browsing(spool_uri) as at:
        assert ids(at)[0] == "x" * 13 + "…" + "x" * 14
        began = time.process_time()
        await at.press("enter")
        assert time.process_time() - began < 5
        assert "1.05M characters" in at.screen.conversation.text


# -- storage, copy, export --------------------------------------------------------------------------------------------


async def test_storage_says_where_bytes_are_and_which_rows_are_missing(tmp_path):
    hot, cold = (
        f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&hot_bytes=1GiB",
        f"{tmp_path}/cold",
    )
    with spool.open(hot) as sp:
        s = sp.session("gappy", experts=SHAPE)
        s.append(
            prompt_token_ids=list(range(20)), response_token_ids=[1, 2], routed_experts=None, logprobs=[-1.0, -2.0]
        )
        session(sp, "other", experts=SHAPE)
        sp.flush()
        located = sp.locate(sp.steps("gappy")[0])
    async with browsing(hot, size=(160, 48)) as at:
        await at.press("down", "enter", "b")
        assert "backlog" in at.text and "of 1 GiB" in at.line("room")
        assert cold in at.line("cold") and f"{tmp_path}/hot" in at.line("  hot  ")
        assert "BYTES OF gappy:0" in at.text
        for found in located:
            row = at.line(f"    {found.field} ")
            assert f"at {found.offset:,}, {found.length:,} bytes" in row
            assert found.file.partition("/hot/")[2] in at.text
        with spool.open(hot) as sp:
            sp.publish(sp.steps("other"))
        await at.press("r")
        assert "0 packs" in at.line("backlog") and "spilled" in at.text
        await at.press("q", "q")
        assert "sessions: 2" in at.lines[0]
    async with browsing(cold) as at:
        assert ids(at) == ["other", "gappy"]
        await at.press("enter", "b")
        assert "none here" in at.line("  hot ") and "evicted" not in at.text
        assert "  cold " in at.line("/token_ids/")


async def test_storage_names_gaps(sp, spool_uri):
    s = sp.session("gap", experts=SHAPE)
    rows = np.arange(5 * 4 * 2, dtype=np.int32).reshape(5, 4, 2) % 16
    rows[2] = -1
    s.append(prompt_token_ids=[1, 2, 3, 4, 5], response_token_ids=[6], routed_experts=rows, routed_experts_start=0)
    gaps = sp.coverage(sp.steps("gap"))[0]["routed_experts"].gaps
    assert gaps
    async with browsing(spool_uri, size=(120, 40)) as at:
        await at.press("enter", "b", "G")
        assert f"gap {gaps[0][0]}..{gaps[0][1]}: never sent" in at.line("routed_experts      gap")


async def test_copy_and_export_take_the_thing_under_the_cursor_or_what_is_marked(many, spool_uri, tmp_path):
    async with browsing(spool_uri) as at:
        await at.press("j", "y")
        assert at.app.clipboard == "s28" and "copied s28" in at.text
        await at.press("enter", "y")
        assert at.app.clipboard == "s28:0"
        await at.press("tab", "y")
        assert at.app.clipboard == "s28@lineage/0"
        await at.press("q", "space", "space")
        assert "2 marked" in at.lines[0] and at.text.count("✓") == 2
        await at.press("y", "e")
        assert "(x) Parquet" in at.text and "( ) a spool" in at.text
        assert at.app.clipboard == "s27\ns28" and "Export 2 sessions" in at.text
        for _ in range(2):
            at.screen.query_one("Input").value = f"{tmp_path}/out"
            await at.press("enter")
            if not _:
                assert "2 segments of 2 sessions are in" in at.text
                await at.press("e")
        assert "there is something" in at.text or "input:" in at.text
        files = [name for _, _, names in os.walk(tmp_path / "out") for name in names]
        assert any(name.endswith(".parquet") for name in files)
        await at.press("e")
        at.screen.query_one("Input").value = f"{tmp_path}/copy"
        await at.press("tab", "right", "enter")
        assert "( ) Parquet" in at.text and "(x) a spool" in at.text
        await at.press("shift+tab", "enter")
        await at.until(lambda: os.path.exists(tmp_path / "copy/spool.json"), "the copy")
    with spool.open(tmp_path / "copy", readonly=True) as copy:
        assert {row.session_id for row in copy.sessions()} == {"s27", "s28"}


async def test_a_step_is_itself_whatever_other_sessions_are_called(sp, spool_uri, tmp_path):
    for name, token in (("a:0", 33), ("a@lineage/0", 44), ("a", 11)):
        s = sp.session(name)
        s.append(prompt_token_ids=[token], response_token_ids=[token])
        s.finalize(outcome="completed")
    async with browsing(spool_uri) as at:
        await at.press("enter")
        for number, key in enumerate(("y", "tab")):
            if number:
                await at.press(key)
            await at.press("y")
            (ref,) = parsed(at.app.clipboard)
            assert ref.session_id == "a"
            await at.press("e")
            at.screen.query_one("Input").value = f"{tmp_path}/out{number}"
            await at.press("enter")
            await at.until(lambda: "1 session is in" in at.text, "the export")
            (tokens,) = pq.read_table(f"{tmp_path}/out{number}")["token_ids"].to_pylist()
            assert tokens == [11, 11]
        await at.press("b")
        assert "BYTES OF a@lineage/0" in at.text and "rows 4..6" in at.line("token_ids  ")
        await at.press("q", "enter")
        assert "a@lineage/0" in at.lines[0] and "11" in at.part("#tokens")[1]


async def test_a_failure_is_told_whole_where_lines_are_short(many, spool_uri):
    words = " ".join(f"word{n}" for n in range(30))
    async with browsing(spool_uri) as at:
        at.screen.fail(words)
        await at.settle()
        assert " ".join("".join(at.lines).split()).count("word") == 30 and "word29" in at.text
        at.screen.say("well again")
        await at.settle()
        assert "well again" in at.lines[-2] and "word" not in at.text


async def test_all_keys_at_the_foot_are_seen_in_80_columns(many, spool_uri):
    async with browsing(spool_uri) as at:
        for keys in ((), ("enter",), ("tab",), ("enter",), ("r",), ("b",)):
            await at.press(*keys)
            assert at.lines[-1].rstrip().endswith("q back"), at.text


async def test_an_export_of_one_thing_is_told_in_the_singular(many, spool_uri, tmp_path):
    async with browsing(spool_uri, size=(200, 24)) as at:
        await at.press("e")
        at.screen.query_one("Input").value = f"{tmp_path}/out"
        await at.press("enter")
        await at.until(lambda: "1 segment of 1 session is in" in at.text, "the export")


async def test_help_lists_the_keys_of_the_screen(many, spool_uri):
    async with browsing(spool_uri, size=(100, 50)) as at:
        await at.press("?")
        for key in ("/", "filter", "space", "mark", "s ", "sort", "^d", "half a page down", "y", "copy", "↑, k"):
            assert key in at.text
        await at.press("q", "enter", "?")
        assert "view" in at.text and "the step that goes on" in at.text and "half a page down" in at.text
        assert "Tree" in at.text and "Conversation" in at.text and "the next message" in at.text


@pytest.mark.parametrize(
    ("keys", "words"),
    [((), ()), (("g",), ()), (("b",), ()), (("enter",), ()), (("enter", "enter"), ("surprise", "edge")),
     (("enter", "r"), ("imbal", "overlap", "entropy"))],
)  # fmt: skip
async def test_help_lists_each_key_once_as_it_is_on_a_keyboard(many, spool_uri, keys, words):
    async with browsing(spool_uri, size=(100, 60)) as at:
        await at.press(*keys, "?")
        said, _, explained = at.screen.text().partition("\nWords\n")
        found = [line.partition("  ")[0].split(", ") for line in said.split("\n") if "  " in line]
        for key in (key for line in found for key in line):
            assert len(key) == 1 or key in (
                "escape", "space", "tab", "shift+tab", "page up", "page down", "home", "end", "enter"
            ) or (key[0] == "^" and len(key) == 2), key  # fmt: skip
        assert len([key for line in found for key in line if key == "b"]) == 1
        assert all(word in explained for word in words)
        assert (["enter"] in found) == (len(keys) < 2 and keys != ("b",))


# -- when things are not as they should be ----------------------------------------------------------------------------


async def test_an_empty_spool_says_so_on_every_screen(sp, spool_uri):
    async with browsing(spool_uri) as at:
        assert "no sessions yet" in at.text
        for key in ("enter", "y", "e", "space", "S", "down", "G", "v", "r"):
            await at.press(key)
        await at.press("g", "y")
        assert "no sessions yet" in at.text and "there is no session" in at.text
        await at.press("enter", "y", "b")
        assert "none yet" in at.text
        session(sp, "first")
        await at.press("q", "q")
        await at.until(lambda: "first" in at.text, "the first session")


async def test_a_session_without_steps_and_one_without_messages(sp, spool_uri):
    sp.session("silent").append(prompt_token_ids=[1], response_token_ids=[])
    with spool.open(f"{spool_uri}-2") as other:
        other.session("x").append(prompt_token_ids=[], response_token_ids=[])
    for location in (spool_uri, f"{spool_uri}-2"):
        async with browsing(location) as at:
            await at.press("enter")
            assert "no messages were recorded" in at.text
            await at.press("v", "tab", "enter", "r", "b")


async def test_a_discarded_session_is_a_line_not_a_crash(many, spool_uri):
    many.discard("s29")
    async with browsing(spool_uri) as at:
        await at.press("enter")
        assert "discarded" in at.lines[0] and "nothing is here" not in at.text and "◆" in at.text
        for key in ("down", "enter", "y", "r", "v", "tab", "b"):
            await at.press(key)
        await at.press("q", "q", "q", "q")
        assert "sessions: 30" in at.lines[0]


async def test_a_spool_that_is_removed_while_someone_looks(many, spool_uri, tmp_path):
    many.close()
    async with browsing(spool_uri) as at:
        shutil.rmtree(tmp_path / "spool")
        await asyncio.sleep(1.3)
        for key in ("j", "r", "s", "enter", "G", "g", "q", "b", "q", "enter", "j", "tab", "v", "b", "r", "q"):
            await at.press(key)
        assert at.app.is_running


@pytest.mark.parametrize(
    ("keys", "back"),
    [("", ""), ("enter", ""), ("enter r", "escape"), ("b", ""), ("question_mark", "escape")],
)
async def test_a_run_that_is_started_anew_in_the_folder_is_shown_instead(sp, spool_uri, tmp_path, keys, back):
    for number in range(3):
        session(sp, f"old{number}", 2, group_id="g")
    sp.close()
    async with browsing(spool_uri) as at:
        await at.press(*keys.split())
        shutil.rmtree(tmp_path / "spool")
        with spool.open(spool_uri) as other:
            session(other, "new")
            await at.press(*back.split())
            await at.until(lambda: "the run was started anew" in at.text, "the new run")
            await at.settle()
            assert "sessions: 1" in at.lines[0] and ids(at) == ["new"]
            session(other, "newer")
            await at.until(lambda: "sessions: 2" in at.lines[0], "the next session")
            await at.settle()  # the row that moved down is fetched
            await at.press("enter")
            assert at.screen.refer().id == "new:0"


async def test_data_that_is_gone_or_damaged_is_a_line_not_a_crash(many, spool_uri, tmp_path):
    many.flush()
    many.close()
    for folder, _, names in os.walk(tmp_path / "spool" / "streams"):
        for name in names:
            if "/c/" in f"{folder}/" or name.endswith(".arrow"):
                with open(os.path.join(folder, name), "r+b") as file:
                    file.truncate(os.path.getsize(file.name) // 2)
    async with browsing(spool_uri) as at:
        assert ids(at)[0] == "s29"
        await at.press("enter", "j", "b", "q", "tab", "tab", "u", "b")
        assert at.app.is_running


async def test_a_storage_that_hangs_holds_up_neither_keys_nor_the_exit(many, spool_uri, monkeypatch):
    gate = threading.Event()
    async with browsing(spool_uri) as at:
        monkeypatch.setattr(spool.handle.Spool, "steps", lambda *_, **__: gate.wait(60))
        await at.pilot.press("enter")
        await at.pilot.pause(0.2)
        assert "looking" in at.text
        began = time.monotonic()
        await at.pilot.press("q")
        await at.pilot.pause(0.1)
        assert "sessions: 30" in at.lines[0]
        await at.pilot.press("j", "question_mark")
        assert time.monotonic() - began < 5
        gate.set()
        await at.settle()


async def test_the_screen_is_there_before_the_spool_is_and_may_be_left(many, spool_uri):
    gate = threading.Event()
    app = Browser(lambda: gate.wait(60) and spool.open(spool_uri, readonly=True, create=False))
    async with app.run_test() as pilot:
        await pilot.pause(0.2)
        assert "opening the spool" in Driven(app, pilot).text
        await pilot.press("b", "y", "e", "question_mark", "escape", "escape", "q")
        await pilot.pause(0.1)
        assert not app.is_running
    gate.set()


async def test_what_keeps_a_spool_from_opening_is_what_the_browser_returns(tmp_path):
    app = Browser(lambda: spool.open(f"{tmp_path}/none", readonly=True, create=False))
    async with app.run_test() as pilot:
        await Driven(app, pilot).until(lambda: not app.is_running, "the end")
    assert isinstance(app.return_value, spool.NotFoundError)


async def test_failures_of_storage_are_told_and_gone_when_it_works_again(many, spool_uri, monkeypatch):
    async with browsing(spool_uri) as at:
        real = spool.listing.Listing.refresh

        def fails(self):
            raise StorageError("the bucket [red]is away[/red]")

        monkeypatch.setattr(spool.listing.Listing, "refresh", fails)
        await at.until(lambda: "storage: the bucket [red]is away[/red]" in at.text, "the failure")
        assert ids(at)[0] == "s29"
        monkeypatch.setattr(spool.listing.Listing, "refresh", real)
        await at.until(lambda: "is away" not in at.text, "its end")


async def test_a_fault_of_the_browser_is_a_line_and_is_remembered(many, spool_uri, monkeypatch):
    async with browsing(spool_uri) as at:
        monkeypatch.setattr("spool.browse.session.look_at", lambda *_: 1 / 0)
        await at.pilot.press("enter")
        await at.until(lambda: "fault, ZeroDivisionError" in at.text, "the fault")
        monkeypatch.undo()
        assert {type(fault) for fault in at.app.faults} == {ZeroDivisionError}
        at.app.faults.clear()


async def test_a_terminal_may_change_its_size_and_be_tiny(sp, spool_uri):
    tree(sp)
    async with browsing(spool_uri) as at:
        await at.press("enter", "j", "j", "tab", "tab", "u")
        for size in ((40, 8), (200, 60), (20, 4), (80, 24)):
            await at.pilot.resize_terminal(*size)
            await at.settle()
            assert all(len(line) <= size[0] for line in at.lines) and len(at.lines) == size[1]
        assert "Second." in at.text or "line 0" in at.text


async def test_screens_that_are_left_at_once(many, spool_uri):
    ref = many.final_segments("s29")[0]
    async with browsing(spool_uri) as at:
        app = at.app
        for number in range(30):
            app.open_session("s29")
            (app.open_groups, app.open_storage, lambda: app.open_segment(ref), lambda: app.open_routing(ref))[
                number % 4
            ]()
            await asyncio.sleep(0.01 * (number % 3))
            app.action_leave()
            app.action_leave()
            await asyncio.sleep(0.01 * (number % 5))
        await at.settle()
        assert "sessions: 30" in at.lines[0] and len(app.screen_stack) == 2


async def test_without_colour_nothing_is_coloured(sp, spool_uri, monkeypatch):
    tree(sp)
    monkeypatch.setenv("NO_COLOR", "1")
    async with browsing(spool_uri) as at:
        assert at.app.no_color
        await at.press("enter")
        colours = {
            part for strip in at.screen._compositor.render_strips() for part in _colours(strip.apply_filter(
                at.app._filters[0], at.screen.background_colors[1]))
        }  # fmt: skip
        assert colours and all(red == green == blue for red, green, blue in colours)


def _colours(strip):
    for segment in strip:
        for colour in (segment.style.color, segment.style.bgcolor) if segment.style else ():
            if colour is not None and colour.triplet is not None:
                yield tuple(colour.triplet)


# -- real runs --------------------------------------------------------------------------------------------------------


async def test_real_recorded_runs(sp, spool_uri, shared_data):
    paths = ["trajectories/harbor-atif/tests/golden", "trajectories/tau-bench", "trajectories/swe-agent"]
    for path in paths:
        if (shared_data / path).exists():
            spool.importers.import_runs(str(shared_data / path), sp)
    rows = list(sp.sessions())
    assert len(rows) > 5
    async with browsing(spool_uri, size=(160, 48)) as at:
        assert f"sessions: {len(rows)}" in at.lines[0]
        for _ in range(6):
            session_id = at.screen.refer()
            await at.press("enter")
            steps = sp.steps(session_id)
            assert len(at.screen.steps.rows) == len(steps)
            await at.press("end")
            last = at.screen.steps.current.step
            wanted = sp.messages(last.ref)
            assert at.screen.conversation._blocks[-1].message == len(wanted) - 1
            await at.press("tab", "tab", "u", "end", "v", "q", "down")


async def test_synthetic_groups_with_branches_and_rewrites(sp, spool_uri):
    for step in rollouts(
        SHAPE, groups=2, samples=2, turns=8, prompt_tokens=40, observation_tokens=20, response_tokens=10
    ):
        s = sp.session(**step.session, experts=SHAPE)
        s.append(**step.append)
        if step.last:
            s.finalize(outcome="completed")
    async with browsing(spool_uri, size=(120, 40)) as at:
        for row in reversed(list(sp.sessions())):
            await at.press("enter")
            shown = at.screen.steps.rows
            assert sorted(line.step.index for line in shown) == list(range(8))
            starts = [line.step.index for line in shown if line.kind == "start"]
            assert starts == [step.index for step in sp.steps(row.session_id) if step.parent is None]
            await at.press("q", "down")


# -- the verb ---------------------------------------------------------------------------------------------------------


async def test_the_verb_needs_a_terminal_and_a_spool(tmp_path):
    assert "browse needs a terminal" in run("browse", f"{tmp_path}", code=2).err
    assert "LOCATION" in run("browse", code=2).err


async def test_the_verb_runs_on_a_terminal_and_leaves_with_the_right_code(many, spool_uri, tmp_path):
    code, shown = await asyncio.to_thread(_on_terminal, [spool_uri], b"jq", "sessions: 30")
    assert code == 0 and "s29" in shown
    code, shown = await asyncio.to_thread(_on_terminal, [f"{tmp_path}/nowhere"], b"", "there is no spool")
    assert code == 3


async def test_without_the_extra_the_verb_says_what_to_install(many, spool_uri, tmp_path):
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide/textual.py").write_text("raise ModuleNotFoundError('no textual', name='textual')")
    code, shown = await asyncio.to_thread(
        _on_terminal, [spool_uri], b"", "spool-store[tui]", {"PYTHONPATH": f"{tmp_path}/hide"}
    )
    assert code == 2 and "pip install 'spool-store[tui]'" in shown


def _on_terminal(arguments, keys, awaited, variables=None):
    """Run ``spool browse`` on a terminal of its own; press keys once ``awaited`` is shown; return code and output."""
    import pty
    import select
    import signal

    pid, fd = pty.fork()
    if pid == 0:
        more = variables or {}
        path = os.pathsep.join(filter(None, [more.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
        env = {**environment(), **more, "PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        os.execve(SCRIPT, [SCRIPT, "browse", *arguments], env)
    shown, sent, until = b"", False, time.monotonic() + 60
    try:
        while time.monotonic() < until:
            ready, _, _ = select.select([fd], [], [], 0.2)
            try:
                part = os.read(fd, 65536) if ready else b""
            except OSError:
                break
            shown += part
            if not sent and awaited.encode() in shown and keys:
                sent = True
                time.sleep(0.3)
                os.write(fd, keys)
            if ready and not part:
                break
        else:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode("utf-8", "replace")
    finally:
        os.close(fd)
