"""``spool export``."""

import click


@click.command("export")
def command() -> None:
    """Write."""
