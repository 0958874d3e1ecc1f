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

def contract(
    first: np.ndarray,
    source: np.ndarray,
    weight: np.ndarray,
    lag: np.ndarray,
    anchor: np.ndarray,
    input: np.ndarray,
    out_first: np.ndarray,
    out_source: np.ndarray,
    out_weight: np.ndarray,
) -> tuple[bytes, bytes, bytes, bytes]:
    """Contract a graph to its inputs and outputs, as records of terms (basis, weight).

    A basis of 0 is the zero of time, k the record k - 1. ``input`` (int32) numbers the moments that
    come from elsewhere, -1 for others; edges that enter these tell when their own arrives. Output o
    is the latest of out_source[e] + out_weight[e], out_first[o] <= e < out_first[o + 1].

    Returns:
        first (int64) term of each record, basis (int32) and weight (int64) of each term, and the
        input (int32) that each record is, -1 for none; the last records are the outputs.

    Raises:
        ValueError: lengths that do not fit, or an edge that does not come from an earlier moment.
    """

def couple(
    of_rank: np.ndarray,
    first: np.ndarray,
    basis: np.ndarray,
    weight: np.ndarray,
    instance: np.ndarray,
    late: np.ndarray,
    ready: np.ndarray,
    time: np.ndarray,
) -> int:
    """Solve the records of several ranks together: fill ``time`` and, by input, ``ready`` (int64).

    Records of rank r are of_rank[r] <= n < of_rank[r + 1]. An input comes once it was reached on
    all ranks that have it; ``late`` (int64) is how much later than that record it was.

    Returns:
        How many inputs did not wait for all ranks, whose orders contradict each other.

    Raises:
        ValueError: lengths that do not fit, or records that refer to later ones.
    """
