"""Writes ``docs/cli.md`` from the help of each verb; ``--check`` says whether it is up to date instead."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from spool.cli import VERBS, root

PATH = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 88

HEAD = """\
# Command line

Made from `spool --help` by `python -m tools.cli_reference`: edit the help, not this file.

"""


def document() -> str:
    """Return the text of the reference."""
    settings = {"terminal_width": WIDTH, "max_content_width": WIDTH, "help_option_names": ["-h", "--help"]}
    top = click.Context(root, info_name="spool", **settings)
    parts = [HEAD + _block(root.get_help(top))]
    for verb in VERBS:
        command = root.get_command(top, verb)
        assert command is not None, verb
        context = click.Context(command, info_name=verb, parent=top, **settings)
        parts.append(f"## spool {verb}\n\n{_block(command.get_help(context))}")
    return "\n".join(parts)


def _block(text: str) -> str:
    return "```\n" + "\n".join(line.rstrip() for line in text.splitlines()) + "\n```\n"


def main() -> int:
    text = document()
    if PATH.exists() and PATH.read_text() == text:
        print("up to date")
        return 0
    if "--check" in sys.argv:
        print(f"stale: {PATH}; run python -m tools.cli_reference")
        return 1
    PATH.write_text(text)
    print(f"written: {PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
