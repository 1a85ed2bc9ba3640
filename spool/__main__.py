"""``python -m spool``: the command line."""

from spool.cli import main

if __name__ == "__main__":
    main()
