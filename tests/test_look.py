"""What people look at, as plain facts: trees, conversations, filters as they are typed, wrapped text, short numbers."""

import random
import time

import pytest
from browsing import session, tree
from rich.cells import cell_len

from spool.browse.filters import read_typed
from spool.browse.wrapping import TAB, place_after, place_before, wrapped
from spool.errors import NotFoundError
from spool.look.conversation import Block, blocks, n_shared, spelled, step_before
from spool.look.places import FieldPlace, fetched_bytes, places
from spool.look.references import find, named
from spool.look.session import look_at
from spool.look.text import ago, each_shown, one_line, safe_text, short, shortened
from spool.look.tree import StepLook, glyph, rails, tree_rows
from spool.model.refs import StepRef


def step(index, parent):
    ref = StepRef(spool_id="s", session_id="x", step_id=f"#{index}", index=index, parent=parent)
    return StepLook(
        index=index, step_id=ref.step_id, parent=parent, n_prompt=1, n_response=1, n_new=1, finish_reason=None,
        versions=(), n_nonfinite=0, ref=ref,
    )  # fmt: skip


def shown(parents, **options):
    rows = tree_rows([step(index, parent) for index, parent in enumerate(parents)], **options)
    return [f"{rails(row)}{glyph(row)}{row.step.index}" for row in rows]


def test_a_chain_has_no_depth_and_a_branch_one():
    assert shown([None, 0, 1, 2]) == ["◆0", "●1", "●2", "■3"]
    assert shown([None, 0, 0, 2]) == ["◆0", "├─■1", "●2", "■3"]
    assert shown([None, 0, 1, 0]) == ["◆0", "├─■3", "●1", "■2"]
    assert shown([None, 0, 0, 1, 1, 2, 5, 6]) == ["◆0", "├─●1", "│ ├─■3", "│ ■4", "●2", "●5", "●6", "■7"]
    assert shown([None, None, 0], superseded={1}) == ["◆0", "■2", "✗1"]
    assert shown([]) == []


def test_a_step_whose_parent_is_gone_is_a_root():
    rows = tree_rows([step(3, 1), step(4, 3)])
    assert [(row.step.index, row.kind) for row in rows] == [(3, "start"), (4, "next")]


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_is_shown_whole_in_order_and_flat(seed):
    rng = random.Random(seed)
    n = rng.randrange(1, 400)
    parents = [None, *(rng.choice([None, index - 1, index - 1, rng.randrange(index)]) for index in range(1, n))]
    rows = tree_rows([step(index, parent) for index, parent in enumerate(parents)])
    assert sorted(row.step.index for row in rows) == list(range(n))
    assert max(row.depth for row in rows) <= n.bit_length()
    above = {}
    for place, row in enumerate(rows):
        index = row.step.index
        assert row.n_children == parents.count(index)
        if row.kind == "start":
            assert parents[index] is None and row.depth == 0
        elif row.kind == "branch":
            assert row.depth == rows[above[parents[index]]].depth + 1
        else:
            # it goes on in the column of its parent, and all between hangs on that one
            parent = above[parents[index]]
            assert row.depth == rows[parent].depth
            assert all(between.depth > row.depth for between in rows[parent + 1 : place])
        above[index] = place


def test_a_comb_of_20000_steps_is_quick_and_needs_no_recursion():
    parents = [None, *((index - 1) // 2 * 2 for index in range(1, 20_000))]
    began = time.process_time()
    lines = shown(parents)
    assert len(lines) == 20_000 and max(map(len, lines)) < 12
    assert time.process_time() - began < 5


def test_a_session_is_looked_at_with_its_retries_and_the_segments_of_a_view(sp):
    tree(sp).finalize(outcome="completed")
    found = look_at(sp, "tree")
    assert (found.view, found.is_final) == ("lineage", True)
    assert [row.step.index for row in found.rows if row.superseded] == [1]
    users = {row.step.index: row.segments for row in found.rows}
    assert users == {0: (0, 1), 1: (), 2: (0, 1), 4: (0,), 3: (1,), 5: (1,), 6: (2,)}
    assert [segment.ref.id for segment in found.segments] == [f"tree@lineage/{index}" for index in range(3)]
    assert look_at(sp, "tree", "timeline").is_final is False
    for row in found.rows:
        assert sp.messages(row.step.ref) == sp.messages(sp.steps("tree")[row.step.index])


@pytest.mark.parametrize("options", [
    {"superseded": "keep"}, {"trailing": "keep", "gaps": "keep"}, {"train_shared_prefix": "all"},
    {"view": "timeline", "gaps": "keep"},
])  # fmt: skip
def test_a_segment_is_named_as_the_session_was_finalised_whatever_the_options(sp, options):
    made = tree(sp).finalize(outcome="completed", **options)
    found = look_at(sp, "tree")
    assert found.is_final and [segment.ref.id for segment in found.segments] == [ref.id for ref in made]
    assert [find(sp, look.ref.id) for look in found.segments] == [[ref] for ref in sp.final_segments("tree")]
    assert [each[0].steps for each in (find(sp, ref.id) for ref in made)] == [ref.steps for ref in made]
    other = "lineage" if "view" in options else "timeline"
    assert find(sp, f"tree@{other}/1") == [sp.view("tree", other)[1]]
    with pytest.raises(NotFoundError, match=f"has no {made[0].view} segment {len(made)}; it has 0, 1"):
        find(sp, f"tree@{made[0].view}/{len(made)}")


def test_light_references_of_a_session_in_several_streams_find_their_messages(sp, open_spool, spool_uri):
    session(sp, "moved", 2, outcome=None)
    sp.close()
    later = open_spool(spool_uri)
    s = later.session("moved")
    tokens = [3, 4, 5, 7, 8, 4, 4, 5, 7, 8, 9]
    s.append(prompt_token_ids=tokens, response_token_ids=[1], messages=[{"role": "user", "content": "late"}])
    found = look_at(later, "moved")
    assert len({extent.stream for extent in found.rows[-1].step.ref.extents["token_ids"]}) == 2
    assert [later.messages(row.step.ref) for row in found.rows] == [later.messages(ref) for ref in later.steps("moved")]


def test_names_are_found_as_the_command_line_takes_them(sp):
    session(sp, "a", 2)
    session(sp, "a:0")
    assert [ref.id for ref in find(sp, "a")] == ["a@lineage/0"]
    assert [ref.id for ref in find(sp, "a:0")] == ["a:0@lineage/0"]
    assert [ref.id for ref in find(sp, "a:1")] == ["a:1"]
    assert named(sp, "b") is None and named(sp, "") is None and named(sp, "\ud800") is None


def test_places_are_what_locate_says_joined(sp):
    session(sp, "a", 3)
    session(sp, "b", 3, view="timeline")
    (found,), n_left = places(sp, "a")
    assert n_left == 0 and len(places(sp, "b")[0]) == 3
    assert [part.ref for part in places(sp, "b", 2)[0]] == ["b@timeline/0", "b@timeline/1"] and places(sp, "b", 2)[
        1
    ] == 1
    located = sp.locate(sp.final_segments("a")[0])
    assert {(part.file, part.field) for part in found.ranges} == {(part.file, part.field) for part in located}
    assert sum(part.length for part in found.ranges) == sum(part.length for part in located)
    assert all(part.tier == "hot" for part in found.ranges) and found.gaps == {} and found.error is None


def test_messages_of_any_shape_become_blocks():
    call = {"function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, 3]},
        {"role": "tool", "content": ["out", {"type": "text", "text": "more"}, {"type": "image"}], "name": "f"},
        {"role": "user"},
        {"other": 1},
        "text",
        None,
        {"role": 5, "content": 5, "tool_calls": call},
        {"role": "assistant", "content": "", "refusal": "no", "audio": None, "reasoning": "why", "args": {"code": "1"}},
        {"role": "assistant", "function_call": {"name": "g", "arguments": "{}"}},
    ]
    assert [(b.message, b.role, b.kind, b.text, b.name) for b in blocks(said)] == [
        (0, "user", "text", "hi", ""),
        (1, "assistant", "thought", "hm", ""),
        (1, "assistant", "call", "{}", "f"),
        (1, "assistant", "call", "3", ""),
        (2, "tool", "result", "out", "f"),
        (2, "tool", "result", "more", "f"),
        (2, "tool", "result", '{"type": "image"}', "f"),
        (3, "user", "text", "", ""),
        (4, "?", "raw", '{"other": 1}', ""),
        (5, "?", "raw", '"text"', ""),
        (6, "?", "raw", "null", ""),
        (7, "5", "text", "5", ""),
        (7, "5", "call", "{}", "f"),
        (8, "assistant", "thought", "why", ""),
        (8, "assistant", "raw", '{"refusal": "no", "args": {"code": "1"}}', ""),
        (9, "assistant", "call", "{}", "g"),
    ]
    assert blocks([]) == []


def test_a_call_is_spelled_out_and_left_alone_where_it_is_no_json():
    assert spelled(Block(0, "a", "call", twice := '{"a": {"b": 1, "b": 2}}')) == twice
    assert spelled(Block(0, "a", "call", '{"command": "a\\nb", "n": 1}')) == "command:\na\nb\nn: 1"
    for text in ("{broken", "[1]", "", "{" * 100_000):
        assert spelled(Block(0, "a", "call", text)) == text
    assert spelled(Block(0, "a", "text", '{"a": 1}')) == '{"a": 1}'


def test_what_a_step_goes_on_with():
    steps = {index: step(index, parent) for index, parent in ((0, None), (2, 0), (5, None))}
    assert step_before(steps[0], steps) is None
    assert step_before(steps[2], steps) is steps[0]
    assert step_before(steps[5], steps) is steps[2]
    assert n_shared([1, 2, 3], [1, 2, 4]) == 2 and n_shared([], [1]) == 0


@pytest.mark.parametrize("width", [1, 7, 40])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "word " * 50,
        "x" * 1000,
        "日本語" * 40,
        "tab\tand\r\nlines\n\n\nend",
        "👩‍💻 e\u0301 \x1b[0m \ud800" * 20,
        "\n" * 99,
    ],
)
def test_wrapped_text_is_whole_and_fits(text, width):
    made = list(wrapped(text, 0, len(text), width))
    rows, starts = [row.text for row in made], [row.start for row in made]
    assert starts == sorted(starts) and starts[:1] in ([0], [])
    assert all(cell_len(row) <= max(width, 2) for row in rows)
    assert all(char.isprintable() or char in "\u200d\u0301" for row in rows for char in row)
    shown = one_line(text.replace("\r\n", "\n").replace("\t", "    ").replace("\n", ""))
    assert "".join(rows).replace(" ", "") == shown.replace(" ", "")


@pytest.mark.parametrize("width", [1, 7, 60])
@pytest.mark.parametrize(
    "text",
    ["\t" + "👨‍👩‍👧 word " * 60 + "end", "a\u200db\x1b[0m\t👩‍💻\ud800 " * 40 + "\r\n\t日本 tail", "plain words\n" * 30],
)
def test_each_character_of_a_row_has_the_place_of_what_it_shows(text, width):
    shown = each_shown(text)
    for row in wrapped(text, 0, len(text), width):
        assert len(row.places) == len(row.text) and [row.start, *row.places] == sorted([row.start, *row.places])
        assert row.start == row.places[0] if row.text else "\n" in text[row.start - 1 : row.start + 1]
        for char, place in zip(row.text, row.places, strict=True):
            assert char in (TAB if text[place] == "\t" else shown[place])


def test_pages_of_a_text_are_found_in_both_directions():
    text = "\n".join(f"line {number}" for number in range(1000))
    at, seen, edges = 0, [], [0]
    while at < len(text):
        begin, at = at, place_after(text, at, 40, 30)
        rows = list(wrapped(text, begin, at, 40))
        assert 1 <= len(rows) <= 30
        seen += [row.text for row in rows]
        edges.append(at)
    assert seen == text.split("\n")
    assert [place_before(text, at, 40, 30) for at in edges[1:-1]] == edges[:-2]
    assert place_before(text, 0, 40, 30) == 0 and place_after(text, len(text), 40, 30) == len(text)


@pytest.mark.parametrize("width", [0, 1, 80])
def test_no_more_of_a_text_is_looked_at_than_is_shown(width):
    class Counted(str):
        taken = 0

        def __getitem__(self, key):
            part = super().__getitem__(key)
            Counted.taken += len(part)
            return part

    for text in (Counted("x" * 10_000_000), Counted("word " * 1_000_000), Counted("\n" * 1_000_000)):
        middle = len(text) // 2
        start, stop = place_before(text, middle, width, 30), place_after(text, middle, width, 30)
        assert start < middle < stop <= middle + max(width, 1) * 30 + 1
        assert text[0] != "w" or width < 10 or text[start - 1] == " "
        Counted.taken = 0
        assert len(list(wrapped(text, start, stop, width))) <= 70
        assert Counted.taken <= stop - start


def test_what_is_typed_is_an_expression_where_it_compares():
    for text in ("reward > 0.5", "source = 'swe'", "reward is null", "source in ('a')", "group_id like 'a%'", "a <"):
        assert read_typed(f" {text} ") == (text, "expression", text)
    for text in ("swe", "g1@40", "it's", "in the middle", "is", "between"):
        assert read_typed(text).kind == "text"
    assert read_typed("  ") == (None, "", "")


def test_the_text_that_is_typed_is_quoted(sp):
    session(sp, "it's", source="A'B")
    session(sp, "other")
    for text in ("t's", "a'b", "IT'S", "\ud800it's"):
        assert [row.session_id for row in sp.sessions(read_typed(text).where)] == ["it's"]


def test_short_numbers_and_ages():
    assert [short(n) for n in (0, 9_999, 10_000, 99_949, 999_999, 1_000_000, 12_345_678, 10**12, 10**24)] == [
        "0", "9,999", "10.0K", "99.9K", "1000K", "1.00M", "12.3M", "1.00T", "1000000E",
    ]  # fmt: skip
    assert [ago(s) for s in (-5, 0, 59.9, 60, 7200, 90_000)] == ["0s", "0s", "59s", "1m", "2h", "1d"]


@pytest.mark.parametrize("char", "\u034f\u115f\u1160\u2800\u3164\uffa0\u200b\u202e\u00ad\u061c\x1b\x00\x9b")
def test_what_cannot_be_seen_is_shown_as_an_escape(char):
    assert one_line(f"a{char}b").isascii()
    assert safe_text(f"a{char}b").isascii()


def test_bytes_that_a_read_fetches_count_once():
    def place(start, stop, tier="cold", file="a", field="routed_experts"):
        return FieldPlace(
            field=field, file=file, tier=tier, stream="s", start=0, stop=1, offset=start, length=stop - start
        )

    ranges = [place(0, 100), place(50, 150), place(20, 30), place(300, 310), place(0, 7, "hot", "b"), place(0, 100)]
    assert fetched_bytes(ranges) == {("routed_experts", "cold"): 160, ("routed_experts", "hot"): 7}
    assert fetched_bytes([place(0, 4), place(0, 4, file="c"), place(0, 4, field="logprobs")]) == {
        ("routed_experts", "cold"): 8,
        ("logprobs", "cold"): 4,
    }
    assert fetched_bytes([]) == {}


@pytest.mark.parametrize(("text", "width", "shown"), [
    ("abc", 3, "abc"), ("abcdef", 5, "ab..."), ("宽宽", 4, "宽宽"), ("宽宽宽", 5, "宽..."), ("x" * 50_000, 4, "x..."),
])  # fmt: skip
def test_lines_are_shortened_to_cells(text, width, shown):
    assert shortened(text, width) == shown
