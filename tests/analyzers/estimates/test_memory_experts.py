"""Mixtures of experts: what a layer keeps, who holds which experts, each term by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.estimates.blocks import block
from chopper.analyzers.estimates.memory import Memory, memory
from chopper.analyzers.estimates.step import Step
from chopper.analyzers.estimates.tape import Ledger, forward
from chopper.analyzers.estimates.training import Training
from chopper.cli.estimates.offload import Machine, offload
from chopper.errors import UsageError
from chopper.models.architectures import CATALOGUE, Architecture, Experts, Latent
from tests.analyzers.estimates.test_memory import SMALL

T = 512
"""Tokens: one sequence."""
OF = Experts(count=16, chosen_count=4, width=512)
MIXED = msgspec.structs.replace(SMALL, name="mixed", experts=OF)
SHARED = msgspec.structs.replace(
    MIXED, experts=Experts(count=16, chosen_count=4, width=512, shared_width=768, shared_gate=True)
)
EXPERTS = 16 * 3 * 1024 * 512
"""Parameters of one layer's experts."""
LATENT = msgspec.structs.replace(
    SMALL,
    name="latent",
    kv_heads_count=16,
    head_width=96,
    latent=Latent(kv_rank=256, q_rank=384, rope_width=32, value_width=64),
)


def estimate(architecture: Architecture = MIXED, **options: Any) -> Memory:
    common: dict[str, Any] = {"batch_count": 1, "sequence_count": T, "fragmentation_ratio": 0}
    return memory(Training(architecture=architecture, **{**common, **options}))


EACH_OF_FOUR: dict[str, Any] = {"strategy": "ddp", "ranks_count": 4, "expert_parallel_count": 4}


def kept_bytes(a: Architecture, **layout: Any) -> int:
    """What one layer in 16 bits keeps for its backward, its input among it."""
    of = Training(architecture=a, sequence_count=T, **layout)
    ledger = Ledger()
    x = ledger.take("activations", T * a.width * 2)
    ops = block(of, mixture=a.experts is not None)
    out, _ = forward(ledger, ops, {"x": x}, keep=True)
    ledger.drop(x)
    ledger.drop(out)
    assert ledger.total_bytes == ledger.now["activations"]
    return ledger.now["activations"]


@pytest.mark.parametrize(("architecture", "shared"), [(MIXED, 0), (SHARED, 768)])
def test_a_layer_keeps_what_the_formula_says(architecture: Architecture, shared: int) -> None:
    # 8h + 4ad + 4·kv·d; of each of 4 experts: the row sent (2h), both halves, the activation
    # and their product (8f), what comes back before it is weighted (2h), its weight (4), its number
    # and three permutations (8 each); the router's probabilities in float32 (4E).
    attention = T * (8 * 1024 + 4 * 64 * (16 + 4))
    mixed = T * (4 * (4 * 1024 + 8 * 512 + 36) + 8 * shared + 4 * 16)
    # Softmax of attention and two norms: 4 bytes per head and token, and per token. With a gate,
    # the shared experts' output and its weight.
    statistics = T * (4 * 16 + 2 * 4)
    gate = T * 2 * (1024 + 1) if shared else 0
    assert kept_bytes(architecture) == attention + mixed + statistics + gate


def test_attention_from_a_latent_keeps_it_and_what_is_made_of_it() -> None:
    """By hand, elements per token: x, n1, y, n2 and attention's output twice, 4 · 1024 and 2 · 16 ·
    64; queries 384 before and after their norm, 16 · 96 rotated; the latent 256 + 32 with the
    shared key, 256 normalized; keys 16 · 96 joined; 16 · (64 + 64) of which values are a view; 4 ·
    3584 of the network."""
    elements = (
        4 * 1024 + 2 * 16 * 64 + 2 * 384 + 16 * 96 + 288 + 256 + 16 * 96 + 16 * 128 + 4 * 3584
    )
    # Attention's softmax per head, four norms.
    statistics = 4 * 16 + 4 * 4
    assert kept_bytes(LATENT) == T * (2 * elements + statistics)


def test_gpt_oss_keeps_seven_of_a_clamped_gate() -> None:
    """Both halves before they are clamped, the gate after, its sigmoid, their product, the other
    half and one, the result; without a clamp: both halves, the activation, the result."""
    clamped = msgspec.structs.replace(MIXED, experts=msgspec.structs.replace(OF, clamped=True))
    assert kept_bytes(clamped) - kept_bytes(MIXED) == T * 4 * 3 * 512 * 2


@pytest.mark.parametrize(("kind", "kept"), [("smooth", 2), ("relu", 1), ("relu2", 2), ("tanh", 5)])
def test_activations_keep_what_backward_needs(kind: Any, kept: int) -> None:
    """In networks' widths: what is read and written, of ReLU the latter only."""
    plain = msgspec.structs.replace(SMALL, gated=False)
    none = kept_bytes(msgspec.structs.replace(plain, activation="relu"))
    some = kept_bytes(msgspec.structs.replace(plain, activation=kind))
    assert some - none == T * 3584 * 2 * (kept - 1)


def test_values_of_a_fused_product_hold_all_of_it() -> None:
    """Rotated queries and keys are new; the product's result stays for the values: q and k more."""
    fused = msgspec.structs.replace(SMALL, fused_qkv=True)
    assert kept_bytes(fused) - kept_bytes(SMALL) == T * 2 * (1024 + 256)


def test_queries_that_are_joined_from_parts_have_the_output_copied() -> None:
    part = msgspec.structs.replace(SMALL, rotates_a_part=True)
    assert kept_bytes(part) - kept_bytes(SMALL) == T * 2 * 1024


@given(
    count=st.sampled_from((4, 8, 32)),
    chosen=st.integers(1, 4),
    shared=st.sampled_from((0, 64)),
    options=st.sampled_from(
        ({}, {"norms_after": True}, {"parallel": True}, {"fused_qkv": True, "fused_up": True})
    ),
)
def test_operators_have_all_of_a_layers_parameters(
    count: int, chosen: int, shared: int, options: dict[str, Any]
) -> None:
    of = Experts(count=count, chosen_count=chosen, width=128, shared_width=shared)
    for base in (SMALL, LATENT):
        if base is LATENT and "fused_qkv" in options:
            continue
        a = msgspec.structs.replace(base, experts=of, **options)
        for mixture, network in ((False, a.mlp_count), (True, a.mixture_count)):
            ops = block(Training(architecture=a, sequence_count=8), mixture=mixture)
            expected = a.attention_count + network + 2 * a.norm_count
            assert sum(op.weights_count for op in ops) == expected


@pytest.mark.parametrize("name", [n for n, a in CATALOGUE.items() if a.experts])
def test_a_step_has_all_parameters(name: str) -> None:
    step = Step(Training(architecture=CATALOGUE[name], sequence_count=64))
    assert step.local_count == CATALOGUE[name].parameters_count
    assert sum(step.parts().counts) + _head_bias(name) == CATALOGUE[name].parameters_count


def _head_bias(name: str) -> int:
    return CATALOGUE[name].vocabulary_count * CATALOGUE[name].head_bias


def test_experts_are_cut_over_some_ranks_and_shared_by_the_others() -> None:
    """Of 8 ranks, 4 have different experts; 2 have the same ones."""
    others, experts = MIXED.parameters_count - 4 * EXPERTS, 4 * EXPERTS
    options: dict[str, Any] = {"ranks_count": 8, "expert_parallel_count": 4, "precision": "fp32"}
    ddp = estimate(strategy="ddp", **options)
    # Weights, AdamW's two moments, and buckets with a copy of all gradients.
    assert ddp.steady_bytes == 16 * (others + experts // 4)
    zero = estimate(strategy="zero1-torch", **options)
    whole, part = others + experts // 4, others / 8 + experts / 4 / 2
    assert zero.steady_bytes == pytest.approx(8 * whole + 8 * part, rel=1e-6)
    fsdp = estimate(strategy="fsdp2", **options)
    assert fsdp.steady_bytes == pytest.approx(12 * MIXED.parameters_count / 8, rel=1e-6)


def test_experts_that_no_other_rank_has_are_not_reduced() -> None:
    found = estimate(strategy="ddp", ranks_count=4, expert_parallel_count=4, precision="fp32")
    others, experts = MIXED.parameters_count - 4 * EXPERTS, EXPERTS
    assert found.steady_bytes == 12 * (others + experts) + 4 * others


def test_experts_that_are_cut_are_units_of_their_own() -> None:
    """With a token, at a layer's backward. Whole, at the last but one: it or what is sent of it,
    its gradients, and the next one are there. Cut, at the last one, with nothing to fetch ahead but
    shards of one more layer's gradients: experts are reduced first, an eighth of them twice, beside
    the others."""
    options: dict[str, Any] = {"strategy": "fsdp1", "ranks_count": 8, "precision": "fp32"}
    options |= {"batch_count": 1, "sequence_count": 1, "checkpoint": "full"}
    whole, cut = (
        estimate(expert_parallel_count=ep, **options).phases_bytes["backward"] for ep in (1, 8)
    )
    others = MIXED.layer_count - EXPERTS
    shard = (EXPERTS + others) / 8
    expected = 4 * (3 * (EXPERTS + others) - (2 * EXPERTS / 8 + others + shard))
    assert whole - cut == pytest.approx(expected, rel=0.001)


def test_stage_3_gathers_all_experts_of_a_layer_as_one_module() -> None:
    common: dict[str, Any] = {"strategy": "zero3", "ranks_count": 4, "bucket_count": 1}
    common |= {"sequence_count": 1, "precision": "fp32"}
    found = estimate(**common)
    steady = (4 + 4 + 12) * MIXED.parameters_count / 4
    assert found.phases_bytes["forward"] == pytest.approx(steady + 4 * EXPERTS, rel=0.01)


def test_a_balanced_load_keeps_the_same_and_another_only_more_rows() -> None:
    """More rows: what the experts read (2h), both halves, activation and product (8f) of each."""
    balanced = kept_bytes(MIXED, **EACH_OF_FOUR)
    assert balanced == kept_bytes(MIXED)
    busiest = kept_bytes(MIXED, **EACH_OF_FOUR, imbalance_ratio=1.5)
    assert busiest - balanced == T * 4 // 2 * (2 * 1024 + 8 * 512)


def test_what_is_sent_is_communication() -> None:
    """In the forward of the last layer, rows before they go: 4 of 1024 elements for each token."""
    ops = block(Training(architecture=MIXED, sequence_count=T, **EACH_OF_FOUR), mixture=True)
    sent = [op for op in ops if op.category == "communication"]
    assert [op.size_bytes for op in sent] == [T * 4 * 1024 * 2]
    assert sum(op.name == "all-to-all" for op in ops) == 2


@given(
    chosen=st.integers(1, 8),
    checkpoint=st.sampled_from(("none", "selective", "full")),
    strategy=st.sampled_from(("ddp", "zero1-torch", "fsdp1", "fsdp2")),
    ep=st.sampled_from((1, 2, 8)),
)
def test_more_experts_for_each_token_take_no_less(
    chosen: int, checkpoint: Any, strategy: Any, ep: int
) -> None:
    options: dict[str, Any] = {"checkpoint": checkpoint, "strategy": strategy, "ranks_count": 8}
    sizes = []
    for k in (chosen, chosen + 1):
        of = msgspec.structs.replace(OF, chosen_count=k)
        a = msgspec.structs.replace(MIXED, experts=of)
        found = estimate(a, expert_parallel_count=ep, **options)
        assert sum(found.categories_bytes.values()) == found.peak_bytes
        sizes.append(found.allocated_bytes)
    assert sizes[0] <= sizes[1]


def test_the_step_computes_with_active_parameters_and_moves_all() -> None:
    """Mixtral, 1000 tokens at 1 PFLOP/s: 2 · 12.88e9 · 1000 ÷ 1e15 s, and 4 bytes of all 46.7e9."""
    machine = Machine(
        device="made up",
        flop_per_s=1e15,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=3e12,
        to_device_bytes_per_s=50e9,
        to_host_bytes_per_s=50e9,
        host_bytes_per_s=200e9,
        source="test",
    )
    found = offload(CATALOGUE["mixtral-8x7b"], machine, sequence_count=1000, checkpoint="none")
    assert found.variants[0].forward_s == pytest.approx(2 * 12_879_925_248 * 1000 / 1e15)
    assert found.variants[1].link_bytes == 4 * 46_702_792_704
    # 4 Ψ_active t ÷ F = 2 Ψ ÷ B: fewer FLOP to hide behind, so more tokens.
    expected = 2 * 46_702_792_704 / 50e9 * 1e15 / (4 * 12_879_925_248)
    assert found.tokens_to_hide_gradients == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel_count": 0}, "expert parallel: found 0"),
        ({"expert_parallel_count": 3, "ranks_count": 6}, "must divide mixed's 16 experts"),
        ({"expert_parallel_count": 4, "ranks_count": 6}, "the 6 data-parallel ranks"),
        ({"expert_parallel_count": 4, "strategy": "zero2", "ranks_count": 4}, "contradicts zero2"),
        ({"imbalance_ratio": 2.0}, "imbalance 2 needs expert parallelism"),
        ({"imbalance_ratio": 5.0, "expert_parallel_count": 4, "ranks_count": 4}, "expected 1"),
        ({"precision": "autocast", "strategy": "single"}, "autocast is not modelled for experts"),
        ({"architecture": SMALL, "expert_parallel_count": 2, "ranks_count": 2}, "has no experts"),
    ],
)
def test_what_experts_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        estimate(**{"strategy": "ddp", **options})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"count": 0}, "experts' count is 0"),
        ({"chosen_count": 17}, "chooses 17 of 16 experts"),
        ({"width": -1}, "experts' width is -1"),
    ],
)
def test_experts_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    of = msgspec.structs.replace(OF, **changed)
    with pytest.raises(UsageError, match=message):
        msgspec.structs.replace(SMALL, experts=of)
