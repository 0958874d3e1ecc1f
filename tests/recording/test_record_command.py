from __future__ import annotations

import contextlib
import datetime as dt
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import psutil
import pytest

from chopper import cli, pipeline
from chopper.collectors import registry
from chopper.recording.finish import finalize
from chopper.storage.parts import RunWriter
from chopper.storage.run import Run
from tests import command
from tests.attributing import verdict_of
from tests.recording.make import DESCENT
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ROOT / "examples" / "train_plain.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]

pytestmark = pytest.mark.slow

MODEL = f"""
import os, sys
{DESCENT}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = Descent(model.parameters(), lr=0.1)

def step(x=None):
    model(torch.ones(4, 8) if x is None else x).sum().backward()
    optimizer.step()
"""


RANK = """
import os, sys
from pathlib import Path
from chopper.storage.parts import RunWriter
rank = RunWriter(Path(os.environ["CHOPPER_OUTPUT"]), 0)
rank.manifest.status = "complete"
rank.manifest.steps_source, rank.manifest.end_ns = "mark", 1
rank.save()
"""
"""What a rank leaves that recorded, in a tenth of the time that torch takes to be imported."""


STEPS = """
import sys, chopper
with chopper.profile(trace=False, collect=[]) as prof:
    for _ in range(int(sys.argv[1])): prof.step()
"""
"""Records so many steps, without torch."""


class Recorder:
    """Runs `chopper record` in a directory, with children that can be told from all others."""

    def __init__(self, directory, capfd):
        self.directory, self.capfd = directory, capfd
        self.mark = f"chopper-test-{os.getpid()}-{directory.name}"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("CHOPPER_")}
        self.env |= {"CHOPPER_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1"}

    def script(self, body, name="script.py", *, begin=MODEL):
        path = self.directory / name
        path.write_text(begin + textwrap.dedent(body))
        return str(path)

    def argv(self, *command, options=("-o", "run")):
        return [sys.executable, "-m", "chopper", "record", *options, "--", *command]

    def popen(self, *command, options=("-o", "run"), **more):
        return subprocess.Popen(
            self.argv(*command, options=options),
            cwd=self.directory,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **more,
        )

    def __call__(self, *command, options=("-o", "run")):
        """Record from this process, which has imported what the command needs."""
        self.capfd.readouterr()
        argv = ["chopper", *self.argv(*command, options=options)[3:]]
        with (
            contextlib.chdir(self.directory),
            mock.patch.dict(os.environ, self.env, clear=True),
            mock.patch.object(sys, "argv", argv),
            pytest.raises(SystemExit) as ended,
        ):
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(argv, code, *self.capfd.readouterr())

    def write_earlier(self):
        """A run that was recorded before."""
        RunWriter(self.directory / "run", 0).save()
        finalize(self.directory / "run", workload="earlier")

    def run(self):
        return Run.open(self.directory / "run")

    def spans(self, rank):
        return pipeline.read(self.directory / "run").table(rank, "host_span")["name"].to_pylist()

    def processes(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("CHOPPER_TEST_MARK") == self.mark:
                    found.append((process, process.cmdline()))
            except psutil.Error:
                continue
        return found

    def left(self):
        """Processes that a recording left behind."""
        return [command for _, command in self.processes()]


@pytest.fixture
def record(tmp_path, capfd):
    recorder = Recorder(tmp_path, capfd)
    yield recorder
    assert recorder.left() == []


def lines_of_chopper(err):
    return [line for line in err.splitlines() if line.startswith("chopper: ")]


def test_torchrun_and_a_script_that_knows_nothing_of_chopper(record):
    done = record(*TORCHRUN, str(PLAIN), "--steps", "9")
    assert done.returncode == 0, done.stderr
    run = record.run()
    assert run.ranks == [0, 1]
    assert run.manifest.exit_code == 0
    assert run.manifest.command is not None
    assert str(PLAIN) in run.manifest.command
    assert run.manifest.findings == []
    for rank in run.ranks:
        part = run.part(rank)
        assert (part.status, part.world_size, part.backend) == ("complete", 2, "gloo")
        assert part.steps_source == "optimizer"
        steps = run.table(rank, "step").to_pylist()
        assert [row["number"] for row in steps] == list(range(9))
        assert [row["number"] for row in steps if row["traced"]] == [2, 3, 4, 5, 6]
        spans = set(record.spans(rank))
        assert "gloo:all_reduce" in spans
        assert "chopper::layer::0.0" in spans
        assert any(name.startswith("enumerate(DataLoader)#") for name in spans)
        layers = set(run.table(rank, "layer_sequence")["layer"].to_pylist())
        # DistributedDataParallel's prefix is not part of a name; the root goes by its class.
        assert {"Sequential", "0.0", "0.1", "5"} <= layers
    # What samples the host runs once on it; each rank says what it asked for itself.
    assert {r.name for r in run.part(0).collectors} == set(registry.defaults())
    assert {r.name for r in run.part(1).collectors} == {"torch_trace", "core_wait", "device_memory"}
    ours = lines_of_chopper(done.stderr)
    assert ours == [
        "chopper: recording to run",
        "chopper: recorded 2 ranks, 9 steps, steps 2 to 6 traced",
        "chopper: next: chopper analyze run",
    ]


def test_a_plain_script(record):
    script = record.script(
        """
        for _ in range(3): step()
        print("out", sys.argv[1:], {"torch._dynamo", "torch._inductor"} & {*sys.modules})
        """
    )
    done = record(sys.executable, script, "--steps", "8", "-o", "x")
    assert done.returncode == 0, done.stderr
    # What the program does not use of torch is not imported for it.
    assert done.stdout == "out ['--steps', '8', '-o', 'x'] set()\n"
    assert record.run().table(0, "step").num_rows == 3
    names = record.spans(0)
    # The recording began inside the first forward, which is named all the same.
    assert names.count("chopper::layer::Sequential") == 3
    assert names.count("chopper::layer::0") == 3


def test_options_reach_the_ranks_and_the_exit_code_comes_back(record):
    script = record.script("for _ in range(8): step()\nsys.exit(17)")
    done = record(
        sys.executable,
        script,
        options=("-o", "run", "--steps", "4:6", "--collect", "torch_trace"),
    )
    assert done.returncode == record.run().manifest.exit_code == 17
    assert record.run().part(0).status == "complete"
    steps = record.run().table(0, "step").to_pylist()
    assert [row["number"] for row in steps if row["traced"]] == [4, 5]
    assert [r.name for r in record.run().part(0).collectors] == ["torch_trace"]


def test_a_profile_in_the_program_is_the_same_recording(record):
    script = record.script(
        """
        import chopper
        with chopper.profile("somewhere else") as prof:
            for _ in range(4):
                step()
                prof.step()
        """
    )
    done = record(sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert not (record.directory / "somewhere else").exists()
    assert record.run().part(0).steps_source == "mark"


def test_an_exception_keeps_its_exit_code_and_what_was_recorded(record):
    script = record.script("for _ in range(4): step()\nraise ValueError('loss is nan')")
    done = record(sys.executable, script)
    assert done.returncode == 1
    assert "ValueError: loss is nan" in done.stderr
    part = record.run().part(0)
    assert (part.status, part.error) == ("failed", "ValueError: loss is nan")
    assert record.run().table(0, "step").num_rows == 4
    assert record.run().manifest.exit_code == 1
    assert any("its recording is kept" in line for line in lines_of_chopper(done.stderr))


def test_what_ended_a_child_of_multiprocessing_is_known(record):
    script = record.script(
        """
        import multiprocessing

        def work():
            for _ in range(4): step()
            raise ValueError("loss is nan")

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        sys.exit(child.exitcode)
        """
    )
    done = record(sys.executable, script)
    assert done.returncode == 1
    part = record.run().part(0)
    assert (part.status, part.error) == ("failed", "ValueError: loss is nan"), done.stderr


LOOP = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
n = 0
while True:
    step()
    dist.all_reduce(torch.ones(1))
    n += 1
    if n == 9:
        if rank == {dies}:
            os.kill(os.getpid(), 9)
        os.write(1, b"ready\\n")
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_ctrl_c_reaches_all_and_keeps_what_was_recorded(record, number):
    script = record.script(LOOP.format(dies=-1))
    # One window: until the signal comes they may get as far as a later one.
    with record.popen(*TORCHRUN, script, options=("-o", "run", "--steps", "2:7")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode not in (0, None)
    assert record.left() == []
    run = record.run()
    assert run.ranks == [0, 1]
    for rank in run.ranks:
        # Also where a peer that went first is what it failed of.
        assert run.part(rank).status == "interrupted", err
        steps = run.table(rank, "step").to_pylist()
        assert [row["number"] for row in steps if row["traced"]] == [2, 3, 4, 5, 6]
    assert any("next:" in line for line in lines_of_chopper(err))


def test_a_rank_that_is_killed_takes_nothing_with_it(record):
    script = record.script(LOOP.format(dies=1))
    done = record(*TORCHRUN, script)
    assert done.returncode == 1
    run = record.run()
    assert run.part(1).status == "running"
    assert run.part(0).status in ("interrupted", "failed")
    [died] = run.manifest.findings
    last = run.table(1, "step").to_pylist()[-1]
    ended = dt.datetime.fromtimestamp(last["end_ns"] // 10**9, dt.UTC)
    assert (died.code, died.rank) == ("run.rank_died", 1)
    assert f"process {run.part(1).pid} is gone: killed, or ended by os._exit; " in died.message
    assert f"step {last['number']}, which ended at {ended:%Y-%m-%d %H:%M:%S} UTC" in died.message
    assert "rank-00001 was last written to at " in died.message
    assert "exit code" not in died.message  # torchrun's own says nothing of the rank's
    for rank in run.ranks:
        steps = run.table(rank, "step").to_pylist()
        assert [row["number"] for row in steps if row["traced"]] == [2, 3, 4, 5, 6]
        assert run.part(rank).traces
        assert record.spans(rank)


def test_processes_that_outlive_the_command_are_ended(record):
    script = record.script(
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)", begin=RANK
    )
    assert record(sys.executable, script).returncode == 0
    assert record.left() == []


START_METHODS = (pytest.param("spawn", marks=pytest.mark.long), "fork")


@pytest.mark.parametrize("method", START_METHODS)
def test_ranks_of_multiprocessing(record, method):
    script = record.script(
        """
        import torch.distributed as dist, torch.multiprocessing as mp

        def main(rank):
            dist.init_process_group(
                "gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=rank, world_size=2
            )
            for _ in range(4): step()
            dist.barrier()
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.start_processes(main, nprocs=2, start_method=sys.argv[1])
        """
    )
    done = record(sys.executable, script, method)
    assert done.returncode == 0, done.stderr
    run = record.run()
    assert run.ranks == [0, 1]
    assert {run.part(rank).status for rank in run.ranks} == {"complete"}
    assert run.table(1, "step").num_rows == 4


@pytest.mark.parametrize("method", START_METHODS)
def test_data_loader_workers_do_not_record(record, method):
    script = record.script(
        """
        from torch.utils.data import DataLoader, Dataset

        class Augmented(Dataset):
            def __init__(self): self.transform = torch.nn.Linear(8, 8)
            def __len__(self): return 6
            def __getitem__(self, index): return self.transform(torch.ones(8)).detach()

        if __name__ == "__main__":
            loader = DataLoader(
                Augmented(), 2, num_workers=1, multiprocessing_context=sys.argv[1]
            )
            for x in loader: step(x)
        """
    )
    done = record(sys.executable, script, method)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (record.directory / "run").iterdir()) == [
        "manifest.json",
        "rank-00000",
    ]
    assert record.run().table(0, "step").num_rows == 3
    assert len(lines_of_chopper(done.stderr)) == 3


def test_processes_without_rank_have_runs_of_their_own(record):
    script = record.script("", begin=STEPS)
    a, b, c = (f"{sys.executable} {script} {count}" for count in (2, 3, 4))
    done = record("sh", "-c", f"{a}; {b} & {c} & wait")
    assert done.returncode == 0, done.stderr
    run = record.run()
    assert run.table(0, "step").num_rows == run.part(0).steps_count == 2
    inner = [Run.open(record.directory / "run" / f"process-{number}") for number in (2, 3)]
    assert sorted(one.table(0, "step").num_rows for one in inner) == [3, 4]
    for one in inner:
        assert one.ranks == [0]
        assert one.part(0).status == "complete"
        assert not one.manifest.findings
    (finding,) = (f for f in run.manifest.findings if f.code == "run.processes")
    for number, one in enumerate(inner, 2):
        part = one.part(0)
        assert part.command is not None
        words = f"{part.steps_count} steps, {shlex.join(part.command[:4])}"
        shown = f"run/process-{number} ({words})"
        assert shown in finding.message
        assert shown in done.stderr
    assert "3 processes recorded separately" in done.stderr
    assert sorted(p.name for p in (record.directory / "run").iterdir()) == [
        "manifest.json", "process-2", "process-3", "rank-00000",
    ]  # fmt: skip


def test_set_up_is_not_part_of_the_first_step(record):
    script = record.script(
        """
        import time

        class Detector(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)
                self.stride = 64 / self(torch.zeros(1, 8)).shape[-1]  # in training mode

            def forward(self, x): return self.layer(x)

        model = Detector()
        model(torch.ones(1, 8))  # set-up: what comes before the optimizer is not a step
        optimizer = Descent(model.parameters(), lr=0.1)
        print(time.time_ns())
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        """,
        begin=DESCENT,
    )
    done = record(sys.executable, script)
    assert done.returncode == 0, done.stderr
    run = record.run()
    steps = run.table(0, "step").to_pylist()
    assert len(steps) == 3
    assert int(done.stdout) < run.part(0).start_ns < steps[0]["start_ns"]
    names = record.spans(0)
    assert names.count("chopper::layer::Detector") == 3


def test_two_commands_do_not_record_into_one_directory(record):
    with record.popen("sh", "-c", "echo ready; read line", stdin=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        for options in (("-o", "run"), ("-o", "run", "--force")):
            done = record("echo", "started", options=options)
            assert done.returncode == 1
            assert done.stdout == ""
            (line,) = lines_of_chopper(done.stderr)
            assert f"run: process {first.pid} is writing into it" in line
        first.communicate("go on\n", timeout=PATIENCE_S)


def test_another_sitecustomize_runs_too(record):
    other = record.directory / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins; builtins.customized = 'yes'\n")
    record.env["PYTHONPATH"] = str(other)
    script = record.script(
        """
        step()
        import sitecustomize
        print(customized, sitecustomize.__file__,
              any(entry.endswith("chopper/recording/hook") for entry in sys.path))
        """
    )
    done = record(sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"yes {other / 'sitecustomize.py'} False\n"
    assert "recorded 1 rank, 1 step, step 0 traced" in done.stderr  # no plural


# -- nothing to record --------------------------------------------------------------------------


def test_a_python_that_cannot_be_hooked(record):
    script = record.script("import sys; sys.exit(int(sys.argv[1]))", begin="")
    for code, expected in (("0", 1), ("3", 3)):
        done = record(sys.executable, "-I", script, code)
        assert done.returncode == expected
        last = lines_of_chopper(done.stderr)[-1]
        assert "started no Python that could be hooked" in last
        assert "call chopper.profile in the program instead" in last
        assert not (record.directory / "run").exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("pass", "Python was started, but torch was never imported"),
        ("import torch; torch.nn.Linear(2, 2).eval()(torch.ones(1, 2))", "nothing trained"),
    ],
)
def test_a_program_that_does_not_train(record, body, why):
    done = record(sys.executable, "-c", body)
    assert done.returncode == 1
    assert why in lines_of_chopper(done.stderr)[-1]


def test_no_such_command(record):
    done = record("no-such-command-here")
    assert done.returncode == 127
    assert done.stdout == ""
    assert "no-such-command-here: command not found" in lines_of_chopper(done.stderr)[-1]
    assert not (record.directory / "run").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--steps", "5:2"), "holds none"),
        (("--collect", "hots"), "no collector is called 'hots'"),
    ],
)
def test_wrong_options(record, options, why):
    done = record("true", options=options)
    assert done.returncode == 2
    assert why in done.stderr
    assert not (record.directory / "runs").exists()


def test_no_command(record):
    done = record()
    assert done.returncode == 2
    assert "no command;" in done.stderr


def test_the_earlier_run_is_there_until_the_new_one_is(record):
    script = record.script(STEPS, begin="")
    options = ("-o", "run", "--no-trace", "--force")
    record.write_earlier()
    assert record("no-such-command-here", options=options).returncode == 127
    done = record("false", options=options)
    assert done.returncode == 1
    assert "nothing was recorded" in lines_of_chopper(done.stderr)[-1]
    done = record("rm", "-rf", "run", options=options)
    assert done.returncode == 1
    assert record.run().manifest.workload == "earlier"
    assert record(sys.executable, script, "3", options=options).returncode == 0
    assert record.run().manifest.workload is None
    assert record.run().table(0, "step").num_rows == 3
    assert record.run().part(0).traces == ()
    assert sorted(p.name for p in record.directory.iterdir()) == ["run", "script.py"]


def test_a_recording_without_a_step_replaces_no_run(record):
    script = record.script(STEPS, begin="")
    options = ("-o", "run", "--no-trace", "--force")
    assert record(sys.executable, script, "3", options=options).returncode == 0
    done = record(sys.executable, script, "0", options=options)
    assert done.returncode == 1
    last = lines_of_chopper(done.stderr)[-1]
    assert "run: no step was recorded, so the run that was there stays;" in last
    assert last.endswith("what was recorded is kept as run.no-steps")
    assert record.run().table(0, "step").num_rows == 3
    assert Run.open(record.directory / "run.no-steps").part(0).steps_count == 0
    names = sorted(p.name for p in record.directory.iterdir())
    assert names == ["run", "run.no-steps", "script.py"]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_outlives_a_killed_replacement(record, recorded):
    script = record.script("print('recorded', flush=True)\nsys.stdin.read()", begin=RANK)
    options = ("-o", "run", "--no-trace", "--force")
    record.write_earlier()
    command = (sys.executable, script) if recorded else ("sh", "-c", "echo recorded; cat")
    with record.popen(*command, options=options, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "recorded\n"
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([p for p, _ in record.processes()], timeout=PATIENCE_S)
    assert not alive
    done = record("false", options=options[:-1])
    assert done.returncode == 1
    assert "holds a run already" in done.stderr
    first, *_ = lines_of_chopper(done.stderr)
    if recorded:
        assert first.endswith("the run that was there before is kept as run.before")
        kept = Run.open(record.directory / "run.before")
        assert record.run().manifest.ranks[0].rank == 0
    else:
        assert first.endswith("the run that it was to replace is back in run")
        kept = record.run()
    assert kept.manifest.workload == "earlier"
    assert not [p for p in record.directory.iterdir() if p.name.endswith(".old")]


@pytest.mark.parametrize(("ends", "expected"), [("true", 1), ("exit 7", 7)])
def test_a_command_that_removes_the_output(record, ends, expected):
    done = record("sh", "-c", f"rm -rf run; {ends}")
    assert done.returncode == expected
    assert "Traceback" not in done.stderr
    last = lines_of_chopper(done.stderr)[-1]
    assert "nothing was recorded: the command removed the output directory run" in last


_FILLS = """
import os, resource, sys, time, chopper
sys.dont_write_bytecode = True  # Python keeps what a limit cuts short, and cannot read it again
with chopper.profile(trace=False, collect=[]) as prof:
    prof.step()
    if sys.argv[1] == "full":
        with open("ballast", "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
    elif os.environ.get("RANK", "1") == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    else:
        for _ in range(20): prof.step()
    while prof.recording and os.environ.get("RANK", "1") == "1":
        prof.step()
        time.sleep(0.001)
print("done")
"""


@pytest.mark.parametrize(
    ("how", "reason"), [("full", "No space left on device"), ("limit", "File too large")]
)
def test_a_disk_that_is_full_costs_the_rest_of_the_recording_and_no_exit_code(
    record, small_disk, how, reason
):
    record.directory = small_disk
    done = record(sys.executable, record.script(_FILLS, begin=""), how, options=("-o", "run"))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    ours = lines_of_chopper(done.stderr)
    stopped = f"step.arrow: cannot be written ({reason})"
    assert [line for line in ours if "recording stopped" in line] == [
        f"chopper: recording stopped: {small_disk.resolve()}/run/rank-00000/{stopped}; the program "
        "goes on"
    ]
    assert any(stopped in line and line.startswith("chopper: warning: rank 0") for line in ours)
    assert "killed" not in done.stderr
    part = record.run().part(0)
    assert "run.stopped" in [finding.code for finding in part.findings]
    assert record.run().table(0, "step").num_rows == part.steps_count == 1
    assert not [*(small_disk / "run").rglob(".*.tmp")]
    shown = command.run("analyze", small_disk / "run")
    assert shown.code == 0
    assert f"({reason})" in " ".join(shown.out.split())


def test_a_trace_that_could_not_be_written_is_what_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_MODEL + _TRAINS)
    limited = f"ulimit -f 64; exec env PYTHONDONTWRITEBYTECODE=1 {sys.executable} program.py"
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "record", "-o", "run", "--", "sh", "-c", limited],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    verdict = verdict_of(pipeline.attribute(pipeline.read(tmp_path / "run"))).sentence
    assert verdict.startswith("Cannot be told: rank 0 has no kernel trace: recording stopped: ")
    assert "(File too large" in verdict


def test_one_rank_that_cannot_write_costs_no_other_rank_its_recording(record):
    script = record.script(_FILLS, begin="")
    rank = f"WORLD_SIZE=2 MASTER_PORT=1 {sys.executable} {script} limit"
    done = record("sh", "-c", f"RANK=0 {rank} & RANK=1 {rank}; wait")
    assert done.returncode == 0, done.stderr
    parts = [record.run().part(number) for number in (0, 1)]
    assert [part.steps_count for part in parts] == [21, 1]
    assert [part.status for part in parts] == ["complete", "failed"]
    assert "rank 1 stopped recording in step" in done.stderr
    assert "killed" not in done.stderr
    assert command.run("analyze", record.directory / "run").code == 0


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("7", 7)])
def test_a_run_that_cannot_be_closed_keeps_the_exit_code(record, code, expected):
    # In the manifest's place, a directory: what a full disk does, without a full disk.
    script = record.script(
        "os.makedirs('run/manifest.json/x')\nsys.exit(int(sys.argv[1]))", begin=RANK
    )
    done = record(sys.executable, script, code, options=("-o", "run", "--no-trace"))
    assert done.returncode == expected
    assert "Traceback" not in done.stderr
    ours = lines_of_chopper(done.stderr)
    assert "cannot be written" in ours[1]
    assert "what the ranks recorded is kept" in ours[1]
    assert ours[2].startswith("chopper: recorded 1 rank")
    assert ours[-1] == "chopper: next: chopper analyze run"


def test_a_hang_up_is_passed_on(record):
    # As SIGTERM, on which ranks close their recordings.
    script = "trap 'exit 9' TERM; echo ready; read line"
    with record.popen("sh", "-c", script, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        # Its input stays open: read would end otherwise, and the shell with it.
        assert process.wait(timeout=PATIENCE_S) == 9


def test_under_nohup_a_hang_up_changes_nothing(record):
    with record.popen(
        "sh",
        "-c",
        "echo ready; read line; exit 5",
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate("go on\n", timeout=PATIENCE_S)
    assert process.returncode == 5, err


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        pytest.param(
            """
            class Groups(torch.nn.Sequential):
                def parameters(self, recurse=True):
                    return [{"params": list(super().parameters()), "lr": 0.1}]

            model = Groups(*model)
            optimizer = Descent(model.parameters(), lr=0.1)
            for _ in range(3):
                step()
            """,
            3,
            id="parameters() of its own",
        ),
        pytest.param(
            """
            from torch.optim.optimizer import register_optimizer_step_pre_hook
            register_optimizer_step_pre_hook(lambda *_: None)
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            """,
            2,  # what the first of them is the sign of begins with it
            id="a hook of optimizers behind ours",
        ),
        pytest.param(
            """
            import warnings
            warnings.simplefilter("error")
            model = torch.compile(model, backend="eager")
            for _ in range(3):
                step()
            """,
            3,
            id="warnings about hooks are errors",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_watches_for_training_raises_nothing_in_the_program(record, body, steps):
    done = record(sys.executable, record.script(body))
    assert done.returncode == 0, done.stderr
    assert record.run().table(0, "step").num_rows >= steps


_MODEL = f"{DESCENT}\nnet = torch.nn.Linear(8, 8); x = torch.ones(4, 8)\n"
_TRAINS = (
    "o = Descent(net.parameters(), 0.1)\nfor _ in range(12): net(x).sum().backward(); o.step()\n"
)
_INFERS = "net.eval()\nwith torch.no_grad():\n  for _ in range(20): net(x)\nnet.train()\n"


def recorded(record, program, *options):
    done = record(sys.executable, "-c", program, options=("-o", "run", *options))
    assert done.returncode == 0, done.stderr
    return done.stderr, pipeline.attribute(pipeline.read(record.directory / "run"))


def test_a_program_that_only_infers_leaves_a_trace_and_says_that_it_has_no_steps(record):
    said, run = recorded(record, _MODEL + _INFERS)
    assert "chopper: info: no step was detected" in said
    assert "for times of each batch or request, call prof.step() of chopper.profile" in said
    assert run.observed_ns > 0
    assert {"aten::linear", "aten::addmm"} & {str(g.key) for g in run.by("op")}


def test_requests_that_a_program_marks_are_steps_of_inference(record):
    marked = _INFERS.replace("net(x)", "net(x); prof.step()").replace("\n", "\n  ")
    program = f"import chopper\n{_MODEL}with chopper.profile() as prof:\n  {marked}"
    said, run = recorded(record, program)
    assert "no step was detected" not in said
    # On a busy machine a step may be a long one, and so of another kind.
    assert run.all_steps.windows["number"].to_pylist() == [2, 3, 4, 5, 6]
    assert {str(g.key) for g in run.by("phase")} >= {"inference"}


def test_functions_in_a_loop_are_recorded_from_the_import_of_torch_on(record):
    loop = "import torch\na = torch.ones(64, 64)\nfor _ in range(50): (a @ a).relu()\n"
    done = record(sys.executable, "-c", loop, options=("-o", "none"))
    assert done.returncode == 1
    assert "chopper record --from-import" in done.stderr
    _, run = recorded(record, loop, "--from-import")
    assert run.observed_ns > 0
    assert any(str(g.key) in ("aten::matmul", "aten::mm") for g in run.by("op"))


def test_steps_are_counted_from_the_training_on_where_the_model_was_called_before(record):
    _, run = recorded(record, _MODEL + _INFERS + _TRAINS)
    # On a busy machine the profiler is ready a step later.
    assert run.all_steps.windows["number"].to_pylist() in ([2, 3, 4, 5, 6], [3, 4, 5, 6])
    assert run.recording.manifest.ranks[0].steps_count == 12


def test_steps_that_never_came_are_said_and_those_that_did_are_shown(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_MODEL + _TRAINS)
    record = [sys.executable, "-X", "importtime", "-m", "chopper", "record", "-o", "run"]
    done = subprocess.run(
        [*record, "--steps", "100:105", "--", sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "ended after 12 steps, before steps 100:105 were traced" in done.stderr
    assert "--steps 7:12" in done.stderr
    # Pandas takes half a second, which is waited for after the training has ended.
    assert "pyarrow" in done.stderr
    assert "pandas.core" not in done.stderr
    shown = command.run("analyze", tmp_path / "run")
    assert shown.code == 0
    assert "A step takes" in shown.out
    assert "no step was traced" in shown.out
    assert "rank 0 has no kernel trace: the program ended after 12 steps" in shown.out


@pytest.mark.parametrize(
    ("number", "ended", "error"),
    [
        (signal.SIGINT, (0, "interrupted\n"), "recording stopped: KeyboardInterrupt"),
        (signal.SIGTERM, (128 + signal.SIGTERM, ""), "ended by SIGTERM"),
    ],
)
def test_a_recording_that_a_signal_ends_as_it_starts_is_closed(record, number, ended, error):
    script = record.script(
        f"""
        import signal

        def interrupt(event, _):
            if event == "subprocess.Popen":  # the sampler's
                signal.raise_signal({int(number)})

        sys.addaudithook(interrupt)
        try:
            step()
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    done = record(sys.executable, script)
    assert (done.returncode, done.stdout) == ended, done.stderr
    assert "recorded 1 rank, 0 steps" in done.stderr
    part = record.run().part(0)
    assert (part.status, part.error) == ("interrupted", error)
    assert record.run().manifest.findings == []


RANK_OF_TWO = """
import os, select
from pathlib import Path
from chopper.hardware.launchers import rank_info
from chopper.storage.layout import rank_dirs
from chopper.storage.parts import RunWriter
run, info = Path(os.environ["CHOPPER_OUTPUT"]), rank_info()
rank = RunWriter(run, info.rank)
rank.manifest.world_size, rank.manifest.status = info.world_size, "complete"
rank.manifest.steps_source = "mark"
rank.save()
while len(rank_dirs(run)) < 2:  # both record at once
    select.select([], [], [], 0.01)
"""


def test_recorders_that_mpirun_starts_share_a_run(record):
    script = record.script("", begin=RANK_OF_TWO)
    started = []
    for rank in range(2):
        record.env |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
        record.env |= {"PMIX_NAMESPACE": "prterun-1@1"}
        started.append(record.popen(sys.executable, script))
    for process in started:
        with process:
            _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
    run = record.run()
    assert run.ranks == [0, 1]
    assert run.manifest.findings == []
    assert sorted(p.name for p in (record.directory / "run").iterdir()) == [
        "manifest.json",
        "rank-00000",
        "rank-00001",
    ]
