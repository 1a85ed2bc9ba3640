"""The screens of one segment and of routing: keys are pressed, and what is shown is looked at."""

import asyncio
import math
import re
import threading

import numpy as np
import pytest
from kit import SHAPE, add, counting, routing

import spool
from spool.browse.app import Browser
from spool.browse.heat import BAR_CELLS, heat, logprob_bar, side
from spool.browse.layer_map import LayerMap
from spool.browse.line_input import LineInput
from spool.browse.routing import RoutingScreen
from spool.browse.segment import SegmentScreen, parse_token
from spool.browse.token_pane import TokenPane
from spool.browse.tokens import TokenTable
from spool.importers import import_runs
from spool.model.fields import FieldSpec
from spool.model.moe import MoEShape

TALL, SMALL = (160, 48), (80, 24)


class Shown(Browser):
    """The browser, with one screen in front."""

    def __init__(self, sp, screen, **more):
        super().__init__(lambda: sp, **more)
        self._first = screen

    def opened(self, spool):
        self._spool = spool
        self.switch_screen(self._first)


async def settle(pilot):
    """Wait until every question is answered."""
    for _ in range(500):
        await pilot.pause(0.01)
        if not getattr(pilot.app.screen, "is_busy", False):
            await pilot.pause(0.02)
            if not getattr(pilot.app.screen, "is_busy", False):
                return
    raise AssertionError("the screen is still busy")


def look(sp, screen, do, *, size=TALL, **more):
    """Show a screen, wait, and run ``do(pilot)`` on it."""

    async def run():
        app = Shown(sp, screen, **more)
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            await do(pilot)
        assert not app.faults

    asyncio.run(run())


async def press(pilot, *keys):
    for key in keys:
        await pilot.press(key)
    await settle(pilot)


def lines(pilot, kind):
    """The lines of a list as they are shown."""
    table = pilot.app.screen.query_one(kind)
    return [table.render_line(y).text.rstrip() for y in range(table.size.height)]


def text(pilot, selector):
    return str(pilot.app.screen.query_one(selector).render())


def pane(pilot):
    return text(pilot, "TokenPane #facts")


def drawn(n, shape, seed=0):
    noise = np.random.default_rng(seed).random((n, shape.num_layers, shape.num_experts))
    return np.argsort(noise, axis=-1)[..., : shape.topk].astype(np.int32)


def mixed(sp):
    """Two versions, an observation, odd logprobs, a mask that is cleared."""
    s = sp.session("mixed", experts=SHAPE)
    odd = np.array([-0.25, math.nan, -math.inf, -3.5, 0.5, -9], np.float32)
    add(s, counting(10), counting(6, 50), weight_version="3", logprobs=odd, loss_mask=[1, 1, 0, 0, 1, 1])
    add(s, [*counting(10), *counting(6, 50), 900], counting(4, 70), weight_version="4[b]")
    return s.finalize(view="lineage")[0]


# -- numbers as cells -----------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_a_token_was_unlikely():
    lengths = [len(logprob_bar(value)[0].rstrip()) for value in (-0.0, -0.5, -1.0, -2.25, -8.0, -80.0)]
    assert lengths == [0, 1, 1, 3, 8, 8]
    assert logprob_bar(-0.5)[0][0] == "▌"
    for value in (None, math.nan, -math.inf, math.inf, 0.5, 1e30, -1e-30, -1e30):
        assert len(logprob_bar(value)[0]) == BAR_CELLS
    assert (
        "NaN" in logprob_bar(math.nan)[0] and "-inf" in logprob_bar(-math.inf)[0] and "+inf" in logprob_bar(math.inf)[0]
    )
    assert [logprob_bar(value)[1] for value in (-0.1, -1, -3, -6, math.nan, 0.5)] == [
        "good", "", "warn", "bad", "bad", "bad",
    ]  # fmt: skip


def test_heat_grows_and_says_never():
    values = (0.01, 0.3, 0.6, 1.2, 2, 3, 5, 100)
    assert [heat(value, plain=True)[0] for value in values] == list(".:-=+*#@")
    assert [heat(value, plain=False)[1] for value in values] == [f"heat{n}" for n in range(8)]
    assert heat(0, plain=True)[0] == " " and heat(0, plain=False) == ("·", "dim")
    assert heat(math.nan, plain=False)[0] == heat(math.nan, plain=True)[0] == "?"
    assert "".join(side(value, plain=True)[0] for value in (-5, -2, -0.5, 0.1, 0.5, 2, 5)) == "<(- +)>"
    assert [side(value, plain=False)[1] for value in (-5, 0, 5)] == ["side0", "side3", "side6"]


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_every_column_of_every_token(sp):
    async def do(pilot):
        heading, *rows = lines(pilot, TokenTable)[:22]
        assert heading.split() == ["TOKEN", "ID", "M", "LOGPROB", "SURPRISE", "STEP", "VERSION"]
        assert [row.split()[:2] for row in rows[:3]] == [["0", "1000"], ["1", "1001"], ["2", "1002"]]
        assert rows[10].split()[:5] == ["10", "R", "50", "1", "-0.250"] and rows[10].split()[-2:] == ["0", "3"]
        assert "nan NaN" in rows[11] and "-inf ████-inf" in rows[12] and "-9.000 ████████" in rows[15]
        assert "0.500 +0.5" in rows[14] and "· " in rows[12] and " 1 " in rows[14]
        assert rows[16].split() == ["16", "900", "·"]
        assert rows[17].split()[:3] == ["17", "V", "70"] and rows[17].endswith("1 4[b]")

    look(sp, SegmentScreen(mixed(sp)), do)


@pytest.mark.parametrize("size", [TALL, SMALL, (60, 15), (30, 8)])
def test_no_size_breaks_it(sp, size):
    async def do(pilot):
        await press(pilot, "G", "n", "p", "k")
        assert any(line for line in lines(pilot, TokenTable))

    look(sp, SegmentScreen(mixed(sp)), do, size=size)


def test_the_pane_tells_all_of_the_token_under_the_cursor(sp):
    async def do(pilot):
        await press(pilot, *"jjjjjjjjjjj")
        assert "token    11\n" in pane(pilot) and "id       51\n" in pane(pilot) and "logprob  nan\n" in pane(pilot)
        assert "generated by step 0\n" in pane(pilot) and "version  3\n" in pane(pilot)
        for layer, experts in zip((1, 2), routing([*counting(10), *counting(6, 50)])[11, 1:].tolist(), strict=True):
            found = next(line for line in pane(pilot).splitlines() if line.split()[:1] == [str(layer)])
            assert [int(part) for part in re.findall(r"\d+", found)] == [layer, *experts]
        await press(pilot, "G")
        assert "token    20\n" in pane(pilot) and "the last token: no forward over it" in pane(pilot)
        await press(pilot, "g", "g")
        assert "token    0\n" in pane(pilot) and "prompt or observation" in pane(pilot)

    look(sp, SegmentScreen(mixed(sp)), do)


def test_edges_are_gone_through_in_both_directions(sp):
    async def do(pilot):
        table, seen = pilot.app.screen.query_one(TokenTable), []
        for _ in range(6):
            await press(pilot, "n")
            seen.append(table.cursor)
        assert seen == [10, 12, 14, 16, 17, 17]
        assert "no edge behind this token, of 5" in text(pilot, "#status")
        await press(pilot, "p")
        assert table.cursor == 16 and "edge 4 of 5" in text(pilot, "#status")
        await press(pilot, "j", "p", "p")
        assert table.cursor == 14

    look(sp, SegmentScreen(mixed(sp)), do)


def test_what_is_typed_is_gone_to(sp):
    async def do(pilot):
        table = pilot.app.screen.query_one(TokenTable)
        for typed, token in (("12", 12), ("-1", 20), ("50%", 10), ("r", 10), ("0", 0)):
            await press(
                pilot, "colon", *["minus" if c == "-" else "percent_sign" if c == "%" else c for c in typed], "enter"
            )
            assert table.cursor == token and table.has_focus
        await press(pilot, "colon", "9", "9", "enter")
        assert table.cursor == 0 and "no token '99' among 21" in text(pilot, "#status")
        await press(pilot, "colon", "5", "escape")
        assert table.cursor == 0 and not pilot.app.screen.query_one(LineInput).has_class("open")
        assert isinstance(pilot.app.screen, SegmentScreen) and table.has_focus

    look(sp, SegmentScreen(mixed(sp)), do)


def test_what_names_no_token(sp):
    ref = mixed(sp)
    assert [parse_token(typed, ref) for typed in ("", "-", "%", "x", "21", "-22", "1.5", "٣x")] == [None] * 8
    assert [parse_token(typed, ref) for typed in ("1_0", "0,020", "100%", "9" * 99 + "%")] == [10, 20, 20, 20]


def test_a_long_segment_is_read_where_it_is_looked_at(sp, monkeypatch):
    n = 262_144
    s = sp.session("long", experts=SHAPE)
    rng = np.random.default_rng(0)
    s.append(prompt_token_ids=rng.integers(0, 9999, n - 1000), response_token_ids=counting(1000),
             logprobs=np.full(1000, -1, np.float32))  # fmt: skip
    (ref,) = s.finalize(view="lineage", gaps="keep")
    read, most = sp.read, []

    def counted(ref, **options):
        if options.get("fields") != ["loss_mask"]:
            most.append(options["tokens"].stop - options["tokens"].start)
        return read(ref, **options)

    monkeypatch.setattr(sp, "read", counted)

    async def do(pilot):
        table = pilot.app.screen.query_one(TokenTable)
        for _ in range(30):
            await pilot.press("ctrl+d")
        await press(pilot, "G", "ctrl+u", "pageup", "pagedown")
        assert table.cursor > n - 200
        shown = [line.split()[:2] for line in lines(pilot, TokenTable)[1:]]
        assert all(ids == [f"{int(ids[0].replace(',', '')):,}", ids[1]] and ids[1].isdigit() for ids in shown)
        await press(pilot, "n")
        await press(pilot, "p")
        assert table.cursor == n - 1000
        assert "gap: the experts of this token" in pane(pilot)

    look(sp, SegmentScreen(ref), do)
    assert max(most) < 600


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_tokens(sp, n):
    async def do(pilot):
        await press(pilot, "j", "G", "n", "p", "k", "ctrl+d")
        shown = lines(pilot, TokenTable)
        assert [line.split()[1] for line in shown[1 : n + 1]] == [str(1000 + i) for i in range(n)]
        assert ("no tokens" in shown[1]) == (n == 0)

    look(
        sp,
        SegmentScreen(sp.session("few", experts=SHAPE).append(prompt_token_ids=counting(n), response_token_ids=[])),
        do,
    )


def test_fields_of_the_user_are_in_the_pane(open_spool):
    kinds = [FieldSpec(name="kept", dtype="int32", align="token", ragged=True),
             FieldSpec(name="value", dtype="float32", align="response")]  # fmt: skip
    sp = open_spool(fields=kinds)
    ref = sp.session("user").append(prompt_token_ids=[1, 2], response_token_ids=[3], fields={
        "kept": [[], [7, 8], [9]], "value": np.array([math.inf], np.float32),
    })  # fmt: skip

    async def do(pilot):
        await press(pilot, "j")
        assert "kept     7 8\n" in pane(pilot) and "value    -\n" in pane(pilot)
        await press(pilot, "j")
        assert "kept     9\n" in pane(pilot) and "value    inf\n" in pane(pilot)
        assert "no routing was stored" in pane(pilot)

    look(sp, SegmentScreen(ref), do)


def test_hostile_text_is_shown_and_never_sent_to_the_terminal(sp, tmp_path):
    from tokenizers import AddedToken, Tokenizer, models

    words = ["\x1b[31m", "\x00", "\u202eabc", "[bold]x[/bold]", "🙂", "a" * 5000, "\u200b", "\n", "漢" * 200]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ref = sp.session("bad").append(prompt_token_ids=[*range(10), 77], response_token_ids=[3])

    async def do(pilot):
        for size in (TALL, SMALL):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            shown = "\n".join(lines(pilot, TokenTable))
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e]", shown)
            assert "\\x1b[31m" in shown and "[bold]" in shown and "🙂" in shown and "\\n" in shown
            assert "unknown id" in shown
            table = pilot.app.screen.query_one(TokenTable)
            assert {table.render_line(y).cell_length for y in range(12)} == {table.scrollable_content_region.width}
        for _ in range(11):
            await press(pilot, "j")
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e]", pane(pilot))

    look(sp, SegmentScreen(ref), do, tokenizer=str(tmp_path / "tokenizer.json"))


def test_a_bad_tokenizer_is_told_and_tokens_are_shown_all_the_same(sp, tmp_path):
    async def do(pilot):
        assert "no tokenizer file" in text(pilot, "#status")
        assert lines(pilot, TokenTable)[1].split()[:2] == ["0", "1000"]

    look(sp, SegmentScreen(mixed(sp)), do, tokenizer=str(tmp_path / "none.json"))


def test_recorded_tokens_and_their_text(sp, shared_data):
    import_runs(shared_data / "routing" / "A_12L_256E" / "taubench_airline_a.npz", sp)
    (ref,) = sp.segments()

    async def do(pilot):
        await press(pilot, "n")
        shown = lines(pilot, TokenTable)
        assert any("<|im_start|>" in line for line in shown) and any("assistant" in line for line in shown)
        assert len([line for line in pane(pilot).splitlines() if re.match(r" +\d+[ *] *\d+[ *]", line)]) == 12
        assert "generated by step 0, the first" in pane(pilot)
        assert pilot.app.screen.refer().id == ref.id

    look(sp, SegmentScreen(ref), do, tokenizer=str(shared_data / "routing" / "tokenizer.json"))


def test_data_that_cannot_be_read_is_a_line_in_the_status(sp, monkeypatch):
    ref = mixed(sp)
    read = sp.read

    def broken(*args, **options):
        if "token_ids" in options["fields"]:
            raise spool.StorageError("the disk is gone\nsecond line")
        return read(*args, **options)

    monkeypatch.setattr(sp, "read", broken)

    async def do(pilot):
        assert "the disk is gone" in text(pilot, "#status")
        await press(pilot, "j", "n")
        assert "…" in lines(pilot, TokenTable)[1]

    look(sp, SegmentScreen(ref), do)


# -- routing --------------------------------------------------------------------------------------------------------


def finished(sp, name, rows, shape):
    s = sp.session(name, experts=shape)
    s.append(prompt_token_ids=counting(len(rows)), response_token_ids=[7], routed_experts=rows)
    return s.finalize()[0]


def test_the_map_shows_every_layer_with_its_numbers(sp):
    shape = MoEShape(num_layers=5, num_experts=16, topk=2, moe_layers=(1, 3, 4))
    rows = drawn(200, shape)
    rows[:, [0, 2]] = 0
    rows[:, 3] = [5, 9]

    async def do(pilot):
        heading, *shown = lines(pilot, LayerMap)[:4]
        assert heading.split()[:5] == ["LAYER", "imbal", "entropy", "overlap", "unused"]
        assert [line.split()[0] for line in shown] == ["1", "3", "4"]
        assert shown[1].split()[1:5] == ["8.00", "0.250", "1.000", "0.875"]
        assert shown[1].endswith(" ····· ··· ······")
        assert "200 rows" in text(pilot, "#status")
        await press(pilot, "j", *("l" * 5))
        assert "layer 3, expert 5: 200 (50.00%, 8.00 x mean)" in text(pilot, "#numbers")
        assert "busiest 5 50.0%, 9 50.0%" in text(pilot, "#numbers") and "14 of 16 never used" in text(
            pilot, "#numbers"
        )
        await press(pilot, "s")
        assert lines(pilot, LayerMap)[1].split()[0] == "3"
        assert "sorted by imbal" in text(pilot, "#status")
        assert "layer 3" in text(pilot, "#numbers")
        for _ in range(4):
            await press(pilot, "s")
        assert [line.split()[0] for line in lines(pilot, LayerMap)[1:4]] == ["1", "3", "4"]

    look(sp, RoutingScreen(finished(sp, "map", rows, shape)), do)


def test_without_colour_the_map_is_made_of_signs(sp, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shape = MoEShape(num_layers=1, num_experts=4, topk=1)
    rows = np.zeros((40, 1, 1), np.int32)
    rows[30:, 0, 0] = 2

    async def do(pilot):
        await press(pilot, "$")
        assert lines(pilot, LayerMap)[1].endswith(" * =┃")
        assert ". less" in text(pilot, "#legend")

    look(sp, RoutingScreen(finished(sp, "plain", rows, shape)), do)


@pytest.mark.parametrize("size", [TALL, SMALL, (40, 12)])
def test_512_experts_and_75_layers_fit(sp, size):
    shape = MoEShape(num_layers=75, num_experts=512, topk=8)

    async def do(pilot):
        await press(pilot, "G", "$")
        assert lines(pilot, LayerMap)[-1].split()[0] == "74"
        assert re.search(r"layer 74, experts? (\d+ to )?511", text(pilot, "#numbers"))
        widths = {pilot.app.screen.query_one(LayerMap).render_line(y).cell_length for y in range(8)}
        assert widths == {pilot.app.screen.query_one(LayerMap).scrollable_content_region.width}

    look(sp, RoutingScreen(finished(sp, "wide", drawn(60, shape), shape)), do, size=size)


def test_the_cursor_on_the_last_expert_stays_there_in_any_size(sp):
    shape = MoEShape(num_layers=2, num_experts=256, topk=2)

    async def do(pilot):
        await press(pilot, "dollar_sign")
        table = pilot.app.screen.query_one(LayerMap)
        for width in (79, 50, 300, 20, 80):
            await pilot.resize_terminal(width, 24)
            await settle(pilot)
            low, high = table.experts
            assert 0 <= low < high <= 256 and f"expert{'s' if high - low > 1 else ''} {low}" in text(pilot, "#numbers")

    look(sp, RoutingScreen(finished(sp, "wide", drawn(20, shape), shape)), do, size=SMALL)


def test_nothing_and_gaps_are_told(sp):
    plain = sp.session("none").append(prompt_token_ids=counting(5), response_token_ids=[1])
    gaps = sp.session("gaps", experts=SHAPE).append(
        prompt_token_ids=counting(9), response_token_ids=[1], routed_experts=routing(counting(10))[5:],
        routed_experts_start=5)  # fmt: skip
    never = sp.session("never", experts=SHAPE).append(prompt_token_ids=counting(9), response_token_ids=[1])
    empty = sp.session("empty", experts=SHAPE).append(prompt_token_ids=[], response_token_ids=[])

    async def none(pilot):
        assert "no routing was stored for its 5 rows" in lines(pilot, LayerMap)[1]
        await press(pilot, "s", "j", "l")

    async def some(pilot):
        assert "4 rows · 5 never sent, in 1 gap" in text(pilot, "#status")

    async def all_gap(pilot):
        assert "0 rows · 9 never sent" in text(pilot, "#status")
        assert "nothing was counted" in text(pilot, "#numbers") and "never used" not in text(pilot, "#numbers")
        assert lines(pilot, LayerMap)[1].split()[1:5] == ["-"] * 4
        await press(pilot, "s", "j", "l")

    async def nothing(pilot):
        assert "0 rows" in text(pilot, "#status")

    for ref, do in ((plain, none), (gaps, some), (never, all_gap), (empty, nothing)):
        look(sp, RoutingScreen(ref), do)


def test_two_segments_are_compared(sp):
    shape = MoEShape(num_layers=2, num_experts=32, topk=2)
    a, b = finished(sp, "a", drawn(50, shape, 1), shape), finished(sp, "b", drawn(50, shape, 2), shape)

    async def do(pilot):
        await press(pilot, "v")
        await press(pilot, "v")
        assert "A-B · 50 and 50 rows · 50 in common" in text(pilot, "#status")
        assert lines(pilot, LayerMap)[0].split()[:4] == ["LAYER", "dist", "agree", "same"]
        from spool.look.routing import compare

        wanted = compare(sp, a, b)
        for number, line in enumerate(lines(pilot, LayerMap)[1:3]):
            found = [float(part) for part in line.split()[1:4]]
            assert np.allclose(
                found, [wanted.distance[number], wanted.agreement[number], wanted.identical[number]], atol=1e-3
            )
        await press(pilot, "v")
        assert lines(pilot, LayerMap)[0].split()[1] == "imbal" and text(pilot, "#status").strip().startswith("A · ")

    look(sp, RoutingScreen(a, b), do)


def test_what_to_compare_with_is_chosen_or_typed(sp):
    s = sp.session("two", experts=SHAPE)
    add(s, counting(20), counting(5, 50))
    add(s, counting(20), counting(5, 90))
    first = s.finalize(view="lineage")[0]
    add(sp.session("other", experts=SHAPE), counting(20), counting(5, 70))

    async def do(pilot):
        await press(pilot, "c")
        await press(pilot, "j", "enter")
        screen = pilot.app.screen
        assert isinstance(screen, RoutingScreen) and screen.other.id == "two@timeline/0"
        assert "against two@timeline/0" in text(pilot, "#heading")
        assert "20 in common" in text(pilot, "#status")
        await press(pilot, "c")
        await press(pilot, "enter")
        await press(pilot, *"other", "colon", "0", "enter")
        assert screen.other.id == "other:0" and "20 in common" in text(pilot, "#status")
        await press(pilot, "c")
        await press(pilot, "enter")
        await press(pilot, *"nosuch", "enter")
        assert screen.other.id == "other:0" and "no session, step or segment 'nosuch'" in text(pilot, "#status")

    look(sp, RoutingScreen(first), do)


def test_what_cannot_be_compared_leaves_the_comparison_that_there_is(sp):
    shape = MoEShape(num_layers=2, num_experts=32, topk=2)
    a, b = finished(sp, "a", drawn(50, shape, 1), shape), finished(sp, "b", drawn(50, shape, 2), shape)
    finished(sp, "small", drawn(9, MoEShape(2, 8, 2)), MoEShape(2, 8, 2))

    async def do(pilot):
        await press(pilot, "v", "v")
        await press(pilot, "c")
        await press(pilot, "enter")
        await press(pilot, *"small", "colon", "0", "enter")
        assert "different shapes cannot be compared" in text(pilot, "#status")
        assert pilot.app.screen.other.id == b.id and f"against {b.id}" in text(pilot, "#heading")
        assert lines(pilot, LayerMap)[0].split()[:4] == ["LAYER", "dist", "agree", "same"]
        await press(pilot, "v", "v", "v")
        assert "50 in common" in text(pilot, "#status")

    look(sp, RoutingScreen(a, b), do)


def test_models_of_other_shapes_are_told_apart(sp):
    shape = MoEShape(num_layers=2, num_experts=32, topk=2)
    a, b = finished(sp, "a", drawn(50, shape), shape), finished(sp, "b", drawn(9, MoEShape(2, 8, 2)), MoEShape(2, 8, 2))

    async def do(pilot):
        assert "different shapes cannot be compared" in text(pilot, "#status")
        assert len(lines(pilot, LayerMap)[1].split()) >= 5
        await press(pilot, "v", "j", "l")

    look(sp, RoutingScreen(a, b), do)


def test_it_is_filled_in_while_it_reads_and_left_at_once(sp, monkeypatch):
    from spool.browse import routing as shown_routing
    from spool.look import rows

    monkeypatch.setattr(rows, "WINDOW_ROWS", 8)
    monkeypatch.setattr(shown_routing, "_EVERY_S", 0.0)
    shape = MoEShape(num_layers=2, num_experts=32, topk=2)
    ref = finished(sp, "slow", drawn(400, shape), shape)
    go, reads, read = threading.Semaphore(5), [], sp.read

    def slow(*args, **options):
        assert go.acquire(timeout=30)
        reads.append(options["tokens"])
        return read(*args, **options)

    monkeypatch.setattr(sp, "read", slow)

    async def run():
        app = Shown(sp, RoutingScreen(ref))
        async with app.run_test(size=TALL) as pilot:
            for _ in range(200):
                await pilot.pause(0.02)
                if len(reads) == 5 and "reading: 40 of 400 rows" in text(pilot, "#status"):
                    break
            assert "reading: 40 of 400 rows" in text(pilot, "#status")
            assert lines(pilot, LayerMap)[1].split()[0] == "0" and app.screen.is_busy
            await pilot.press("q")
        go.release(1000)

    asyncio.run(run())
    for thread in threading.enumerate():
        if thread.name.startswith("spool-browse-routing"):
            thread.join(10)
    assert len(reads) <= 6


def test_screens_that_are_left_before_they_are_laid_out(sp):
    ref = mixed(sp)

    async def do(pilot):
        for screen in (SegmentScreen(ref), RoutingScreen(ref)):
            pilot.app.push_screen(screen)
            pilot.app.pop_screen()
            await settle(pilot)
        assert pilot.app.screen.query_one(TokenTable).n_rows == 21

    look(sp, SegmentScreen(ref), do)


def test_recorded_routing_and_the_way_there(sp, shared_data):
    import_runs(shared_data / "routing" / "B_8L_384E" / "taubench_airline_a.npz", sp)
    (ref,) = sp.segments()

    async def do(pilot):
        await press(pilot, "r")
        assert isinstance(pilot.app.screen, RoutingScreen)
        rows = sp.read(ref, fields=["routed_experts"])["routed_experts"]
        for layer, line in enumerate(lines(pilot, LayerMap)[1:9]):
            load = np.bincount(rows[:, layer].ravel(), minlength=384)
            assert line.split()[0] == str(layer)
            assert math.isclose(float(line.split()[1]), load.max() / load.mean(), abs_tol=0.006)
        await press(pilot, "q")
        assert isinstance(pilot.app.screen, SegmentScreen)
        assert pilot.app.screen.query_one(TokenPane) is not None

    look(sp, SegmentScreen(ref), do, size=SMALL)
