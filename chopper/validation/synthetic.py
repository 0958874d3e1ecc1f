"""Injections into a discrete-event model of a training job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.validation.results import Case, OnCase


def injections() -> dict[str, str]:
    """Name of each injection → id of the cause that it belongs to."""
    return {}


def run_cases(
    *,
    injections: Sequence[str],
    magnitudes: Sequence[str],
    seed: int = 0,
    quick: bool = False,
    on_case: OnCase | None = None,
) -> list[Case]:
    """Inject and attribute; the cases in order.

    Args:
        injections: names, from :func:`injections`.
        magnitudes: of ``small``, ``medium``, ``large``.
        seed: of everything random.
        quick: a subset.
        on_case: called with each case as it is done.
    """
    del injections, magnitudes, seed, quick, on_case
    return []
