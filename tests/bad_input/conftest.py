from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.make import analyzed, of_rank, write
from tests.command import run
from tests.kineto_writer import small_trace


@pytest.fixture(scope="module")
def intact() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return analyzed(write(Path(folder) / "t.json", small_trace().encode()))


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    source = tmp_path / "traces"
    source.mkdir()
    for r in range(2):
        write(source / f"rank{r}.json.gz", gzip.compress(of_rank(r)))
    assert run("import", source, "-o", tmp_path / "run").code == 0
    return tmp_path / "run"
