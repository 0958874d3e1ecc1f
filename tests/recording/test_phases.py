"""Phases that the program names: rows of every one of them, spans while a trace is taken."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import save as save_imported_before

import chopper
from chopper.recording import session as _session
from chopper.recording.trainers import Wrapper
from chopper.storage.run import Run
from tests.recording.make import TRACE_ONLY, findings_of, steps_of, trace_of, traced_of
from tests.waiting import PATIENCE_S


def current_phase():
    """Name of the innermost phase of the running code."""
    session = _session.active()
    assert session is not None
    return session._steps.phases.current()


def phases_of(path="run"):
    return Run.open(Path(path)).table(0, "program_phase").to_pylist()


def spans_of(path="run"):
    """Spans of phases in a run's trace, but for backward passes, which every step has."""
    events = [e for e in trace_of(path)["traceEvents"] if e.get("cat") == "user_annotation"]
    spans = [e for e in events if e["name"].startswith("chopper::phase::")]
    return [e for e in spans if e["name"] != "chopper::phase::backward"]


def test_a_phase_is_a_row_always_and_a_span_while_traced(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(1, 2)) as prof:
        for _ in range(4):
            task.step()
            with prof.phase("evaluation"):
                task.model(torch.ones(2, 8))
            prof.step()
    assert traced_of("run") == [1]
    assert [row["name"] for row in phases_of()] == ["evaluation"] * 4
    events = trace_of("run")["traceEvents"]
    (step,) = [e for e in events if e["name"] == "ProfilerStep#1" and e["ph"] == "X"]
    inside = [s for s in spans_of() if step["ts"] <= s["ts"] <= step["ts"] + step["dur"]]
    assert [s["name"] for s in inside] == ["chopper::phase::evaluation"]


def test_the_innermost_phase_has_the_time(task):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        with prof.phase("rollout"):
            with prof.phase("rollout"):  # what calls itself is one phase
                task.model(torch.ones(2, 8))
            with prof.phase("generation"):
                task.model(torch.ones(2, 8))
            task.model(torch.ones(2, 8))
        task.step()
        prof.step()
    generation, rollout = phases_of()
    assert (generation["name"], rollout["name"]) == ("generation", "rollout")
    assert rollout["start_ns"] <= generation["start_ns"]
    assert generation["end_ns"] <= rollout["end_ns"]


def test_a_phase_around_steps_is_shown_in_each_of_them(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(1, 3)) as prof, prof.phase("epoch"):
        for _ in range(4):
            task.step()
            prof.step()
    assert [row["name"] for row in phases_of()] == ["epoch"]
    steps = {
        e["name"]: e
        for e in trace_of("run")["traceEvents"]
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")
    }
    spans = spans_of()
    assert len(spans) == len(steps)
    for span, step in zip(spans, steps.values(), strict=True):
        assert step["ts"] <= span["ts"]
        assert span["ts"] + span["dur"] <= step["ts"] + step["dur"]


def test_exceptions_and_threads_end_their_own_phases(task):
    inside, done = threading.Event(), threading.Event()

    def save():
        with prof.phase("checkpoint"):
            inside.set()
            done.wait(PATIENCE_S)

    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, 2)) as prof:
        thread = threading.Thread(target=save)
        thread.start()
        inside.wait(PATIENCE_S)
        with pytest.raises(KeyError), prof.phase("evaluation"):
            raise KeyError
        with prof.phase("open at the end"):
            task.step()
            prof.step()
            done.set()
            thread.join()
            open_phase = prof.phase("never ended")
            open_phase.__enter__()
    open_phase.__exit__(None, None, None)
    rows = phases_of()
    assert {row["name"] for row in rows} == {
        "evaluation",
        "checkpoint",
        "open at the end",
        "never ended",
    }
    assert len({row["tid"] for row in rows}) == 2
    # Nothing of the other thread is in the trace of this one.
    assert "chopper::phase::checkpoint" not in [s["name"] for s in spans_of()]
    assert findings_of() == []


def test_a_phase_outside_of_a_recording_or_after_its_failure_does_nothing(task, capsys):
    prof = chopper.profile("run", collect=TRACE_ONLY)
    with prof.phase("evaluation"):
        pass
    with prof:
        session = _session.active()
        assert session is not None
        with prof.phase("evaluation"):
            session._give_up(OSError("a disk that vanished"))
            task.step()
        with prof.phase("evaluation"):
            task.step()
    assert capsys.readouterr().err.count("recording stopped") == 1
    assert [row["name"] for row in phases_of()] == ["evaluation"]


def test_a_phase_inside_a_compiled_function_does_not_break_its_graph(task):
    prof = chopper.profile("run", collect=TRACE_ONLY, steps=(0, 2))

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        with prof.phase("evaluation"):
            return task.model(x).sum()

    with prof:
        for _ in range(2):
            compiled(torch.ones(2, 8)).backward()
            task.optimizer.step()
    assert phases_of() == []


_TRAINER = '''
class Trainer:
    def evaluate(self, dataset=None, *, prefix="eval"):
        """Return metrics."""
        return self.evaluation_loop(dataset), prefix

    def evaluation_loop(self, dataset):
        return len(dataset)

    def _save_checkpoint(self, model):
        raise OSError("disk full")
'''


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    """A module of the shape of transformers', in its place."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "library" / "transformers").mkdir(parents=True)
    (tmp_path / "library" / "transformers" / "__init__.py").touch()
    (tmp_path / "library" / "transformers" / "trainer.py").write_text(_TRAINER)
    monkeypatch.syspath_prepend(tmp_path / "library")
    yield
    for name in ("transformers", "transformers.trainer"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("imported", ["before", "inside"])
def test_what_trainers_do_has_the_phase_that_they_name(task, transformers, imported):
    if imported == "before":
        importlib.import_module("transformers.trainer")
    with chopper.profile("run", collect=TRACE_ONLY):
        trainer_class = importlib.import_module("transformers.trainer").Trainer
        trainer = trainer_class()
        assert trainer.evaluate([1, 2], prefix="test") == (2, "test")
        with pytest.raises(OSError, match="disk full"):
            trainer._save_checkpoint(task.model)
        assert str(inspect.signature(trainer_class.evaluate)) == (
            "(self, dataset=None, *, prefix='eval')"
        )
        assert trainer_class.evaluate.__qualname__ == "Trainer.evaluate"
        assert trainer_class.evaluate.__doc__ == "Return metrics."
        task.step()
    # The loop is part of its evaluation.
    assert [row["name"] for row in phases_of()] == ["evaluation", "checkpoint"]
    assert trainer.evaluate([1]) == (1, "eval")


def test_saving_is_a_checkpoint_and_torch_is_as_it_was(task, tmp_path):
    own, code = torch.save, torch.save.__code__
    signature, source = inspect.signature(torch.save), inspect.getsource(torch.save)
    with chopper.profile("run", collect=TRACE_ONLY, trace=False):
        task.step()
        save_imported_before(task.model.state_dict(), tmp_path / "model.pt")
        assert torch.save is torch.serialization.save is own
        for library in (pickle, importlib.import_module("cloudpickle"), ForkingPickler):
            assert pickle.loads(library.dumps(save_imported_before)) is own
        assert (inspect.signature(torch.save), inspect.getsource(torch.save)) == (signature, source)
    assert torch.save.__code__ is code
    assert [row["name"] for row in phases_of()] == ["checkpoint"]
    assert torch.load(tmp_path / "model.pt").keys() == task.model.state_dict().keys()


_EVALUATION = """
def evaluate_policy(model, episodes=10, *, seed=0):
    if seed < 0:
        raise ValueError("seed")
    return model, episodes, seed
"""


def test_a_function_that_programs_import_by_name_is_not_touched(task, tmp_path, monkeypatch):
    folder = tmp_path / "library" / "stable_baselines3" / "common"
    folder.mkdir(parents=True)
    (folder / "evaluation.py").write_text(_EVALUATION)
    of_library = "from stable_baselines3.common.evaluation import evaluate_policy\n"
    (folder / "callbacks.py").write_text(of_library)
    monkeypatch.syspath_prepend(tmp_path / "library")
    package = "stable_baselines3.common"
    own = importlib.import_module(f"{package}.evaluation").evaluate_policy
    try:
        with chopper.profile("run", collect=TRACE_ONLY, trace=False):
            callbacks = importlib.import_module(f"{package}.callbacks")
            for function in (own, callbacks.evaluate_policy):
                assert function("model", seed=1) == ("model", 10, 1)
                with pytest.raises(ValueError, match="seed"):
                    function("model", seed=-1)
            assert pickle.loads(pickle.dumps(own)) is own
            task.step()
        assert callbacks.evaluate_policy is own
    finally:
        for name in (f"{package}.evaluation", f"{package}.callbacks", package, "stable_baselines3"):
            sys.modules.pop(name, None)
    sees_all = sys.version_info >= (3, 12)
    assert [row["name"] for row in phases_of()] == ["evaluation"] * (4 if sees_all else 2)
    codes = [f.code for f in Run.open(Path("run")).part(0).findings]
    assert ("run.phases_unseen" in codes) is not sees_all


def test_a_method_that_was_wrapped_once_more_stays_so():
    class Trainer:
        def run(self, value=3):
            return [value]

        instructions: ClassVar[dict[str, Any]] = {"run": run}

    calls = []

    def counted(original, *args, **kwargs):
        calls.append(args[1:])
        return original(*args, **kwargs)

    own = Trainer.run
    wrapper = Wrapper(Trainer, "run", counted)
    assert Trainer().run() == [3]
    assert Trainer.instructions["run"](Trainer(), 4) == [4]
    assert calls == [(), (4,)]
    outer = Wrapper(Trainer, "run", counted)
    wrapper.end()
    assert Trainer().run(5) == [5]
    assert calls == [(), (4,), (5,)]
    outer.end()
    Trainer().run()
    assert len(calls) == 3
    again = Wrapper(Trainer, "run", counted)
    again.end()
    again.end()
    assert Trainer().run() == Trainer.instructions["run"](Trainer()) == own(Trainer()) == [3]


def test_a_library_whose_import_is_under_way_is_seen(task, transformers, tmp_path):
    trainer = tmp_path / "library" / "transformers" / "trainer.py"
    begin = "import sys; sys.modules['conftest_of_a_test'].begin()\n"
    trainer.write_text(begin + trainer.read_text())
    prof = chopper.profile("run", collect=TRACE_ONLY, trace=False)
    sys.modules["conftest_of_a_test"] = module = types.ModuleType("conftest_of_a_test")
    vars(module)["begin"] = prof.__enter__
    try:
        module = importlib.import_module("transformers.trainer")
        assert type(module.__spec__) is ModuleSpec
        module.Trainer().evaluate([1])
        task.step()
    finally:
        prof.__exit__(None, None, None)
        del sys.modules["conftest_of_a_test"]
    assert [row["name"] for row in phases_of()] == ["evaluation"]


def test_an_evaluation_needs_no_name(task):
    """Steps without a trace have a kind as well."""
    teacher = torch.nn.Linear(8, 4)
    code = torch.nn.Module.eval.__code__, torch.nn.Module.train.__code__
    with chopper.profile("run", collect=TRACE_ONLY, trace=False) as prof:
        task.model.eval()  # as models are loaded
        task.model.train()
        for number in range(4):
            teacher.eval()  # which never trains
            task.step()
            if number == 1:
                task.model.eval()
                with torch.no_grad():
                    task.model(torch.ones(2, 8))
                task.model.train()
            if number == 2:  # trained in eval mode: batch norm is frozen
                task.model.eval()
                task.step()
                task.model.train()
            if number == 3:
                with prof.phase("rollout"):  # named otherwise
                    task.model.eval()
                    task.model.train()
            prof.step()
    assert code == (torch.nn.Module.eval.__code__, torch.nn.Module.train.__code__)
    evaluation, rollout = phases_of()
    assert (evaluation["name"], rollout["name"]) == ("evaluation", "rollout")
    step = steps_of("run")[1]
    assert step["start_ns"] <= evaluation["start_ns"] < evaluation["end_ns"] <= step["end_ns"]


def test_a_phase_that_is_entered_again_within_itself_ends(task):
    with chopper.profile("run", collect=TRACE_ONLY, trace=False) as prof:
        evaluation = prof.phase("evaluation")
        with evaluation, evaluation:
            task.step()
        assert current_phase() is None
        left, entered = threading.Event(), threading.Event()

        def elsewhere():
            with evaluation:
                entered.set()
                left.wait()

        thread = threading.Thread(target=elsewhere)
        with evaluation:
            thread.start()
            entered.wait()
        assert current_phase() is None
        left.set()
        thread.join()
    rows = phases_of()
    assert [row["name"] for row in rows] == ["evaluation"] * 3
    assert len({row["tid"] for row in rows}) == 2


def test_coroutines_that_take_turns_keep_their_phases(task):
    """Those of one thread, with a trace: spans nest all the same."""
    turns: list[str | None] = []

    async def run(name, entered, others, *, last):
        with shared if name == "shared" else prof.phase(name):
            turns.append(current_phase())
            entered.set()
            await others.wait()
            turns.append(current_phase())
            if last:
                await asyncio.sleep(0)
            task.model(torch.ones(2, 8))
        turns.append(current_phase())

    async def both(first, second):
        one, two = asyncio.Event(), asyncio.Event()
        await asyncio.gather(run(first, one, two, last=False), run(second, two, one, last=True))

    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, 2)) as prof:
        shared = prof.phase("shared")
        asyncio.run(both("rollout", "evaluation"))
        assert turns == ["rollout", "evaluation", "evaluation", "rollout", None, None]
        asyncio.run(both("shared", "shared"))
        task.step()
        prof.step()
    rollout, evaluation, *shared_rows = sorted(phases_of(), key=lambda row: row["start_ns"])
    assert (rollout["name"], evaluation["name"]) == ("rollout", "evaluation")
    assert rollout["start_ns"] < evaluation["start_ns"] < rollout["end_ns"] < evaluation["end_ns"]
    assert [row["name"] for row in shared_rows] == ["shared"] * 2
    spans = sorted((s["ts"], s["ts"] + s["dur"], s["name"]) for s in spans_of())
    assert [name.rpartition(":")[2] for _, _, name in spans][:3] == [
        "rollout",
        "evaluation",
        "evaluation",
    ]
    for start, end, _ in spans:
        assert all(
            b <= start or a >= end or (a <= start and end <= b) or (start <= a and b <= end)
            for a, b, _ in spans
        )


def test_a_generator_that_is_suspended_in_a_phase_ends_no_other(task):
    def batches(name):
        with prof.phase(name):
            yield torch.ones(2, 8)
            yield torch.ones(2, 8)

    with chopper.profile("run", collect=TRACE_ONLY, trace=False) as prof:
        with prof.phase("evaluation"):
            inside = batches("begun inside")
            next(inside)
        assert current_phase() == "begun inside"
        inside.close()
        assert current_phase() is None
        outside = batches("begun outside")
        next(outside)
        with prof.phase("evaluation"):
            assert [*outside]
            assert current_phase() == "evaluation"
            task.step()
        assert current_phase() is None
    ended = [row["name"] for row in phases_of()]
    assert ended == ["evaluation", "begun inside", "begun outside", "evaluation"]


def test_a_thread_inherits_no_phase_of_one_that_died(task):
    names = []

    def enter():
        prof.phase("never ended").__enter__()

    def look():
        names.append(current_phase())

    with chopper.profile("run", collect=TRACE_ONLY, trace=False) as prof:
        for target in (enter, look):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        task.step()
    assert names == [None]
