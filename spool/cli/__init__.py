"""The command line: ``spool VERB [LOCATION] [REF ...]``. One file a verb; heavy imports wait for the verb."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from spool.cli.exits import Exit, report

VERBS = ("cat", "demo", "du", "import", "info", "locate", "ls", "rebuild", "recover", "show", "verify")


class _Verbs(click.Group):
    """Loads the file of a verb when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module = import_module(f"spool.cli.{cmd_name}_")
        command: click.Command = module.command
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="spool-store", prog_name="spool")
def root() -> None:
    """Store, look at and read back rollouts of large MoE models.

    LOCATION is a spool URI (file:///nvme/spool) or a directory; $SPOOL_URI where it is left out. A REF is a session id,
    SESSION:STEP, SESSION@VIEW/INDEX, a reference as JSON, or @FILE that holds one.

    Data goes to stdout, all else to stderr. Exit codes: 0 ok, 1 the operation failed or a check found something,
    2 usage, 3 not found, 4 storage unavailable, 5 integrity, 130 interrupted.
    """


def main() -> None:
    """Run the command line and exit."""
    try:
        code = root.main(standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (every failure becomes one line and one code)
        code = report(error)
    sys.exit(code if isinstance(code, int) else Exit.OK)
