"""Offload on a side stream, on streams whose copies happen as late as CUDA may let them.

A copy runs when somebody waits for it and not before: what was not waited for is still garbage, and
what was given up too early is seen when the copy runs.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from chopper.models.architectures import Architecture  # noqa: E402
from chopper.workloads import offload_memory  # noqa: E402
from chopper.workloads.llama import Llama  # noqa: E402
from chopper.workloads.offload_memory import AHEAD, OverlappedOffload  # noqa: E402

CPU = torch.device("cpu")


class Stream:
    """Copies in order, each done when it is waited for."""

    def __init__(self, device=None):
        self.copies = []
        self.done = 0

    def wait_stream(self, other):
        """The computing stream has done all it was given."""

    def wait_event(self, event):
        event.stream.run(event.at)

    def run(self, until):
        for into, source, to_host in self.copies[self.done : until]:
            self.done += 1
            target, read = into(), source()
            if target is None:
                assert to_host, "the device's memory was given up before the copy into it was done"
                continue
            assert read is not None, "a tensor was given up before it was copied"
            target.copy_(read)


class Event:
    def record(self, stream):
        self.stream, self.at = stream, len(stream.copies)


class Cuda:
    """As much of torch.cuda as the module uses."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.computing = Stream()
        self.current = self.computing
        self.sides = []

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, side):
        self.current = side
        if side not in self.sides:
            self.sides.append(side)
        yield
        self.current = self.computing

    def copy(self, into, source):
        # Only a host's copy is made from a tensor that takes part in the graph's forward.
        to_host = id(source) not in self.hosts
        if to_host:
            self.hosts[id(into)] = into
        into.fill_(float("nan")) if into.is_floating_point() else into.zero_()
        self.current.copies.append((weakref.ref(into), weakref.ref(source), to_host))
        self.log.append("out" if to_host else tuple(source.shape))

    hosts: Any
    log: list[Any]


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    fake.hosts, fake.log = weakref.WeakValueDictionary(), []

    class Torch:
        cuda = fake

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(offload_memory, "torch", Torch())
    monkeypatch.setattr(offload_memory, "_copy", fake.copy)
    monkeypatch.setattr(offload_memory, "SMALLEST_BYTES", 1)
    return fake


def finish(cuda):
    """Everything that is still under way, at the very end."""
    gc.collect()
    for side in cuda.sides:
        side.run(len(side.copies))


def chain(x, weights):
    """Products and gates that each save their input."""
    for w in weights:
        x = torch.tanh(x @ w)
    return x.sum()


def made(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def weights_of(shapes):
    return [torch.nn.Parameter(made(*shape)) for shape in shapes]


def test_gradients_of_a_model_are_the_same(cuda):
    torch.manual_seed(0)
    model = Llama(
        Architecture(
            name="tiny",
            layers_count=3,
            width=32,
            heads_count=4,
            kv_heads_count=2,
            head_width=8,
            ffn_width=48,
            vocabulary_count=64,
        )
    )
    tokens = torch.randint(0, 64, (2, 16))

    def gradients(context):
        model.zero_grad(set_to_none=True)
        with context:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return [w.grad.clone() for w in model.parameters() if w.grad is not None]

    expected = gradients(contextlib.nullcontext())
    offload = OverlappedOffload(CPU)
    for _ in range(2):  # one object serves every step
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(offload), strict=True))
    assert offload.moved_bytes > 0
    finish(cuda)


def test_what_is_saved_thrice_travels_once_and_weights_stay(cuda):
    x, weights = made(8, 8), weights_of([(8, 8)] * 3)
    offload = OverlappedOffload(CPU)
    with offload:
        # Of a product with a transposed weight, the transposed view is saved.
        sum(x @ w.t() for w in weights).sum().backward()
    assert offload.moved_bytes == x.nbytes
    finish(cuda)


def test_the_stash_is_bounded_in_both_directions(cuda):
    x, weights = made(8, 8), weights_of([(8, 8)] * 20)
    offload = OverlappedOffload(CPU)
    alive = []

    def count(*_):
        found = [saved for ref in offload._order if (saved := ref()) is not None]
        alive.append(
            (sum(s.source is not None for s in found), sum(s.back is not None for s in found))
        )

    with offload:
        hidden = x
        for w in weights:
            hidden = torch.tanh(hidden @ w)
            count()
            hidden.register_hook(count)
    hidden.sum().backward()
    assert max(sources for sources, _ in alive) == AHEAD
    assert AHEAD <= max(backs for _, backs in alive) <= 2 * AHEAD + 1
    finish(cuda)


def test_changing_a_tensor_that_is_on_its_way_is_refused(cuda):
    x = made(8, 8)
    with OverlappedOffload(CPU):
        hidden = torch.tanh(x)
        loss = (hidden * hidden).sum()
        hidden.add_(1)
    with pytest.raises(RuntimeError, match=r"\(8, 8\).*changed in place"):
        loss.backward()


def test_a_graph_may_be_used_again_and_differentiated_twice(cuda):
    x, weights = made(4, 4), weights_of([(4, 4)] * 6)
    once = torch.autograd.grad(chain(x, weights), x)[0]
    with OverlappedOffload(CPU):
        loss = chain(x, weights)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, once)
    assert torch.equal(torch.autograd.grad(loss, x)[0], once)

    def offloaded(x):
        with OverlappedOffload(CPU):
            return chain(x, weights)

    assert torch.autograd.gradgradcheck(offloaded, (x,))
    finish(cuda)


def test_a_backward_that_stops_leaves_nothing_written_later(cuda):
    x, weights = made(4, 4), weights_of([(4, 4)] * 10)
    with OverlappedOffload(CPU):
        loss = chain(x, weights)
    # Only the last weight's gradient: what was fetched ahead is never used.
    torch.autograd.grad(loss, weights[-6])
    del loss
    finish(cuda)


@pytest.mark.parametrize(
    "seen",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(6, -1),
        lambda t: t.unfold(0, 2, 1),
        lambda t: t[1:1],
    ],
    ids=["transposed", "strided", "expanded", "overlapping", "empty"],
)
def test_views_come_back_as_they_were(cuda, seen):
    base, w = made(6, 6), made(1)

    def loss():
        return ((seen(base * 1) * w) ** 2).sum() + chain(
            base, [made(6, 6).detach() for _ in range(3)]
        )

    torch.manual_seed(1)
    expected = torch.autograd.grad(loss(), [base, w])
    torch.manual_seed(1)
    with OverlappedOffload(CPU):
        held = loss()
    found = torch.autograd.grad(held, [base, w])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finish(cuda)
