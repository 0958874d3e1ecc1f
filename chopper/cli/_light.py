"""Keep commands quick to start."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Absent(MetaPathFinder):
    """An import hook to which pandas is not installed."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's argument
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out of this process", name="pandas")
        return None


def without_pandas() -> None:
    """Make pandas look absent in this process, unless something has loaded it already.

    Whenever pandas is installed, pyarrow imports it (0.3 s and more) only to ask whether a list is
    a Series. Commands that read, attribute and report make none.
    """
    if "pandas" not in sys.modules and not any(isinstance(f, _Absent) for f in sys.meta_path):
        sys.meta_path.insert(0, _Absent())
