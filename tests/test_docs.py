"""The documents say what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_program_in_the_readme_runs(tmp_path):
    program, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "file:///tmp/spool" in program
    program = program.replace("file:///tmp/spool", f"file://{tmp_path}/spool")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_program_with_a_cold_root_runs(tmp_path, s3_root):
    _, program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    recorded = (
        "s = sp.session(experts='qwen3.6-35b-a3b')\n"
        "s.append(prompt_token_ids=range(9), response_token_ids=[1], routed_experts=routing)\nsegments = s.finalize()"
    )
    assert "\n...  " in program
    program = re.sub(r"\n\.\.\. [^\n]*", lambda _: f"\n{recorded}", program)
    program = program.replace("file:///nvme/spool", f"file://{tmp_path}/spool").replace("s3://bucket/run7", s3_root)
    setting = "import numpy as np, spool\nrouting = np.tile(np.arange(1, 9), (9, 40, 1))\n"
    checks = "\nassert batch[0]['routed_experts'].shape == (9, 20, 8)\nsp.close()"
    subprocess.run([sys.executable, "-c", setting + program + checks], check=True)


def test_the_options_in_the_readme_are_those_of_a_uri():
    from spool.config import OPTIONS

    table = README.split("## Options of a spool URI")[1]
    named = re.findall(
        r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    )
    assert sorted(named) == sorted(OPTIONS)


def test_the_measured_rows_are_those_of_the_bench():
    rows = re.findall(r"^\| `(\w+)` \|", README.split("## Measured")[1].split("## What it is not")[0], re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "tools" / "bench").glob("*.py"))
    assert len(rows) > 8
    assert [name for name in rows if f'"{name}"' not in source] == []


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "docs/format.md"])
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_modules_named_in_the_architecture_exist():
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    for line in picture.splitlines():
        for name in re.split(r"  +", line.strip())[0:1] if line.strip(" |") else []:
            for module in name.split():
                module = module.rstrip(",")
                assert (ROOT / "spool" / module).is_dir() or (ROOT / "spool" / f"{module}.py").exists(), module
