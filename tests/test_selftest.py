"""Checks of a selftest: on scripted libraries, on recordings of real devices, and on wrong ones."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.cli.selftest_ import anonymous
from chopper.experiments import selftest
from chopper.experiments.selftest import CHECKS, PATHS, Machine, Missed
from chopper.reports import to_text
from chopper.reports.selftest import page
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests import recordings
from tests.collectors import amd_player, nvml_player

ROOT = Path(__file__).parents[1]
GPU = {"device": "cuda:0", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * 10**9}
HERE = {"available": True, "reason": None}


class Given(Machine):
    """A machine whose runs were made by hand."""

    runs: dict[str, Run]

    def run(self, name: str, variant: str = "random") -> Run:
        return self.runs[variant] if hasattr(self, "runs") else super().run(name, variant)


def machine(folder: Path, *, devices: Any = (), seconds: float = 600, **collectors: Any) -> Given:
    known = {"nvml": {"available": False, "reason": "no library"}}
    known |= {"amdsmi": {"available": False, "reason": "no AMD"}, "fabric": known["nvml"]}
    return Given(devices, known | collectors, folder, seconds=seconds)


def test_every_declared_path_has_its_check_and_its_proofs_are_there() -> None:
    assert PATHS.keys() == CHECKS.keys()
    for name, path in PATHS.items():
        assert all((ROOT / proof).is_file() for proof in path.proofs), name
        assert path.proofs or path.today.startswith("Nothing"), name


# ---------------------------------------------------------------- scripted libraries

_SCRIPT_S = 6
RECORD = f"""
import sys, time
import chopper
with chopper.profile(sys.argv[1], collect=sys.argv[2], trace=False) as prof:
    for _ in range(2):
        time.sleep({_SCRIPT_S / 2})
        prof.step()
"""


def telemetry(folder: Path, collector: str, environment: dict[str, str]) -> Path:
    """Record a collector for some seconds in a process of its own, as the products are."""
    path = folder / "products" / "random-1"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RECORD), str(path), collector],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path.parent


def scripted(power_w: float, joules_per_s: float) -> str:
    """An H100 whose clock steps, and whose counter grows at a rate of its own."""
    energy = "".join(
        f"set 0 field:83 {5_000_000 + joules_per_s * 1000 * at / 1000:.0f} {at}\n"
        for at in range(0, 60_000, 100)
    )
    return f"""
    gpu 0 GPU-aaaa0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3
    set 0 sm 1980
    set 0 sm 1755 2000
    set 0 mem 2619
    set 0 max_sm 1980
    set 0 max_mem 2619
    set 0 limit 700000
    set 0 memory_used 1000000
    set 0 memory_total 85899345920
    set 0 field:186 {power_w * 1000:.0f}
    set 0 reasons 4
    set 0 mig 1
    set 0 gpm 1
    set 0 gpm:2 90
    set 0 gpm:5 63
    {energy}"""


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    library = nvml_player.build(tmp_path_factory.mktemp("library"))
    folder = tmp_path_factory.mktemp("nvidia")
    player = nvml_player.Player(library, folder)
    found = machine(folder, devices=[GPU], nvml=HERE)
    found._made["products"] = telemetry(folder, "nvml", player.environment(scripted(650, 650)))
    return found


def check(found: Machine, name: str) -> str:
    (result,) = selftest.run_checks(found, [name])
    assert result.title == PATHS[name].title
    return f"{result.status}: {result.reason or result.found}"


def test_a_scripted_h100_passes(nvidia: Machine) -> None:
    assert check(nvidia, "nvml") == (
        "passed: device 0 (NVIDIA H100 80GB HBM3): power limit 700 W, largest clock 1980 MHz, "
        "memory 85.9 GB"
    )
    said = check(nvidia, "nvml_sampling")
    assert "device 0: clock 1755 to 1980 MHz; device 0: power 650 to 650 W" in said
    # A busy machine may sample late, and nothing else is wrong.
    assert said.startswith("passed: ") or said.endswith("wrong: rate"), said
    said = check(nvidia, "energy")
    assert said.startswith("passed: device 0: "), said
    counted, integrated = (float(x) for x in re.findall(r"(\S+) J", said))
    assert counted == pytest.approx(integrated, rel=0.05)
    assert check(nvidia, "gpm").endswith("tensor cores busy up to 63.0 %")
    assert "partitioned (MIG)" in check(nvidia, "mig")


def test_a_counter_that_disagrees_with_power_fails(nvidia: Machine, tmp_path: Path) -> None:
    """The same samples, and a counter that grows twice as fast."""
    run = nvidia.run("products")
    counters = run.table(0, "device_counter")
    at = counters.column_names.index("energy_j")
    doubled = pa.array([None if v is None else 2 * v for v in counters["energy_j"].to_pylist()])
    changed = run.with_tables({(0, "device_counter"): counters.set_column(at, "energy_j", doubled)})
    wrong = machine(tmp_path, nvml=HERE)
    wrong.runs = {"random": changed}
    with pytest.raises(Missed, match=r"\((1\.9|2\.)"):
        selftest.energy(wrong)


def test_clocks_beyond_the_device_and_a_slow_sampler_fail(nvidia: Machine, tmp_path: Path) -> None:
    run = nvidia.run("products")
    clocks = run.table(0, "device_clock")
    at = clocks.column_names.index("sm_clock_hz")
    beyond = pa.array([2_500_000_000] * clocks.num_rows)
    part = run.part(0)
    reports = [
        m.CollectorReport(name="nvml", status="obtained", samples_count=80, dropped_count=20)
        if report.name == "nvml"
        else report
        for report in part.collectors
    ]
    manifest = m.RunManifest(
        kind="recorded", name="made", ranks=[m.RankManifest(rank=0, collectors=reports)]
    )
    tables = {
        (0, "device_clock"): clocks.set_column(at, "sm_clock_hz", beyond),
        (0, "device_limit"): run.table(0, "device_limit"),
    }
    wrong = machine(tmp_path, nvml=HERE)
    wrong.runs = {"random": Run(manifest, None, tables)}
    with pytest.raises(Missed, match=r"wrong: rate, clock of device 0, which allows 1980 MHz"):
        selftest.sampling(wrong, "nvml")


@amd_player.needs_amdsmi
def test_a_scripted_mi300x_passes(tmp_path: Path, tmp_path_factory: Any) -> None:
    library = amd_player.build(tmp_path_factory.mktemp("amd"))
    player = amd_player.Player(*library, tmp_path)
    lines = [amd_player.ONE, "clock 0 2100 500", "cap 0 750000000 0 750000000"]
    lines += [player.set(0, "current_gfxclks", 1900 + i, item=i) for i in range(8)]
    lines += [player.set(0, "current_socket_power", 640)]
    environment = {**os.environ, **player.environment(*lines)}
    found = machine(tmp_path, amdsmi=HERE)
    found._made["products"] = telemetry(tmp_path, "amdsmi", environment)
    said = check(found, "amdsmi_sampling")
    assert "device 0: clock 1904 to 1904 MHz; device 0: power 640 to 640 W" in said
    assert said.startswith("passed: ") or said.endswith("wrong: rate"), said
    said = check(found, "amdsmi")
    assert "power limit 750 W, largest clock 2100 MHz" in said


# ---------------------------------------------------------------- physics, by hand


def products(watts: float, mhz: int) -> Run:
    """A run that draws ``watts`` at ``mhz`` while it measures."""
    phases = [{"name": "measured", "tid": 1, "start_ns": 11_001, "end_ns": 17_000}]
    rows = [
        {
            "time_ns": at,
            "span_ns": 1,
            "device_id": 0,
            "device_uuid": None,
            "memory_clock_hz": None,
            "event_reasons": 0,
            "sm_clock_hz": (mhz if 11_000 < at < 17_000 else 345) * 10**6,
            "power_w": watts if 11_000 < at < 17_000 else 70.0,
        }
        for at in range(0, 18_000, 500)
    ]
    manifest = m.RunManifest(kind="recorded", name="made", ranks=[m.RankManifest(rank=0)])
    tables: dict[str, list[dict[str, Any]]] = {"program_phase": phases, "device_clock": rows}
    return Run(manifest, None, {(0, n): TABLES[n].of_rows(r) for n, r in tables.items()})


@pytest.mark.parametrize(
    ("of_zeros", "passes"),
    [((480.0, 1980), True), ((480.0, 1700), False), ((695.0, 1980), False), ((70.0, 1750), True)],
)
def test_zeros_draw_less_at_no_lower_a_clock(
    of_zeros: tuple[float, int], passes: bool, tmp_path: Path
) -> None:
    found = machine(tmp_path, devices=[GPU], nvml=HERE)
    found.runs = {"random": products(690.0, 1755), "zeros": products(*of_zeros)}
    status = f"random 690 W at 1755 MHz, zeros {of_zeros[0]:g} W at {of_zeros[1]} MHz"
    assert check(found, "data_dependence") == f"{'passed' if passes else 'failed'}: {status}"


REAL = {
    "cuda_trace": "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a.json.gz",
    "rocm_trace": "tracelens/mi300x-bert-small-inference.json.gz",
}


@pytest.mark.parametrize("path", REAL)
def test_kernels_of_real_devices_follow_their_launches(
    path: str, traces_dir: Path, tmp_path: Path
) -> None:
    vendor = {"cuda_trace": "nvml", "rocm_trace": "amdsmi"}[path]
    here: dict[str, Any] = {vendor: HERE}
    found = machine(tmp_path, devices=[GPU], **here)
    found._attributed = selftest.imported(traces_dir / REAL[path])
    said = check(found, path)
    assert re.match(r"passed: rank 0: (\d+) of \1 kernels with a launch, 0 before it", said), said
    assert selftest.closure(found._attributed).endswith("closed to the nanosecond")
    # The same kernels a millisecond earlier.
    joined = found._attributed.joined[0]
    events = joined.device_event
    at = events.column_names.index("start_ns")
    earlier = pa.array(np.asarray(events["start_ns"]) - 1_000_000)
    joined_earlier = type(joined)(
        **{f: getattr(joined, f) for f in joined.__dataclass_fields__}
        | {"device_event": events.set_column(at, "start_ns", earlier)}
    )
    found._attributed.joined[0] = joined_earlier
    assert check(found, path).startswith("failed: rank 0: ")


def test_a_sum_that_is_off_by_a_nanosecond_fails(traces_dir: Path) -> None:
    run = selftest.imported(traces_dir / REAL["cuda_trace"])
    times = run.pieces["time_ns"].to_pylist()
    at = run.pieces.column_names.index("time_ns")
    object.__setattr__(
        run, "pieces", run.pieces.set_column(at, "time_ns", pa.array([times[0] + 1, *times[1:]]))
    )
    with pytest.raises(Missed, match=r"off: step \d+ of rank 0 by 1 ns"):
        selftest.closure(run)


PEAK = {"bf16_flop_per_s": 989.4e12}


@pytest.mark.parametrize(
    ("path", "document", "said"),
    [
        ("ceilings", {"gemm": {"bf16": [{"best_per_s": 700e12}]}}, "passed"),
        ("ceilings", {"gemm": {"bf16": [{"best_per_s": 1.1e15}]}}, "failed: bf16 1.1"),
        ("ceilings", {"gemm": {}}, "failed"),
        (
            "symmetric_memory",
            {
                "variants": [{"name": n, "runs": ["a"]} for n in ("symmetric", "triton")],
                "notes": [],
            },
            "passed: ran to their end: symmetric, triton",
        ),
        (
            "symmetric_memory",
            {"variants": [{"name": "symmetric", "runs": ["a"]}], "notes": []},
            "not possible: left out: triton",
        ),
        ("symmetric_memory", {"variants": [], "notes": ["no peers"]}, "not possible: no peers"),
    ],
)
def test_what_commands_print_is_judged(
    path: str, document: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found = machine(tmp_path, devices=[GPU | PEAK, GPU], nvml=HERE)
    name = {"symmetric_memory": "symmetric"}.get(path, path)
    found._made[name] = tmp_path / name
    (tmp_path / f"{name}.out").write_text(json.dumps(document))
    assert check(found, path).startswith(said)


@pytest.mark.parametrize(("held_hz", "status"), [(1.21e9, "passed"), (1.5e9, "failed")])
def test_a_clock_above_what_was_set_fails(held_hz: float, status: str, tmp_path: Path) -> None:
    found = machine(tmp_path, devices=[GPU], nvml=HERE)
    found.set_clocks = True
    found._made["clocks"] = tmp_path / "clocks"
    points = [
        {"set_value": set_hz, "clock_hz": {"value": clock_hz}}
        for set_hz, clock_hz in ((1.98e9, 1.755e9), (1.2e9, held_hz))
    ]
    (tmp_path / "clocks.out").write_text(json.dumps({"points": points}))
    assert check(found, "clock_setting").startswith(f"{status}: set 1980, held 1755 MHz, set 1200")


def test_memory_beyond_the_device_fails(tmp_path: Path) -> None:
    def held(allocated: int, reserved: int) -> Machine:
        row = {
            "time_ns": 1,
            "span_ns": 1,
            "device_id": 0,
            "step": 0,
            "allocated_bytes": allocated,
            "max_allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "max_reserved_bytes": reserved,
        }
        manifest = m.RunManifest(kind="recorded", name="made", ranks=[m.RankManifest(rank=0)])
        found = machine(tmp_path, devices=[GPU])
        run = Run(manifest, None, {(0, "device_memory"): TABLES["device_memory"].of_rows([row])})
        found.runs = {"random": run}
        return found

    assert check(held(10**9, 2 * 10**9), "device_memory") == "passed: rank 0: 1 step, peak 954 MiB"
    assert check(held(2 * 10**9, 10**9), "device_memory").startswith("failed")
    assert check(held(10**9, 86 * 10**9), "device_memory").startswith("failed")


# ---------------------------------------------------------------- recordings and tools


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which programs are found first."""
    (folder / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    return folder / "bin"


def repeated(count: int) -> recordings.Recording:
    """``count`` products, each with its launch."""
    made = recordings.Recording()
    for i in range(count):
        at = 1_000_000 + 100_000 * i
        made.calls.append(recordings.Span("cudaLaunchKernel", at, at + 5_000, i + 1))
        made.work.append(recordings.Work(recordings.KERNEL, at + 10_000, at + 90_000, i + 1))
    return made


@pytest.mark.parametrize(("count", "status"), [(40, "passed"), (39, "failed")])
@pytest.mark.parametrize("profiler", ["nsys", "rocprofv3"])
def test_other_profilers_are_run_and_read(
    profiler: str, count: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the profiler's name writes where it is told what one of its format holds."""
    write: Any = {"nsys": recordings.write_nsys, "rocprofv3": recordings.write_rocpd}[profiler]
    write(tmp_path / "made.db", repeated(count))
    flag, name = {"nsys": ("-o", "$out.sqlite"), "rocprofv3": ("-d", "$out/host/1_results.db")}[
        profiler
    ]
    executable = programs(tmp_path, monkeypatch) / profiler
    executable.write_text(
        f'#!/bin/sh\nwhile [ "$1" != {flag} ]; do shift; done\nout=$2\n'
        f'mkdir -p "$(dirname "{name}")" && cp "{tmp_path}/made.db" "{name}"\n'
    )
    executable.chmod(0o755)
    found = machine(tmp_path, devices=[GPU], nvml=HERE, amdsmi=HERE)
    assert check(found, profiler).startswith(f"{status}: {count} of 40 products")


def test_a_counter_table_that_nsight_compute_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = programs(tmp_path, monkeypatch) / "ncu"
    heading = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","nsecond"'
    executable.write_text(
        f'#!/bin/sh\ncat <<\'E\'\n==PROF== Connected\n{heading}\n"0","gemm","8123"\nE\n'
    )
    executable.chmod(0o755)
    assert check(machine(tmp_path, devices=[GPU], nvml=HERE), "counters").startswith("passed: gemm")
    executable.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1\n")
    (tmp_path / "again").mkdir()
    said = check(machine(tmp_path / "again", devices=[GPU], nvml=HERE), "counters")
    assert said == "not possible: exit code 1: ==ERROR== ERR_NVGPUCTRPERM - no permission"


def test_a_recording_that_hangs_is_ended_and_the_rest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = programs(tmp_path, monkeypatch) / "hang"
    # One child to end, and one that brings back clocks.
    executable.write_text(
        '#!/bin/sh\nsleep 600 & echo $! >"$1"\n'
        'tail -f /dev/null chopper.experiments.guardian 2>&1 & echo $! >"$1.kept"\nwait\n'
    )
    executable.chmod(0o755)
    monkeypatch.setitem(selftest._RECORDINGS, "training", "hang {out}")
    monkeypatch.setattr(selftest, "_GRACE_S", 0.5)
    found = machine(tmp_path, seconds=2)
    assert check(found, "host") == "failed: its recording (training) had not ended after 1 s"
    child = int((tmp_path / "training").read_text())
    # Where nobody waits for orphans, it is there as a zombie.
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    kept = psutil.Process(int((tmp_path / "training.kept").read_text()))
    assert kept.status() != psutil.STATUS_ZOMBIE
    kept.kill()
    # Not recorded again.
    assert check(found, "attribution").endswith("had not ended after 1 s")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine(tmp_path, devices=[GPU], nvml=HERE)
    assert check(found, "symmetric_memory") == (
        "not possible: torch sees one accelerator, two are needed"
    )
    assert check(found, "amdsmi") == "not possible: amdsmi: no AMD"
    assert check(found, "clock_setting").startswith("not possible: it sets clocks")
    assert check(machine(tmp_path), "energy") == "not possible: nvml: no library; amdsmi: no AMD"
    with monkeypatch.context() as without_torch:
        without_torch.setattr(importlib.util, "find_spec", lambda _: None)
        for name in ("host", "attribution", "ceilings"):
            said = check(machine(tmp_path), name)
            assert said.startswith("not possible: PyTorch is not installed: pip install"), name
    late = machine(tmp_path, seconds=0)
    assert check(late, "host") == ("not possible: the time for all checks was over before this one")


def test_a_check_that_fails_by_itself_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECKS, "host", lambda _: str(1 / 0))
    results = list(selftest.run_checks(machine(tmp_path), ["host", "nsys"]))
    assert results[0].found == "the check itself failed: ZeroDivisionError: division by zero"
    assert results[1].status == "not possible"


# ---------------------------------------------------------------- the command


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["selftest", *words], catch_exceptions=False)


def test_the_file_names_results_and_no_person_or_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("--only", "nsys,fabric", "--json")
    assert done.exit_code == 0, done.output
    text = Path("selftest.json").read_text()
    document = json.loads(text)
    assert json.loads(done.stdout) == document
    assert document["schema"] == selftest.SCHEMA
    assert [r["path"] for r in document["results"]] == ["fabric", "nsys"]
    for result in document["results"]:
        assert result["status"] == "passed" or result["reason"]
    assert {"chopper", "python", "torch", "driver", "nvidia-ml-py"} <= set(document["versions"])
    for secret in (str(tmp_path), str(Path.home()), sys.prefix, "hostname", "executable"):
        assert secret not in text
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    # It is there: not overwritten.
    with pytest.raises(Exception, match=r"selftest\.json.*--force"):
        run("--only", "fabric")


def test_the_file_is_there_when_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "selftest.json"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "chopper", "selftest", "--only", "nsys", "-o", str(file)]
    subprocess.run(command, stdout=writer, check=False)
    os.close(writer)
    assert json.loads(file.read_text())["results"][0]["path"] == "nsys"


def test_names_are_replaced_wherever_they_stand() -> None:
    host, home = socket.gethostname(), Path.home()
    found = anonymous(
        {"a": [f"{home}/x on {host}: {host}name", 3, None], "b": {"c": "/run/1/out"}}, "/run/1"
    )
    assert found == {"a": [f"~/x on <host>: {host}name", 3, None], "b": {"c": "<folder>/out"}}


def test_other_folders_are_left_out_and_what_the_system_has_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("USER", "nsys")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.corp")
    found = "File '/data/secret/run.py' of nsys on node7: /proc/1/maps, 3 MB/s, https://x.org/a/b"
    assert anonymous({"path": "nsys", "found": found}, "/run/1") == {
        "path": "nsys",
        "found": "File '<folder>/run.py' of <user> on <host>: /proc/1/maps, 3 MB/s, "
        "https://x.org/a/b",
    }


def test_the_page_puts_failures_first() -> None:
    def result(path: str, status: str, found: str | None, reason: str | None) -> dict[str, Any]:
        return {
            "path": path,
            "title": path.upper(),
            "status": status,
            "expected": "sums close",
            "found": found,
            "reason": reason,
            "seconds": 1.0,
        }

    document = {
        "versions": {"chopper": "1", "torch": "2.13", "cuda": None},
        "devices": [GPU],
        "seconds": 61.0,
        "results": [
            result("a", "passed", "all of it", None),
            result("b", "not possible", None, "no driver"),
            result("c", "not possible", None, "no driver"),
            result("d", "failed", "off by 1 ns", None),
        ],
    }
    text = " ".join(to_text.render(page(document)).split())
    assert "1 of 4 checks passed, 1 failed, 2 not possible here." in text
    assert "D (d): found off by 1 ns; expected: sums close" in text
    assert (
        text.index("off by 1 ns") < text.index("all of it") < text.index("no driver: B (b), C (c)")
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--only", "nvmk"], 2, "nvml"),
        (["--only", ","], 2, "none named; expected of host, attribution"),
        (["--seconds", "0"], 2, "0 is not in the range"),
        (["-o", "nowhere/x.json"], 1, "nowhere does not exist"),
        (["-o", "x.csv"], 2, ".html"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "selftest", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "recording" not in done.stderr


@pytest.mark.long
def test_all_of_it_on_this_machine(tmp_path: Path) -> None:
    """What every machine can do passes, in the time that it may take."""
    file = tmp_path / "selftest.json"
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "selftest", "--seconds", "900", "-o", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    results = {r["path"]: r for r in json.loads(file.read_bytes())["results"]}
    assert list(results) == list(PATHS)
    assert done.returncode == 0, done.stdout
    for name in ("host", "attribution", "ceilings"):
        assert results[name]["status"] == "passed", results[name]
