from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel

from chopper.recording.annotate import Annotator, module_names, named_submodules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAIN = {"Net", "layers", "layers.0", "layers.1", "head"}


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def annotator():
    annotator = Annotator()
    annotator.install()
    yield annotator
    annotator.remove()
    assert not nn_module._global_forward_hooks
    assert not nn_module._global_forward_pre_hooks


def names(module):
    return set(module_names(module).values())


def test_checkpointing_and_compiling_change_no_name():
    net: Any = Net()
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    net.layers[1] = torch.compile(net.layers[1], backend="eager")
    assert names(net) == PLAIN
    assert names(torch.compile(net, backend="eager")) == PLAIN


def test_distributed_wrappers_change_no_name(group):
    assert names(DistributedDataParallel(Net())) == PLAIN
    sharded = Net()
    fully_shard(sharded.layers[0])
    fully_shard(sharded)
    assert names(sharded) == PLAIN


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_fsdp1_changes_no_name(group):
    net: Any = Net()
    net.head = FullyShardedDataParallel(net.head, device_id=torch.device("cpu"))
    assert names(FullyShardedDataParallel(net, device_id=torch.device("cpu"))) == PLAIN


def test_a_module_called_module_keeps_its_name():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert names(Own()) == {"Own", "module"}


def layers(annotator):
    return [layer for layer, *_ in annotator.take_rows()]


def test_calls_that_autograd_does_not_see_have_no_rows(annotator):
    with torch.no_grad():
        Net()(torch.ones(1, 4))
    assert layers(annotator) == []


def test_methods_that_the_program_made_its_own_are_not_asked(annotator):
    class Odd(Net):
        def named_modules(self, *args, **kwargs):
            raise RuntimeError("not these")

        def named_children(self):
            raise RuntimeError("nor these")

        def modules(self):  # type: ignore[override]
            raise RuntimeError("nor these")

    model = Odd()
    model(torch.ones(1, 4))
    assert set(layers(annotator)) == {"Odd", "layers.0", "layers.1", "head"}


def test_names_walk_as_torch_does():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()), nn.Linear(4, 4))
    model.register_module("none", None)
    assert [(n, id(m)) for n, m in named_submodules(model)] == [
        (n, id(m)) for n, m in model.named_modules()
    ]


def test_a_second_model_is_told_from_the_first(annotator):
    first, second, third = Net(), Net(), Net()
    for net in (first, second, third, first):
        net(torch.ones(1, 4))
    found = layers(annotator)
    assert found[:4] == ["layers.0", "layers.1", "head", "Net"]
    assert found[4:8] == ["Net#2.layers.0", "Net#2.layers.1", "Net#2.head", "Net#2"]
    assert found[8:12] == ["Net#3.layers.0", "Net#3.layers.1", "Net#3.head", "Net#3"]
    assert found[12:] == found[:4]


def test_a_loss_module_takes_no_name_from_the_model(annotator):
    loss, net = nn.MSELoss(), Net()
    loss(torch.ones(1, requires_grad=True), torch.zeros(1))
    loss(net(torch.ones(1, 4)), torch.zeros(1, 1))
    assert layers(annotator) == ["MSELoss", "layers.0", "layers.1", "head", "Net", "MSELoss"]


def test_a_module_made_on_the_way_is_named_after_its_parent(annotator):
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return nn.Tanh()(self.first(x))

    Makes()(torch.ones(1, 4))
    assert layers(annotator) == ["first", "Makes.Tanh", "Makes"]


def test_an_interruption_leaves_nothing_open(annotator):
    class Interrupted(Net):
        def forward(self, x):
            raise KeyboardInterrupt

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Interrupted()
            self.after = nn.Linear(4, 4)

        def forward(self, x):
            try:
                self.inner(x)
            except KeyboardInterrupt:  # no hook sees it
                return self.after(x)

    Catches()(torch.ones(1, 4))
    assert layers(annotator)[-1] == "Catches"
    assert annotator._threads.stack == []


def test_each_thread_has_its_own_calls(annotator):
    net = Net()
    net(torch.ones(1, 4))
    annotator.take_rows()

    def call():
        tids.append(threading.get_native_id())
        net(torch.ones(1, 4))

    tids: list[int] = []
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    rows = annotator.take_rows()
    assert [layer for layer, *_ in rows] == ["layers.0", "layers.1", "head", "Net"]
    assert {row[2] for row in rows} == set(tids)


def test_outputs_and_gradients_are_what_they_were(annotator):
    torch.manual_seed(0)
    net = Net()
    x = torch.ones(1, 4)
    net(x).sum().backward()
    seen = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    annotator.remove()
    net.zero_grad()
    net(x).sum().backward()
    for one, parameter in zip(seen, net.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=0)


def test_names_die_with_their_modules(annotator):
    annotator_names = annotator._names
    for _ in range(3):
        Net()(torch.ones(1, 4))
        gc.collect()
    # Ids are used again; a name never outlives the module it was made for.
    assert all(entry.module() is None for entry in annotator_names.values())
