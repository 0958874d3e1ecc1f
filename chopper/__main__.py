"""``chopper`` and ``python -m chopper``."""

from __future__ import annotations

import sys

from chopper.fresh_python import keep_current_directory_last, open_standard_streams


def main() -> None:
    """The command; an interrupt is one line, also while the command itself is being loaded."""
    open_standard_streams()
    keep_current_directory_last()
    try:
        from chopper.cli import main as command
        from chopper.cli.output import make_writable

        make_writable()
        command()
    except KeyboardInterrupt:
        from chopper.errors import say

        say("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
