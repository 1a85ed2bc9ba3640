"""``python -m spool``: the command line."""

from spool.cli import main

main()
