"""Views declare themselves: one file each, found by listing their folder."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from chopper.analyzers.views import SECTIONS
from chopper.views import VIEWS, in_sections, summaries
from tests.kineto_writer import small_trace

ADDED = '''"""How many device events each rank ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.analyzers.views import View, column

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed

VIEW = View(
    "event_counts",
    __doc__,
    (column("rank", "Rank.", "int32"), column("event_count", "Device events of the rank.")),
    title="Event counts",
    section="Operators",
    needs="nothing ran on the device",
)


def event_counts(run: Attributed) -> pa.Table:
    """EVENT_LINK -> EVENT_COUNTS."""
    links = run.links.items()
    return VIEW.of_rows([{"rank": r, "event_count": t.num_rows} for r, t in links])
'''


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_view_is_what_its_file_is_called(name: str) -> None:
    view = VIEWS[name]
    module = importlib.import_module(f"chopper.analyzers.views.{name}")
    assert view.name == name
    assert callable(getattr(module, name))
    assert view.section in SECTIONS
    assert view.summary.endswith(".")
    assert all(column.doc.endswith(".") for column in view.columns)
    names = [column.name for column in view.columns]
    assert len(names) == len(set(names))


def test_summaries_are_read_without_importing_a_view() -> None:
    assert summaries() == {view.name: view.summary for view in in_sections()}


def _with_folder(folder: Path, *arguments: str) -> str:
    """What the command prints where the folder of views reaches into another one."""
    code = (
        "import sys\n"
        "import chopper.analyzers.views as views\n"
        f"views.__path__.append({str(folder)!r})\n"
        "from chopper.cli import main\n"
        f"sys.argv = ['chopper', *{list(arguments)!r}]\n"
        "main()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_a_file_in_the_folder_is_a_view(tmp_path: Path) -> None:
    (tmp_path / "event_counts.py").write_text(ADDED)
    trace = tmp_path / "trace.json"
    trace.write_bytes(small_trace().encode())
    listed = _with_folder(tmp_path, "analyze", "--view", "list")
    assert "How many device events each rank ran." in listed
    shown = _with_folder(tmp_path, "analyze", str(trace), "--view", "event_counts", "--csv")
    assert shown.splitlines()[0] == "rank,event_count"
    assert int(shown.splitlines()[1].split(",")[1]) > 0
    assert "Device events of the rank." in _with_folder(tmp_path, "schema", "event_counts")
    assert "event_counts" in _with_folder(tmp_path, "schema")
