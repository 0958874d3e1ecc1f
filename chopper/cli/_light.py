"""Keep commands quick to start."""

from __future__ import annotations

import sys


def without_pandas() -> None:
    """Make pandas look absent in this process, unless something has loaded it already.

    Whenever pandas is installed, pyarrow imports it (0.3 s and more) only to ask whether a list is
    a Series. Commands that read, attribute and report make none.
    """
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
