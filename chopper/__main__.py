"""``python -m chopper``."""

from __future__ import annotations

from chopper.cli import main

if __name__ == "__main__":
    main()
