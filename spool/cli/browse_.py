"""``spool browse``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from spool.cli.places import location_argument, open_spool
from spool.config import default_location
from spool.errors import ConfigError


@click.command("browse")
@location_argument
@click.option("--tokenizer", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="A tokenizer.json, to show the text of tokens.")  # fmt: skip
def command(location: str | None, tokenizer: str | None) -> int:
    """Look around in a spool, while it is being written or not.

    Sessions, groups, one session's steps and conversation, tokens, routing, and where the bytes are. Keys are at the
    foot of each screen; ? shows all. Nothing is written, and no more is read than is shown. NO_COLOR is honoured.

    Needs the extra tui: pip install '.[tui]' in a checkout, or pip install 'spool-store[tui]'.
    """
    if location is None and default_location() is None:
        raise click.UsageError("no LOCATION given, and SPOOL_URI is not set")
    # the screen is drawn on stderr
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise click.UsageError(
            "browse needs a terminal as stdin, stdout and stderr; ls, show and stats print the same as text"
        )
    try:
        from spool.browse.app import Browser
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "textual":
            raise
        raise ConfigError(
            "the browser is not installed: pip install '.[tui]' in a checkout, or pip install 'spool-store[tui]'"
        ) from None
    browser = Browser(lambda: open_spool(location), tokenizer=tokenizer)
    with _quiet():
        failure = browser.run()
        browser.close()
    if failure is not None:
        raise failure
    return browser.return_code or 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Print no warnings over the screen."""
    log = logging.getLogger("spool")
    handlers, log.handlers = log.handlers, [logging.NullHandler()]
    try:
        yield
    finally:
        log.handlers = handlers
