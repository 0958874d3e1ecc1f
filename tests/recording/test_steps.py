"""Where steps begin and end, and which of them are traced."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pyarrow
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import chopper
from chopper import pipeline
from chopper.errors import UsageError
from chopper.recording import claim
from chopper.recording.logs import StepLog
from chopper.recording.options import (
    DEFAULT_WINDOWS,
    Window,
    parse_windows,
)
from chopper.recording.steps import OptimizerCycle
from chopper.recording.windows import LongSteps
from chopper.storage import clock
from chopper.storage.run import Run
from tests import command
from tests.recording.make import (
    DESCENT,
    TRACE_ONLY,
    Task,
    findings_of,
    names_of,
    steps_of,
    traced_of,
)


def ends(cycle, *optimizers):
    """Feed optimizers at times 1, 2, 3 ... and return the ends of steps."""
    return [end for at, which in enumerate(optimizers, 1) for end in cycle.stepped(which, at)]


@pytest.mark.parametrize(
    ("optimizers", "found"),
    [
        ([7], []),  # certain only when the optimizer comes round again
        ([7, 7, 7], [1, 2, 3]),
        ([1, 2, 1, 2, 1, 2], [2, 4, 6]),
        ([1, 2, 1, 2, 1], [2, 4]),
        ([9, *[1, 2] * 20], [1, *range(3, 43, 2)]),  # what stepped once at first begins no steps
    ],
)
def test_the_last_of_the_optimizers_of_a_step_ends_it(optimizers, found):
    assert ends(OptimizerCycle(), *optimizers) == found


def test_optimizers_may_change_for_good():
    cycle = OptimizerCycle()
    assert ends(cycle, 1, 2, 1, 2) == [2, 4]
    assert ends(cycle, *[1] * 250)[-1] == 250  # 2 never comes again
    assert len(ends(cycle, *[3, 4] * 20)) == 20  # nor does 1: its step, and those of 3 and 4


C, A, T = "critic", "actor", "temperature"
DELAYED = {
    "one": [[A]],
    "both each step": [[C, A]],
    "TD3": [[C], [C, A]],
    "SAC": [[C], [C, A, T, A, T]],
    "SAC, three": [[C], [C], [C, A, T, A, T, A, T]],
    "n_critic": [[C]] * 4 + [[C, A]],
    "actor first": [[A, C, C]],
    "lazily": [[A, C, T], [A, C], [A, C], [A, C]],
    "per parameter": [list(range(40))],
}


def feed(cycle, units):
    """Step through ``units``; return the ends found with the time at which each was known."""
    at = itertools.count(1)
    found, truth = [], []
    for unit in units:
        for which in unit:
            now = next(at)
            found += [(end, now) for end in cycle.stepped(which, now)]
        truth.append(now)
    return found, truth


@pytest.mark.parametrize("schedule", DELAYED.values(), ids=DELAYED)
@pytest.mark.parametrize("warm_up", [0, 1, 7, 100], ids="{} before".format)
def test_optimizers_that_step_in_some_steps_only(schedule, warm_up):
    """A step for each round of the first optimizer; exact, and known at once, from the third on."""
    units = [schedule[0][:1]] * warm_up + schedule * 12
    found, truth = feed(OptimizerCycle(), units)
    assert len(found) == len(truth)
    assert [end for end, _ in found] == sorted(end for end, _ in found)
    learned = warm_up + 4 * len(schedule)
    assert [end for end, _ in found[learned:]] == truth[learned:]
    assert all(known == end for end, known in found[learned:])


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)), max_size=4)
)
def test_any_schedule_of_followers_is_learned(followers):
    """Each follower steps every n-th step, from an offset on, some times in a row."""
    units = [
        [C]
        + [
            name
            for name, (every, offset, times) in enumerate(followers)
            for _ in range(times * (number % every == offset % every))
        ]
        for number in range(120)
    ]
    cycle = OptimizerCycle()
    found, truth = feed(cycle, units)
    if cycle.tentative_ns is not None:
        found.append((cycle.tentative_ns, cycle.tentative_ns))
    assert len(found) == len(truth)
    assert [end for end, _ in found[48:]] == truth[48:]


@pytest.mark.parametrize("spec", ["3:8", (3, 8), range(3, 8)])
def test_steps_to_trace(spec):
    assert parse_windows(spec) == (Window(3, 8, settle=1),)


@pytest.mark.parametrize("spec", ["", "3", "a:b", "5:5", "8:3", (-1, 3), (1, 2, 3), 4])
def test_steps_to_trace_wrong(spec):
    with pytest.raises(UsageError, match="steps to trace"):
        chopper.profile(steps=spec)


def test_an_empty_output_is_refused():
    with pytest.raises(UsageError, match="an empty name"):
        chopper.profile("")


def test_a_name_leads_to_no_other_directory():
    for name, ends in (("../../x", "-x"), ("a b/c", "-a-b-c"), ("..", "")):
        path = claim.choose_output(None, name)
        assert path.parent == Path("runs")
        assert path.name.partition("-")[2].lstrip("0123456789") == ends


def test_steps_are_found_through_the_optimizer(task):
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(9):
            task.step()
    rows = steps_of("run")
    assert [row["number"] for row in rows] == list(range(9))
    assert {row["source"] for row in rows} == {"optimizer"}
    for before, after in itertools.pairwise(rows):
        if after["number"] in (DEFAULT_WINDOWS[0].stop, DEFAULT_WINDOWS[0].begin):
            assert after["start_ns"] >= before["end_ns"]  # writing the trace is in no step
        else:
            assert after["start_ns"] == before["end_ns"]
    assert traced_of("run") == [2, 3, 4, 5, 6]
    spans = {n for n in names_of("run") if n.startswith("ProfilerStep#")}
    assert {f"ProfilerStep#{n}" for n in range(2, 7)} <= spans
    assert pipeline.read("run/rank-00000/trace.json.gz").part(0).hostname == socket.gethostname()


def test_marks_are_believed_over_optimizers(task):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for _ in range(4):
            for _ in range(3):  # three optimizer steps make one step of the program
                task.step()
            prof.step()
    rows = steps_of("run")
    assert [(row["number"], row["source"]) for row in rows] == [(n, "mark") for n in range(4)]
    assert rows[0]["end_ns"] == rows[1]["start_ns"]


def scaled_step(task, scaler, optimizer, *, overflows=False):
    loss = task.model(torch.ones(2, 8)).sum()
    scaler.scale(loss * float("inf") if overflows else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_tokens_of_steps_are_kept_where_the_program_says_them(task):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for i in range(4):
            task.step()
            prof.step(tokens=None if i == 1 else 100 + i)
    work = Run.open(Path("run")).table(0, "step_work").to_pylist()
    assert [(row["step"], row["tokens_count"]) for row in work] == [(0, 100), (2, 102), (3, 103)]
    of = {row["number"]: row for row in steps_of("run")}
    assert all(
        row["span_ns"] == of[row["step"]]["end_ns"] - of[row["step"]]["start_ns"] for row in work
    )


def test_a_delayed_actor_is_part_of_its_critics_step():
    """TD3: the critic steps each time, the actor every other time, after a warm-up."""
    critic, actor = Task(), Task()
    ends_ns = []
    with chopper.profile("run", collect=TRACE_ONLY, steps=(20, 24)):
        for number in range(32):
            critic.step()
            if number > 7 and number % 2:
                actor.step()
            ends_ns.append(time.time_ns())
    rows = steps_of("run")
    assert [row["number"] for row in rows] == list(range(32))
    # Learned: the step ends before the program's own loop came round, and after its last step.
    for row, before_ns, after_ns in zip(rows[13:], ends_ns[12:], ends_ns[13:], strict=False):
        assert before_ns < row["end_ns"] < after_ns
    assert traced_of("run") == [20, 21, 22, 23]


def test_a_step_that_a_gradient_scaler_skips_is_a_step(task):
    from torch.amp.grad_scaler import GradScaler

    plain = GradScaler.step
    scaler = GradScaler("cpu")
    before = task.model[0].weight.detach().clone()
    with chopper.profile("run", collect=(), trace=False):
        for number in range(6):
            scaled_step(task, scaler, task.optimizer, overflows=number in (0, 1, 4))
            if number == 1:
                assert torch.equal(task.model[0].weight, before)  # it does skip
    assert [row["number"] for row in steps_of("run")] == list(range(6))
    assert GradScaler.step is plain


def test_a_scaler_that_fails_fails_as_without_a_recording(task):
    from torch.amp.grad_scaler import GradScaler

    scaler = GradScaler("cpu")
    with chopper.profile("run", collect=(), trace=False):
        scaled_step(task, scaler, task.optimizer)
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
        scaled_step(task, scaler, task.optimizer)
    assert len(steps_of("run")) == 2


LATE = """
import sys, chopper
with chopper.profile("run", collect=(), trace=False):
    assert "torch" not in sys.modules
    {body}
assert not [f for f in sys.meta_path if "chopper" in type(f).__module__]
"""
TRAINS = f"""
{textwrap.indent(DESCENT, "    ")}
    model = torch.nn.Linear(4, 4)
    optimizer = Descent(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "count", "why"),
    [(TRAINS, 4, None), ("pass", 0, "torch was never imported")],
    ids=["trains", "does not"],
)
def test_optimizers_are_seen_when_torch_comes_later(tmp_path, body, count, why):
    (tmp_path / "script.py").write_text(LATE.format(body=body))
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=600)
    assert len(steps_of(tmp_path / "run")) == count
    found = Run.open(tmp_path / "run").part(0).findings
    assert [f.code for f in found] == (["run.no_steps"] if why else [])
    assert why is None or why in found[0].message


@pytest.mark.parametrize(
    ("count", "traced"),
    [(1, [0]), (2, [0, 1]), (3, [2]), (6, [2, 3, 4, 5]), (20, [2, 3, 4, 5, 6])],
)
@pytest.mark.parametrize("marks", [False, True])
def test_a_run_of_any_length_has_a_trace(task, count, traced, marks):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for _ in range(count):
            task.step()
            if marks:
                prof.step()
    assert traced_of("run") == traced
    assert len(steps_of("run")) == count
    assert "aten::addmm" in names_of("run")


@pytest.fixture
def told_clock(monkeypatch):
    """A clock that is told how long each step took: set ``ahead_ns``."""
    told = SimpleNamespace(ahead_ns=0)
    now_ns = clock.now_ns
    monkeypatch.setattr(clock, "now_ns", lambda: now_ns() + told.ahead_ns)
    return told


@pytest.mark.parametrize(
    ("count", "slower", "traced"),
    [
        (52, 2, [2, 3, 4, 5, 6]),  # too short for the later window
        (56, 1, [2, 3, 4, 5, 6]),  # which would show nothing else
        (56, 2, [50, 51, 52, 53, 54]),
    ],
)
def test_a_later_window_replaces_the_first_when_it_is_as_good(
    task, told_clock, count, slower, traced
):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for number in range(count):
            task.step()
            told_clock.ahead_ns += (slower if number > 30 else 1) * 10**10
            prof.step()
    assert traced_of("run") == traced
    assert [row["number"] for row in steps_of("run")] == list(range(count))
    assert f"ProfilerStep#{traced[0]}" in names_of("run")
    assert Run.open(Path("run")).part(0).traced_steps == (traced[0], traced[-1] + 1)
    assert findings_of() == (["run.window_kept"] if slower == 1 else [])


def profiled_of(path):
    return [row["number"] for row in steps_of(path) if row["profiled"]]


def test_steps_say_whether_a_trace_was_being_taken(task, told_clock):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for number in range(56):
            task.step()
            told_clock.ahead_ns += (2 if number > 30 else 1) * 10**10
            prof.step()
    assert profiled_of("run") == [0, 1, 2, 3, 4, 5, 6, 49, 50, 51, 52, 53, 54]


def test_a_step_in_which_the_trace_gave_way_was_profiled(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(3, 6)):
        for number in range(8):
            if number == 4:
                with torch.profiler.profile():
                    task.model(torch.ones(2, 8))
            task.step()
    assert profiled_of("run") == [2, 3, 4]


def test_steps_found_before_the_programs_own_were_parts_of_its_first(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, 1)) as prof:
        for _ in range(3):
            task.step()
            task.step()
            prof.step()
    assert profiled_of("run") == [0]


@pytest.mark.parametrize(
    "lengths",
    [
        [3.1 if n % 90 == 0 else 1 for n in range(600)],  # too rare to matter
        [2.5 if n % 9 == 0 else 1 for n in range(90)],  # not much longer
        [90 if n == 40 else 1 for n in range(90)],  # alone
        [0.3 if n % 9 == 0 else 0.01 for n in range(90)],  # short, as by a busy machine
        [{30: 20, 60: 80}.get(n, 1) for n in range(90)],  # not alike
    ],
)
def test_other_long_steps_are_not(lengths):
    steps = LongSteps()
    assert not [n for n, length in enumerate(lengths) if steps.ended(n, int(length * 10**9))]


@pytest.mark.parametrize(
    ("period", "world_size", "rounds", "traced"),
    [
        (16, "1", 126, range(47, 63)),
        (40, "1", 126, range(119, 124)),
        (40, "1", 100, range(2, 7)),  # it ends before the next of them
        (16, "2", 126, range(50, 55)),
    ],
)
def test_the_later_window_holds_the_next_of_the_long_steps(
    task, monkeypatch, told_clock, period, world_size, rounds, traced
):
    """PPO's rollouts. Ranks trace the same steps, so they keep theirs."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with chopper.profile("run", collect=TRACE_ONLY, trace_limit=100) as prof:
        for number in range(rounds):
            task.step()
            told_clock.ahead_ns += (100 if number and number % period == 0 else 10) * 10**9
            prof.step()
    assert traced_of("run") == list(traced)
    kept = ["run.window_kept"] if period == 40 else []
    follows = ["run.window_follows"] if world_size == "1" and rounds == 126 else []
    assert findings_of() == [*kept, *follows]


def test_no_second_trace_while_a_span_of_the_first_is_open(task):
    with chopper.profile("run", collect=TRACE_ONLY), torch.profiler.record_function("epoch"):
        for _ in range(56):
            task.step()
    assert traced_of("run") == [2, 3, 4, 5, 6]
    assert [f.code for f in Run.open(Path("run")).part(0).findings] == ["run.window_skipped"]


def test_steps_stay_on_disk_until_those_that_replace_them_are(tmp_path):
    def on_disk():
        with pyarrow.ipc.open_stream(tmp_path / "step.arrow") as stream:
            return stream.read_all()["end_ns"].to_pylist()

    log = StepLog(tmp_path)
    log.source = "optimizer"
    log.begin()
    for end_ns in (10**18, 10**18 + 1):
        log.end(end_ns, traced=False, profiled=False)
    log.flush()
    log.restart()
    assert on_disk() == [10**18, 10**18 + 1]  # what a killed process leaves
    log.source = "mark"
    for end_ns in (10**18 + 2, 10**18 + 3):
        log.end(end_ns, traced=False, profiled=False)
        log.flush()
        assert on_disk()[-1] == end_ns
    log.close()
    assert on_disk() == [10**18 + 2, 10**18 + 3]
    assert [p.name for p in tmp_path.iterdir()] == ["step.arrow"]


def test_marks_that_come_late_begin_the_windows_again(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(2, 4)) as prof:
        for _ in range(6):
            for _ in range(20):
                task.step()
            prof.step()
    assert traced_of("run") == [2, 3]
    assert names_of("run").count("aten::addmm") >= 2 * 2 * 20
    assert findings_of() == ["run.steps_recounted"]


def test_a_recording_without_steps_says_so():
    with chopper.profile("run", collect=(), trace=False):
        pass
    assert findings_of() == ["run.no_steps"]


MANUAL = """
import sys, torch, chopper
layer = torch.nn.Linear(8, 8)
weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]


def by_hand(count):
    for _ in range(count):
        layer(torch.ones(2, 8)).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def functional(count):
    for _ in range(count):
        x = torch.ones(2, 8)
        for weight in weights:
            x = torch.tanh(x @ weight)
        penalty = torch.autograd.grad(x.sum(), weights, create_graph=True)[0].square().sum()
        gradients = torch.autograd.grad(x.sum() + penalty, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight -= 0.1 * gradient


def accumulated(count, micro_batches):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(count):
        for _ in range(micro_batches):
            layer(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def of_functions(count):
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    def loss(weights, x):
        inner = torch.func.grad(lambda x: torch.func.functional_call(layer, weights, (x,)).sum())
        return inner(x).pow(2).sum()
    for _ in range(count):
        gradients = torch.func.grad(loss)(weights, torch.ones(2, 8))
        weights = {name: p - 0.1 * gradients[name] for name, p in weights.items()}


def with_penalties(count):
    for _ in range(count):
        x = torch.ones(2, 8, requires_grad=True)
        y = layer(x).sum()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (y + gradient.pow(2).sum()).backward()


def then_an_optimizer():
    by_hand(10)
    accumulated(5, 3)


def never_stepped():
    torch.optim.SGD(layer.parameters())
    by_hand(9)


"""
RECORDED = """
for name, train, *arguments in (
    ("hand", by_hand, 12),
    ("functional", functional, 12),
    ("torch.func", of_functions, 12),
    ("penalties", with_penalties, 12),
    ("three", by_hand, 3),
    ("later", then_an_optimizer),
    ("accumulated", accumulated, 4, 40),
    ("none", never_stepped),
):
    with chopper.profile(name, collect=("torch_trace",)):
        train(*arguments)
"""


def test_backward_passes_are_steps_where_no_optimizer_is(tmp_path):
    """Which there is, from a later one's making on: so the order of the recordings matters."""
    (tmp_path / "script.py").write_text(MANUAL + RECORDED)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=600)
    for name, sources, traced in (
        ("hand", ["backward"] * 12, [2, 3, 4, 5, 6]),
        ("functional", ["backward"] * 12, [2, 3, 4, 5, 6]),
        ("torch.func", ["backward"] * 12, [2, 3, 4, 5, 6]),
        ("penalties", ["backward"] * 12, [2, 3, 4, 5, 6]),
        ("three", ["backward"] * 3, [2]),
        # The three passes before an optimizer's first step cannot be told from those by hand.
        ("later", ["backward"] * 13 + ["optimizer"] * 5, [2, 3, 4, 5, 6]),
        ("accumulated", ["optimizer"] * 4, [2, 3]),
        ("none", [], []),
    ):
        rows = steps_of(tmp_path / name)
        assert [row["source"] for row in rows] == sources, name
        assert [row["number"] for row in rows] == list(range(len(sources))), name
        assert traced_of(tmp_path / name) == traced, name


WRAPPED = """
engine, passes = torch.autograd._engine_run_backward, []


def counted(*args, **kwargs):
    passes.append(1)
    return engine(*args, **kwargs)


torch.autograd._engine_run_backward = counted
by_hand(9)
assert len(passes) == 9, passes
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("functional(9)", id="tensors"),
        pytest.param("of_functions(9)", id="torch.func", marks=pytest.mark.long),
        pytest.param(WRAPPED, id="wrapped", marks=pytest.mark.long),
    ],
)
def test_a_program_without_an_optimizer_is_recorded(tmp_path, program):
    """Also one that puts a function of its own around torch's backward pass."""
    (tmp_path / "script.py").write_text(MANUAL + program)
    options = ["-o", "run", "--collect", "torch_trace"]
    assert command.run("record", *options, "--", sys.executable, "script.py").code == 0
    assert len(steps_of(tmp_path / "run")) == 9
    assert traced_of(tmp_path / "run") == [2, 3, 4, 5, 6]


def test_folds_whose_optimizers_share_two_addresses_lose_no_step():
    cycle = OptimizerCycle()
    ends: list[int | None] = []
    for fold in range(4):
        for step in range(10):
            ends += cycle.stepped(fold % 2, 10 * fold + step)
        if fold < 3:
            cycle.dropped(fold % 2)
    ends.append(cycle.tentative_ns)
    assert list(dict.fromkeys(e for e in ends if e is not None)) == list(range(40))


def test_models_that_are_trained_in_turn_have_steps_of_their_own_kind():
    """A large one, then four folds of a small one, of which the later window is."""

    def train(width, count):
        model = nn.Linear(8, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(count):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    with chopper.profile("run", collect=TRACE_ONLY):
        train(4096, 20)
        for _ in range(4):
            train(4, 10)
    sources = [row["source"] for row in steps_of("run")]
    assert sources == ["optimizer"] * 20 + ["optimizer 2"] * 40
    step = pipeline.attribute("run").step_time()
    steps = {kind.name: kind.steps for kind in step.kinds}
    assert step.kind == "training (optimizer 2)"
    second = sorted(n for kind, numbers in steps.items() if "2" in kind for n in numbers)
    assert second == list(range(20, 60))  # those that took long among them
    assert traced_of("run") == list(range(50, 55))
