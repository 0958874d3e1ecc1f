from __future__ import annotations

import json
from pathlib import Path

import pytest

from chopper import pipeline
from tests.command import Outcome, run
from tests.conftest import tmpfs
from tests.golden.own import OWN
from tests.kineto_writer import small_trace


@pytest.fixture
def trace() -> str:
    return str(OWN / "fsdp2" / "rank-00000" / "trace.json.gz")


def chopper(*arguments: str, cwd: Path) -> Outcome:
    return run(*arguments, cwd=cwd)


def test_the_default_is_report_html_and_is_not_overwritten(trace, tmp_path) -> None:
    shown = chopper("report", trace, cwd=tmp_path)
    assert shown.code == 0, shown.err
    assert shown.out == "report.html\n"
    assert "MiB written" in shown.err
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")

    (tmp_path / "report.html").write_text("mine")
    again = chopper("report", trace, "-o", "report.html", cwd=tmp_path)
    assert again.code == 1
    assert "pass --force" in again.line
    assert chopper("report", trace, cwd=tmp_path).out == "report-2.html\n"
    (tmp_path / "report-2.html").unlink()
    assert (tmp_path / "report.html").read_text() == "mine"
    forced = chopper("report", trace, "--force", cwd=tmp_path)
    assert forced.code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_extension_chooses_the_format(trace, tmp_path) -> None:
    for name in ("r.md", "r.json", "r.txt"):
        shown = chopper("report", trace, "-o", name, cwd=tmp_path)
        assert shown.code == 0, shown.err
        assert shown.out == f"{name}\n"
        assert "next: chopper analyze" in shown.err
    assert json.loads((tmp_path / "r.json").read_text())["schema"] == "chopper.attribution/4"
    assert (tmp_path / "r.md").read_text().startswith("# ")
    assert "Observed" in (tmp_path / "r.txt").read_text()
    wrong = chopper("report", trace, "-o", "r.pdf", cwd=tmp_path)
    assert wrong.code == 2
    assert ".html, .md, .json, .txt" in wrong.line


def test_an_output_that_cannot_be_written_is_one_line(trace, tmp_path) -> None:
    missing = chopper("report", trace, "-o", "nowhere/r.html", cwd=tmp_path)
    assert missing.code == 1
    assert "does not exist" in missing.line
    (tmp_path / "d.html").mkdir()
    folder = chopper("report", trace, "-o", "d.html", cwd=tmp_path)
    assert folder.code == 1
    assert "is a directory" in folder.line


def test_a_full_disk_leaves_no_part_behind(trace, tmp_path) -> None:
    with tmpfs("size=256k") as disk:
        shown = chopper("report", trace, "-o", str(disk / "r.html"), cwd=tmp_path)
        assert shown.code == 1
        assert "No space left" in shown.line
        assert list(disk.iterdir()) == []


def test_what_is_no_run_is_one_line(tmp_path) -> None:
    (tmp_path / "empty.json").write_text("")
    for source in ("empty.json", "missing.json", "none-*.json", "."):
        shown = chopper("report", source, "-o", "r.html", cwd=tmp_path)
        assert shown.code == 1, source
        assert shown.line.startswith("chopper: ")
        assert not (tmp_path / "r.html").exists()


def test_what_the_report_is_made_from_is_not_overwritten(tmp_path) -> None:
    trace = tmp_path / "t.json"
    trace.write_bytes(small_trace().encode())
    before = trace.read_bytes()
    link = tmp_path / "link.json"
    link.hardlink_to(trace)
    for source, output in (("t.json", "t.json"), ("*.json", "t.json"), (".", "link.json")):
        shown = chopper("report", source, "-o", output, "--force", cwd=tmp_path)
        assert shown.code == 1
        assert "is an input of the report" in shown.line
    assert trace.read_bytes() == before
    assert chopper("report", "t.json", "-o", "other.json", cwd=tmp_path).code == 0


def test_no_report_goes_into_a_run(tmp_path) -> None:
    (tmp_path / "t.json").write_bytes(small_trace().encode())
    assert chopper("import", "t.json", "-o", "run", cwd=tmp_path).code == 0
    (tmp_path / "link").symlink_to("run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    for output in ("run/manifest.json", "run/report.html", "link/rank-00000/r.md"):
        for source in ("run", "t.json"):
            shown = chopper("report", source, "-o", output, "--force", cwd=tmp_path)
            assert shown.code == 1
            assert "lies inside the run" in shown.line
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    # A web page's manifest.json does not make its directory a run.
    (tmp_path / "manifest.json").write_text('{"name": "my site"}')
    assert chopper("report", "run", "-o", "r.md", cwd=tmp_path).code == 0


def test_the_api_does_not_overwrite_what_the_report_is_made_from_either(tmp_path) -> None:
    import chopper as api
    from chopper.errors import OutputError

    trace = tmp_path / "t.json"
    trace.write_bytes(small_trace().encode())
    before = trace.read_bytes()
    run = pipeline.read(trace)
    for source in (trace, run, pipeline.attribute(run)):
        with pytest.raises(OutputError, match="is an input of the report"):
            api.report(source, trace)
    assert trace.read_bytes() == before
    assert api.report(trace, tmp_path / "other.json").stat().st_size


def test_the_api_takes_several_traces_wherever_it_takes_one(tmp_path) -> None:
    import chopper as api

    paths = []
    for rank in range(2):
        paths.append(tmp_path / f"rank{rank}.json")
        paths[-1].write_bytes(small_trace(pid=10 + rank, device=rank).encode())
    assert len(pipeline.attribute(paths).ranks) == 2
    assert api.report(paths, tmp_path / "r.json").stat().st_size
    assert api.compare(paths, paths).a.ranks == 2
