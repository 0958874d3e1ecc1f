"""What a rank says about its cores and its device's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from chopper.hardware import environment
from chopper.wording import ranges


def test_sets_of_cores_are_written_as_the_kernel_does() -> None:
    assert ranges([8, 0, 1, 2, 3, 10]) == "0-3,8,10"
    assert ranges([]) == ""


def test_the_manifest_names_the_cores_that_this_process_may_use() -> None:
    told = environment.environment()
    assert told["affinity"] == ranges(os.sched_getaffinity(0))
    assert told["cores_allowed"] == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_the_numa_node_of_a_device_is_that_of_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, node: int | None
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    fake = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _index: properties))
    monkeypatch.setitem(sys.modules, "torch", fake)
    folder = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    assert environment.device_numa_node("cuda:0", str(tmp_path)) == node


def test_a_device_without_an_address_has_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _index: object()))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert environment.device_numa_node("cuda:0") is None
