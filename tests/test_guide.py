"""The guide says what is so: its program runs, and its tables are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = (DOCS / "guide.md").read_text()
ARCHITECTURE = (DOCS / "architecture.md").read_text()


def rows_behind(heading):
    """Return the cells of the first table whose heading row is ``heading``."""
    table = GUIDE.split(f"{heading}\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def test_the_program_in_the_guide_runs(tmp_path):
    blocks = list(re.finditer(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 10
    namespace = {"__name__": "guide"}
    for block in blocks:
        lines_before = GUIDE.count("\n", 0, block.start(1))
        source = "\n" * lines_before + block[1].replace("file:///tmp/spool-guide/", f"file://{tmp_path}/")
        exec(compile(source, "docs/guide.md", "exec"), namespace)


def test_the_options_of_views_are_those_of_the_code():
    from spool.rollout.views import segments

    options = {
        name: parameter.default
        for name, parameter in inspect.signature(segments).parameters.items()
        if name not in ("state", "outcome", "transaction")
    }
    table = rows_behind("| option | default | what it does |")
    assert {name.strip("`"): default.strip("`") for name, default, _ in table} == options


def test_the_options_of_read_are_those_of_the_code():
    from spool import Spool

    documented = {name.strip("`") for name, *_ in rows_behind("| option | default | meaning |")}
    assert documented == inspect.signature(Spool.read).parameters.keys() - {"self", "refs", "tokens", "layers"}


def test_the_options_of_batches_are_those_of_the_code():
    from spool.train.dataset import SegmentDataset

    names = re.findall(
        r"`(\w+)`", " ".join(name for name, *_ in rows_behind("| option of `batches` | default | meaning |"))
    )
    assert set(names) == inspect.signature(SegmentDataset.batches).parameters.keys() - {"self"}


def test_the_arguments_of_encode_once_are_those_of_the_code():
    from spool.train import encode_once

    documented = {name.strip("`") for name, *_ in rows_behind("| argument of `encode_once` | default | what it does |")}
    assert documented == inspect.signature(encode_once).parameters.keys() - {"encoder", "units"}


def test_the_columns_of_filters_are_those_of_the_code():
    from spool.catalog.query import SEGMENT, SESSION

    named, key = {}, None
    for of, columns in rows_behind("| of | columns |"):
        key = of.strip("`") or key
        named.setdefault(key, set()).update(columns.strip("`").split())
    assert named["both"] == SEGMENT.known.keys() & SESSION.known.keys()
    assert named["both"] | named["segments"] == SEGMENT.known.keys()
    assert named["both"] | named["sessions"] == SESSION.known.keys()


@pytest.mark.parametrize("text", [GUIDE, ARCHITECTURE], ids=["guide", "architecture"])
def test_links_lead_somewhere_and_lines_are_short(text):
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (DOCS / target).exists(), target
    assert [line for line in text.splitlines() if len(line) > 120] == []


def test_files_named_in_the_documents_exist():
    for path in re.findall(r"`((?:spool|tests|tools|schemas|docs)/[\w./*-]+)`", GUIDE + ARCHITECTURE):
        assert list(DOCS.parent.glob(path.rstrip("/"))), path
