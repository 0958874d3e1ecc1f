"""A source, loaded and attributed while the terminal shows that something happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed


def attributed(source: str) -> Attributed:
    """Return the attribution of a run or trace."""
    from chopper.api import attribute, load
    from chopper.cli._progress import progress

    with progress("attributing"):
        return attribute(load([source]))
