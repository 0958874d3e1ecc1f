"""``--layout``, and all that is shown of the places of ranks in the dimensions of parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import chopper
from chopper.cli import cli
from chopper.errors import UsageError
from tests.kineto_writer import small_trace


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)


def document(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def _traces(folder: Path, groups: dict[str, list[list[int]]]) -> Path:
    """Traces of four ranks whose headers list the process groups of each, as Kineto does."""
    for rank in range(4):
        trace = small_trace(rank=rank, world=4, pid=100 + rank, device=rank)
        content = json.loads(trace.encode())
        content["distributedInfo"]["pg_config"] = [
            {"pg_name": str(i), "pg_desc": name, "ranks": members, "pg_size": len(members)}
            for i, (name, each) in enumerate(groups.items())
            for members in each
            if rank in members
        ]
        (folder / f"rank{rank}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _traces(tmp_path_factory.mktemp("plain"), {"undefined": [[0, 1], [2, 3]]})


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Ranks 0 and 2 are one pipeline.
    groups = {"mesh_pp": [[0, 2], [1, 3]], "mesh_tp": [[0, 1], [2, 3]]}
    return _traces(tmp_path_factory.mktemp("mesh"), groups)


def test_time_is_grouped_by_the_dimensions_that_groups_tell(mesh: Path) -> None:
    by_rank = {g["rank"]: g for g in document("analyze", mesh, "--by", "rank")["groups"]}
    found = document("analyze", mesh, "--by", "pipeline")
    assert [g["pipeline"] for g in found["groups"]] == [0, 1]
    for stage in found["groups"]:
        ranks = [by_rank[2 * stage["pipeline"] + i] for i in (0, 1)]
        assert stage["time_ns"] == sum(one["time_ns"] for one in ranks)
        assert stage["step_ns"] == sum(one["step_ns"] for one in ranks) // 2
    assert sum(g["time_ns"] for g in found["groups"]) == found["observed_ns"]
    shown = run("analyze", mesh, "--by", "tensor").stdout
    assert "By tensor parallelism" in shown
    assert "tensor 1" in shown


def test_ranks_are_named_and_ordered_by_their_places(plain: Path) -> None:
    laid = ("--layout", "pp=2,tp=2")
    labels = [r["label"] for r in document("analyze", plain, *laid)["ranks"]]
    assert labels[1] == "rank 1 (pipeline 1, tensor 0)"
    shown = run("analyze", plain, "--by", "rank", *laid)
    rows = [line for line in shown.stdout.splitlines() if "rank " in line and "µs" in line]
    order = [int(line.split("rank ")[1].split()[0]) for line in rows[:4]]
    assert order == [0, 2, 1, 3]
    assert f"chopper report {plain} --layout pp=2,tp=2" in run("analyze", plain, *laid).stderr


def test_the_table_of_coordinates_joins_every_other(mesh: Path, tmp_path: Path) -> None:
    sql = "SELECT rank, dimension, index, size_count, source FROM coordinate ORDER BY ALL"
    listed = run("query", mesh, sql, "--format", "csv").stdout.splitlines()
    assert listed[1] == "0,pipeline,0,2,process group mesh_pp"
    assert len(listed) == 1 + 2 * 4
    joined = (
        'SELECT c.index, sum(w.end_ns - w.start_ns) FROM "window" w JOIN coordinate c USING (rank)'
        " WHERE c.dimension = 'tensor' GROUP BY 1 ORDER BY 1"
    )
    attribution = chopper.attribute(mesh)
    groups = [group["time_ns"] for group in attribution.by("tensor")]
    rows = run("query", mesh, joined, "--format", "csv").stdout.splitlines()[1:]
    assert [int(row.split(",")[1]) for row in rows] == groups
    imported = tmp_path / "run"
    assert run("import", mesh, "-o", imported).exit_code == 0
    assert run("query", imported, sql, "--format", "csv").stdout.splitlines() == listed
    target = tmp_path / "tables"
    assert run("export", mesh, "--to", "csv", "-o", target).exit_code == 0
    assert len((target / "coordinate.csv").read_text().splitlines()) == 1 + 2 * 4
    assert (target / "summary/by_pipeline.csv").is_file()
    assert not (target / "summary/by_data.csv").exists()


def test_a_dimension_that_is_not_known_says_why(plain: Path, mesh: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run("analyze", plain, "--by", "pipeline")
    assert str(caught.value) == (
        f"{plain}: no rank's place in pipeline parallelism is known: process groups of 2 ranks "
        "have no name that tells what they divide; name the layout, for example "
        "--layout tp=4,pp=4,dp=4"
    )
    with pytest.raises(UsageError, match="pipeline 2 × tensor 2 are all 4 ranks"):
        chopper.attribute(mesh).by("data")


def test_every_command_that_takes_a_run_takes_a_layout(plain: Path, tmp_path: Path) -> None:
    laid = ("--layout", "tp=2,pp=2,vp=2")
    page = tmp_path / "page.md"
    assert run("report", plain, *laid, "-o", page).exit_code == 0
    assert "By pipeline parallelism" in page.read_text()
    assert run("whatif", plain, *laid).exit_code == 0
    assert run("compare", plain, plain, *laid).exit_code == 0
    sql = "SELECT stages, stages_count FROM coordinate WHERE rank = 3 AND dimension = 'pipeline'"
    rows = ["stages,stages_count", '"1,3",4']
    assert run("query", plain, sql, *laid, "--format", "csv").stdout.splitlines() == rows
    target = tmp_path / "tables"
    assert run("export", plain, *laid, "--to", "csv", "-o", target).exit_code == 0
    assert "named by the user: tp=2" in (target / "coordinate.csv").read_text()
    imported = tmp_path / "run"
    assert run("import", plain, *laid, "-o", imported).exit_code == 0
    assert run("query", imported, sql, "--format", "csv").stdout.splitlines() == rows
    assert [g["tensor"] for g in document("analyze", imported, "--by", "tensor")["groups"]] == [
        0,
        1,
    ]


def test_python_takes_a_layout(plain: Path) -> None:
    loaded = chopper.load(plain, layout="tp=2,dp=2")
    assert [g["data"] for g in loaded.attribution.by("data")] == [0, 1]
    assert len(loaded.query("FROM coordinate")) == 8
    assert [g["pipeline"] for g in chopper.attribute(plain, layout="pp=4").by("pipeline")] == [
        *range(4)
    ]
    with pytest.raises(UsageError, match="layout is 4"):
        chopper.load(plain, layout=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2", "layout 'tp=2': its sizes multiply to 2, expected 4"),
        ("tp=2,zz=2", "no dimension is called 'zz'"),
        ("tp", "--layout 'tp': 'tp' is no size; write tp=4,pp=4,dp=4"),
    ],
)
def test_what_is_refused(text: str, message: str, plain: Path) -> None:
    for command in (("analyze", plain), ("query", plain, "FROM coordinate")):
        with pytest.raises(UsageError) as caught:
            run(*command, "--layout", text)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
