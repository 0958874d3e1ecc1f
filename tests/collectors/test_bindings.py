"""The oldest bindings that are declared read what the newest do, of the scripted libraries.

The newest are those of the development environment; the oldest come from the package index once,
into pytest's cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.collectors import amd_player, nvml_player

OLDEST = {"nvidia-ml-py": "12.560.30", "amdsmi": "6.3.0"}
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
SOURCES = {
    "nvml": ("ClockSource", "CounterSource", "ActivitySource", "LimitSource"),
    "amd": ("ClockSource", "CounterSource", "LimitSource", "PartSource"),
}


@pytest.fixture(scope="module")
def oldest(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the oldest bindings; skips where the index cannot be reached."""
    pins = [f"{name}=={version}" for name, version in OLDEST.items()]
    folder = Path(pytestconfig.cache.mkdir("bindings")) / "-".join(OLDEST.values())
    if not folder.exists():
        made = tmp_path_factory.mktemp("oldest") / "made"
        command = [sys.executable, *PIP, "--no-compile", "--target", str(made), *pins]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"no package index gives {', '.join(pins)}: {last}")
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def test_the_oldest_bindings_are_those_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["amd"]]
    for name, version in OLDEST.items():
        (least,) = (d.partition(">=")[2] for d in declared if d.startswith(f"{name}>="))
        assert version.startswith(f"{least}."), name


def reading(vendor: str, module: str, *times: int) -> str:
    """Code that prints all that the sources of a vendor tell, and where the binding lies."""
    return f"""
    import importlib
    found = [probed()]
    for name in {SOURCES[vendor]!r}:
        source = getattr(_sources, name)()
        found += [name, rows(opened(source), *{times}), dict(source.absent)]
    print(json.dumps([found, importlib.import_module({module!r}).__file__]))
    """


NVML = (
    nvml_player.TWO
    + """
    set 0 capability 90
    set 0 limit 700000
    set 0 max_sm 1980
    set 0 temperature 61
    set 0 threshold:3 87
    set 0 utilization 90
    set 0 memory_used 1073741824
    set 0 memory_total 85520809984
    set 0 field:83 12500
    set 0 field:74 7
    set 0 field:269 5
    set 0 gpm 1
    set 0 gpm:2 50
    set 1 power 300000
"""
)


def test_nvidia(oldest: Path, nvml_library: Path, tmp_path: Path) -> None:
    play = nvml_player.Player(nvml_library, tmp_path)
    code = reading("nvml", "pynvml", 0, 200)
    newest, newest_file = play(NVML, code)
    found, file = play(NVML, code, PYTHONPATH=str(oldest))
    assert Path(file).is_relative_to(oldest)
    assert not Path(newest_file).is_relative_to(oldest)
    assert found == newest
    assert {row[0] for row in [*found[2], *found[5], *found[8], *found[11]]} == {
        "device_clock", "device_counter", "device_activity", "device_limit",
    }  # fmt: skip


@pytest.fixture
def amd_players(
    oldest: Path, amd_library: tuple[Path, dict[str, list[int]]], tmp_path: Path
) -> tuple[amd_player.Player, amd_player.Player]:
    """Players for the newest and for the oldest binding, each with a library of its layouts."""
    for name in ("newest", "oldest", "library"):
        (tmp_path / name).mkdir()
    library = amd_player.build(tmp_path / "library", oldest)
    return (
        amd_player.Player(*amd_library, tmp_path / "newest"),
        amd_player.Player(*library, tmp_path / "oldest"),
    )


@amd_player.needs_amdsmi
def test_amd(oldest: Path, amd_players: tuple[amd_player.Player, amd_player.Player]) -> None:
    """Before 6.4 there is no amdsmi_enumeration_info_t: KFD's nodes and serial numbers tell it."""
    told = []
    for play in amd_players:
        lines = ["gpu 0 1 GPU-b1c8b5c8c3a9f2d1 SPX", "gpu 1 0 GPU-e1e8b5c8c3a9f2d1 SPX"]
        lines += ["clock 0 2100", "cap 0 750000000 0 750000000"]
        for n in range(3):
            lines.append(play.set(0, "accumulation_counter", 1000 + 100 * n, n))
            lines.append(play.set(0, "ppt_residency_acc", 10 * n, n))
        for name, value in (
            ("current_gfxclk", 1900), ("current_uclk", 1300), ("current_socket_power", 640),
            ("energy_accumulator", 1_000_000), ("temperature_hotspot", 71),
            ("temperature_mem", 60), ("average_gfx_activity", 88), ("pcie_link_width", 16),
        ):  # fmt: skip
            lines += [play.set(device, name, value + device) for device in (0, 1)]
        lines += [play.set(0, "xgmi_read_data_acc", 3, item=0)]
        environment = {} if play is amd_players[0] else {"PYTHONPATH": str(oldest)}
        told.append(play(lines, reading("amd", "amdsmi", 10**9, 2 * 10**9), **environment))
    (newest, _), (found, file) = told
    assert Path(file).is_relative_to(oldest)
    assert found == newest
    (_, _, clocks, _, *_) = found
    assert [(row["device_id"], row["device_uuid"]) for row in clocks[:2]] == [
        (0, "GPU-e1e8b5c8c3a9f2d1"),
        (1, "GPU-b1c8b5c8c3a9f2d1"),
    ]
