"""Published formulas of memory, each a function: to print beside the estimate, and to test it.

Sources: ZeRO (arXiv 1910.02054), DeepSpeed's own estimators, Korthikanti et al. (arXiv 2205.05198),
and the rule of thumb of 40 bytes per parameter.
"""

from __future__ import annotations

from typing import Literal

from chopper.errors import UsageError
from chopper.quantities import positive

RULE_BYTES_PER_PARAMETER = 40
RULE_DEVICE_BYTES = 80 * 10**9
RULE_TABLE_COUNT = (10**9, 7 * 10**9, 13 * 10**9, 70 * 10**9, 175 * 10**9)
RULE_FAULTS = (
    "the rule knows parameters only: batch, sequence, number formats, sharding and checkpointing "
    "change memory severalfold and are not in it",
    "states alone are 8 bytes per parameter in pure bf16, 16 with mixed precision, 20 in "
    "DeepSpeed; "
    "what is left of 40 stands for activations, which do not grow with parameters",
    "measured: Llama 2 7B, all of it trained in bf16 with AdamW, peaked at 51.6 GB on one A100, "
    "where the rule says 280 GB",
    "dividing by 80 GB assumes that everything is sharded evenly; gathered layers, activations and "
    "logits are whole on every rank",
    "the survey's table lists ZeRO's stages and offload as alternatives: stages partition states "
    "over ranks, offload moves them to the host, and both go together; offloading parameters "
    "needs stage 3",
)


def rule_of_thumb(parameters_count: int) -> tuple[int, int]:
    """The survey's rule: 40 bytes per parameter, and 80 GB devices for it.

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

    Raises:
        UsageError: no such stage, or anything not positive.
    """
    positive(parameters_count, "parameters")
    positive(ranks_count, "ranks")
    psi, n, k = parameters_count, ranks_count, optimizer_bytes
    by_stage = {
        0: (4 + k) * psi,
        1: 4 * psi + k * psi / n,
        2: 2 * psi + (2 + k) * psi / n,
        3: (4 + k) * psi / n,
    }
    if stage not in by_stage:
        raise UsageError(f"ZeRO stage {stage!r}: expected 0, 1, 2 or 3")
    return by_stage[stage]


def deepspeed_zero2_bytes(
    parameters_count: int, gpus_count: int, *, offload: bool, buffer_ratio: float = 1.5
) -> tuple[float, float]:
    """DeepSpeed's estimate for stage 2, as its ``estimate_zero2_model_states_mem_needs``.

    Returns:
        Bytes per GPU, and of host memory per node where all GPUs are of one node.
    """
    psi, g = parameters_count, gpus_count
    if offload:
        return 2.0 * psi, psi * max(4 * g, 16) * buffer_ratio
    return 2 * psi + 18 * psi / g, 0.0


def deepspeed_zero3_bytes(
    parameters_count: int,
    largest_layer_count: int,
    gpus_count: int,
    nodes_count: int = 1,
    *,
    offload: Literal["none", "optimizer", "parameters"] = "none",
    buffer_ratio: float = 1.5,
) -> tuple[float, float]:
    """DeepSpeed's estimate for stage 3, as its ``estimate_zero3_model_states_mem_needs``.

    Returns:
        Bytes per GPU, and of host memory per node.
    """
    psi, largest = parameters_count, 4.0 * largest_layer_count
    if offload == "parameters":
        return largest, 18 * psi / nodes_count * buffer_ratio
    if offload == "optimizer":
        return largest + 2 * psi / gpus_count, 16 * psi / nodes_count * buffer_ratio
    return largest + 18 * psi / gpus_count, 0.0


def layer_activation_bytes(
    *,
    sequence_count: int,
    batch_count: int,
    width: int,
    heads_count: int,
    tensor_parallel_count: int = 1,
    sequence_parallel: bool = False,
    checkpoint: Literal["none", "selective", "full"] = "none",
) -> float:
    """Activations of one GPT layer in 16 bits (Korthikanti et al., table 2).

    None: sbh(34+5as/h); selective recomputation of attention 34sbh; full 2sbh. With t-way tensor
    parallelism sbh(10+24/t+5as/(ht)), with sequence parallelism sbh/t·(34+5as/h).
    """
    s, b, h, a, t = sequence_count, batch_count, width, heads_count, tensor_parallel_count
    sbh = s * b * h
    if checkpoint == "full":
        return 2.0 * sbh
    scores = 0.0 if checkpoint == "selective" else 5 * a * s / h
    if sequence_parallel:
        return sbh / t * (34 + scores)
    return sbh * (10 + 24 / t + scores / t)


def llama_layer_activation_bytes(
    *,
    sequence_count: int,
    batch_count: int,
    width: int,
    heads_count: int,
    kv_heads_count: int,
    ffn_width: int,
    head_width: int | None = None,
) -> float:
    """Activations of one Llama layer in 16 bits, fused attention: sbh(12 + 4·kv/a + 8f/h).

    Of the 12, 4 are the queries and attention's output, a·d wide, where heads of width d do not
    make up h (Gemma): sb(8h + 4ad + 4·kv·d + 8f). Without `head_width`, d = h/a.
    """
    d = width / heads_count if head_width is None else head_width
    attention = 4 * d * (heads_count + kv_heads_count)
    return sequence_count * batch_count * (8 * width + attention + 8 * ffn_width)


def experts_activation_bytes(
    *,
    tokens_count: int,
    width: int,
    experts_count: int,
    chosen_count: int,
    expert_width: int,
    shared_width: int = 0,
) -> int:
    """Activations of one layer's experts in 16 bits, in the place of a feed-forward network's 8sbf.

    sb(k(4h + 8f + 36) + 8f_shared + 4E): for each chosen expert the row that is sent (2h), both
    halves, the activation and their product (8f), what comes back before it is weighted (2h), its
    weight (4), its number and three permutations (8 each); the router's probabilities in float32
    (4E). Derived from the tensors that transformers' ``grouped_mm_experts_forward`` and its routers
    keep for backward.
    """
    row = 4 * width + 8 * expert_width + 36
    return tokens_count * (chosen_count * row + 8 * shared_width + 4 * experts_count)


def logits_bytes(*, sequence_count: int, batch_count: int, vocabulary_count: int) -> int:
    """Logits in 16 bits, their float32 copy and its gradient, in one piece: s·b·V·10."""
    return 10 * sequence_count * batch_count * vocabulary_count
