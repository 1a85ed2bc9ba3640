"""What others wrote never acts on a terminal, never breaks a line, and is valid JSON always."""

import json
import re
import subprocess

import numpy as np
import pytest
from kit import SHAPE, add
from shell import HOSTILE, SCRIPT, environment, on_terminal, run

import spool as library
from spool.errors import ConfigError
from spool.model.events import Annotated

EVIL = "\x1b[31mred\x1b[0m\x07\x9b2J\x7f\u202egnp.exe\u2066\u200b\ufeff\r\n\tend"
LEGAL = "red\x9b2J\x9b31m\u202egnp.exe\u2066\u200b\ufeff\u2028end"
"""What the name of a root may hold: C0 control characters are refused."""
NAMES = [
    "good",
    f"a{EVIL}",
    "nul\x00nul",
    "new\nline",
    "tab\there",
    "\x1b]0;title\x07",
    "\u202e",
    "👩‍🚀 日本",
    "[bold]x[/bold]",
]
LONE = "lone \ud800 half"
VERBS, PARTS = ("cat", "locate", "show", "show"), ("", ":0", "@lineage/0", "@timeline/1")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("cli") / "hostile")
    with library.open(root) as sp:
        for number, name in enumerate(NAMES):
            s = sp.session(
                name, experts=SHAPE, group_id=f"g{EVIL}", source=EVIL, prompt_id=EVIL, split=EVIL,
                metadata={EVIL: [EVIL, float("nan")], "n": float("inf")},
            )  # fmt: skip
            call = {"function": {"name": EVIL, "arguments": {EVIL: LONE}}}
            said = [
                {"role": EVIL, "content": EVIL},
                {"role": "user", "content": [{"type": "text", "text": LONE + EVIL}, {"type": EVIL}], EVIL: None},
                {"role": "assistant", "content": None, "reasoning_content": EVIL, "tool_calls": [call, EVIL]},
            ]
            odd = np.array([np.nan, -np.inf, -0.0], np.float32)
            options = {"weight_version": EVIL, "finish_reason": EVIL, "logprobs": odd, "messages": said}
            add(s, [1, 2], [3, 4, 5], step_id=EVIL, **options)
            add(s, [1, 2, 3, 4, 5, 6], [7, 8, 9], **options, metadata={EVIL: EVIL})
            if name != "good":
                s.finalize()
            odd_facts = {"reward": [float("nan"), float("inf"), 1e308, -0.0][number % 4], "why": EVIL, EVIL: EVIL}
            # as other versions may have recorded: annotate refuses such names and rewards
            sp._facts._record(Annotated(name, 1.0, odd_facts))
    return root


def assert_harmless(text, where):
    found = [char for char in HOSTILE if char in text]
    assert not found, (where, found, text[:2000])
    assert not re.search("[\ud800-\udfff]", text)


def every_call(root, tmp_path):
    yield from (("ls", root), ("ls", root, "--all"), ("info", root), ("du", root), ("verify", root, "--deep"))
    yield from (("ls", root, "--segments"), ("ls", root, "--view", "timeline"))
    for name in NAMES:
        if "\x00" not in name:
            yield from ((verb, root, f"{name}{part}") for verb, part in zip(VERBS, PARTS, strict=True))
            yield ("show", root, name, "--messages")
            yield ("show", root, f"{name}:1", "--messages")


def test_json_is_valid_and_says_what_was_recorded(root, tmp_path):
    for call in every_call(root, tmp_path):
        done = run(*call, "--json")
        assert_harmless(done.text, call)
        assert done.json is not None
        if call[0] == "show":
            assert {facts["session_id"] for facts in done.json} <= set(NAMES)
    rows = run("ls", root, "--json").json
    assert [row["session_id"] for row in rows] == NAMES
    assert [row["source"] for row in rows] == [EVIL] * len(NAMES)
    assert [row["reward"] for row in rows[:4]] == ["nan", "inf", 1e308, -0.0]
    assert rows[0]["metadata"] == {EVIL: [EVIL, "nan"], "n": "inf"}
    (cat,) = run("cat", root, "good:0").json
    assert cat["fields"]["logprobs"] == ["nan", "-inf", -0.0]
    (session,) = run("show", root, "good", "--messages", "--json").json
    said = session["messages"][0]["messages"]
    assert said[0] == {"role": EVIL, "content": EVIL}
    assert said[1]["content"][0]["text"] == LONE.replace("\ud800", "�") + EVIL
    assert (session["steps"][0]["step_id"], session["steps"][0]["finish_reason"]) == (EVIL, EVIL)


def test_references_are_json_that_leads_back(root, tmp_path):
    refs = run("show", root, "--ref", *(name for name in NAMES if "\x00" not in name))
    assert_harmless(refs.text, "show --ref")
    with library.open(root, readonly=True) as sp:
        (nul,) = sp.final_segments("nul\x00nul")
    (tmp_path / "refs").write_text(refs.text + nul.to_json() + "\n")
    found = run("show", root, "--json", f"@{tmp_path}/refs").json
    assert {facts["session_id"] for facts in found} == set(NAMES)
    assert len(run("cat", root, "--json", f"@{tmp_path}/refs").json) == len(NAMES)


def test_lines_and_tables_hold_nothing_that_acts(root, tmp_path):
    for call in every_call(root, tmp_path):
        done = run(*call)
        assert_harmless(done.text, call)
        assert_harmless(done.err, call)
    assert [row["n_steps"] for row in run("ls", root).rows] == ["2"] * len(NAMES)
    assert len(run("ls", root, "--view", "timeline").rows) == 2 * (len(NAMES) - 1)
    assert run("ls", root).rows[3]["session_id"] == "new\\nline"
    assert run("ls", root).rows[-2]["session_id"] == "👩‍🚀 日本"


STYLE = re.compile(r"\x1b\[(?:0|1)?m")
"""All that tables use: bold, and back."""


@pytest.mark.parametrize(
    "call",
    [("ls",), ("ls", "--segments"), ("show", NAMES[1], "--messages"), ("show", "good:1"), ("locate", NAMES[1]),
     ("show", NAMES[1], "--json", "--messages"), ("cat", NAMES[1]), ("ls", "--json"), ("show", "good", "--ref")],
)  # fmt: skip
def test_a_terminal_is_not_acted_on(root, call):
    for columns in (80, 33):
        shown = on_terminal(call[0], root, *call[1:], columns=columns)
        assert_harmless(STYLE.sub("", shown), call)
        if call == ("ls",):
            assert max(len(line) for line in STYLE.sub("", shown).splitlines() if "left out: " not in line) <= columns
            assert "[bold]x[/bold]" in shown or columns == 33


@pytest.mark.parametrize(
    "args",
    [
        (EVIL,), ("ls", LEGAL), ("ls", f"file:///x?{LEGAL}=1"), ("ls", EVIL), ("ls", f"/{EVIL}"),
        ("ls", f"file:///{EVIL}?x={EVIL}"), ("ls", "ROOT", "--where", EVIL),
        ("show", "ROOT", EVIL), ("show", "ROOT", f"good:7{EVIL}"), ("show", "ROOT", f"@{EVIL}"),
        ("cat", "ROOT", "good", "--field", EVIL), ("cat", "ROOT", "good", "--tokens", EVIL), ("import", EVIL, "ROOT"),
        ("cat", "ROOT", "good", "--format", EVIL), ("ls", "ROOT", f"--{EVIL}"), ("ls", "ROOT", EVIL),
        ("import", "ROOT", "ROOT", "--form", EVIL), ("cat", "ROOT", "good", "-o", f"/nowhere/{EVIL}"),
    ],
)  # fmt: skip
def test_errors_do_not_act_either(root, args):
    done = run(*(root if arg == "ROOT" else arg for arg in args), code=None)
    assert done.code in (2, 3, 4)
    assert done.out == b""
    assert_harmless(done.err, args)
    assert "Traceback" not in done.err
    # the rest of a URL may be a secret: where its characters are refused, they are not shown
    assert "red" in done.err or "control characters" in done.err


def test_folders_with_odd_names(tmp_path):
    with pytest.raises(ConfigError):
        library.open(str(tmp_path / f"dir {EVIL}"))
    assert not any(tmp_path.iterdir())
    root = tmp_path / f"dir {LEGAL}"
    with library.open(str(root)) as sp:
        add(sp.session("s", experts=SHAPE), [1, 2], [3])
    (root / "streams" / f"x{EVIL}").mkdir()
    for call in (("info",), ("du",), ("locate", "s:0"), ("locate", "s:0", "--dd"), ("verify",), ("recover",), ("ls",)):
        done = run(call[0], root, *call[1:])
        assert_harmless(done.text + done.err, call)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_locale_will_do(root, encoding):
    env = {"PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    for call in (("ls", root, "--json"), ("show", root, "good", "--messages")):
        done = subprocess.run([SCRIPT, *call], capture_output=True, env=environment(**env), timeout=60)
        assert (done.returncode, done.stderr) == (0, b""), done
        if "--json" in call:
            assert [row["session_id"] for row in json.loads(done.stdout.decode(encoding))] == NAMES
