"""The campaign: python -m tests.fuzz [--seconds 600] [--seed 0] [--only run]"""

from __future__ import annotations

from tests.fuzz.campaign import main

if __name__ == "__main__":
    raise SystemExit(main())
