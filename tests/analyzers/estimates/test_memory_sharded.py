"""What sharding strategies hold beside their shards, each term by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.estimates.memory import Memory, memory
from chopper.analyzers.estimates.step import Step
from chopper.analyzers.estimates.tape import Ledger
from chopper.analyzers.estimates.training import Training
from chopper.analyzers.estimates.zero import Parts, Reduction
from chopper.models.architectures import Architecture, named
from tests.analyzers.estimates.test_memory import SMALL

A = SMALL
PSI, LAYER, OUTER = A.parameters_count, A.layer_count, A.outer_count
LARGEST = 1024 * 3584


def estimate(**options: Any) -> Memory:
    """With so few tokens, weights and gradients are all that there is to see."""
    common: dict[str, Any] = {"ranks_count": 4, "batch_count": 1, "sequence_count": 64}
    common |= {"checkpoint": "full", "optimizer_kind": "loop", "kernels": "cpu", "bucket_count": 1}
    return memory(Training(architecture=A, fragmentation_ratio=0, **{**common, **options}))


@pytest.mark.parametrize(
    ("strategy", "precision", "whole", "shared"),
    [
        # 16-bit weights whole; master and moments 12, the gradient in float32, Adam's two
        # temporaries.
        ("zero1", "mixed", 2, 12 + 4 + 8),
        ("zero2", "mixed", 2, 12 + 4 + 8),
        # Its 16-bit weights and gradients are shared, and the latter stay beside their float32
        # copy.
        ("zero3", "mixed", 0, 2 + 2 + 12 + 4 + 8),
        # Float32 gradients of everything stay, and the 16-bit ones until `zero_grad`.
        ("zero1", "mixed-fp32-grads", 2 + 4 + 2, 12 + 8),
        ("zero2", "mixed-fp32-grads", 2, 12 + 4 + 8),
        ("zero3", "mixed-fp32-grads", 0, 2 + 4 + 12 + 4 + 8),
        # Weights, a float32 copy of its own, moments, one copy of the gradients, Adam's
        # temporaries.
        ("zero1", "fp32", 4, 12 + 4 + 8),
        ("zero2", "fp32", 4, 12 + 4 + 8),
        ("zero3", "fp32", 0, 4 + 4 + 12 + 4 + 8),
    ],
)
def test_deepspeed_updates_its_part_as_one_tensor(
    strategy: Any, precision: Any, whole: int, shared: int
) -> None:
    found = estimate(strategy=strategy, precision=precision)
    expected = whole * PSI + shared * PSI / 4
    assert found.phases_bytes["optimizer"] == pytest.approx(expected, rel=0.001)


def test_stage_1_has_its_part_beside_all_gradients_at_the_end_of_the_backward() -> None:
    """Weights 4, gradients 4; copies and moments 12 of a part, and the part of the gradients."""
    found = estimate(strategy="zero1", precision="fp32", ranks_count=2)
    assert found.peak_at == "backward"
    part = PSI / 2
    # The last rank's part is made before its first gradient goes into it.
    assert found.allocated_bytes == pytest.approx((4 + 4) * PSI + (12 + 4) * part, rel=0.01)


def test_stage_2_holds_two_gradients_beside_its_part() -> None:
    """The last rank has its part from the first gradient on; a gradient waits for the next one."""
    found = estimate(strategy="zero2", ranks_count=2)
    part = PSI / 2
    expected = 2 * PSI + 12 * part + 2 * part + 2 * 2 * LARGEST
    assert found.phases_bytes["backward"] == pytest.approx(expected, rel=0.02)


def test_stage_3_holds_one_module_and_two_gradients() -> None:
    found = estimate(strategy="zero3")
    steady = (2 + 2 + 12) * PSI / 4
    assert found.steady_bytes == pytest.approx(steady, rel=0.001)
    expected = steady + 2 * LARGEST + 2 * 2 * LARGEST
    assert found.phases_bytes["backward"] == pytest.approx(expected, rel=0.02)


def test_stage_3_updates_at_most_a_billion_at_once() -> None:
    large = Architecture(
        name="large",
        layers_count=40,
        width=8192,
        heads_count=64,
        kv_heads_count=8,
        head_width=128,
        ffn_width=28672,
        vocabulary_count=64,
    )
    options: dict[str, Any] = {"ranks_count": 8, "sequence_count": 64, "bucket_count": 1}
    found = memory(Training(architecture=large, strategy="zero3", fragmentation_ratio=0, **options))
    assert large.parameters_count / 8 > 4e9
    expected = (2 + 2 + 12) * large.parameters_count / 8 + (2 + 4) * 10**9
    assert found.phases_bytes["optimizer"] == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize(("strategy", "width"), [("zero1", 2), ("zero2", 2), ("zero3", 2)])
def test_the_bucket_is_as_large_as_it_may_be(strategy: Any, width: int) -> None:
    """Of DeepSpeed's default, half a billion elements, for any model; stages 1 and 2 free it."""
    count = 500_000_000
    found = estimate(strategy=strategy, bucket_count=count)
    assert found.categories_bytes["communication"] >= count * width
    update = found.phases_bytes["optimizer"]
    without = estimate(strategy=strategy).phases_bytes["optimizer"]
    assert update - without == (count - 1) * width * (strategy == "zero3")


def test_fsdp1_has_the_next_layer_beside_a_layer_that_is_reduced() -> None:
    """By hand, at the third of four layers: float32 shards and moments; embedding, norm and head
    gathered; the layer's gradients in 16 bits and in float32 to be sent; the next layer gathered;
    the shards of two layers' gradients."""
    found = estimate(strategy="fsdp1")
    expected = 12 * PSI / 4 + 2 * OUTER + (2 + 4 + 2) * LAYER + 2 * 4 * LAYER / 4
    assert found.phases_bytes["backward"] == pytest.approx(expected, rel=0.01)


def test_fsdp1_gathers_one_layer_at_a_time_in_the_forward() -> None:
    """With a single token: shards and moments, one layer, and embedding, norm and head."""
    found = estimate(strategy="fsdp1", precision="fp32", sequence_count=1)
    expected = 12 * PSI / 4 + 4 * OUTER + 4 * LAYER
    assert found.phases_bytes["forward"] == pytest.approx(expected, rel=0.01)


def test_parts_are_cut_without_regard_to_borders() -> None:
    """Twelve and eight elements over four ranks, six each."""
    parts = Parts([12, 8], 4)
    assert parts.part_count == 6
    assert [parts.owners(i) for i in (0, 1)] == [(0, 1), (2, 3)]
    assert [parts.touched_count(rank) for rank in range(4)] == [12, 12, 8, 8]
    # Over two ranks of ten each, the first owns a part of the first alone, the other of both.
    assert [Parts([12, 8], 2).touched_count(rank) for rank in (0, 1)] == [12, 20]
    assert Parts([12, 8], 2).extremes() == {1}


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    ranks=st.integers(1, 9),
)
def test_touched_agrees_with_counting(counts: list[int], ranks: int) -> None:
    parts = Parts(counts, ranks)
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    size = parts.part_count
    touched = []
    for rank in range(ranks):
        own = set(owners[rank * size : (rank + 1) * size])
        touched.append(sum(counts[i] for i in own))
        assert parts.touched_count(rank) == touched[-1]
    assert max(touched) == max(touched[rank] for rank in parts.extremes())


def reduction(counts: list[int], **options: Any) -> tuple[Ledger, Reduction]:
    ledger = Ledger()
    common: dict[str, Any] = {"stage": 2, "rank": 0, "bucket_count": 10, "width": 2}
    common |= {"wide": False, "updated_width": 4, "on_host": False}
    return ledger, Reduction(ledger, Parts(counts, 2), **{**common, **options})


def arrive(ledger: Ledger, of: Reduction) -> None:
    for index in reversed(range(len(of.parts.counts))):
        size = of.parts.counts[index] * of.width
        of.arrived(index, ledger.take("gradients", size))


def test_a_gradient_moves_into_the_bucket_and_an_own_one_from_it_into_the_part() -> None:
    """[4, 4 | 8]: the first eight are this rank's; a bucket of ten, two bytes each."""
    ledger, of = reduction([4, 4, 8])
    arrive(ledger, of)
    # The bucket; the other rank's eight were in it, and went with its reduction.
    assert (ledger.now["communication"], ledger.now["gradients"]) == (20, 0)
    of.finish()
    assert (ledger.now["communication"], ledger.now["gradients"]) == (0, 16)
    # Neighbours of one owner are sent as they lie: beside the bucket there was one gradient at
    # most.
    assert ledger.peak_bytes == 20 + 16


def test_what_two_ranks_own_is_sent_as_a_copy() -> None:
    """[6 | 6] in one bucket: two slices are copied into one piece."""
    ledger, of = reduction([6, 6], bucket_count=12)
    arrive(ledger, of)
    of.finish()
    assert ledger.peak_bytes == 24 + 24
    assert ledger.now["gradients"] == 12


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    ranks=st.integers(1, 12),
    bucket=st.integers(1, 40),
    rank=st.integers(0, 11),
    wide=st.booleans(),
    rising=st.booleans(),
)
def test_what_is_sent_together_agrees_with_cutting_slice_by_slice(
    counts: list[int], ranks: int, bucket: int, rank: int, *, wide: bool, rising: bool
) -> None:
    _, of = reduction(counts, bucket_count=bucket, rank=rank % ranks, wide=wide)
    of.parts = Parts(counts, ranks)
    indices = range(len(counts)) if rising else reversed(range(len(counts)))
    of.waiting = [(index, None) for index in indices]
    slices: list[tuple[int, int]] = []
    for index, _ in of.waiting:
        end = of.parts.ends[index]
        elements = range(end - counts[index], end)
        for owner, own in itertools.groupby(e // of.parts.part_count for e in elements):
            count = len(list(own))
            if slices and slices[-1][0] == owner and not (wide and owner == of.rank):
                count += slices.pop()[1]
            slices.append((owner, count))
    together: list[list[int]] = [[]]
    for _, count in slices:
        together[-1].append(count)
        if sum(together[-1]) > bucket:
            together.append([])
    assert of.sent_count() == max(sum(one) * (len(one) > 1) for one in together)


def test_so_many_ranks_take_no_longer_than_few() -> None:
    """A parameter over ten million parts is cut into three kinds of slices, not into each."""
    ledger = Ledger()
    parts = Parts([5, 10**9, 5], 10**7)
    options: dict[str, Any] = {"stage": 2, "rank": 0, "bucket_count": 1000, "width": 2}
    of = Reduction(ledger, parts, **options, wide=False, updated_width=4, on_host=False)
    of.waiting = [(1, None)]
    # Parts of 102 elements: 97 are left of the first; 10 whole ones are more than a bucket.
    assert of.slices() == [(97, 1), (102, 9_803_920), (63, 1)]
    assert of.sent_count() == 1020


def test_a_gradient_larger_than_the_bucket_waits_for_the_next_one() -> None:
    ledger, of = reduction([20, 20], rank=0)
    of.arrived(1, ledger.take("gradients", 40))
    assert ledger.now["gradients"] == 40
    of.arrived(0, ledger.take("gradients", 40))
    # The other rank's is gone; this rank's waits.
    assert ledger.now["gradients"] == 40
    of.finish()
    assert ledger.peak_bytes == 20 + 80
    assert ledger.now["gradients"] == 40


def test_stage_1_keeps_all_until_the_end() -> None:
    """[20 | 20], a bucket of ten: 80 bytes of gradients, the bucket, and then the own part."""
    ledger, of = reduction([20, 20], stage=1)
    arrive(ledger, of)
    assert (ledger.now["gradients"], ledger.now["communication"]) == (80, 20)
    of.finish()
    assert ledger.peak_bytes == 80 + 20 + 40
    assert (ledger.now["gradients"], ledger.now["communication"]) == (40, 0)


def test_gradients_in_float32_are_made_with_the_first_own_one() -> None:
    ledger, of = reduction([4, 4, 8], wide=True)
    arrive(ledger, of)
    assert ledger.now["gradients"] == 0
    of.finish()
    # The part, eight elements of four bytes, and the update reads it as it is.
    assert ledger.now["gradients"] == 32
    assert of.gradient() is not None
    assert ledger.now["gradients"] == 32


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_states_leave_no_gradient_behind(stage: int) -> None:
    ledger, of = reduction([20, 20], stage=stage, on_host=True)
    of.before()
    # What gradients are copied through: the largest parameter.
    assert ledger.now["communication"] == 40
    arrive(ledger, of)
    # Stage 1 holds all of them on the device until the end, stage 2 one.
    assert ledger.now["gradients"] == (80 if stage == 1 else 40)
    of.finish()
    assert ledger.now["gradients"] == 0


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_of_eight_ranks_none_needs_more_than_the_estimate(checkpoint: Any) -> None:
    training = Training(
        architecture=named("llama3-8b"),
        strategy="zero1",
        ranks_count=8,
        sequence_count=1024,
        checkpoint=checkpoint,
    )
    peaks = []
    for rank in range(8):
        step = Step(training, rank=rank)
        step.run()
        peaks.append(step.ledger.peak_bytes)
    assert memory(training).allocated_bytes == max(peaks)
