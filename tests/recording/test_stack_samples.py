"""Sampled stacks: which function had the time, and whether it made data."""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import chopper
from chopper import pipeline
from chopper.recording.stack_samples import StackSampler, _stack_of
from tests.recording.make import TRACE_ONLY
from tests.waiting import until

HERE = "test_stack_samples.py"


class Probe(nn.Module):
    """Looks at its own stack in its forward, through a container's iterator."""

    def __init__(self, look):
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity()])
        self.look = look

    def __getitem__(self, index):
        return self.look()

    def forward(self):
        return self[0]


@pytest.fixture
def place():
    """Where the running code is, below a loop that ended a step in the caller's frame."""
    sampler = StackSampler()
    sampler.step_ended()

    def look():
        return sampler._locate([frame for frame, _ in traceback.walk_stack(sys._getframe(1))])

    return SimpleNamespace(look=look, step_ended=sampler.step_ended)


def get_batch(look):
    return look()


def on_train_batch_end(look):
    return look()


def batches(look):
    while True:
        yield look()


@contextlib.contextmanager
def timed(look, places):
    places.append(look())
    yield


class Shards:
    def __init__(self, look):
        self.look = look

    def __getitem__(self, index):
        return self.look()


def test_iterators_and_functions_that_make_batches_are_data(place):
    place.step_ended()
    cases = {
        "batches": next(batches(place.look)),
        "get_batch": get_batch(place.look),
        "__getitem__": Shards(place.look)[0],
    }
    for name, (function, line, _, is_data) in cases.items():
        assert is_data, name
        assert f"{HERE}(" in function
        assert function.endswith(f": {name}")
        assert line > 0


def test_callbacks_modules_and_context_managers_are_not(place):
    place.step_ended()
    places = [on_train_batch_end(place.look), Probe(place.look)()]
    with timed(place.look, places):
        pass
    assert [is_data for *_, is_data in places] == [False] * 3
    assert places[0][0].endswith(": on_train_batch_end")


def test_a_generator_is_data_where_the_loop_iterates_over_it(place):
    def on_step_end():
        return next(next(batches(place.look)) for _ in range(1))

    place.step_ended()
    for iterated in (place.look() for _ in range(1)):
        assert iterated[3]
    for iterated in enumerate(batches(place.look)):
        assert iterated[1][3]
        break
    (consumed,) = sorted(place.look() for _ in range(1))
    assert not consumed[3]
    assert not on_step_end()[3]


def test_a_loop_that_is_a_generator_itself_is_no_data(place):
    def train():
        while True:
            place.step_ended()
            yield place.look(), next(batches(place.look))

    (own, data), again = next(train()), next(train())
    assert (own[3], data[3]) == (again[0][3], again[1][3]) == (False, True)


def test_a_generator_of_the_program_is_data_in_its_trace(task):
    """The generator takes as long as the sampler needs to see it twice."""

    def waited():
        while True:
            first = len(windows._stacks._rows)
            until(functools.partial(enough, first + 2), "two samples")
            yield torch.ones(2, 8)

    def enough(count):
        return not windows.tracing or len(windows._stacks._rows) >= count

    with chopper.profile("run", collect=TRACE_ONLY, steps=(1, 4)) as prof:
        assert prof._session is not None
        windows: Any = prof._session._steps.windows
        for number, batch in enumerate(waited()):
            task.step(batch)
            if number == 4:
                break
    run = pipeline.read("run")
    samples = run.table(0, "python_sample").to_pylist()
    mine = [s for s in samples if s["is_data"]]
    assert len(mine) >= 3
    # The innermost one, which the generator calls; what that calls in turn is seen at times.
    [waits, *_] = {s["function"] for s in mine if "tests/waiting.py" in s["function"]}
    host = run.table(0, "host_span").to_pylist()
    assert any(s["name"] == waits and s["category"] == "python" for s in host)
    attribution = pipeline.attribute(run).all_steps
    data = {group.key: group.causes for group in attribution.by("phase")}["data"]
    assert data["idle.preparation.data"] > 0


class _Turns:
    """An event to wait for that ends the sampler's first wait, and its second once it may."""

    def __init__(self):
        self.waits = 0
        self.sampled, self.may_end = threading.Event(), threading.Event()

    def is_set(self):
        return False

    def wait(self, _):
        self.waits += 1
        if self.waits == 1:
            return False
        self.sampled.set()
        return self.may_end.wait()


def test_what_a_function_held_is_gone_once_it_returns():
    sampler, turns = StackSampler(), _Turns()
    sampler._ident, sampler._tid = threading.get_ident(), threading.get_native_id()
    thread = threading.Thread(target=sampler._run, args=(turns,))

    def step():
        activations = torch.ones(4)
        thread.start()
        assert turns.sampled.wait(10)
        return weakref.ref(activations)

    try:
        assert step()() is None
    finally:
        turns.may_end.set()
        thread.join()
    assert len(sampler.take_rows()) == 1


COLLECTED = """
import gc, sys, threading, time
from chopper.recording.stack_samples import StackSampler

alive, main, over = 0, threading.get_ident(), threading.Event()

class Late:  # lets the other thread go on where the collector finds it
    def __init__(self):
        global alive
        self.me, alive = self, alive + 1

    def __del__(self):
        global alive
        alive -= 1
        if threading.get_ident() != main and not over.is_set():
            time.sleep(0.001)

def down(depth):
    if alive < 30:
        Late()
    return down(depth - 1) if depth else 0

gc.set_threshold(2)
sampler = StackSampler()
sampler.begin()
sys.setswitchinterval(1e-5)
rows = 0
while rows < 20:
    for depth in (3, 40, 150, 600):
        down(depth)
    rows = len(sampler._rows)
over.set()
sampler.end()
assert gc.isenabled()
"""


def test_the_collector_runs_while_a_stack_is_sampled(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr


def test_a_thread_that_ends_while_it_is_sampled_ends_the_sampling():
    sampler, may_end = StackSampler(), threading.Event()
    other = threading.Thread(target=may_end.wait)
    other.start()

    def ends(_):
        may_end.set()
        gone = Path(f"/proc/self/task/{other.native_id}")
        until(lambda: not gone.exists(), "the end of the thread")
        return False

    sampler._ident, sampler._tid = threading.get_ident(), other.native_id or 0
    over: Any = SimpleNamespace(wait=ends, is_set=lambda: False)
    sampler._run(over)
    assert not sampler.take_rows()


def test_the_interpreters_switch_interval_is_the_programs_again():
    before_s, sampler = sys.getswitchinterval(), StackSampler()
    sampler.begin()
    try:
        assert sys.getswitchinterval() < before_s
    finally:
        sampler.end()
        sampler.end()
    assert sys.getswitchinterval() == pytest.approx(before_s)


def make_log_record(look):
    return look()


def load(look):
    return look()


def test_names_of_functions_that_write_are_no_data(place):
    place.step_ended()
    assert load(place.look)[3]
    assert not make_log_record(place.look)[3]


def test_an_import_is_no_data_unless_what_makes_data_imports(place, tmp_path, monkeypatch):
    """The import system reads modules by functions of its own, such as `get_data`."""
    (tmp_path / "lazily.py").write_text("import builtins\nseen = builtins.look_here()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def lazily():
        sys.modules.pop("lazily", None)
        return importlib.import_module("lazily").seen

    def get_batch():
        return lazily()

    for look in (place.look, functools.partial(load, place.look)):
        monkeypatch.setattr("builtins.look_here", look, raising=False)
        place.step_ended()
        assert not lazily()[3]
        assert get_batch()[3]


def test_waiting_for_what_another_thread_gives_is_waiting_for_data():
    given: queue.Queue[int] = queue.Queue()
    sampler = StackSampler()
    sampler.step_ended()
    ident = threading.get_ident()
    rows: list[Any] = []

    def give():
        until(lambda: _waits_in(ident, "get"), "the program waits")
        rows.append(sampler._locate(_stack_of(ident)))
        given.put(1)

    thread = threading.Thread(target=give)
    thread.start()
    given.get()
    thread.join()
    [(function, _, library, is_data)] = rows
    assert is_data
    assert function is None
    assert library.endswith(": get")


def _waits_in(ident, name):
    return [frame.f_code.co_name for frame in _stack_of(ident)][:2] == ["wait", name]
