from __future__ import annotations

import argparse
import importlib.util
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from chopper.workloads import dataloader, options  # noqa: E402
from chopper.workloads.decoder import Decoder, cost_of, loss_of  # noqa: E402
from chopper.workloads.disaggregated import packed  # noqa: E402
from chopper.workloads.mixture import SourceError, make_sources, planner  # noqa: E402
from chopper.workloads.planning import Cost, pack  # noqa: E402
from chopper.workloads.torch_loading import (  # noqa: E402
    ConcurrentDocuments,
    Documents,
    padded,
    torch_batches,
)

CPU = torch.device("cpu")


def documents(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, n).astype(np.uint16) for n in lengths]


def model():
    torch.manual_seed(0)
    return Decoder(width=32, longest=64, vocabulary=50)


def as_rows(docs, width=64):
    rows = pack(np.array([len(d) for d in docs]), width)
    total = sum(map(len, docs))
    return packed(0, [[docs[d] for d in row] for row in rows], [], width=width, step_tokens=total)


def as_padded(docs):
    tokens, _ = padded(docs)
    return packed(
        0, [[d] for d in docs], [], width=tokens.shape[1], step_tokens=sum(map(len, docs))
    )


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
            batch = packed(0, [[docs[d]] for d in part], [], width=64, step_tokens=total)
            found.append(loss_of(model(), batch, len(parts), CPU).item())
        return sum(found) / len(found)

    assert mean([[0, 1, 2], [3, 4, 5]]) == pytest.approx(mean([[0], [1, 2, 3, 4, 5]]), rel=1e-5)


def test_cost_is_the_flop_of_the_model():
    # Width 32, vocabulary 50: 12·32² + 32·50 weights in products, 6 FLOP each and token.
    assert cost_of(32, 50) == Cost(alpha=6 * (12 * 1024 + 1600), beta=192)


def sources(fault="none"):
    return make_sources(
        count=5,
        state_bytes=50_000,
        latency_s=1e-4,
        documents=200,
        tokens=20,
        longest=64,
        seed=2,
        fault=fault,
    )


def loading(kind, fault="none", steps=6, first=0):
    made = sources(fault)

    def plans():
        return planner(made, batch=4, ranks=2, seed=1, cost=Cost(), method="random")

    return plans(), torch_batches(
        kind(made, 0.0),
        (plans(), plans()),
        rank=1,
        first=first,
        steps=steps,
        workers=2,
        prefetch=2,
        timeout_s=30,
    )


@pytest.mark.parametrize("kind", [Documents, ConcurrentDocuments])
def test_the_data_loader_serves_what_was_planned(kind):
    plan, batches = loading(kind, first=3)
    found = list(batches)
    assert [batch.step for batch in found] == [3, 4, 5, 6, 7, 8]
    for batch in found:
        planned = plan.plan(batch.step)
        assert Counter(batch.samples) == Counter(planned.of(1))
        mine = planned.length[planned.rank == 1]
        assert [row[0] for row in batch.documents] == mine.tolist()
        assert batch.step_tokens == planned.length.sum()


@pytest.mark.parametrize("kind", [Documents, ConcurrentDocuments])
def test_a_source_that_raises_in_a_worker_is_one_line(kind):
    _, batches = loading(kind, "raises", steps=20)
    with pytest.raises(SourceError, match=r"^source code-01, sample \d+: OSError: conn") as refused:
        list(batches)
    assert "\n" not in str(refused.value)


def arguments(*words, variants=()):
    args = options.parse(options.DATALOADER, words)
    return argparse.Namespace(**vars(args), variants=variants)


def test_memory_is_told_before_it_is_taken():
    # 24 sources of 12 MB in each of 24 workers, 20 MB for each worker, 600 MB for the rank.
    found = dataloader.needs(arguments(variants=("loader", "tuned")), 2, "cpu")
    assert found.memory_bytes == pytest.approx(24 * (24 * 12e6 + 20e6) + 600e6, rel=1e-3)
    less = dataloader.needs(arguments(variants=("loader",)), 2, "cpu")
    assert less.memory_bytes < found.memory_bytes / 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "9999999"], "all sources together hold"),
        (["--fault", "empty"], "source code-01 is empty"),
        (["--longest", "2"], "a document has at least 8 tokens"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=message) as refused:
        dataloader.needs(arguments(*words, variants=("loader",)), 2, "cpu")
    assert "\n" not in str(refused.value)


def test_without_ray_only_the_actors_are_refused(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "ray" else find_spec(name, *a)
    )
    dataloader.needs(arguments(variants=("loader", "tuned", "concurrent")), 2, "cpu")
    with pytest.raises(
        ValueError, match=r"chopper-profiler\[ray\]'; or without: --variants loader,tuned"
    ):
        dataloader.needs(arguments(variants=("loader", "balanced")), 2, "cpu")
