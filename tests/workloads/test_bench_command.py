from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from click.testing import CliRunner

from chopper import pipeline
from chopper.errors import UsageError
from chopper.experiments import prepare as preparing
from chopper.experiments.prepare import WorkloadUnavailable, find, options_of, prepare, workloads
from chopper.fresh_python import own_python
from tests.listening import listening_addresses, reachable_from_outside
from tests.waiting import PATIENCE_S, until

SHORT = ["--", "--batch", "1", "--sequence", "32", "--device", "cpu"]


def test_every_workload_is_described_and_exists():
    for name, workload in workloads().items():
        assert workload.summary
        assert importlib.util.find_spec(workload.module)
        assert {option.name for option in options_of(name)} >= {"seed", "device"}
        assert all(option.help for option in options_of(name))
        assert workload.baseline is None or workload.baseline in {v.name for v in workload.variants}


def test_listing_needs_no_torch():
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from chopper.cli.bench_ import workloads\nworkloads(['--json'], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed = json.loads(done.stdout)
    assert listed["schema"] == "chopper.workloads/1"
    assert [w["name"] for w in listed["workloads"]] == [*workloads()]
    size = next(o for o in listed["workloads"][0]["options"] if o["name"] == "--size")
    assert size["choices"] == ["debug", "1b", "8b", "13b"]
    assert size["default"] == "debug"


@pytest.mark.parametrize("name", workloads())
def test_each_is_described_with_variants_options_and_time(name):
    from chopper.cli import bench_

    shown = CliRunner().invoke(bench_.command, [name, "--help"]).stdout
    assert shown == CliRunner().invoke(bench_.workloads, [name]).stdout
    assert shown == CliRunner().invoke(bench_.command, ["-o", "x", name, "--", "-h"]).stdout
    assert f"about {find(name).seconds} s on two cores" in shown
    for option in options_of(name):
        assert f"--{option.name} " in shown
    for variant in find(name).variants:
        assert f"  {variant.name} " in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "fsdp3"}, "no workload is called 'fsdp3'; did you mean fsdp"),
        ({"ranks": 0}, "--ranks 0: a run needs at least one rank"),
        ({"ranks": -1}, "--ranks -1: a run needs at least one rank"),
        ({"steps": 0}, "argument --steps: '0' is not a whole number of at least 1"),
        ({"steps": 2, "options": ["--steps=3"]}, "--steps is given twice"),
        ({"repeats": 2}, "--repeats: fsdp2 is recorded once"),
        ({"variants": "a"}, "--variants: fsdp2 has no variants"),
        ({"name": "fsdp", "repeats": 0}, "--repeats 0: each variant runs at least once"),
        (
            {"name": "fsdp", "variants": "fspd2"},
            "no variant of fsdp is called 'fspd2'; did you mean fsdp2",
        ),
        ({"name": "gemm", "options": ["--variant", "zeros"]}, "name those to run with --variants"),
        ({"name": "membw", "steps": 3}, "--steps: membw has no steps"),
        ({"options": ["--output", "x"]}, "name the run's directory with -o"),
        ({"options": ["-o", "x"]}, "name the run's directory with -o, before the --"),
        ({"options": ["--size", "9b"]}, "argument --size: invalid choice: '9b'"),
        ({"options": ["--batch", "many"]}, "'many' is not a whole number of at least 1"),
        ({"options": ["--seed", "-1"]}, "'-1' is not a whole number of at least 0"),
        ({"options": ["--seed", "4294967296"]}, "'4294967296' exceeds 4294967295"),
        ({"options": ["--batch", "9" * 20]}, "exceeds 1000000000000000"),
        ({"name": "gemm", "options": ["--shapes", "3x"]}, "--shapes: '3x' is not MxNxK"),
        ({"name": "collectives", "ranks": 1}, "one rank has no peer to exchange with"),
        ({"name": "membw", "options": ["--largest", "9"]}, "is larger than --largest 9"),
        ({"options": ["--size"]}, "argument --size: expected one argument"),
        ({"options": ["--wings", "2"]}, "unrecognized arguments: --wings 2"),
        ({"options": ["--si", "8b"]}, "unrecognized arguments: --si 8b"),
    ],
)
def test_wrong_words_are_refused_in_one_line(arguments, message):
    with pytest.raises(UsageError) as refused:
        prepare(**{"name": "fsdp2", **arguments})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_torch_it_says_what_to_install(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    with pytest.raises(WorkloadUnavailable, match=r"pip install torch$"):
        prepare("fsdp2")


def test_a_torch_that_cannot_be_imported_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(
        WorkloadUnavailable, match=r"^fsdp2: needs PyTorch, which is installed and "
    ):
        prepare("fsdp2")


def test_what_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(preparing, "usable_memory_bytes", lambda: 24_000_000_000)
    with pytest.raises(WorkloadUnavailable) as refused:
        prepare("fsdp2", ranks=2, options=["--size", "8b", "--device", "cpu"])
    # 16 bytes for each of 8.03 billion parameters, and what is not sharded.
    assert "8.03 B parameters" in str(refused.value)
    assert "needs about 150 GB, 2 ranks here can have 24 GB" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_automatic_choices_carry_their_reason(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    launch = prepare("fsdp2", ranks=2)
    assert launch.words[-2:] == ("--device", "cpu")
    assert any(n.startswith("on the CPU: 1 GPU visible to torch") for n in launch.notes)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "2 ranks (the workload's default on CPUs)" in prepare("fsdp2").notes[0]


def test_too_many_ranks_for_the_cores_are_warned_of(monkeypatch):
    monkeypatch.setattr(preparing, "usable_cores", lambda: 2)
    options = ["--device", "cpu"]
    assert any(
        "3 ranks share 2 cores" in n for n in prepare("fsdp2", ranks=3, options=options).notes
    )
    assert not prepare("fsdp2", ranks=2, options=options).notes


def test_an_option_of_the_workload_before_the_dashes_is_explained():
    from chopper.cli.bench_ import command

    result = CliRunner().invoke(command, ["fsdp2", "--size", "8b"])
    assert result.exit_code == 2
    assert "go behind --" in result.stderr


def chopper_run(output, *words):
    return own_python("chopper", "bench", "fsdp2", "--ranks", "2", "-o", str(output), *words)


@pytest.mark.slow
def test_runs_records_and_attributes(tmp_path, hostile_directory):
    output, scratch = tmp_path / "my run", tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        chopper_run(output, "--steps", "4", "--json", *SHORT),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"TMPDIR": str(scratch)},
        cwd=hostile_directory,
    )
    assert done.returncode == 0, done.stderr
    # Torch keeps a cache there, one for all runs; of this run nothing is left.
    assert [p.name for p in scratch.iterdir() if not p.name.startswith("torchinductor_")] == []
    attribution = json.loads(done.stdout)
    assert attribution["schema"] == "chopper.attribution/4"
    parents = {cause["parent"] for cause in attribution["causes"]}
    leaves = [cause for cause in attribution["causes"] if cause["id"] not in parents]
    assert sum(leaf["time_ns"] for leaf in leaves) == attribution["observed_ns"] > 0
    assert len(attribution["ranks"]) == 2
    assert "step    3   loss" in done.stderr
    assert f"chopper report '{output}' -o report.html" in done.stderr
    manifest = json.loads((output / "manifest.json").read_bytes())
    assert manifest["workload"] == "fsdp2"
    assert manifest["exit_code"] == 0

    again = subprocess.run(chopper_run(output, *SHORT), capture_output=True, text=True)
    assert again.returncode == 1
    assert "holds a run already; pass --force" in again.stderr


def processes_of(output):
    """Living processes that were told to record into ``output``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CHOPPER_OUTPUT") == str(output):
                found.append(process)
        except psutil.Error:
            continue
    return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def has_trace(directory):
    """Whether the rank has said that it holds a whole trace."""
    manifest = directory / "manifest.json"
    return manifest.is_file() and bool(json.loads(manifest.read_bytes()).get("traces"))


# Also shown by tests/workloads/test_processes.py and test_interrupts.py, without a training.
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="signals of parents' deaths are Linux's")
@pytest.mark.parametrize(
    ("victim", "number", "exit_code"),
    [
        ("chopper", signal.SIGINT, 130),
        ("chopper", signal.SIGKILL, -signal.SIGKILL),
        ("rank", signal.SIGKILL, 128 + signal.SIGKILL),
        ("launcher", signal.SIGKILL, 128 + signal.SIGKILL),
    ],
    ids=["ctrl-c", "killed", "rank killed", "launcher killed"],
)
def test_however_it_ends_the_run_is_kept_and_nothing_is_left(tmp_path, victim, number, exit_code):
    output = tmp_path / "run"
    process = subprocess.Popen(
        chopper_run(output, "--steps", "100000", *SHORT),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: all(has_trace(output / f"rank-0000{rank}") for rank in (0, 1)), "traces")
        addresses = listening_addresses(psutil.Process(process.pid).children(recursive=True))
        if victim == "chopper":
            os.kill(process.pid, number)
        else:
            launcher = "chopper.workloads.processes"
            wanted = launcher if victim == "launcher" else "chopper.workloads.fsdp2"
            alive = [p for p in processes_of(output) if p.cmdline()[-1:] and wanted in p.cmdline()]
            ranks = [p for p in alive if p.environ().get("RANK") == "1"]
            (ranks if victim == "rank" else alive)[0].send_signal(number)
        _, messages = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == exit_code
        assert "Traceback" not in messages
        until(lambda: not processes_of(output), "the end of all processes")
    finally:
        process.kill()
        process.communicate()
    assert len(addresses) >= 3  # the store, and gloo in each rank
    assert reachable_from_outside(addresses) == []
    if number == signal.SIGKILL and victim == "rank":
        assert "chopper: rank 1" in messages
        assert "by SIGKILL" in messages

    run = pipeline.read(output)
    assert run.ranks == [0, 1]
    if number == signal.SIGKILL and victim == "rank":
        assert any("137, as after SIGKILL" in finding.message for finding in run.manifest.findings)
    assert pipeline.attribute(run).observed_ns > 0
