"""Steps, windows, clocks and lost records of unusual traces, and the right answer to each.

The files lie in ``steps``; other cases of each kind are made from their reference.
"""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay import schedule
from chopper.analyzers.replay.replay import Replay, replay_or_reason
from chopper.analyzers.views.utilization import utilization

FILES = Path(__file__).parent / "steps"
GOOD = json.loads((FILES / "good-reference.json").read_text(encoding="utf-8"))
US, MS = 1_000, 1_000_000
MATH_NS = 600 * US
"""Of a step with all its kernels."""
UNKNOWN, CORRECTED = "idle.device_unknown", "device.clock_corrected"
Event = dict[str, Any]
Edit = Callable[[Event], list[Event]]


def lengths(found: Attribution) -> list[int]:
    windows = found.all_steps.windows.to_pylist()
    return [w["end_ns"] - w["start_ns"] for w in windows]


def step_numbers(found: Attribution) -> list[int | None]:
    return [w["number"] for w in found.all_steps.windows.to_pylist()]


def said(found: Attribution) -> dict[str, str]:
    """Message of each finding but those that all such traces have."""
    usual = ("telemetry.clock_missing", "trace.no_shapes", "trace.not_recorded", "trace.boot_clock")
    return {f.code: f.message for f in found.findings if f.code not in usual}


def times(found: Attribution) -> dict[str, int]:
    """Time of each cause, which sum to the windows exactly."""
    causes = {c.id: c.time_ns for c in found.all_steps.leaves()}
    assert sum(causes.values()) == sum(lengths(found)) == found.all_steps.observed_ns
    return causes


def computing(found: Attribution) -> int:
    return sum(t for cause, t in times(found).items() if cause.startswith("compute."))


def write(path: Path, *edits: Edit) -> Path:
    """Write the reference, each event replaced by what the edits make of it, one after another."""
    events: list[Event] = copy.deepcopy(GOOD["traceEvents"])
    for edit in edits:
        events = [new for event in events for new in edit(event)]
    path.write_text(json.dumps({**GOOD, "traceEvents": events}), encoding="utf-8")
    return path


def of_steps(*marks: Callable[[int, Event], Event]) -> Edit:
    """Return the edit that puts other marks in the place of each ProfilerStep."""

    def edit(event: Event) -> list[Event]:
        if not event["name"].startswith("ProfilerStep"):
            return [event]
        number = int(event["name"].partition("#")[2]) - 2
        return [{**event, **mark(number, event)} for mark in marks]

    return edit


def named(text: str) -> Edit:
    return of_steps(lambda i, _: {"name": text.format(i=i, number=i + 7)})


def of_kernels(change: Callable[[int, Event], Event | None]) -> Edit:
    """Return the edit of the kernels, by their number; without those of which nothing is left."""
    number = iter(range(1_000))

    def edit(event: Event) -> list[Event]:
        if event.get("cat") != "kernel":
            return [event]
        new = change(next(number), event)
        return [] if new is None else [new]

    return edit


def moved(us: float, drift: float = 0.0) -> Edit:
    first = min(event["ts"] for event in GOOD["traceEvents"] if event.get("cat") == "kernel")
    return of_kernels(lambda _, k: {**k, "ts": k["ts"] + us + drift * (k["ts"] - first)})


def without(lost: Callable[[int], bool]) -> Edit:
    return of_kernels(lambda i, k: None if lost(i) else k)


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize(
    ("files", "steps", "observed_ns", "math_ns", "codes"),
    [
        ("good-reference.json", 6, 5_890_000, 6 * MATH_NS, {}),
        (
            "first-steps-kernels-dropped.json",
            2,
            1_890_000,
            2 * MATH_NS,
            {"steps.lost": "12 launches of steps 2-3 have no kernel: lost", "device.": ""},
        ),
        (
            "middle-step-kernels-dropped.json",
            5,
            4_780_000,
            5 * MATH_NS,
            {"steps.lost": "6 launches of step 4 have no kernel: lost"},
        ),
        (
            "gpu-clock-5ms-early.json",
            6,
            5_885_000,
            6 * MATH_NS,
            {"device.clock_corrected": "5.00 ms"},
        ),
        (
            "gpu-clock-60us-early.json",
            4,
            3_885_000,
            4 * MATH_NS,
            {"device.clock_corrected": "65.0 µs"},
        ),
        (
            "nvtx-iterations-not-popped.sqlite",
            6,
            5_890_000,
            6 * MATH_NS,
            {"trace.steps_from": "6 steps, one for each range iteration10 …"},
        ),
        ("reference-popped.sqlite", 6, 5_890_000, 6 * MATH_NS, {"trace.steps_from": ""}),
        ("no-steps-host-before-device.json", 1, 11_890_000, 2 * MATH_NS, {"trace.no_steps": ""}),
        ("window.1.pt.trace.json", 1, 11_890_000, 2 * MATH_NS, {"trace.no_steps": ""}),
        (
            "window.?.pt.trace.json",
            2,
            2 * 11_890_000,
            4 * MATH_NS,
            {"run.windows_by_pid": "", "trace.several_windows": "2 windows"},
        ),
        ("step-without-device-work.json", 6, 5_890_000, 5 * MATH_NS, {}),
        (
            "train_step-annotations.json",
            6,
            5_890_000,
            6 * MATH_NS,
            {"trace.steps_from": "6 steps, one for each range train_step (100 % of the recording)"},
        ),
    ],
)
def test_windows_of_the_files(
    files: str, steps: int, observed_ns: int, math_ns: int, codes: dict[str, str]
) -> None:
    found = pipeline.attribute([*sorted(FILES.glob(files))])
    assert len(lengths(found)) == steps
    assert found.all_steps.observed_ns == observed_ns
    assert computing(found) == math_ns
    others = set(said(found))
    for code, text in codes.items():
        others -= {other for other in others if other.startswith(code)}
        assert not text or text in said(found)[code]
    assert not others


def test_launches_without_any_kernel_record_are_no_cpu_run() -> None:
    found = pipeline.attribute(FILES / "launches-but-no-kernels.json")
    assert found.ranks[0].device == "NVIDIA H100 80GB HBM3"
    assert step_numbers(found) == [2, 3, 4, 5]
    assert found.observed_ns == 3_995_000  # on the host
    causes = times(found)
    # From the return of the first launch on, nobody knows; before, the host had launched nothing.
    assert causes.pop(UNKNOWN) == 3_995_000 - 38_000
    assert {cause.rpartition(".")[0] for cause in causes} == {"idle.preparation"}
    [message] = said(found).values()
    assert message.startswith("24 launches, no kernel record: device time unknown")
    assert replay_or_reason(found) == (
        "cannot be replayed: kernel records of rank 0 were lost; record it again"
    )
    assert {row["mfu_ratio"] for row in utilization(found).to_pylist()} == {None}


def test_two_devices_of_one_process_lose_no_kernels() -> None:
    found = pipeline.attribute(FILES / "one-process-two-devices.json")
    assert set(said(found)) == {"trace.several_devices"}
    assert [r.observed_ns for r in found.ranks] == [3_890_000] * 2
    assert not [held for held in found.withheld if held.id == "idle.causes"]
    assert times(found)["idle.preparation.python"] > 0


# ---------------------------------------------------------------- what marks steps


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("iteration {number}", 7),
        ("Iteration({number})", 7),
        ("training_step: {number}", 7),
        ("## step {number}/100 ##", 7),
        ("step[DECODE bs={number}]", 0),
        ("execute_model", 0),
        ("gpu_model_runner: execute_model", 0),
        ("execute_context_{i}({number})_generation_0(0)", 0),
        ("[pl][profile]run_training_batch", 0),
        ("TrainStep", 0),
        ("Optimizer.step#AdamW.step", 0),
        ("Optimizer.zero_grad#AdamW.zero_grad", 0),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0),
    ],
)
def test_what_marks_steps(tmp_path: Path, text: str, first: int) -> None:
    found = pipeline.attribute(write(tmp_path / "t.json", named(text)))
    assert step_numbers(found) == [*range(first, first + 6)]
    assert found.all_steps.observed_ns == 5_890_000
    assert "trace.steps_from" in said(found)


@pytest.mark.parametrize("text", ["my region", "forward", "micro-batch {i}", "load batch {i}"])
def test_what_marks_no_steps(tmp_path: Path, text: str) -> None:
    found = pipeline.attribute(write(tmp_path / "t.json", named(text)))
    assert step_numbers(found) == [None]
    assert found.all_steps.observed_ns == 5_995_000  # to the end of the last range
    assert times(found)["idle.no_step"] == 105_000


def test_the_least_frequent_call_marks_steps(tmp_path: Path) -> None:
    def batch(_: int, event: Event) -> Event:
        return {"name": "enumerate(DataLoader)#_Iter.__next__", "dur": 4}

    def at(us: float) -> Callable[[int, Event], Event]:
        return lambda _, e: {"name": "Optimizer.step#Adam.step", "ts": e["ts"] + us, "dur": 60}

    # Two optimizer steps for each batch, as of a generator and a discriminator.
    twice = pipeline.attribute(write(tmp_path / "a.json", of_steps(batch, at(400), at(900))))
    assert len(lengths(twice)) == 6
    assert "a call of enumerate(DataLoader)" in said(twice)["trace.steps_from"]

    # Two batches for each optimizer step.
    def accumulated(event: Event) -> list[Event]:
        odd = event["name"].startswith("Optimizer") and int(event["ts"]) % 2000 < 1000
        return [] if odd else [event]

    halved = write(tmp_path / "b.json", of_steps(batch, at(900)), accumulated)
    found = pipeline.attribute(halved)
    assert len(lengths(found)) == 3
    assert "up to the end of a call of Optimizer.step#Adam.step" in said(found)["trace.steps_from"]


@pytest.mark.parametrize(("us", "numbers"), [(5_900, [7]), (1_000, [None])])
def test_one_range_is_a_step_if_it_covers_most(
    tmp_path: Path, us: int, numbers: list[int | None]
) -> None:
    def once(event: Event) -> list[Event]:
        step = event["name"].startswith("ProfilerStep")
        new = {**event, "name": "step 7", "dur": us} if event["name"].endswith("#2") else event
        return [] if step and new is event else [new]

    assert step_numbers(pipeline.attribute(write(tmp_path / "t.json", once))) == numbers


def test_a_part_of_the_steps_is_no_step(tmp_path: Path) -> None:
    def outer(i: int, _: Event) -> Event:
        return {"name": "train_step"}

    def inner(i: int, event: Event) -> Event:
        return {"name": f"step {i}", "ts": event["ts"] + 10, "dur": 100}

    found = pipeline.attribute(write(tmp_path / "t.json", of_steps(outer, inner)))
    assert found.all_steps.observed_ns == 5_890_000
    assert "range train_step" in said(found)["trace.steps_from"]


BESIDE = ["val_step {i}", "evaluation step {i}", "test_iter", "inference_step", "accum_step {i}"]


@pytest.mark.parametrize("text", BESIDE)
@pytest.mark.parametrize("call", ["", "Optimizer.step#Adam.step"])
def test_validation_and_accumulation_mark_steps_only_alone(
    tmp_path: Path, text: str, call: str
) -> None:
    def of(numbers: range, name: str) -> Edit:
        def edit(event: Event) -> list[Event]:
            head, _, number = event["name"].partition("#")
            return (
                [{**event, "name": name.format(i=number)}]
                if (head == "ProfilerStep" and int(number) in numbers)
                else [event]
            )

        return edit

    train = call or "train_step"
    path = write(tmp_path / "a.json", of(range(2, 4), train), of(range(4, 8), text))
    found = pipeline.attribute(path)
    assert len(lengths(found)) == 2
    assert train in said(found)["trace.steps_from"]
    alone = pipeline.attribute(write(tmp_path / "b.json", of(range(2, 8), text)))
    assert len(lengths(alone)) == 6


@pytest.mark.parametrize("inner", ["accumulation_step {i}", "enumerate(DataLoader)#_It.__next__"])
def test_one_step_is_not_cut_into_its_micro_steps(tmp_path: Path, inner: str) -> None:
    def once(event: Event) -> list[Event]:
        head, _, number = event["name"].partition("#")
        if head != "ProfilerStep":
            return [event]
        part = {**event, "name": inner.format(i=number)}
        whole = {**event, "name": "train_step", "dur": 5_990}
        return [whole, part] if number == "2" else [part]

    found = pipeline.attribute(write(tmp_path / "t.json", once))
    assert lengths(found) == [5_890_000]
    assert "range train_step" in said(found)["trace.steps_from"]


@pytest.mark.parametrize(("us", "numbered"), [(950, True), (700, False)])
def test_numbers_decide_only_between_ranges_of_the_same_time(
    tmp_path: Path, us: int, numbered: bool
) -> None:
    def outer(i: int, _: Event) -> Event:
        return {"name": "train_step"}

    def inner(i: int, event: Event) -> Event:
        return {"name": f"iteration {i + 7}", "ts": event["ts"] + 5, "dur": us}

    found = pipeline.attribute(write(tmp_path / "t.json", of_steps(outer, inner)))
    assert step_numbers(found) == [*(range(7, 13) if numbered else range(6))]


def test_recorded_time_between_steps_is_not_called_unrecorded(tmp_path: Path) -> None:
    def sparse(event: Event) -> list[Event]:
        name, _, number = event["name"].partition("#")
        if name != "ProfilerStep":
            return [event]
        return [] if number in "45" else [{**event, "name": f"{name}#{10 * int(number)}"}]

    found = pipeline.attribute(write(tmp_path / "t.json", sparse))
    assert step_numbers(found) == [20, 30, 60, 70]
    assert set(said(found)) == {"trace.between_steps", "steps.not_consecutive"}
    # From the end of step 30 on the device, at 1 890 µs, to the start of step 60 at 4 000 µs. Steps
    # 20 and 30 follow each other: the program counts by ten.
    assert lengths(found) == [890_000, 1_000_000, 890_000, 1_000_000]
    assert said(found)["trace.between_steps"].startswith("2.11 ms")


def test_ranges_without_an_end_last_until_the_next(tmp_path: Path) -> None:
    path = tmp_path / "open.sqlite"
    path.write_bytes((FILES / "nvtx-iterations-not-popped.sqlite").read_bytes())
    with sqlite3.connect(path) as database:
        database.execute("UPDATE NVTX_EVENTS SET end = NULL")
    found = pipeline.attribute(path)
    assert step_numbers(found) == [*range(10, 16)]
    assert found.all_steps.observed_ns == 5_890_000


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("us", [-5_000, -300, -60, -20])
def test_a_device_clock_that_is_early_is_corrected(tmp_path: Path, us: int) -> None:
    found = pipeline.attribute(write(tmp_path / "t.json", moved(us)))
    assert step_numbers(found) == [*range(2, 8)]
    assert found.coverage["launch_known_ratio"] == 1
    # The quickest launch takes 5 µs from its call on, instead of 10.
    assert found.all_steps.observed_ns == 5_885_000
    [(code, message)] = said(found).items()
    assert code == "device.clock_corrected"
    assert "behind" in message
    assert times(found)["idle.preparation.python"] == 1_720_000


def waits(_: int, event: Event) -> Event:
    """Wait for the device until the last kernel of the step ends."""
    sync = {"name": "cudaDeviceSynchronize", "cat": "cuda_runtime", "args": {}}
    return {**sync, "ts": event["ts"] + 800, "dur": 90}


@pytest.mark.parametrize("us", [120, 300, 900, 5_000])
def test_a_late_device_clock_is_told_from_latency_by_what_waited(tmp_path: Path, us: int) -> None:
    waited = pipeline.attribute(
        write(tmp_path / "a.json", moved(us), of_steps(lambda i, e: {}, waits))
    )
    assert "ahead of" in said(waited)["device.clock_corrected"]
    assert waited.all_steps.observed_ns == 5_890_000
    latency = pipeline.attribute(write(tmp_path / "b.json", moved(us)))
    assert not [code for code in said(latency) if code.startswith("device.clock")]
    assert latency.all_steps.observed_ns == 5_890_000 + us * US


@pytest.mark.parametrize("stray", [False, True])
def test_a_call_that_waited_for_another_device_moves_no_clock(tmp_path: Path, stray: bool) -> None:
    # Device 1 works on when the call returns, which waited for device 0.
    def second(event: Event) -> list[Event]:
        if event.get("cat") not in ("kernel", "cuda_runtime") or "correlation" not in event["args"]:
            return [event]
        args = {**event["args"], "correlation": event["args"]["correlation"] + 1_000}
        if event["cat"] == "kernel":
            args["device"] = 1
            event = {**event, "pid": 1, "ts": event["ts"] + 50}
        return [event, {**event, "args": args}]

    def also(event: Event) -> list[Event]:
        if event.get("cat") != "kernel":
            return [event]
        args = {**event["args"], "device": 1, "correlation": 0}
        return [event, {**event, "dur": 0.5, "args": args}]

    late = (moved(50), also) if stray else (second,)
    path = write(tmp_path / "t.json", *late, of_steps(lambda i, e: {}, waits))
    found = pipeline.attribute(path)
    assert not [code for code in said(found) if code.startswith("device.clock")]


@pytest.mark.parametrize("us", [0, -3, 20])
def test_a_clock_that_may_be_right_is_left_alone(tmp_path: Path, us: int) -> None:
    found = pipeline.attribute(write(tmp_path / "t.json", moved(us)))
    assert not said(found)
    assert found.all_steps.observed_ns == 5_890_000 + us * US


@pytest.mark.parametrize("drift", [-0.05, -0.2])
def test_a_clock_that_drifts_withholds_host_causes(tmp_path: Path, drift: float) -> None:
    found = pipeline.attribute(write(tmp_path / "t.json", moved(0, drift)))
    assert "device.clock_drifts" in said(found)
    assert [held.id for held in found.withheld if "idle" in held.id] == ["idle.causes"]
    assert len(lengths(found)) == 6


def test_a_device_is_not_busy_after_a_call_that_waited_for_it(tmp_path: Path) -> None:
    # The device always lags behind the host, so that launches tell nothing; the call at the end of
    # each step does: it returns 10 µs after the last kernel, in truth.
    def queued(i: int, k: Event) -> Event:
        return {**k, "ts": k["ts"] - (i % 6) * 45 + 400, "dur": 104.9}

    def later(i: int, event: Event) -> Event:
        return {**waits(i, event), "ts": event["ts"] + 860, "dur": 120}

    path = write(tmp_path / "t.json", of_kernels(queued), of_steps(lambda i, e: {}, later))
    found = pipeline.attribute(path)
    late = [f for f in found.findings if f.code.startswith("device.clock")]
    assert [f.code for f in late] == ["device.clock_corrected"]
    assert "events end after calls that waited for them have returned" in late[0].message


def test_one_mismatched_launch_moves_no_clock(tmp_path: Path) -> None:
    early = of_kernels(lambda i, k: {**k, "ts": k["ts"] - 900} if i == 20 else k)
    assert not said(pipeline.attribute(write(tmp_path / "t.json", early))).keys() & {
        "device.clock_corrected",
        "device.clock_drifts",
    }


# ---------------------------------------------------------------- lost records


@pytest.mark.parametrize(
    ("lost", "steps", "message"),
    [
        (lambda i: i >= 24, [2, 3, 4, 5], "12 launches of steps 6-7"),
        (lambda i: i >= 33, [2, 3, 4, 5, 6], "3 launches of step 7"),
        (lambda i: i < 3, [3, 4, 5, 6, 7], "3 launches of step 2"),
        (lambda i: 8 <= i < 21, [2, 6, 7], "13 launches of steps 3-5"),
    ],
)
def test_steps_whose_kernels_were_lost_are_named_and_left_out(
    tmp_path: Path, lost: Callable[[int], bool], steps: list[int], message: str
) -> None:
    found = pipeline.attribute(write(tmp_path / "t.json", without(lost)))
    assert step_numbers(found) == steps
    assert said(found)["steps.lost"].startswith(f"{message} have no kernel: lost")
    assert computing(found) == len(steps) * MATH_NS
    assert "were lost" in str(replay_or_reason(found)) or "several windows" in str(
        replay_or_reason(found)
    )


def test_until_a_kernel_follows_a_lost_one_the_device_is_unknown(tmp_path: Path) -> None:
    # Kernel 10, of step 3, launched in [1 630, 1 638] µs; the next one began at 1 790 µs.
    found = pipeline.attribute(write(tmp_path / "t.json", without(lambda i: i == 10)))
    assert times(found)[UNKNOWN] == 152_000
    assert "1 of 36 kernel launches" in said(found)["launch.without_kernel"]
    assert found.all_steps.observed_ns == 5_890_000


def test_where_all_steps_lost_most_kernels_all_stay(tmp_path: Path) -> None:
    found = pipeline.attribute(write(tmp_path / "t.json", without(lambda i: i % 6 != 0)))
    assert step_numbers(found) == [*range(2, 8)]
    assert "steps.lost" not in said(found)
    assert times(found)[UNKNOWN] > 0.8 * found.all_steps.observed_ns
    assert computing(found) == 6 * 100 * US


# ---------------------------------------------------------------- latency


@pytest.mark.parametrize(("us", "cause"), [(90, "idle.launch_latency"), (400_000, UNKNOWN)])
def test_launch_latency_is_microseconds(tmp_path: Path, us: int, cause: str) -> None:
    # The last kernel begins late. Its call had returned at 5 788 µs.
    late = of_kernels(lambda i, k: {**k, "ts": k["ts"] + us} if i == 35 else k)
    found = pipeline.attribute(write(tmp_path / "t.json", late))
    usual = 0 if cause == UNKNOWN else 35 * 2 * US
    assert times(found)[cause] == usual + (us + 2) * US
    assert ("device.state_unknown" in said(found)) == (cause == UNKNOWN)


def test_unknown_time_is_no_part_of_mfu(tmp_path: Path) -> None:
    late = of_kernels(lambda i, k: {**k, "ts": k["ts"] + 400_000} if i == 35 else k)
    good = pipeline.attribute(FILES / "good-reference.json")
    found = pipeline.attribute(write(tmp_path / "t.json", late))
    ratios = [utilization(run.all_steps).to_pylist()[0]["mfu_ratio"] for run in (good, found)]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.01)


# ---------------------------------------------------------------- ranks


def rank_of_two(path: Path, rank: int, steps: range) -> Path:
    """One step of 1 ms for each number, with a collective that rank 0 enters 60 µs later."""
    events: list[Event] = []

    def add(name: str, category: str, at: float, dur: float, **args: Any) -> None:
        on_device = category == "kernel"
        place = {"pid": rank, "tid": args.get("stream")} if on_device else {"pid": 100, "tid": 100}
        event = {"ph": "X", "cat": category, "name": name, "ts": at, "dur": dur, "args": args}
        events.append(event | place)

    for number in steps:
        at, late = 1000 * number, 60 if rank == 0 else 0
        add(f"ProfilerStep#{number}", "user_annotation", at, 995)
        for i, (name, stream, dur) in enumerate(
            (("gemm", 7, 100), ("ncclDevKernel_AllReduce", 20, 0))
        ):
            begin = at + 300 * i + late * i
            add("cudaLaunchKernel", "cuda_runtime", begin + 30, 8, correlation=10 * number + i)
            length = dur or 200 - late
            place = {"device": rank, "stream": stream, "correlation": 10 * number + i}
            add(name, "kernel", begin + 40, length, **place)
    info = {"backend": "nccl", "rank": rank, "world_size": 2}
    document = {**GOOD, "distributedInfo": info, "traceEvents": events}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("numbers", "waited_ns", "message"),
    [
        ((range(2, 6), range(2, 6)), 4 * 60_000, None),
        ((range(2, 6), range(5, 9)), 60_000, "(rank 0: 2-5, rank 1: 5-8)"),
        ((range(2, 7), range(4, 9)), 3 * 60_000, "that all traced: 4-6"),
        ((range(2, 5), range(5, 8)), None, "none was traced by all"),
    ],
)
def test_ranks_that_traced_different_steps_are_matched_in_those_that_all_traced(
    tmp_path: Path, numbers: tuple[range, range], waited_ns: int | None, message: str | None
) -> None:
    files = [rank_of_two(tmp_path / f"{rank}.json", rank, of) for rank, of in enumerate(numbers)]
    found = pipeline.attribute(files)
    assert times(found).get("communication.wait") == waited_ns
    assert "run.clock_offset" not in said(found)
    assert (message is None) == ("run.steps_differ" not in said(found))
    assert message is None or message in said(found)["run.steps_differ"]


def test_a_kernel_that_a_prediction_leaves_out_is_not_lost() -> None:
    found = pipeline.attribute(FILES / "good-reference.json")
    replay = replay_or_reason(found)
    assert isinstance(replay, Replay)
    scenario = replay.scenario()
    scenario.without_events(0, np.arange(36) % 6 >= 2)
    tables = {0: schedule.tables(scenario.solve(), 0)}
    changed = pipeline.attribute(
        found.recording.with_tables({(0, n): t for n, t in tables[0].items()})
    )
    assert len(lengths(changed)) == 6
    assert not said(changed)
    assert UNKNOWN not in times(changed)
    assert computing(changed) == 6 * 200 * US
