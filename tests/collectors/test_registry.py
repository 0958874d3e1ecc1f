"""The registry: built-ins, real entry points of other packages, and what is wrong with them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from chopper.collectors import registry
from chopper.collectors.base import Collector
from chopper.errors import ChopperError, CollectorUnavailable, UsageError

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
    assert set(registry.BUILTIN) <= set(registry.names())
    assert list(registry.BUILTIN) == sorted(registry.BUILTIN)
    for name in registry.BUILTIN:
        kind = registry.get(name)
        assert kind.name == name
        assert kind.scope in ("rank", "host")
        assert isinstance(kind(), Collector)


def test_defaults_exist() -> None:
    assert set(registry.defaults()) <= set(registry.names())


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
    assert registry.origin("sensor") == "good_sensor:Sensor"
    assert isinstance(registry.get("sensor")(), Collector)


def test_a_built_in_name_cannot_be_taken(package: Path) -> None:
    assert registry.origin("host") == "chopper.collectors.host:HostCollector"


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
    assert set(loaded) == {*registry.BUILTIN, "sensor"}
    loaded, refused = registry.load_all(["host", "broken"])
    assert (set(loaded), set(refused)) == ({"host"}, {"broken"})
    with pytest.raises(ChopperError):
        registry.load_all(["host", "no_such"])
