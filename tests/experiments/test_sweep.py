"""`chopper sweep clock`: what is set, in what order, and that it is undone under every exit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from chopper.experiments import results as ex
from chopper.experiments.loading import load
from chopper.experiments.sweep import swept
from chopper.reports import to_text
from chopper.reports.experiment import sweep_page
from chopper.reports.page import Figure
from chopper.statistics import power_law
from tests.collectors import amd_player, nvml_player
from tests.experiments.test_judgement import experiment

GPU = """
    gpu 0 GPU-aaaa0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3
    set 0 mem 2619
    set 0 clock_min 210
    set 0 clock_max 1980
    set 0 power_limit 650000
    set 0 power_min 200000
    set 0 power_max 700000
"""
SET, RESET = "nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"
PATIENCE_S = 120


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return nvml_player.build(tmp_path_factory.mktemp("nvml"))


class Machine:
    """The command, on a machine that a shim or a folder plays."""

    def __init__(self, folder: Path, environment: dict[str, str], log: Path) -> None:
        self.log = log
        # Set by the suite, some of these would send a recording elsewhere.
        self.environment = {
            **os.environ,
            **environment,
            "XDG_DATA_HOME": str(folder / "data"),
        }
        self.folder = folder

    def start(self, *words: str, **how) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "chopper", "sweep", "clock", *words],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **how,
        )

    def __call__(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def logged(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def until(self, line: str) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while line not in self.logged():
            assert time.monotonic() < give_up_s, self.logged()
            select.select([], [], [], 0.01)


@pytest.fixture
def machine(nvml, tmp_path):
    def make(script: str = GPU) -> Machine:
        played = nvml_player.Player(nvml, tmp_path).environment(script)
        log = tmp_path / "log"
        return Machine(tmp_path, {**played, "NVML_SHIM_LOG": str(log)}, log)

    return make


ENDS = [sys.executable, "-c", "pass"]
WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


def test_a_plan_sets_nothing(machine):
    found = machine()
    code, out, _ = found("--values", "1000MHz,1980MHz", "--", *ENDS)
    assert code == 0
    assert "at 1.98 GHz, 1.01 GHz, in turn" in out or "at 1.98 GHz, 1.00 GHz, in turn" in out
    assert "device 0 (NVIDIA H100 80GB HBM3), SM clock (supports 210 MHz to 1.98 GHz)" in out
    assert "does not tell whether clocks were locked before" in out
    assert "Nothing was set and nothing ran; --apply does both." in out
    assert found.logged() == []
    assert not (found.folder / "runs").exists()
    code, out, _ = found("--what", "power", "--points", "2", "--json", "--", *ENDS)
    plan = json.loads(out)
    assert plan["settings"] == [700.0, 200.0]
    assert plan["devices"][0]["before"] == {"limit_mw": 650000}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--values", "3GHz,1GHz"), "SM clock supports, 210 MHz to 1.98 GHz"),
        (("--values", "1000MHz,1001MHz"), "the same setting throughout"),
        (("--device", "7"), "--device 7: not there; found 0"),
    ],
)
def test_what_cannot_be_set_is_refused_in_a_line(machine, words, said):
    found = machine()
    code, out, err = found("--apply", *words, "--", *ENDS)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert found.logged() == []


def test_without_permission_a_line_says_what_would_help(machine):
    found = machine(GPU + f"fail 0 {SET} 4\n")
    code, _, err = found("--apply", "--points", "2", "--", *ENDS)
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert "no permission to set it; run as root (sudo)" in last
    # What was refused needs no undoing, but it does no harm.
    assert found.logged()[-1] == f"0 {RESET} 0 0 = 0"


def test_the_power_limit_that_was_before_comes_back(machine):
    found = machine()
    code, _, _ = found("--apply", "--what", "power", "--values", "700W,300W", "--", *ENDS)
    assert code == 1  # the command trains nothing, so the first setting is the last
    power = "nvmlDeviceSetPowerManagementLimit"
    assert found.logged() == [f"0 {power} 700000 0 = 0", f"0 {power} 650000 0 = 0"]


def end(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_clocks_are_unlocked_however_it_ends(machine, number):
    found = machine()
    process = found.start("--apply", "--points", "2", "--", *WAITS, start_new_session=True)
    found.until(f"0 {SET} 1980 1980 = 0")
    # The recorded command is a job of its own: a signal to chopper alone ends, or orphans, it.
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait()
        found.until(f"0 {RESET} 0 0 = 0")
        end(children)
    else:
        process.wait(timeout=PATIENCE_S)
    process.communicate()
    assert found.logged() == [f"0 {SET} 1980 1980 = 0", f"0 {RESET} 0 0 = 0"]


def test_a_second_sweep_is_refused_until_the_first_is_undone(machine):
    found = machine()
    process = found.start("--apply", "--points", "2", "-o", "first", "--", *WAITS)
    found.until(f"0 {SET} 1980 1980 = 0")
    code, _, err = found("--apply", "--points", "2", "-o", "second", "--", *ENDS)
    assert code == 1
    assert "another sweep sets clocks of this machine" in err.strip().splitlines()[-1]
    assert found.logged() == [f"0 {SET} 1980 1980 = 0"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert found.logged()[1:] == [f"0 {RESET} 0 0 = 0"]


def test_what_a_killed_guardian_left_is_undone_by_the_next_sweep(machine):
    """Its own state is read back: the power limit of before, not the one that it left."""
    import msgspec

    from chopper.collectors.knobs import Knob

    found = machine()
    lock = next(iter((found.folder / "data" / "chopper").glob("*.lock")), None)
    assert lock is None
    found("--apply", "--what", "power", "--values", "700W,300W", "--", *ENDS)
    (lock,) = (found.folder / "data" / "chopper").glob("*.lock")
    assert lock.read_bytes() == b""
    left = Knob(
        vendor="nvml",
        what="power",
        target="GPU-aaaa0000-0000-0000-0000-000000000000",
        label="device 0, power limit",
        unit="W",
        scale=1e-3,
        allowed=(200000, 700000),
        continuous=True,
        before={"limit_mw": 555000},
    )
    lock.write_bytes(msgspec.json.encode([left]))
    found.log.unlink()
    found("--apply", "--points", "2", "--", *ENDS)
    assert found.logged()[0] == "0 nvmlDeviceSetPowerManagementLimit 555000 0 = 0"
    assert found.logged()[-1] == f"0 {RESET} 0 0 = 0"
    assert lock.read_bytes() == b""


def test_what_cannot_be_brought_back_is_said_and_kept(machine):
    power = "nvmlDeviceSetPowerManagementLimit"
    found = machine(GPU + f"fail 0 {power} 999\n")
    code, _, err = found("--apply", "--what", "power", "--points", "2", "--", *ENDS)
    assert code == 1
    assert "not all is as before: device 0 (NVIDIA H100 80GB HBM3), power limit" in err
    (lock,) = (found.folder / "data" / "chopper").glob("*.lock")
    assert json.loads(lock.read_bytes())[0]["before"] == {"limit_mw": 650000}


@amd_player.needs_amdsmi
def test_amd_limits_and_level_come_back(tmp_path):
    folder, fields = amd_player.build(tmp_path)
    played = amd_player.Player(folder, fields, tmp_path).environment(
        amd_player.ONE, "clock 0 2100 132", "cap 0 750000000 100000000 800000000"
    )
    log = tmp_path / "log"
    found = Machine(tmp_path, {**played, "AMD_SHIM_LOG": str(log)}, log)
    code, _, err = found("--apply", "--points", "2", "-o", "a", "--", *ENDS)
    assert code == 1, err
    limit = "amdsmi_set_gpu_clk_limit"
    least, most = 0, 1
    assert found.logged() == [
        f"0 {limit} {least} 132 = 0",
        f"0 {limit} {most} 2100 = 0",
        f"0 {limit} {least} 2100 = 0",
        f"0 {limit} {least} 132 = 0",
        f"0 {limit} {most} 2100 = 0",
        f"0 {limit} {least} 132 = 0",
        "0 amdsmi_set_gpu_perf_level 0 0 = 0",
    ]
    log.unlink()
    found("--apply", "--what", "power", "--values", "800W,400W", "-o", "b", "--", *ENDS)
    assert found.logged() == [
        "0 amdsmi_set_power_cap 0 800000000 = 0",
        "0 amdsmi_set_power_cap 0 750000000 = 0",
    ]


@pytest.fixture
def host(tmp_path):
    policy = tmp_path / "sys/devices/system/cpu/cpufreq/policy0"
    policy.mkdir(parents=True)
    for name, khz in (
        ("cpuinfo_min_freq", 800000),
        ("cpuinfo_max_freq", 3600000),
        ("scaling_min_freq", 1000000),
        ("scaling_max_freq", 3000000),
    ):
        (policy / name).write_text(f"{khz}\n")
    return policy


def test_the_hosts_limits_come_back_after_a_kill(tmp_path, host):
    found = Machine(tmp_path, {}, tmp_path / "log")
    words = ("--what", "host", "--sysfs", str(tmp_path / "sys"), "--points", "2", "--apply")
    process = found.start(*words, "--", *WAITS)
    found.log = host / "scaling_min_freq"
    found.until("3600000")
    assert (host / "scaling_max_freq").read_text() == "3600000"
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    found.until("1000000")
    assert (host / "scaling_max_freq").read_text() == "3000000"
    end(children)
    process.communicate()


def test_a_machine_without_cpufreq_says_so(tmp_path):
    found = Machine(tmp_path, {}, tmp_path / "log")
    code, _, err = found("--what", "host", "--sysfs", str(tmp_path), "--", *ENDS)
    assert code != 0
    assert "no cpufreq policy" in err
    assert len(err.strip().splitlines()) == 1


def made(tmp_path, *, other_cores=0.0):
    """Steps that take t ∝ f^-0.8, with 1 % of noise, at 400 W × (f / 2 GHz)²."""
    clocks = {"2000MHz": 2e9, "1500MHz": 1.5e9, "1000MHz": 1e9}

    def of(clock):
        ratio = clock / 2e9
        return {
            ("step_ns",): lambda repeat: 1e8 * ratio**-0.8 * (1 + 0.01 * (repeat - 1)),
            ("power_w",): 400 * ratio**2,
            ("sm_clock_hz",): clock - 15e6,
        }

    values = {name: of(clock) for name, clock in clocks.items()}
    path = experiment(tmp_path / "e", "sweep", values, other_cores=other_cores)
    return swept(load(path), clocks, "Hz")


def test_the_exponent_energy_and_intervals_are_those_of_the_law(tmp_path):
    found = made(tmp_path)
    assert found.sensitivity_ratio == pytest.approx(0.8, abs=0.002)
    assert found.sensitivity_ci95 is not None
    low, high = found.sensitivity_ci95
    assert low < 0.8 < high < 0.83
    fast, _, slow = found.points
    assert fast.energy_j is not None
    assert slow.energy_j is not None
    assert fast.energy_j.value == pytest.approx(0.1 * 400)
    assert slow.energy_j.value == pytest.approx(0.1 * 2**0.8 * 100)
    assert fast.energy_j.ci95 is not None
    text = to_text.render(sweep_page(found))
    assert "Step time ∝ clock^(−a) with a = 0.80" in text
    assert "1.50 GHz" in text
    blocks = [block for section in sweep_page(found).sections for block in section.blocks]
    figures = [block for block in blocks if isinstance(block, Figure)]
    assert [f.name for f in figures] == ["sweep-step_ns", "sweep-energy_j"]


def test_the_fit_is_withheld_on_a_busy_machine(tmp_path):
    found = made(tmp_path, other_cores=1.5)
    assert found.sensitivity_ratio is None
    assert "other programs used 1.5 of 2 cores" in found.why
    assert "No fit of the step by clock: withheld" in to_text.render(sweep_page(found))


def test_a_power_law_is_found_and_noise_widens_its_interval():
    x = np.array([1.0, 2.0, 4.0, 8.0])
    exponent, ci95, r2 = power_law(x.tolist(), (3 * x**-0.7).tolist())
    assert exponent == pytest.approx(-0.7)
    assert r2 == pytest.approx(1)
    assert ci95 == pytest.approx((-0.7, -0.7))
    assert ex.SCHEMA == "chopper.experiment/1"


@pytest.mark.long
def test_a_training_is_measured_at_each_clock_in_turn(machine, tmp_path):
    """The command itself, to its end: order of settings, runs that are kept, the JSON."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(256, 256)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(30):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.rand(64, 256)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    found = machine()
    words = ("--values", "1980MHz,1200MHz", "--repeats", "2", "--apply", "--json", "-o", "out")
    code, out, err = found(*words, "--", sys.executable, "train.py")
    assert code == 0, err
    assert found.logged() == [
        *(f"0 {SET} {mhz} {mhz} = 0" for mhz in (1980, 1200, 1980, 1200)),
        f"0 {RESET} 0 0 = 0",
    ]
    document = json.loads(out)
    assert document["schema"] == "chopper.sweep/1"
    for point in document["points"]:
        assert point["step_ns"]["repeats_count"] == 2
    assert "all settings are as before" in err
    assert (tmp_path / "out" / "report.html").is_file()
    assert (tmp_path / "out" / "1200MHz-2" / "manifest.json").is_file()
