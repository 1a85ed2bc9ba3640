"""The shape of the package: imports point down, and importing it is cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {
    "torch", "ray", "click", "prometheus_client", "textual", "rich", "s3fs", "botocore", "boto3", "zarr", "tensorstore",
}  # fmt: skip


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(name.partition('.')[0] for name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_importing_spool_loads_nothing_heavy():
    assert not modules_after("import spool") & (HEAVY | {"numpy", "pyarrow", "apsw"})


def test_using_spool_loads_no_framework(tmp_path):
    loaded = modules_after(f"import spool; sp = spool.open({str(tmp_path)!r}); sp.close()")
    assert "numpy" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "--help"], ["demo", "--help"], ["cat", "--help"]])
def test_help_loads_no_numpy(arguments):
    code = (
        f"import sys; sys.argv = ['spool', *{arguments!r}]\n"
        "from spool.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert 'numpy' not in sys.modules and 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_imports_point_down():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_every_public_name_is_there():
    import spool

    for name in spool.__all__:
        assert getattr(spool, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        spool.nothing  # noqa: B018


def test_schemas_are_up_to_date():
    from tools.schemas import FOLDER, documents

    for name, text in documents().items():
        assert (FOLDER / name).read_text() == text, f"run python -m tools.schemas: {name} is stale"
