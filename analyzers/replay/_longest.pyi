import numpy as np

def longest(
    first: np.ndarray,
    source: np.ndarray,
    weight: np.ndarray,
    lag: np.ndarray,
    anchor: np.ndarray,
    time: np.ndarray,
    decided: np.ndarray | None,
) -> None:
    """Fill ``time`` (int64), and ``decided`` (int32) where given; see _longest.c.

    Raises:
        ValueError: lengths that do not fit, or an edge that does not come from an earlier moment.
    """
