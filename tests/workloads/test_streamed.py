"""A model streamed from disk trains as the same model in memory does, to the last digit."""

from __future__ import annotations

import msgspec
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from chopper.workloads.llama import SIZES, Llama, initial_value, optimizer_of  # noqa: E402
from chopper.workloads.offload_trainers import (  # noqa: E402
    PAGE_BYTES,
    Store,
    StreamedTrainer,
    padded,
)
from tests.conftest import tmpfs  # noqa: E402

SEED = 3


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(forward, backward, update, vocabulary):
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for _ in range(3):
        tokens = torch.randint(0, vocabulary, (2, 9), generator=generator)
        logits = forward(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        backward(loss)
        update()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("dtype", "optimizer", "layers"),
    [
        ("float32", "adamw", 1),
        ("float32", "sgd", 2),
        ("bfloat16", "adamw", 5),
        ("bfloat16", "sgd", 5),
    ],
)
def test_it_trains_as_in_memory(tmp_path, alone, dtype, optimizer, layers):
    config = msgspec.structs.replace(
        SIZES["debug"], layers_count=layers, width=64, ffn_width=100, vocabulary_count=128
    )
    cpu = torch.device("cpu")
    model = Llama(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_value(name, weight.shape, config, seed=SEED, device=cpu))
    plain = optimizer_of(optimizer, model.parameters())

    def update():
        plain.step()
        plain.zero_grad()

    expected = losses(model, lambda loss: loss.backward(), update, 128)
    streamed = StreamedTrainer(
        config,
        cpu,
        dtype=getattr(torch, dtype),
        optimizer=optimizer,
        directory=tmp_path,
        seed=SEED,
    )
    found = losses(streamed.forward, streamed.backward, streamed.update, 128)
    assert found == expected
    assert len(set(found)) == 3
    # Each step writes each layer once, in whole pages; nothing is left under a name.
    layer_bytes = sum(streamed.on_disk_bytes.values()) // layers
    assert streamed.store.written_bytes == 3 * layers * padded(layer_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["group"]


def test_a_store_gives_back_what_was_written_and_zeros_elsewhere(tmp_path):
    store = Store(tmp_path, 4 * PAGE_BYTES)
    raw = torch.zeros(3 * PAGE_BYTES, dtype=torch.uint8)
    piece = raw[-raw.data_ptr() % PAGE_BYTES :][: 2 * PAGE_BYTES]
    piece.copy_(torch.arange(2 * PAGE_BYTES) % 251)
    store.write(memoryview(piece.numpy()), PAGE_BYTES)
    written = piece.clone()
    store.read(memoryview(piece.numpy()), 2 * PAGE_BYTES)
    assert torch.equal(piece[:PAGE_BYTES], written[PAGE_BYTES:])
    assert not piece[PAGE_BYTES:].any()
    assert (store.written_bytes, store.read_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)


def test_a_full_disk_ends_the_workload_with_one_line():
    with tmpfs("size=64k") as small, pytest.raises(SystemExit, match=r"No space left.*--scratch"):
        StreamedTrainer(
            SIZES["debug"],
            torch.device("cpu"),
            dtype=torch.float32,
            optimizer="sgd",
            directory=small,
            seed=SEED,
        )
