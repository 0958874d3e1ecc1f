from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from chopper.workloads.llama import SyntheticTokens, token_loader  # noqa: E402


def loader(rank=0, workers=0, **changes):
    arguments = {
        "steps": 3,
        "batch": 4,
        "sequence": 31,
        "vocabulary": 50,
        "seed": 7,
        "rank": rank,
        "ranks": 2,
        "workers": workers,
        "pin_memory": False,
    }
    return token_loader(**{**arguments, **changes})


def test_batches_have_the_declared_shape_and_follow_each_other():
    batches = list(loader())
    assert len(batches) == 3
    for tokens, labels in batches:
        assert tokens.shape == labels.shape == (4, 31)
        assert tokens.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        assert tokens.min() >= 0
        assert tokens.max() < 50


@pytest.mark.slow
def test_worker_processes_serve_the_same_tokens():
    for alone, worked in zip(loader(), loader(workers=2), strict=True):
        assert torch.equal(alone[0], worked[0])


def test_ranks_share_the_data_without_overlap():
    sampled = [list(loader(rank).sampler) for rank in (0, 1)]
    assert sorted(sampled[0] + sampled[1]) == list(range(24))


def test_half_of_the_tokens_can_be_predicted_and_frequent_ones_dominate():
    data = SyntheticTokens(length=200, sequence=99, vocabulary=1000, seed=0)
    text = torch.stack([data[i][0] for i in range(200)])
    assert torch.equal(torch.from_numpy(data.successor)[text[:, 0:98:2]], text[:, 1:99:2])
    # Zipf over 1000 ids: the ten most frequent are 39 % of what is drawn.
    assert (text[:, ::2] < 10).float().mean().item() == pytest.approx(0.39, abs=0.02)


def test_an_index_outside_is_refused():
    data = SyntheticTokens(length=2, sequence=8, vocabulary=50, seed=0)
    with pytest.raises(IndexError, match="sequence 2 of 2"):
        data[2]
