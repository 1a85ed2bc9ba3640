"""The command line: ``spool VERB [LOCATION] [REF ...]``. One file a verb; heavy imports wait for the verb."""

from __future__ import annotations

import difflib
import logging
import sys
from importlib import import_module

import click

from spool.cli.exits import Exit, hush, report
from spool.cli.output import say
from spool.cli.streams import fill_in, show_escapes
from spool.config import kill_point
from spool.points import kill_at
from spool.sizes import format_time

VERBS = (
    "browse", "cat", "checkpointed", "demo", "diff", "du", "export", "gc", "import", "info", "locate", "ls", "publish",
    "rebuild", "recover", "release", "report", "show", "spill", "stats", "status", "tail", "verify",
)  # fmt: skip


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

    def invoke(self, ctx: click.Context) -> object:
        """Run a verb; that whoever reads has seen enough is no failure, for which click would take it."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            hush()
            return Exit.OK

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            near = difflib.get_close_matches(name, VERBS, n=2, cutoff=0.65)
            hint = f"did you mean {' or '.join(near)}?" if near else f"verbs are {', '.join(VERBS)}"
            raise click.UsageError(f"there is no verb {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Verbs,
    subcommand_metavar="VERB [LOCATION] [REF]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="spool-store", prog_name="spool")
def root() -> None:
    """Store, look at and read back rollouts of large MoE models.

    LOCATION is a spool URI (file:///nvme/spool) or a directory; $SPOOL_URI where it is left out. The first argument is
    taken for it where it is a URL or a directory that holds a spool.

    A REF is the id of a session, SESSION:STEP, SESSION@VIEW/INDEX, a reference as JSON, or @FILE with such (@- for
    stdin). A session of exactly that id comes first. Write -- before an id that starts with a dash. SESSION@VIEW/INDEX
    is the segment that the session was finalised with where that was with this view, whatever its options; else the one
    that the view makes by default.

    Data goes to stdout, all else to stderr. On a terminal data are tables, elsewhere tab-separated lines under a
    heading, or JSON with --json. Verbs that only read never write to the spool, and wait for no lock in it.

    Exit codes: 0 ok, 1 the operation failed or a check found something, 2 usage, 3 not found, 4 storage unavailable,
    5 integrity, 130 interrupted.
    """


class _Warnings(logging.Handler):
    """Prints Spool's warnings on stderr; with the time where nobody looks on."""

    def emit(self, record: logging.LogRecord) -> None:
        at = "" if sys.stderr.isatty() else f" {format_time(record.created)}"
        say(f"spool:{at} {record.levelname.lower()}: {record.getMessage()}")


def main() -> None:
    """Run the command line and exit."""
    fill_in()
    logging.getLogger("spool").addHandler(_Warnings())
    try:
        show_escapes()
        die_at = kill_point()
        if die_at is not None:
            kill_at(*die_at)
        code = root.main(standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (every failure becomes one line and one code)
        code = report(error)
    sys.exit(code if isinstance(code, int) else Exit.OK)
