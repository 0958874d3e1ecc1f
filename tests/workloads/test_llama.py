from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from chopper.models.architectures import Architecture  # noqa: E402
from chopper.workloads.llama import (  # noqa: E402
    SIZES,
    Attention,
    Llama,
    SyntheticTokens,
    initial_value,
    rotary_table,
    rotate,
    token_loader,
)

TINY = Architecture(
    name="tiny",
    layers_count=2,
    width=32,
    heads_count=4,
    kv_heads_count=2,
    head_width=8,
    ffn_width=64,
    vocabulary_count=101,
)


def built(config: Architecture = TINY, seed: int = 0) -> Llama:
    model = Llama(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_value(name, weight.shape, config, seed=seed, device=weight.device))
    return model


@pytest.mark.parametrize("size", SIZES)
def test_counts_the_parameters_of_the_model_that_is_built(size):
    with torch.device("meta"):
        model = Llama(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == SIZES[size].parameters_count


def test_logits_do_not_depend_on_later_tokens():
    model = built()
    tokens = torch.arange(12).reshape(1, 12)
    changed = tokens.clone()
    changed[0, 7] = 99
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_attention_equals_one_written_out_by_hand():
    attention = built().get_submodule("layers.0.attention")
    assert isinstance(attention, Attention)
    x = torch.randn(2, 9, TINY.width, generator=torch.Generator().manual_seed(1))
    cos, sin = rotary_table(TINY, 9, device=x.device, dtype=x.dtype)

    def heads(projected):
        return projected.view(2, 9, -1, TINY.head_width).transpose(1, 2)

    q, k, v = heads(attention.wq(x)), heads(attention.wk(x)), heads(attention.wv(x))
    # Each key head serves two query heads next to each other.
    k, v = rotate(k, cos, sin).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = rotate(q, cos, sin) @ k.transpose(-1, -2) / TINY.head_width**0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, TINY.width)
    torch.testing.assert_close(attention(x, cos, sin), attention.wo(mixed))


def test_rotation_keeps_lengths_and_sees_only_distances():
    cos, sin = rotary_table(TINY, 20, device=torch.device("cpu"), dtype=torch.float32)
    q, k = torch.randn(2, TINY.head_width, generator=torch.Generator().manual_seed(2))
    turned_q, turned_k = rotate(q.expand(20, -1), cos, sin), rotate(k.expand(20, -1), cos, sin)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(20))
    torch.testing.assert_close(turned_q[3] @ turned_k[1], turned_q[15] @ turned_k[13])


def test_initial_values_depend_on_name_and_seed_alone():
    def value(name, seed=0):
        return initial_value(
            name, torch.Size((64, 64)), TINY, seed=seed, device=torch.device("cpu")
        )

    assert torch.equal(value("layers.0.ffn.w1.weight"), value("layers.0.ffn.w1.weight"))
    assert not torch.equal(value("layers.0.ffn.w1.weight"), value("layers.1.ffn.w1.weight"))
    assert not torch.equal(value("head.weight"), value("head.weight", seed=1))
    assert torch.equal(value("norm.weight"), torch.ones(64, 64))
    # Two blocks add to the residual stream four times.
    assert value("layers.0.ffn.w2.weight").std().item() == pytest.approx(0.01, rel=0.05)


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
