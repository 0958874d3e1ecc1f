"""Published formulas of memory, to print next to the estimate.

Sources: ZeRO (arXiv 1910.02054), and the rule of thumb of 40 bytes per parameter.
"""

from __future__ import annotations

from chopper.analyzers.estimates import assumed
from chopper.errors import UsageError
from chopper.quantities import positive

RULE_BYTES_PER_PARAMETER = 40
RULE_DEVICE_BYTES = 80 * 10**9
RULE_TABLE_COUNT = (10**9, 7 * 10**9, 13 * 10**9, 70 * 10**9, 175 * 10**9)
RULE_FAULTS = assumed("rule_of_thumb")


def rule_of_thumb(parameters_count: int) -> tuple[int, int]:
    """A common rule of thumb: 40 bytes per parameter, and 80 GB devices for it.

    Returns:
        Bytes, and devices (rounded up).
    """
    positive(parameters_count, "parameters")
    size = RULE_BYTES_PER_PARAMETER * parameters_count
    return size, -(-size // RULE_DEVICE_BYTES)


def zero_states_bytes(
    parameters_count: int, ranks_count: int, stage: int, optimizer_bytes: int = 12
) -> float:
    """Bytes of states per rank: 2 for weights, 2 for gradients, K for the optimizer (ZeRO, §5).

    Stage 0 (4+K)Ψ; 1: 4Ψ+KΨ/N; 2: 2Ψ+(2+K)Ψ/N; 3: (4+K)Ψ/N.
    """
    positive(parameters_count, "parameters")
    positive(ranks_count, "ranks")
    if stage not in range(4):
        raise UsageError(f"ZeRO stage {stage!r}: expected 0, 1, 2 or 3")
    # The optimizer's states are shared from stage 1 on, gradients from 2 on, weights from 3 on.
    unsharded_bytes = sum(
        size for first, size in ((1, optimizer_bytes), (2, 2), (3, 2)) if stage < first
    )
    everything = 4 + optimizer_bytes
    return (
        unsharded_bytes * parameters_count
        + (everything - unsharded_bytes) * parameters_count / ranks_count
    )
