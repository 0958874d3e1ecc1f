from __future__ import annotations

from pathlib import Path

import pytest

from tests.collectors import amd_player, nvml_player


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_player.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def amd_library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    return amd_player.build(tmp_path_factory.mktemp("amd"))


@pytest.fixture
def play(nvml_library: Path, tmp_path: Path) -> nvml_player.Player:
    return nvml_player.Player(nvml_library, tmp_path)
