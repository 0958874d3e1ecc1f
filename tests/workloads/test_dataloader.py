from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from chopper.errors import UsageError  # noqa: E402
from chopper.workloads import (  # noqa: E402
    dataloader,
    loading,
    loading_trainer,
)
from chopper.workloads.loading_trainer import Decoder, loss_of  # noqa: E402
from chopper.workloads.planning import (  # noqa: E402
    Cost,
    Planner,
    batch_of,
    cost_of,
)
from chopper.workloads.sources import SourceError, without_latency  # noqa: E402
from chopper.workloads.torch_loading import (  # noqa: E402
    ConcurrentDocuments,
    Documents,
    torch_batches,
)
from tests.waiting import PATIENCE_S, until  # noqa: E402
from tests.workloads.forked import Ranks  # noqa: E402
from tests.workloads.small_mixtures import draw, sources  # noqa: E402

CPU = torch.device("cpu")


def documents(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, n).astype(np.uint16) for n in lengths]


def model():
    torch.manual_seed(0)
    return Decoder(width=32, longest=64, vocabulary=50)


def as_rows(docs, width: int | None = 64):
    numbers = [(0, number) for number in range(len(docs))]
    return batch_of(numbers, docs, width=width, step_tokens=sum(map(len, docs)))


def as_padded(docs):
    return as_rows(docs, None)


def test_packed_and_padded_documents_train_alike():
    docs, losses, gradients = documents(40, 3, 17, 9, 30), [], []
    for batch in (as_rows(docs), as_padded(docs)):
        decoder = model()
        loss = loss_of(decoder, batch, 1, CPU)
        loss.backward()
        losses.append(loss.item())
        gradients.append(decoder.qkv.weight.grad)
    assert len(as_rows(docs).documents) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_a_document_does_not_see_the_others_of_its_row():
    one, two = documents(20, 25)
    changed = two.copy()
    changed[3] = 49 if two[3] != 49 else 48
    decoder = model()

    def logits(second):
        tokens = torch.from_numpy(np.concatenate([one, second]).astype(np.int64))[None]
        places = torch.cat([torch.arange(20), torch.arange(25)])[None]
        return decoder(tokens, places, [[20, 25]])

    before, after = logits(two), logits(changed)
    torch.testing.assert_close(before[:, :23], after[:, :23])
    assert not torch.allclose(before[:, 23:], after[:, 23:])


def test_the_mean_over_ranks_is_the_loss_however_documents_are_given_to_them():
    docs = documents(40, 3, 17, 9, 30, 5)
    total = sum(map(len, docs))

    def mean(parts):
        found = []
        for part in parts:
            mine = [docs[d] for d in part]
            batch = replace(as_rows(mine, None), step_tokens=total)
            found.append(loss_of(model(), batch, len(parts), CPU).item())
        return sum(found) / len(found)

    assert mean([[0, 1, 2], [3, 4, 5]]) == pytest.approx(mean([[0], [1, 2, 3, 4, 5]]), rel=1e-5)


def test_cost_is_the_flop_of_the_model():
    # Width 32, vocabulary 50: 12·32² + 32·50 weights in products, 6 FLOP each and token.
    assert cost_of(32, 50) == Cost(alpha=6 * (12 * 1024 + 1600), beta=192)


def serving(kind, fault="none", steps=6, first=0, width=None, timeout_s=PATIENCE_S):
    made = sources(fault)
    planner = Planner(draw(made))
    dataset = kind(made, 2, () if fault == "hangs" else planner.upcoming(first, range(5)))
    return (
        Planner(draw(made)),
        dataset,
        torch_batches(
            dataset,
            planner,
            rank=1,
            first=first,
            steps=steps,
            workers=2,
            prefetch=2,
            width=width,
            timeout_s=timeout_s,
        ),
    )


@pytest.mark.parametrize("kind", [Documents, ConcurrentDocuments])
def test_the_data_loader_serves_what_was_planned(kind):
    before = multiprocessing.active_children()
    plan, dataset, batches = serving(kind, first=3, width=64)
    found = list(itertools.islice(batches, 6))
    # Workers read on past the last step, as far as they fetch ahead.
    until(lambda: dataset.documents_read() == (6 + 2 * 2) * 4, "what is fetched ahead")
    assert list(batches) == []
    assert [batch.step for batch in found] == [3, 4, 5, 6, 7, 8]
    for batch in found:
        planned = plan.plan(batch.step)
        assert Counter(batch.marked()) == Counter(without_latency(sources()).marked(planned.of(1)))
        lengths = dict(
            zip(zip(planned.source, planned.index, strict=True), planned.length, strict=True)
        )
        held = [length for row in batch.documents for length in row]
        assert held == [lengths[sample] for sample in batch.samples]
        assert batch.step_tokens == planned.length.sum()
    assert dataset.documents_read() == (6 + 2 * 2) * 4
    until(lambda: set(multiprocessing.active_children()) <= set(before), "the end of all workers")


@pytest.mark.parametrize("kind", [Documents, ConcurrentDocuments])
def test_a_source_that_raises_in_a_worker_is_one_line(kind):
    _, _, batches = serving(kind, "raises", steps=20)
    with pytest.raises(SourceError, match=r"^source code-01, sample \d+: FileNotFound") as refused:
        list(batches)
    assert "\n" not in str(refused.value)


def test_workers_of_a_source_that_hangs_are_ended_after_the_stated_time():
    before = multiprocessing.active_children()
    _, _, batches = serving(Documents, "hangs", steps=20, timeout_s=1)
    with pytest.raises(SourceError, match=r"^step \d+: no batch .* for 1 s; a source hangs$"):
        list(batches)
    until(lambda: set(multiprocessing.active_children()) <= set(before), "the end of all workers")


def arguments(*words, variants=()):
    args = dataloader.WORKLOAD.parse(words)
    return argparse.Namespace(**vars(args), variants=variants)


def test_memory_is_told_before_it_is_taken():
    # 32 sources of 14 MB in each of 9 workers, 20 MB for each worker, 600 MB for the rank.
    found = loading.needs(arguments(variants=("loader", "tuned")), 2, "cpu")
    assert found.memory_bytes == pytest.approx(9 * (32 * 14e6 + 20e6) + 600e6, rel=0.01)
    less = loading.needs(arguments(variants=("loader",)), 2, "cpu")
    assert less.memory_bytes == pytest.approx(4 * (32 * 14e6 + 20e6) + 600e6, rel=0.02)
    large = loading.needs(arguments("--width", "65536", variants=("loader",)), 2, "cpu")
    assert large.what.startswith("training a model of --width 65536")
    assert large.memory_bytes > 4 * 5 * 12 * 65536**2


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("loader", (4, 20, 40)), ("tuned", (9, 18, 36)), ("balanced", (64, 108, 18))],
)
def test_measured_steps_are_whole_rounds_of_workers_after_a_warm_up(variant, expected):
    span = loading.span_of(arguments("--variant", variant))
    assert (span.warmup, span.measured, span.traced) == expected
    for variant in ("loader", "tuned", "concurrent"):
        args = arguments("--variant", variant, "--steps", "50")
        assert loading.span_of(args).measured % loading.workers_of(variant, args) == 0


def window(*, elapsed_s=2.0, loaded=32, busy_s=0.0, own_s=0.0, wait_s=1.0, compute_s=(0.1, 0.3)):
    return loading_trainer.Window(
        elapsed_s, own_s, busy_s, loaded, wait_s, list(compute_s), tokens=900, cells=1000
    )


def rates(windows, *, ahead=False):
    own_cpu_s = sum(window.own_cpu_s for window in windows)
    return loading_trainer.rates(windows, 16, own_cpu_s, ahead=ahead)


def test_what_had_been_loaded_before_a_stretch_does_not_count_in_it():
    slow, fast = window(elapsed_s=4.0), window(loaded=260)
    # 2 steps of 2 ranks × 16 samples in the 4 s that the slower rank took.
    assert rates([slow, fast])["samples_per_s"] == 16
    assert rates([fast, fast])["samples_per_s"] == 32
    drained = rates([window(loaded=32), window(loaded=0)])
    assert drained["samples_per_s"] == 16
    assert drained["tokens_per_s"] == 450
    assert drained["padding_ratio"] == pytest.approx(0.1)
    assert rates([window(loaded=-9)] * 2)["samples_per_s"] == 0


def test_a_data_loader_is_credited_with_what_its_workers_read_while_trainers_wait():
    # 64 samples were trained on in 2 s, of which half was waited: at most 128.
    for loaded, expected in ((20, 20.0), (40, 40.0), (64, 64.0), (90, 64.0)):
        assert rates([window(loaded=loaded)] * 2, ahead=True)["samples_per_s"] == expected
    # Trainers that never wait take all that they can already.
    busy = [window(loaded=90, wait_s=0.0)] * 2
    assert rates(busy, ahead=True)["samples_per_s"] == 32
    assert rates([window(wait_s=2.0)] * 2, ahead=True)["samples_per_s"] == 32
    # Who waits least for data waits for the other rank instead.
    apart = [window(loaded=90, wait_s=wait_s) for wait_s in (0.0, 1.0)]
    assert rates(apart, ahead=True)["samples_per_s"] == 64


@pytest.mark.parametrize(("variant", "expected"), [("tuned", 12.0), ("balanced", 6.0)])
def test_actors_are_credited_with_what_was_trained_on_only(monkeypatch, variant, expected):
    alone = SimpleNamespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
        all_gather_object=lambda found, mine: found.__setitem__(0, mine),
    )
    monkeypatch.setattr(loading_trainer, "dist", alone)
    found = {}
    trainer: Any = object.__new__(loading_trainer.Trainer)
    trainer.args = arguments("--variant", variant, "--batch", "6")
    trainer.data_ranks = 1
    trainer.prof = SimpleNamespace(measure=lambda name, value, **_: found.update({name: value}))
    # 2 steps of 6 samples in 2 s, of which half was waited.
    trainer.report(window(loaded=90), {"workers": 7}, [1.0], {"repetition": 0})
    assert found["samples_per_s"] == expected
    assert found["loader_memory_bytes"] == 7


def test_what_other_programs_take_of_the_cores_is_told(monkeypatch):
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    windows = [window(elapsed_s=10.0, busy_s=24.0, own_s=own_s) for own_s in (3.0, 1.0)]
    assert rates(windows)["other_programs_ratio"] == pytest.approx(0.5)
    assert rates(windows)["own_programs_ratio"] == pytest.approx(0.1)


def test_the_slowest_rank_of_each_step_counts():
    found = rates([window(compute_s=c) for c in ((0.1, 0.3), (0.2, 0.1))])
    assert found["slowest_rank_ns"] == pytest.approx(0.25e9)
    assert found["compute_imbalance_ratio"] == pytest.approx((0.2 / 0.15 + 0.3 / 0.2) / 2)


class Kept:
    """Stands where a recording does."""

    def __init__(self):
        self.rows = []

    def measure(self, name, value, **labels):
        self.rows.append((name, value, labels))


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_balancing_alone_gives_the_same_documents_to_other_ranks():
    kept: Any = Kept()
    args, of = arguments("--batch", "2", "--longest", "64"), draw(sources(), batch=2)
    loading_trainer.balancing_alone(args, of, CPU, kept, steps=2)
    found = {
        (name, said["method"], said["virtual_ranks"], said["repetition"]): value
        for name, value, said in kept.rows
    }
    for ranks in (2, 4, 8):
        for step in range(2):
            assert found["as_drawn_over_this_ratio", "random", ranks, step] == 1
            uneven = [
                found["virtual_imbalance_ratio", method, ranks, step] for method in ("kk", "random")
            ]
            assert 1 <= uneven[0] <= uneven[1] <= ranks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loaders", "33"], "--loaders 33: at most one for each of 32 sources"),
        (["--tensor", "3"], "--tensor 3: expected a divisor of the 2 ranks"),
        (["--longest", "2"], "a document has at least 8 tokens"),
        (["--width", "97"], "--width 97: heads have 32 elements"),
        (["--latency", "100000"], "would exceed their timeout"),
        (["--prefetch", "1000000"], "at most 1024 steps"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words, message):
    with pytest.raises((UsageError, ValueError), match=message) as refused:
        loading.needs(arguments(*words, variants=("loader",)), 2, "cpu")
    assert "\n" not in str(refused.value)


def test_without_ray_only_the_actors_are_refused(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "ray" else find_spec(name, *a)
    )
    loading.needs(arguments(variants=("loader", "tuned", "concurrent")), 2, "cpu")
    with pytest.raises(
        ValueError, match=r"chopper-profiler\[ray\]'; or without: --variants loader,tuned"
    ):
        loading.needs(arguments(variants=("loader", "balanced")), 2, "cpu")


def test_one_rank_of_a_tensor_parallel_group_reads_for_all():
    with Ranks() as ranks:
        found = ranks.run(
            "tests.workloads.loading_cases", "broadcast_to_groups", 4, tensor=2, steps=3
        )
    for rank, (read, got) in enumerate(found):
        assert read == ([0, 1, 2] if rank % 2 == 0 else [])
        reader = rank - rank % 2
        row = [*range(1, 4 + reader), *[0] * (5 - reader)]
        assert got == [[[[reader, step]], [row]] for step in range(3)]
