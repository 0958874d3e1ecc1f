"""Products of factors as sums of whole nanoseconds.

t = t₀ · f₁ · f₂ · … becomes t − t₀ = Σ shareᵢ with shareᵢ = L(t, t₀) · ln fᵢ and the logarithmic
mean L(a, b) = (a − b) / ln(a / b): exact, and independent of the order of the factors (Ang, LMDI,
https://doi.org/10.1016/j.enpol.2004.10.007). Since Σ ln fᵢ = ln(t / t₀), a share is the part
ln fᵢ / Σ ln fⱼ of t − t₀.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def fit(
    observed_ln: np.ndarray,
    measured_ln: Sequence[np.ndarray],
    modelled_ln: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what is left for the rest, and the scale of factors that explain too much.

    What was measured comes first: models get what it leaves, and are scaled down alike where they
    explain more. Only where measurements alone exceed what was observed, they are scaled too.

    Args:
        observed_ln: ln(t / t₀), at least 0.
        measured_ln, modelled_ln: logarithms of the known factors, at least 0 each.

    Returns:
        ln of the remaining factor, at least 0; the scale in [0, 1] of the measured factors, and
        that of the modelled ones.
    """
    left, measured_scale = _take(observed_ln, measured_ln)
    left, modelled_scale = _take(left, modelled_ln)
    return left, measured_scale, modelled_scale


def _take(available: np.ndarray, factors: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    known = np.zeros(len(available))
    for factor in factors:
        known += factor
    scale = np.divide(available, known, out=np.ones(len(known)), where=known > available)
    return np.maximum(available - known, 0.0), scale


def apportion(total: np.ndarray, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Split whole numbers in proportion to weights; each part is within 1 of its exact share.

    Cumulative sums are rounded, so the parts sum to the total exactly and no rounding error
    gathers in one of them. Where all weights are 0, everything goes to the last part.

    Args:
        total: int64, at least 0 and below 2**53.
        weights: at least 0, one array per part.
    """
    whole = np.zeros(len(total))
    for weight in weights:
        whole += weight
    running = np.zeros(len(total))
    before = np.zeros(len(total), dtype=np.int64)
    parts = []
    for weight in weights[:-1]:
        running += weight
        share = np.divide(running, whole, out=np.zeros(len(total)), where=whole > 0)
        edge = np.rint(total * np.minimum(share, 1.0)).astype(np.int64)
        parts.append(edge - before)
        before = edge
    parts.append(total - before)
    return parts
