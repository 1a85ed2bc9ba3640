"""`spool report`: one page that fetches nothing, shown in Chromium."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import islice

import numpy as np
import pytest
from browser import dom, picture
from kit import add, session
from shell import HOSTILE, run
from tiers import record

import spool
from spool.importers import import_runs
from spool.report.gather import gather
from spool.report.page import MOST_TEXT, page
from spool.report.write import write_report


class Parsed(HTMLParser):
    """What is in a page: tags with their attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The root of a spool with groups, rewards, branches, several weights, and a cold root."""
    root = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(3)
    with spool.open(f"{root}/hot?spill=file://{root}/cold") as sp:
        for number in range(40):
            record(
                sp, f"s{number}", n_steps=1 + number % 4, n_response=20 + number, source=f"src{number % 3}",
                group_id=f"g{number // 8}", rollout_step=number // 8, sample_index=number % 8, final=number % 10 != 9,
            )  # fmt: skip
            if number % 4:
                sp.annotate(f"s{number}", reward=float(rng.random()))
        sp.publish(list(sp.segments()))
    return f"{root}/hot?spill=file://{root}/cold"


@pytest.fixture(scope="module")
def written(many, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert "is written" in run("report", many, "-o", path).err
    return path


def test_the_page_in_chromium(written):
    shown, console = dom(written)
    assert console == []
    found = Parsed(shown)
    assert "<svg" in shown and len(re.findall("<svg", shown)) == 11
    for words in (
        "Sessions and tokens over time", "Outcomes", "Reward over rollout steps", "Distribution of rewards",
        "Length of segments", "Staleness", "Bytes by field and tier", "Load of experts", "Routing by layer",
        "routed_experts", "completed", "took longest", "src2", "times as much",
    ):  # fmt: skip
        assert words in found.text, words
    assert "40" in found.text and "nan" not in found.text.lower().split()


def test_what_a_page_says_on_the_console_is_heard(tmp_path):
    (tmp_path / "bad.html").write_text("<script>console.error('oh')</script><img src='http://example.com/x.png'>")
    _, console = dom(tmp_path / "bad.html")
    assert any("oh" in line for line in console)


def test_screenshots_light_and_dark_are_not_blank(written, tmp_path):
    light = picture(written, tmp_path / "light.png")
    dark = picture(written, tmp_path / "dark.png", dark=True)
    assert light.shape == dark.shape == (2400, 1280, 3)
    assert light[4, 4].min() > 200 and dark[4, 4].max() < 60
    for shot in (light, dark):
        colours = np.unique(shot.reshape(-1, 3), axis=0)
        assert len(colours) > 200
        # there is something in each part of the page
        assert all(len(np.unique(band.reshape(-1, 3), axis=0)) > 8 for band in np.array_split(shot, 8))


def test_nothing_is_fetched_and_nothing_runs(written):
    text = written.read_text()
    found = Parsed(text)
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "iframe", "object", "embed", "form", "base", "a", "audio", "video", "foreignobject"}
    for tag, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href", "src", "action", "data"):
                assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])
    assert "@import" not in text and re.findall(r"url\((?!#)", text) == []
    assert "default-src 'none'" in text
    # names of XML are no addresses
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_ids_are_unique_and_pictures_are_described(written):
    found = Parsed(written.read_text())
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    pictures = [attributes for tag, attributes in found.tags if attributes.get("role") == "img"]
    assert len(pictures) == 12
    assert all(set(attributes["aria-labelledby"].split()) <= set(ids) for attributes in pictures)
    text = written.read_text()
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', text)) <= set(ids)
    assert "#0101" not in text and "var(--text)" in text


def test_an_empty_spool_has_a_page(tmp_path):
    with spool.open(tmp_path / "s"):
        pass
    run("report", tmp_path / "s", "-o", tmp_path / "r.html")
    shown, console = dom(tmp_path / "r.html")
    assert console == [] and "Nothing to draw" in shown and "Nothing is recorded yet" in shown and "<svg" not in shown
    picture(tmp_path / "r.html", tmp_path / "r.png", height=1200)


def test_one_session_that_only_began(sp):
    add(session(sp, "a"), [1, 2], [3])
    shown = page(gather(sp))
    assert "open" in shown and "There are no rewards" in shown and "There are no segments" in shown


HOSTILE_NAMES = (
    "<script>document.title='owned'</script>", "\"><img src=x onerror=alert(1)>", "</style><h1>", "$\\frac{1}{0}$",
    "".join(HOSTILE), "x" * 1000, "\U0001f600" * 50,
    "{{7*7}}", "&lt;b&gt;", "]]>", "<!--",
)  # fmt: skip


def test_what_was_recorded_is_only_text(sp, tmp_path):
    for name in HOSTILE_NAMES:
        s = session(sp, name[:250], source=name[:250], group_id=name[:250])
        add(s, [1, 2], [3, 4], weight_version=name[:250], finish_reason=name[:250])
        s.finalize()
        sp.annotate(name[:250], reward=1.0)
    target = tmp_path / "r.html"
    write_report(sp, str(target))
    text = target.read_text("utf-8")
    assert not any(char in text for char in HOSTILE)
    found = Parsed(text)
    assert "script" not in {tag for tag, _ in found.tags} and not any(tag == "h1" for tag, _ in found.tags[20:])
    assert "<script>document.title='owned'</script>" in found.text and "$\\frac{1}{0}$" in found.text
    assert max(len(word) for word in found.words if "xxx" in word) <= MOST_TEXT + 1
    shown, console = dom(target)
    assert console == [] and "<title>Spool report" in shown


def test_routing_of_which_nothing_was_sent_is_not_drawn(sp):
    s = session(sp, "a")
    s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5])
    s.finalize()
    shown = page(gather(sp))
    assert "No routing is stored" in shown and "nan" not in shown


def test_values_far_apart_are_drawn(sp):
    for number, reward in enumerate([-1e300, 1e-300, 0.0, 1e300]):
        s = session(sp, f"s{number}", rollout_step=10 ** (4 * number))
        add(s, [1], [2], weight_version=str(10**number), logprobs=[float("nan")])
        s.finalize()
        sp.annotate(f"s{number}", reward=reward)
    shown = page(gather(sp))
    assert "NaN or infinite logprobs" in shown and shown.count("<svg") >= 8


def test_a_file_that_is_there_stays(many, tmp_path):
    target = tmp_path / "r.html"
    target.write_text("mine")
    assert "--force" in run("report", many, "-o", target, code=2).err
    assert target.read_text() == "mine" and os.listdir(tmp_path) == ["r.html"]
    assert run("report", many, "-o", target, "--force", "--json").json == {
        "file": str(target), "n_bytes": target.stat().st_size
    }  # fmt: skip
    assert target.read_text().startswith("<!doctype html>")
    os.mkdir(tmp_path / "folder")
    assert "not a file" in run("report", many, "-o", tmp_path / "folder", "--force", code=2).err
    assert "cannot write" in run("report", many, "-o", tmp_path / "none" / "r.html", code=4).err
    assert sorted(os.listdir(tmp_path)) == ["folder", "r.html"]


def test_a_filter(many, tmp_path):
    run("report", many, "-o", tmp_path / "r.html", "--where", "source = 'src1'")
    text = Parsed((tmp_path / "r.html").read_text()).text
    assert "source = 'src1'" in text and "src2" not in text
    run("report", many, "-o", tmp_path / "x.html", "--where", "rewrd > 1", code=2)
    assert not (tmp_path / "x.html").exists()


def test_without_matplotlib_it_says_what_to_install(many, tmp_path):
    code = (
        "import sys\nsys.modules['matplotlib'] = None\nsys.argv = ['spool', 'report', *sys.argv[1:]]\n"
        "from spool.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, many, "-o", str(tmp_path / "r.html")], capture_output=True, check=False
    )
    assert done.returncode == 2 and b"pip install 'spool-store[report]'" in done.stderr
    assert os.listdir(tmp_path) == []


def test_payload_that_is_lost_is_said(tmp_path):
    root = tmp_path / "s"
    with spool.open(root) as sp:
        record(sp, "a")
    (stream,) = os.listdir(root / "streams")
    shards = root / "streams" / stream / "routed_experts" / "c"
    lost = [path for path in shards.rglob("*") if path.is_file()]
    assert lost
    for path in lost:
        path.unlink()
    with spool.open(root, readonly=True) as sp:
        found = gather(sp)
        assert any("routing of a@lineage/0" in problem for problem in found.problems)
        assert "Not on this page" in page(found)


def test_pages_stay_small(many, sp):
    for number in range(300):
        s = session(sp, f"session number {number}", source=f"source {number}", rollout_step=number * 3)
        add(s, [1], [2], weight_version=str(number))
        s.finalize()
    assert len(page(gather(sp))) < 400_000
    with spool.open(many, readonly=True) as other:
        assert len(page(gather(other))) < 400_000


def test_real_runs(sp, tmp_path, shared_data):
    import_runs(shared_data / "routing", sp)
    import_runs(shared_data / "trajectories", sp)
    for number, row in enumerate(islice(sp.sessions(), 20)):
        sp.annotate(row.session_id, reward=number / 20)
    target = tmp_path / "real.html"
    assert write_report(sp, str(target)) < 2_000_000
    shown, console = dom(target)
    assert console == []
    for words in ("12 layers of 256 experts, top 8", "8 layers of 384 experts, top 8", "nebius", "tau-bench"):
        assert words in Parsed(shown).text, words
    shot = picture(target, tmp_path / "real.png", height=4200)
    assert len(np.unique(shot.reshape(-1, 3), axis=0)) > 1000
