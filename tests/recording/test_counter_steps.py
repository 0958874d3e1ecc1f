"""Hardware counters in steps of their own, with ranges as CUPTI's profiler in torch writes them."""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import chopper
from chopper.collectors.torch_trace import TorchTrace
from chopper.recording.counters import SETS, CounterSteps
from chopper.storage.run import Run
from tests import command
from tests.recording.make import TRACE_ONLY, findings_of, names_of, steps_of, traced_of

BUSY, OPS, DRAM = SETS
KERNELS = ("gemm", "add", "gemm")


def ranges(*names, metrics):
    """Events of one step, not in their order; the times are torch's own invention."""
    events = [
        {
            "ph": "X", "cat": "cuda_profiler_range", "name": name, "pid": 0, "tid": 0,
            "ts": 1000.0 + 10 * i, "dur": 10.0,
            "args": {metric: 10.0 * i + j for j, metric in enumerate(metrics)},
        }
        for i, name in enumerate(names)
    ]  # fmt: skip
    return [
        *reversed(events),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "args": {}},
    ]


@pytest.fixture
def device(monkeypatch):
    """A device whose kernels torch counts as scripted; returns the script, a list for each step."""
    script: deque[tuple[str, ...]] = deque()
    original = TorchTrace._make

    def make(self, metrics):
        profiler = original(self, ())
        if metrics:
            names = script.popleft()

            def export(path):
                content = {"traceEvents": ranges(*names, metrics=metrics)}
                Path(path).write_text(json.dumps(content))

            profiler.export_chrome_trace = export
        return profiler

    monkeypatch.setattr(TorchTrace, "_make", make)
    monkeypatch.setattr(TorchTrace, "uncountable", staticmethod(lambda: None))
    return script


def messages(path="run"):
    return [f.message for f in Run.open(Path(path)).part(0).findings if f.code == "run.no_counters"]


def record(task, steps, **options):
    with chopper.profile("run", collect=TRACE_ONLY, counters=True, **options):
        for _ in range(steps):
            task.step()


def test_each_set_is_measured_in_a_step_after_the_traced_ones(task, device):
    device += [KERNELS] * 3
    record(task, 20)
    assert messages() == []
    assert traced_of("run") == [2, 3, 4, 5, 6]
    # A step at the program's own speed lies between two of them.
    measured = [8, 10, 12]
    profiled = [row["number"] for row in steps_of("run") if row["profiled"]]
    assert profiled == [0, 1, 2, 3, 4, 5, 6, *measured]
    table = Run.open(Path("run")).table(0, "kernel_counter").to_pylist()
    told = [
        (r["step"], r["dispatch_id"], r["kernel"], r["occurrence_id"], r["counter"], r["value"])
        for r in table
    ]
    occurrences = (0, 0, 1)
    assert told == [
        (step, i, name, occurrences[i], metric, 10.0 * i + j)
        for step, metrics in zip(measured, SETS, strict=True)
        for i, name in enumerate(KERNELS)
        for j, metric in enumerate(metrics)
    ]
    assert {r["source"] for r in table} == {
        f"step {step}: {metrics[0]}" for step, metrics in zip(measured, SETS, strict=True)
    }
    # The trace is the one before, whole, with its clock checked.
    assert "ProfilerStep#6" in names_of("run")
    (report,) = (c for c in Run.open(Path("run")).part(0).collectors if c.name == "torch_trace")
    assert report.clock_alignment_error_ns is not None


def test_a_set_whose_kernels_torch_cannot_name_is_not_used(task, device):
    device += [("gemm", "add", "2"), KERNELS, ()]
    record(task, 20)
    assert messages() == [
        f"no hardware counters of step 8 ({BUSY[0]}): torch's profiler names 1 of 3 kernels by "
        "number only (not launched through cudaLaunchKernel), so which kernel is which is unknown"
    ]
    counters = Run.open(Path("run")).table(0, "kernel_counter")["counter"].to_pylist()
    assert counters == [*OPS] * 3


def test_a_program_that_ends_too_early_has_none(task, device):
    device += [KERNELS] * 3
    record(task, 7)
    assert messages()[0].endswith("and the program ended after 7 steps")
    assert Run.open(Path("run")).table(0, "kernel_counter").num_rows == 0


def test_the_programs_own_profiler_goes_first(task, device):
    """In step 8, which is being measured."""
    device += [KERNELS] * 3
    with chopper.profile("run", collect=TRACE_ONLY, counters=True):
        for number in range(16):
            if number == 8:
                with torch.profiler.profile() as own:
                    task.step()
            else:
                task.step()
    assert any(event.name == "aten::linear" for event in own.events())
    assert traced_of("run") == [2, 3, 4, 5, 6]
    table = Run.open(Path("run")).table(0, "kernel_counter").to_pylist()
    assert {row["counter"] for row in table} == {*OPS, *DRAM}


def test_a_later_window_is_traced_all_the_same(task, device, monkeypatch):
    monkeypatch.setattr(
        "chopper.recording.windows.TraceWindows._shows_later_steps", lambda _: False
    )
    device += [KERNELS] * 3
    record(task, 60)
    assert traced_of("run") == [50, 51, 52, 53, 54]
    assert "ProfilerStep#52" in names_of("run")
    assert Run.open(Path("run")).table(0, "kernel_counter").num_rows == 3 * 6


def noting(**trace):
    noted = []
    part = SimpleNamespace(
        note=lambda code, case=None, **values: noted.append((code, case, values))
    )
    return noted, part, SimpleNamespace(uncountable=lambda: None, forget=lambda: None, **trace)


def test_several_ranks_do_not_count():
    noted, part, trace = noting()
    assert not CounterSteps(trace, part, wanted=True, alone=False).ready()
    ((code, _, values),) = noted
    assert code == "run.no_counters"
    assert values["reason"].startswith("they are measured in programs of one rank")


def test_a_torch_without_such_options_is_said():
    def begin(_metrics):
        raise TypeError("no profiler_metrics")

    noted, part, trace = noting(begin=begin)
    steps = CounterSteps(trace, part, wanted=True, alone=True)
    assert steps.ready()
    assert not steps.begin(8)
    assert not steps.ready()
    assert noted == [("run.no_counters", None, {"reason": "TypeError: no profiler_metrics"})]


def test_torch_takes_the_options_that_it_is_given():
    """The real profiler and its configuration; without a device it can go no further."""
    made = TorchTrace()._make(OPS)
    assert {activity.name for activity in made.activities} == {"CUDA"}
    metrics, per_kernel = made.experimental_config.__getstate__()[:2]
    assert (metrics, per_kernel) == ([name.encode() for name in OPS], True)


def test_without_a_device_the_command_says_why_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nm = torch.nn.Linear(4, 4)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(4):\n    m(torch.ones(2, 4)).sum().backward()\n    o.step()\n"
    )
    options = ("--counters", "--collect", "torch_trace", "-o", tmp_path / "run")
    done = command.run("record", *options, "--", sys.executable, tmp_path / "train.py")
    assert done.code == 0
    said = [line for line in done.err.splitlines() if "hardware counters" in line]
    assert said == [
        "chopper: warning: no hardware counters (--counters): torch's profiler sees no NVIDIA "
        "device here"
    ]
    assert findings_of(tmp_path / "run") == ["run.no_counters"]
    refused = command.run("record", "--counters", "--no-trace", "--", "true")
    assert refused.code == 2
    assert "--counters belongs to the trace, which --no-trace disables" in refused.err
