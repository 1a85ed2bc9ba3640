"""The command line: locations, references, exit codes, output, and what it must leave alone."""

import atexit
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kit import SHAPE, add
from shell import SCRIPT, environment, on_terminal, run, spool
from tiers import wait_for

import spool as library
from spool.cli import VERBS
from tools import cli_reference

PAGE = f"{tempfile.gettempdir()}/spool-report-{os.getpid()}.html"
atexit.register(lambda: Path(PAGE).unlink(missing_ok=True))

READING = {
    "cat": ("cat", "plain"), "diff": ("diff", "plain", "plain"), "du": ("du",), "info": ("info",),
    "locate": ("locate", "plain"), "ls": ("ls",),
    "report": ("report", "--force", "-o", PAGE),
    "show": ("show", "plain"), "stats": ("stats",), "status": ("status",), "tail": ("tail", "-n", "1"),
    "verify": ("verify", "--deep"),
}  # fmt: skip
CHANGING = {
    "checkpointed": ("checkpointed", "ckpt"), "demo": ("demo",), "export": ("export", "--all", "-o", "/nowhere/at/all"),
    "gc": ("gc",), "import": ("import", str(cli_reference.PATH)), "publish": ("publish", "plain"),
    "rebuild": ("rebuild",), "recover": ("recover",), "release": ("release", "plain"), "spill": ("spill",),
}  # fmt: skip
SCREENS = {"browse": ("browse",)}
"""Verbs that need a terminal; what they show is tested where they are."""


def at(args, location):
    """Return the arguments with the location behind the verb."""
    return (args[0], location, *args[1:])


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """The root of a spool with a few finished sessions, a branch, a reward, and one that was discarded."""
    root = str(tmp_path_factory.mktemp("cli") / "some")
    with library.open(root) as sp:
        s = sp.session("plain", experts=SHAPE, group_id="g", sample_index=1, source="swe", rollout_step=3)
        add(s, [1, 2, 3], [4, 5], weight_version="7", messages=[{"role": "user", "content": "hi"}])
        add(s, [1, 2, 3, 4, 5, 6], [7, 8, 9], weight_version="8", finish_reason="stop")
        add(s, [1, 2, 3, 4, 5, 60], [70], weight_version="8", finish_reason="length")
        s.finalize()
        sp.annotate("plain", reward=0.5, note="x")
        add(sp.session("open", experts=SHAPE), [1, 2], [3])
        gone = sp.session("gone", experts=SHAPE)
        add(gone, [1], [2])
        gone.finalize()
        sp.discard("gone")
        gap = sp.session("gap", experts=SHAPE)
        gap.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4])
        gap.append(prompt_token_ids=[1, 2, 3, 4, 5], response_token_ids=[6], routed_experts=np.ones((1, 3, 2), int)
                   * [[[0], [1], [1]]] + [[[0, 0], [0, 1], [0, 1]]], routed_experts_start=4)  # fmt: skip
        gap.finalize()
    return root


def tree(root):
    """Return every file of a folder: name, size, time, content, mode."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        stat = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        found[str(path.relative_to(root))] = (stat.st_size, stat.st_mtime_ns, stat.st_mode, content)
    return found


# -- help and documentation -----------------------------------------------------------------------------------------


def test_the_reference_is_up_to_date_and_has_every_verb():
    text = cli_reference.PATH.read_text()
    assert text == cli_reference.document(), "run python -m tools.cli_reference"
    assert re.findall(r"^## spool (\w+)$", text, re.MULTILINE) == sorted(VERBS)
    files = {path.name.removesuffix("_.py") for path in Path(cli_reference.PATH.parents[1] / "spool/cli").glob("*_.py")}
    assert files - {"__init_"} == set(VERBS) == READING.keys() | CHANGING.keys() | SCREENS.keys()


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom spool.cli import main\nsys.argv = ['spool', '--help']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code == 0\n"
        "heavy = {'numpy', 'pyarrow', 'apsw', 'torch', 'rich', 'crc32c'}\n"
        "sys.exit(bool(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert all(f"\n  {verb} " in done.stdout.decode() for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_json_and_says_whether_it_only_reads(verb):
    text = run(verb, "--help").text
    assert ("--json" in text) == (verb not in SCREENS)
    assert ("--dry-run" in text) == (verb in CHANGING)
    assert run(verb, "-h").text == text


def test_the_version_is_told():
    assert run("--version").text == f"spool, version {library.__version__}\n"


@pytest.mark.parametrize(("word", "meant"), [("lss", "ls"), ("verfy", "verify"), ("imprt", "import"), ("list", "ls")])
def test_an_unknown_verb_suggests_another(word, meant):
    done = run(word, code=2)
    assert meant in done.err
    assert done.out == b""


def test_no_verb_is_a_usage_error_with_help():
    done = run(code=2)
    assert "Usage: spool" in done.err + done.text


# -- where the spool is ---------------------------------------------------------------------------------------------


def test_the_location_is_an_argument_or_in_the_environment(some):
    want = run("ls", some, "--json").json
    assert [row["session_id"] for row in want] == ["plain", "open", "gap"]
    for location in (f"file://{some}", f"{some}/", f"file://{some}?threads=1", f"{some}?page_cache_bytes=1MiB"):
        assert run("ls", location, "--json").json == want
    assert run("ls", "--json", env={"SPOOL_URI": f"file://{some}"}).json == want
    assert run("ls", ".", "--json", cwd=some).json == want
    assert run("ls", some, "--json", env={"SPOOL_URI": "/nowhere"}).json == want


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_without_a_location_there_is_a_hint(verb, tmp_path):
    if verb == "demo":
        return  # has a temporary one
    args = {**CHANGING, **READING, **SCREENS}[verb]
    done = run(*args, code=3 if verb in ("cat", "diff", "locate", "publish", "release", "show") else 2)
    assert "SPOOL_URI is not set" in done.err


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"demo", "import"} - SCREENS.keys()))
def test_a_location_without_a_spool_is_not_found_and_not_made(verb, tmp_path):
    args = CHANGING.get(verb) or READING[verb]
    done = run(*at(args, f"file://{tmp_path}/none"), code=3)
    assert "no spool" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", ["file://host/y", "file:///x?nonsense=1"])
def test_other_locations_are_refused(uri):
    assert "input" in run("ls", uri, code=2).err or "config" in run("ls", uri, code=2).err
    assert run("show", uri, "plain", code=2).out == b""


# -- references -----------------------------------------------------------------------------------------------------


def shown(location, *texts, **options):
    return [facts.get("id", facts["session_id"]) for facts in run("show", location, "--json", *texts, **options).json]


def test_references_are_sessions_steps_segments_json_and_files(some, tmp_path):
    assert shown(some, "plain", "plain:1", "plain@lineage/0", "plain@timeline/2") == [
        "plain", "plain:1", "plain@lineage/0", "plain@timeline/2",
    ]  # fmt: skip
    one = run("show", some, "--ref", "plain:1").text
    many = run("show", some, "--ref", "plain", "plain:1").text
    assert len(many.splitlines()) == 3
    assert library.ref_from_json(one).id == "plain:1"
    (tmp_path / "one").write_text(one)
    (tmp_path / "many").write_text(many)
    assert shown(some, one) == ["plain:1"]
    assert shown(some, f"@{tmp_path}/one") == ["plain:1"]
    assert shown(some, f"@{tmp_path}/many") == ["plain@lineage/0", "plain@lineage/1", "plain:1"]
    assert shown(some, "@-", stdin=many) == ["plain@lineage/0", "plain@lineage/1", "plain:1"]
    assert run("cat", some, "@-", stdin=many).json[2]["fields"]["token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with library.open(some, readonly=True) as sp:
        odd = msgspec.structs.replace(sp.steps("plain")[1], step_id="\u2028 \x85", finish_reason="\x1c")
    assert shown(some, "@-", stdin=odd.to_json() + "\n" + one) == ["plain:1", "plain:1"]


def test_a_session_of_exactly_that_id_comes_first(tmp_path):
    names = [
        "a", "a:1", "a@lineage/0", "a@timeline/1", "-rf", "--help", "--json", "x/y:z@w", '{"type":"step"}', "@there",
        "file:///a", "s3://bucket", "a b", "'", '"', "$HOME", "*", "\\", "a:1:1", ":0", "@lineage/0", "日本語", "👩‍🚀",
    ]  # fmt: skip
    root = str(tmp_path / "s")
    (tmp_path / "there").write_text("not a reference")
    with library.open(root) as sp:
        for name in names:
            s = sp.session(name, experts=SHAPE)
            for step in range(2):
                add(s, [1, 2, *range(10, 10 + 2 * step)], [10 + 2 * step, 11 + 2 * step])
            s.finalize()
    done = run("show", root, "--json", "--", *names, cwd=tmp_path).json
    assert [facts["session_id"] for facts in done] == names
    parts = [f"{name}{part}" for name in names for part in (":0", "@timeline/1", "@lineage/0")]
    distinct = [part for part in parts if part not in names]
    found = run("show", root, "--json", "--", *distinct, cwd=tmp_path).json
    assert [facts["id"] for facts in found] == distinct
    listed = run("ls", root, "--segments").rows
    assert [row["id"] for row in listed] == [f"{name}@lineage/0" for name in names]
    ids = [row["id"] for row in listed if row["id"] not in names]
    cats = run("cat", root, "--field", "token_ids", "--", *ids).json
    assert [cat["id"] for cat in cats] == ids
    # a location first: then even what looks like one is a reference
    assert run("show", root, "s3://bucket", "--json").json[0]["session_id"] == "s3://bucket"
    assert run("show", "--json", "x/y:z@w", env={"SPOOL_URI": root}).json[0]["session_id"] == "x/y:z@w"


@pytest.mark.parametrize(
    ("ref", "code", "says"),
    [
        ("nobody", 3, "nobody"),
        ("nobody:0", 3, "nobody:0"),
        ("nobody@lineage/0", 3, "nobody"),
        ("plain:9", 3, "0, 1, 2"),
        ("plain@lineage/7", 3, "0, 1"),
        ("plain@sideways/0", 3, "sideways"),
        ("plain:", 3, "plain:"),
        (":", 3, "':'"),
        ("gone", 3, "discarded"),
        ("gone:0", 3, "discarded"),
        ("@/nowhere/at/all", 3, "/nowhere/at/all"),
        ("@/etc", 4, "/etc"),
        ("{}", 2, "reference"),
        ('{"type":"step"}', 2, "reference"),
        (f"@{sys.executable}", 2, "not a"),
        ("", 3, "''"),
        ("plain:" + "9" * 5000, 3, "plain:999"),
        ("plain:" + "9" * 18, 3, "0, 1, 2"),
        ("plain:\u0663", 3, "plain"),
    ],
)
def test_what_is_not_there_has_its_code_and_a_hint(some, ref, code, says):
    for verb in ("cat", "locate") if ref == "gone" else ("show", "cat", "locate"):
        done = run(verb, some, ref, code=code)
        assert says in done.err
        assert done.out == b""


# -- exit codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("ls", "--where", "reward >"),
        ("ls", "--where", "x = 'a"),
        ("ls", "--nonsense"),
        ("ls", "one too many"),
        ("ls", "--view", "sideways"),
        ("show",),
        ("cat",),
        ("locate",),
        ("cat", "plain", "--tokens", "1-2"),
        ("cat", "plain", "--tokens", "1:2:3"),
        ("cat", "plain", "--layers", "x"),
        ("cat", "plain", "--tokens", f"{'9' * 5000}:"),
        ("cat", "plain", "--missing", "9" * 30),
        ("cat", "plain", "--format", "raw"),
        ("cat", "plain:0", "--format", "raw", "--field", "token_ids", "--field", "logprobs"),
        ("cat", "plain:0", "--json", "--format", "npz"),
        ("cat", "plain:0", "--missing", "x"),
        ("demo", "--groups", "0"),
        ("demo", "--groups", "many"),
    ],
)
def test_a_wrong_call_is_a_usage_error(some, args):
    done = run(*at(args, some), code=2)
    assert done.out == b""
    assert done.err.startswith(("spool: ", "Usage: "))


def test_an_unknown_field_is_not_found(some):
    assert "nonsense" in run("cat", some, "plain", "--field", "nonsense", code=3).err


def test_rows_that_were_never_sent_fail_unless_a_number_stands_for_them(some):
    done = run("cat", some, "gap:1", code=1)
    assert "left out" in done.err and "routed_experts was never sent for forward rows [0, 4)" in done.err
    assert done.json[0]["fields"].keys() == {"token_ids", "loss_mask"}
    assert "missing" in run("cat", some, "gap:1", "--field", "routed_experts", code=1).err
    (found,) = run("cat", some, "gap:1", "--missing", "-1").json
    rows = np.array(found["fields"]["routed_experts"])
    assert rows.shape == (5, 3, 2)
    assert (rows[:4] == -1).all()
    assert (rows[4, 1:] == [1, 2]).all()


def test_storage_that_fails_is_told_apart(some, tmp_path):
    full = run("cat", some, "plain", "-o", "/dev/full", code=4)
    assert "space" in full.err
    assert run("cat", some, "plain", "-o", tmp_path / "no/such/folder", code=4).out == b""
    for args in (
        ("ls", some),
        ("cat", some, "plain"),
        ("ls", some, "--json"),
        ("cat", some, "plain", "--format", "npz"),
    ):
        with open("/dev/full", "wb") as target:
            done = subprocess.run([SCRIPT, *args], stdout=target, stderr=subprocess.PIPE, env=environment())
        assert done.returncode == 4, done
        assert b"Traceback" not in done.stderr
        assert b"No space left" in done.stderr


def test_a_standard_stream_that_is_closed_is_missed_only_where_it_is_needed(some):
    def closed(how, *args):
        command = ["bash", "-c", f'exec "$0" "$@" {how}', SCRIPT, *args]
        done = subprocess.run(command, capture_output=True, env=environment(), timeout=60, stdin=subprocess.DEVNULL)
        assert b"Traceback" not in done.stderr, done
        return done.returncode, done.stdout, done.stderr.decode()

    whole = run("ls", some).out
    assert closed("2>&-", "ls", some) == (0, whole, "")
    assert closed("<&-", "ls", some) == (0, whole, "")
    assert closed("<&- 2>&-", "ls", some) == (0, whole, "")
    for args in (("ls", some), ("ls", some, "--json"), ("cat", some, "plain", "--format", "npz"), ("tail", some)):
        code, _, said = closed(">&-", *args)
        assert code == 4 and "Bad file descriptor" in said
        assert closed("<&- >&- 2>&-", *args)[0] == 4
    assert closed("2>&-", "show", some, "nobody") == (3, b"", "")
    code, _, said = closed("<&-", "show", some, "@-")
    assert code == 4 and "cannot read '-': Bad file descriptor" in said
    assert closed(">&-", "report", some, "--force", "-o", PAGE)[0] == 0
    for how in ("<&-", ">&-"):
        code, _, said = closed(how, "browse", some)
        assert code == 2 and "browse needs a terminal" in said
    assert closed("2>&-", "browse", some)[0] == 2


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    root = str(tmp_path / "s")
    with library.open(root) as sp:
        for number in range(1200):
            sp.session(f"{number:05}-{'x' * 100}").append(prompt_token_ids=[1], response_token_ids=[2])
    for verb in (f"ls {root}", f"ls {root} --json", f"cat {root} $(printf '%05d-%0100d:0 ' 1 0 | tr 0 x) || true"):
        command = f"set -o pipefail; {SCRIPT} {verb} | head -c 10"
        done = subprocess.run(["bash", "-c", command], capture_output=True, env=environment(), timeout=60)
        assert (done.returncode, b"Traceback" in done.stderr, b"BrokenPipe" in done.stderr) == (0, False, False), done
    command = f"{SCRIPT} ls {root} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"session_id\t")


def test_an_interrupt_ends_with_130_and_without_a_traceback(tmp_path):
    root = tmp_path / "s"
    process = subprocess.Popen(
        [SCRIPT, "demo", root, "--groups", "100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    try:
        wait_for(lambda: list(root.glob("streams/2*/records/*.log")), what="the first records", timeout_s=30)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert run("verify", root).err.endswith("nothing wrong\n")


# -- output ---------------------------------------------------------------------------------------------------------


def test_json_has_numbers_as_numbers_and_nothing_twice(some):
    (facts,) = run("show", some, "plain", "--json").json
    assert (facts["reward"], facts["facts"]) == (0.5, {"reward": 0.5, "note": "x"})
    assert isinstance(facts["opened_at"], float)
    assert [step["version_span"] for step in facts["steps"]] == [["7", "7"], ["8", "8"], ["8", "8"]]
    for row in run("du", some, "--json").json["streams"]:
        assert all(isinstance(row[name], int | None) for name in ("rows", "stored_bytes", "sent_bytes", "file_bytes"))
    info = run("info", some, "--json").json
    assert (info["n_sessions"], info["n_open"], info["n_discarded"]) == (3, 1, 1)
    assert len(set(info)) == len(info)
    assert "streams" not in info
    assert run("ls", some, "--where", "source = 'nothing'", "--json").json == []
    assert [row["session_id"] for row in run("ls", some, "--all", "--json").json] == ["plain", "open", "gone", "gap"]
    assert run("ls", some, "--where", "reward > 0.4 and note = 'x'", "--json").json[0]["session_id"] == "plain"


def test_lines_are_tab_separated_and_exact(some):
    rows = run("ls", some).rows
    assert [row["session_id"] for row in rows] == ["plain", "open", "gap"]
    assert (rows[0]["reward"], rows[0]["n_steps"], rows[1]["outcome"]) == ("0.5", "3", "-")
    facts = dict(line.split("\t") for line in run("info", some).text.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["created_at"])
    totals = run("du", some).rows[-1]
    assert totals["field"] == "total"
    assert totals["stored_bytes"].isdecimal()
    text = run("show", some, "plain", "--messages").text
    assert "reward\t0.5\n" in text
    assert "facts.note\tx\n" in text
    assert "\nuser: hi\n" in text
    assert re.search(r"^opened_at\t\d{4}-\d\d-\d\dT", text, re.MULTILINE)
    assert b"\x1b" not in run("ls", some).out


def plain_lines(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def test_a_terminal_gets_tables_that_fit(some, tmp_path):
    for args in (
        ("ls",), ("ls", "--segments"), ("info",), ("du",), ("du", "--streams"), ("show", "plain"), ("show", "plain:1"),
        ("show", "plain@lineage/0"), ("locate", "plain"), ("verify", "--deep"),
    ):  # fmt: skip
        lines = [line for line in plain_lines(on_terminal(*at(args, some))) if "left out: " not in line]
        assert max(map(len, lines)) <= 80, args
        assert not any("\t" in line or "{'" in line or "None" in line for line in lines), args
    lines = plain_lines(on_terminal("ls", some))
    heading = ["SESSION", "STATE", "OUTCOME", "REWARD", "STEPS", "TOKENS", "SEGMENTS", "SOURCE", "GROUP"]
    assert lines[0].split() == heading
    assert lines[1].split() == ["plain", "final", "completed", "0.5", "3", "11", "2", "swe", "g"]
    steps = lines[0].index("STEPS") + len("STEPS")
    assert [line[steps - 1] for line in lines[1:4]] == ["3", "1", "2"]
    *narrow, said = plain_lines(on_terminal("ls", some, columns=40))
    assert max(map(len, narrow)) <= 40
    assert narrow[1].split()[0] == "plain"
    assert " columns are left out: " in said and said.endswith("widen the terminal or use --json")


def test_long_ids_fold_and_sizes_are_for_people(tmp_path):
    name = "runs/" + "an-id-that-goes-on-and-on/" * 5 + "end"
    with library.open(str(tmp_path / "s")) as sp:
        s = sp.session(name, experts=SHAPE)
        s.append(prompt_token_ids=[1] * 3000, response_token_ids=[2] * 1234)
        s.finalize()
    lines = [line for line in plain_lines(on_terminal("ls", tmp_path / "s")) if "left out: " not in line]
    assert "4,234" in lines[1]
    assert "".join(line.split(" ")[0] for line in lines[1:]) == name
    shown = "\n".join(plain_lines(on_terminal("du", tmp_path / "s")))
    assert re.search(r"^token_ids +4,234 +16.5 KiB +16.5 KiB +1 ", shown, re.MULTILINE)
    assert shown.splitlines()[-1].startswith("total")
    assert run("ls", tmp_path / "s").rows[0]["session_id"] == name


def test_binary_output_does_not_go_to_a_terminal(some):
    for form in ("npz", "raw"):
        assert "binary" in on_terminal("cat", some, "plain:0", "--field", "token_ids", "--format", form, code=2)


def test_json_on_a_terminal_is_json(some):
    assert json.loads(on_terminal("ls", some, "--json")) == run("ls", some, "--json").json
    assert json.loads(on_terminal("show", some, "plain", "--json")) == run("show", some, "plain", "--json").json


# -- what reading leaves alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("catalog", ["there", "missing", "old", "damaged"])
def test_reading_verbs_change_nothing(some, tmp_path, catalog):
    root = tmp_path / "copy"
    shutil.copytree(some, root)
    if catalog == "missing":
        (root / "catalog.sqlite").unlink()
    elif catalog == "damaged":
        (root / "catalog.sqlite").write_bytes(b"nonsense" * 1000)
    elif catalog == "old":
        shutil.copy(root / "catalog.sqlite", tmp_path / "old")
        with library.open(str(root)) as sp:
            add(sp.session("later", experts=SHAPE), [1, 2], [3])
        shutil.copy(tmp_path / "old", root / "catalog.sqlite")
    before = tree(root)
    for verb, args in READING.items():
        done = run(*at(args, root), "--json")
        assert verb != "ls" or len(done.json) == (4 if catalog == "old" else 3)
    assert tree(root) == before


def without_privileges():
    """Make root, after the next exec, one of those to whom the permissions of files apply."""
    import ctypes

    drop_from_bounding_set = 24
    for override, _ in ((1, "CAP_DAC_OVERRIDE"), (2, "CAP_DAC_READ_SEARCH"), (3, "CAP_FOWNER")):
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, override, 0, 0, 0) == 0


def test_reading_verbs_work_where_nothing_may_be_written(some):
    folder = tempfile.mkdtemp(prefix="spool-test-")
    try:
        root = os.path.join(folder, "s")
        shutil.copytree(some, root)
        subprocess.run(["chmod", "-R", "a+rX,a-w", folder], check=True)
        options = {}
        if os.getuid() == 0:
            subprocess.run(["chown", "-R", "65534:65534", folder], check=True)
            options["preexec_fn"] = without_privileges
        before = tree(root)
        for args in READING.values():
            spool(*at(args, root), "--json", **options)
        assert "denied" in spool("recover", root, code=1, **options).text
        assert tree(root) == before
    finally:
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)
        shutil.rmtree(folder)


def test_reading_verbs_work_beside_a_live_writer_that_holds_everything(tmp_path):
    import apsw

    root = str(tmp_path / "s")
    with library.open(root) as sp:
        s = sp.session("plain", experts=SHAPE)
        add(s, [1, 2], [3, 4])
        sp.flush()
        add(s, [1, 2, 3, 4, 5], [6])
        deadline = time.monotonic() + 10
        while len(run("show", root, "plain", "--json").json[0]["steps"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        holder = apsw.Connection(f"{root}/catalog.sqlite")
        holder.execute("BEGIN IMMEDIATE")
        holder.execute("DELETE FROM sessions")
        began = time.monotonic()
        for args in READING.values():
            done = run(*at(args, root), "--json").json
            assert args[0] != "cat" or done[0]["fields"]["token_ids"] == [1, 2, 3, 4, 5, 6]
            assert args[0] != "verify" or done["findings"] == []
        assert time.monotonic() - began < 30
        assert run("info", root, "--json").json["n_live"] == 1
        holder.execute("ROLLBACK")
        holder.close()


@pytest.mark.parametrize("cold", ["s3://bucket/run", "FOLDER"])
@pytest.mark.parametrize("verb", ["demo", "import"])
def test_nothing_is_recorded_into_a_cold_root(verb, cold, tmp_path):
    if cold == "FOLDER":
        cold = f"{tmp_path}/cold"
        library.open(f"file://{tmp_path}/hot?spill=file://{cold}").close()
    before = tree(tmp_path)
    # a source that does not parse: the location is looked at first
    (tmp_path / "runs.json").write_text("[")
    args = ("demo", cold, "--groups", "1") if verb == "demo" else ("import", tmp_path / "runs.json", cold)
    done = run(*args, code=2)
    assert "recording needs a hot root in front" in done.err
    assert "Traceback" not in done.err
    (tmp_path / "runs.json").unlink()
    assert tree(tmp_path) == before


# -- verbs that change something ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", sorted(CHANGING))
def test_a_dry_run_changes_nothing(verb, some, tmp_path, shared_data):
    root = tmp_path / "s"
    shutil.copytree(some, root)
    before = tree(tmp_path)
    source = (shared_data / "trajectories" / "tau-bench",) if verb == "import" else ()
    location = f"{root}?spill=file://{tmp_path}/cold" if verb in ("publish", "spill") else root
    args = (*source, location) if verb == "import" else at(CHANGING[verb], location)[1:]
    done = run(verb, *args, "--dry-run", "--json").json
    assert done
    shown = run(verb, *args, "--dry-run")
    assert shown.text or shown.err or verb == "recover"
    assert tree(tmp_path) == before
    if verb in ("import", "demo"):
        run(verb, *source, tmp_path / "none", "--dry-run")
        assert tree(tmp_path) == before
    if verb == "rebuild":
        assert (done["n_sessions"], done["problems"]) == (3, [])
        os.unlink(root / "catalog.sqlite")
        assert run(verb, root, "--dry-run", "--json").json == done
        assert not (root / "catalog.sqlite").exists()
        assert run(verb, root, "--json").json == done
    if verb == "import":
        assert len(done["parsed"]) == 32


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("code.py", b"import os\n"),
        ("program", b"\x7fELF\x02\x01\x01\x00\xd0\xff"),
        ("empty.json", b""),
        ("text.md", b"# Title\n\nwords\n"),
        ("torn.json", b'{"messages": ['),
        ("config.json", b'{"a": 1}'),
        ("list.json", b"[[1], [2]]"),
        ("nothing.npz", b"PK\x05\x06" + bytes(18)),
    ],
)
def test_a_file_of_no_known_form_is_refused_with_the_known_ones(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    done = run("import", tmp_path / name, tmp_path / "s", code=2)
    assert "known forms: routing, atif, nebius, swe-agent, tau-bench, openhands, chat" in done.err
    assert name in done.err
    assert not (tmp_path / "s").exists()


def test_import_says_what_failed_and_what_is_not_there(tmp_path):
    assert "nowhere" in run("import", tmp_path / "nowhere", tmp_path / "s", code=3).err
    assert "known forms" in run("import", tmp_path, tmp_path / "s", "--form", "nonsense", code=2).err
    assert not (tmp_path / "s").exists()
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\x1b[31m"}]}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x\x1b[31m.jsonl").write_text(f"{json.dumps(good)}\nnot json\n{json.dumps(good)}\n")
    done = run("import", tmp_path / "runs", tmp_path / "s", code=1)
    assert done.text == "2 imported, 0 unchanged, 1 failed, 0 ignored\n"
    assert "line 2" in done.err
    assert "\x1b" not in done.err
    facts = run("import", tmp_path / "runs", tmp_path / "s", "--json", code=1).json
    assert {name: len(found) for name, found in facts.items()} == {
        "imported": 0, "unchanged": 2, "failed": 1, "ignored": 0,
    }  # fmt: skip


def test_import_says_which_tokens_it_leaves_out(tmp_path):
    for name, n_tokens in (("a", 5), ("b", 3), ("c", 2)):
        (tmp_path / "M_2L_64E").mkdir(exist_ok=True)
        np.savez(
            tmp_path / "M_2L_64E" / f"{name}.npz",
            token_ids=np.arange(n_tokens), routed_experts=np.full((n_tokens, 2, 2), [[1, 2], [3, 4]], np.uint8),
            turn_role=np.array(["user", "assistant"]), turn_content_start=np.array([0, 1]),
            turn_content_end=np.array([1, 2]),
        )  # fmt: skip
    for more, text in ((("--dry-run",), "3 parsed"), ((), "3 imported"), ((), "0 imported, 3 unchanged")):
        done = run("import", tmp_path / "M_2L_64E", tmp_path / "s", *more)
        assert done.text.startswith(text)
        assert [line for line in done.err.splitlines() if line.startswith("dropped")] == [
            "dropped: M_2L_64E/a.npz: 3 tokens after the last assistant turn",
            "dropped: M_2L_64E/b.npz: 1 tokens after the last assistant turn",
            "dropped: 4 tokens of 2 sessions are in no step",
        ]


def test_demo_records_reads_back_and_checks(tmp_path):
    facts = run("demo", tmp_path / "s", "--groups", "1", "--json").json
    assert (facts["n_sessions"], facts["n_steps"], facts["n_wrong"]) == (4, 32, 0)
    assert sum(facts["kinds"].values()) == 32
    assert facts["n_values"] > 10_000_000
    assert facts["slice_bytes_needed"] <= facts["slice_bytes_read"] < 1.02 * facts["slice_bytes_needed"]
    assert facts["ref_bytes"] / facts["n_segments"] < 2000 < facts["segment_bytes"] / facts["n_segments"] / 100
    text = run("demo", tmp_path / "s", "--groups", "1").text
    assert "each bit for bit as it was sent" in text
    assert f"spool browse {tmp_path}/s" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100
    with library.open(str(tmp_path / "s"), readonly=True) as sp:
        assert {row.reward for row in sp.sessions()} <= {0.0, 0.5, 1.0}
    assert run("info", tmp_path / "s", "--json").json["n_sessions"] == 8
    assert run("verify", tmp_path / "s", "--deep").err.endswith("nothing wrong\n")


def test_demo_alone_leaves_nothing_behind_and_other_spools_alone(tmp_path, some):
    before = tree(some)
    run("demo", "--groups", "1", env={"TMPDIR": tmp_path, "SPOOL_URI": some})
    assert list(tmp_path.iterdir()) == []
    assert tree(some) == before


def test_demo_notices_a_wrong_value(tmp_path, monkeypatch, capsys):
    from spool.cli.demo_ import command
    from spool.handle import Spool

    whole = Spool.read

    def read(self, refs, **options):
        sample = whole(self, refs, **options)
        if getattr(refs, "index", None) == 3 and not options:
            sample["logprobs"][0] = np.nextafter(sample["logprobs"][0], np.float32(1))
        return sample

    monkeypatch.setattr(Spool, "read", read)
    assert command.main([str(tmp_path / "s"), "--groups", "1"], standalone_mode=False) == 1
    assert "4 OF THEM WRONG" in capsys.readouterr().out


def test_advice_is_in_the_words_of_the_command_line(some, tmp_path):
    for field, of, advice in (("routed_experts", "gap:1", "--missing NUMBER"), ("nope", "plain", "--field")):
        said = run("cat", some, of, "--field", field, code=None).err
        assert advice in said and "missing=" not in said and "fields=" not in said, said
    said = run("cat", some, "plain", "-o", tmp_path / "no/such/folder", code=4).err
    assert "cannot write" in said and "Errno" not in said
    assert "views are lineage, timeline" in run("show", some, "plain@lineages/0", code=3).err


def test_an_import_says_what_has_no_tokens_and_what_it_does_not_follow(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "more").mkdir()
    (runs / "loop").symlink_to(runs)
    (runs / "more").symlink_to(tmp_path / "more")
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (runs / "chat.json").write_text(json.dumps({"messages": said}))
    for more in (("--dry-run",), (), ()):
        err = run("import", runs, tmp_path / "s", *more).err
        assert "1 of 1 sessions have messages only: no token ids in the source" in err
        assert "runs/loop" in err and "runs/more" in err and "link to a folder" in err
