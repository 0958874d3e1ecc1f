"""The registry: built-ins, real entry points of other packages, and what is wrong with them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import chopper
import chopper.collectors
from chopper.collectors import registry
from chopper.collectors.base import Collector
from chopper.errors import ChopperError, CollectorUnavailable, UsageError
from chopper.storage.run import Run

GOOD = """
    from chopper.testing import ReplayCollector

    class Sensor(ReplayCollector):
        name = "sensor"
        def __init__(self):
            super().__init__({})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that offers collectors, some of them broken."""
    modules = {
        "good_sensor": GOOD,
        "broken_sensor": "import no_such_driver_library",
        "exiting_sensor": "raise KeyError('libamd_smi.so')",
        "hollow_sensor": "class Sensor:\n    name = 'hollow'\n    scope = 'rank'",
    }
    for name, code in modules.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    info = tmp_path / "sensors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sensors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        textwrap.dedent(
            """
            [chopper.collectors]
            sensor = good_sensor:Sensor
            broken = broken_sensor:Sensor
            exiting = exiting_sensor:Sensor
            hollow = hollow_sensor:Sensor
            missing = good_sensor:NoSuchClass
            host = good_sensor:Sensor
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_built_in_is_a_collector_of_its_name() -> None:
    assert len(registry.built_in()) == 8
    assert set(registry.built_in()) <= set(registry.names())
    for name in registry.built_in():
        kind = registry.get(name)
        assert kind.name == name
        assert kind.scope in ("rank", "host")
        assert isinstance(kind(), Collector)


def test_only_a_collector_that_costs_much_has_to_be_named() -> None:
    assert set(registry.built_in()) - set(registry.defaults()) == {"allocator_history"}


NEW = """
    from chopper.collectors.base import Availability
    from chopper.storage.manifest import CollectorReport

    NAME = "tides"
    BY_DEFAULT = True


    class TideCollector:
        name = NAME
        scope = "rank"

        def probe(self, context):
            return Availability(ok=True)

        def start(self, context):
            self.steps = []

        def on_step(self, step):
            self.steps.append(step)

        def stop(self):
            return CollectorReport(name=NAME, status="obtained", samples_count=len(self.steps))
"""


@pytest.mark.parametrize("file", ["tides.py", "tides/__init__.py"])
def test_a_collector_is_one_file_that_declares_itself(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "more" / file
    written.parent.mkdir(parents=True)
    written.write_text(textwrap.dedent(NEW))
    folders = [*chopper.collectors.__path__, str(tmp_path / "more")]
    monkeypatch.setattr(chopper.collectors, "__path__", folders)
    try:
        assert "tides" in registry.defaults()
        monkeypatch.chdir(tmp_path)
        with chopper.profile("run", trace=False) as prof:
            for _ in range(3):
                prof.step()
    finally:
        sys.modules.pop("chopper.collectors.tides", None)
    reports = {report.name: report for report in Run.open(tmp_path / "run").part(0).collectors}
    assert reports["tides"].samples_count == 3
    assert set(reports) == set(registry.defaults()) | {"tides"}


def test_listing_collectors_imports_none_of_them() -> None:
    code = (
        "import sys; from chopper.collectors import registry; registry.defaults(); "
        "print(*sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(shown.stdout.split())
    assert {name for name in loaded if name.startswith("chopper.collectors.")} == {
        "chopper.collectors.registry"
    }
    assert not loaded & {"amdsmi", "numpy", "pyarrow", "pynvml", "torch"}


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("hots", "did you mean host?"),
        ("torch", "torch_trace"),
        ("xyz", "there are allocator_history, amdsmi,"),
    ],
)
def test_an_unknown_name_is_a_usage_error_with_the_nearest(wrong: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"no collector is called '{wrong}'") as caught:
        registry.get(wrong)
    assert hint in str(caught.value)


def test_another_packages_collector_is_found(package: Path) -> None:
    assert "sensor" in registry.names()
    assert isinstance(registry.get("sensor")(), Collector)


def test_a_built_in_name_cannot_be_taken(package: Path) -> None:
    assert registry.get("host").__module__ == "chopper.collectors.host"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "ModuleNotFoundError: No module named 'no_such_driver_library'"),
        ("exiting", "KeyError: 'libamd_smi.so'"),
        ("missing", "AttributeError: module 'good_sensor' has no attribute 'NoSuchClass'"),
        ("hollow", "is not a collector: it has no probe, start, stop"),
    ],
)
def test_a_broken_one_is_unavailable_with_the_reason(package: Path, name: str, reason: str) -> None:
    with pytest.raises(CollectorUnavailable) as caught:
        registry.get(name)
    assert reason in str(caught.value)
    assert f"collector {name} (" in str(caught.value)


def test_broken_ones_break_no_others(package: Path) -> None:
    loaded, refused = registry.load_all()
    assert set(refused) == {"broken", "exiting", "hollow", "missing"}
    assert set(loaded) == {*registry.built_in(), "sensor"}
    loaded, refused = registry.load_all(["host", "broken"])
    assert (set(loaded), set(refused)) == ({"host"}, {"broken"})
    with pytest.raises(ChopperError):
        registry.load_all(["host", "no_such"])
