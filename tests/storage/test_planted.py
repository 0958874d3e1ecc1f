"""What others put where chopper writes: nothing is written through it, nothing is taken from it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from chopper.collectors.formats import exported
from chopper.errors import ChopperError, InputError, RunFormatError
from chopper.experiments.guardian import guarded
from chopper.ingest.ranks import rank_by_name
from chopper.storage import remote
from chopper.storage.caches import cache_folder
from chopper.storage.destination import is_of_run, working_dir
from chopper.storage.files import create, inside, write_atomic
from chopper.storage.layout import is_rank_dir
from chopper.storage.parquet import Writer
from chopper.storage.streams import StreamWriter
from chopper.tables import TABLES
from tests.bad_input.make import GOOD, of_rank, write
from tests.command import run
from tests.storage.hostile_server import serving
from tests.storage.s3_server import forget

VICTIM = "not to be changed"
OTHER_USER = 12345


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text(VICTIM)
    return file


def _link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def _hard_link(place: Path, victim: Path) -> None:
    place.hardlink_to(victim)


def _fifo(place: Path, victim: Path) -> None:
    os.mkfifo(place)


def _of_another(place: Path, victim: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a file to another user")
    place.write_text("1")
    os.chown(place, OTHER_USER, OTHER_USER)


PLANTED = (_link, _hard_link, _fifo, _of_another)


@pytest.mark.parametrize("plant", PLANTED)
def test_what_stands_at_a_claim_is_refused_in_a_line(
    plant: Callable[[Path, Path], None], tmp_path: Path, victim: Path
) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    plant(tmp_path / ".run.claim", victim)
    outcome = run("import", trace, "-o", tmp_path / "run")
    assert (outcome.code, len(outcome.lines)) == (1, 1)
    assert f"{tmp_path}/.run.claim: is " in outcome.err
    assert "remove it" in outcome.err
    assert victim.read_text() == VICTIM
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("plant", PLANTED)
def test_the_lock_of_clocks_is_ones_own(
    plant: Callable[[Path, Path], None], tmp_path: Path, victim: Path
) -> None:
    plant(lock := tmp_path / "sweep.lock", victim)
    with (
        pytest.raises(ChopperError, match=f"^nothing is set: {lock}: is [^\n]+$"),
        guarded([], lock),
    ):
        pass
    assert victim.read_text() == VICTIM


@pytest.mark.parametrize("plant", PLANTED)
def test_new_files_take_the_place_of_what_is_there(
    plant: Callable[[Path, Path], None], tmp_path: Path, victim: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("new", f".atomic.{os.getpid()}.tmp", f".table.{os.getpid()}.tmp", "step.arrow"):
        plant(folder / name, victim)
    create(folder / "new").close()
    write_atomic(folder / "atomic", b"data")
    with Writer(folder / "table", TABLES["step"].arrow):
        pass
    StreamWriter(folder / "step.arrow", "step").close()
    assert victim.read_text() == VICTIM
    assert {p.name for p in folder.iterdir()} == {"new", "atomic", "table", "step.arrow"}
    assert all(stat.S_ISREG(p.lstat().st_mode) for p in folder.iterdir())


def test_a_working_folder_that_is_there_is_not_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    trace = write(tmp_path / "t.json", GOOD)
    assert run("import", trace, "-o", tmp_path / "run").code == 0
    for what in ("old", "new", "moving"):
        working_dir(tmp_path / "run", what).symlink_to(elsewhere)
    outcome = run("import", trace, "-o", tmp_path / "run", "--force")
    assert (outcome.code, len(outcome.lines)) == (1, 1)
    assert "cannot be replaced" in outcome.err
    assert not [*elsewhere.iterdir()]
    assert (tmp_path / "run" / "manifest.json").is_file()


def test_an_export_goes_through_no_link(tmp_path: Path, victim: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank-00000").symlink_to(tmp_path / "elsewhere")
    (out / "ranks.csv").symlink_to(victim)
    outcome = run("export", trace, "--to", "csv", "-o", out, "--force")
    assert (outcome.code, len(outcome.lines)) == (1, 1)
    assert "is a link" in outcome.err
    assert victim.read_text() == VICTIM
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "t.json", "victim"]


def test_an_export_that_fails_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    arguments = ("export", trace, "--to", "csv", "-o", tmp_path / "out", "--force")
    assert run(*arguments).code == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.setattr("pyarrow.csv.write_csv", _raises_full)
    assert run(*arguments).code == 1
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def _raises_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_cache_is_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "chopper").mkdir(mode=0o777)
    folder = cache_folder("imports", "a")
    assert folder == cache_folder("imports", "a") != cache_folder("imports", "b")
    for own in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
    (tmp_path / "chopper/linked").symlink_to(tmp_path)
    assert not cache_folder("linked", "a").is_relative_to(tmp_path / "chopper")
    if not os.geteuid():
        os.chown(folder, OTHER_USER, OTHER_USER)
        assert not cache_folder("imports", "a").is_relative_to(tmp_path)


def test_an_import_takes_nothing_that_lies_beside_its_output(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank in range(2):
        (traces / f"rank{rank}.json").write_bytes(of_rank(rank, 2))
    (tmp_path / ".run.chopper-read").symlink_to("elsewhere")
    assert run("import", traces, "-o", tmp_path / "run", "--workers", "1").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run.chopper-read", "run", "traces"]


def test_what_tells_copies_apart_is_a_file_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with serving(GOOD) as server:
        words = ("analyze", server(headers={"ETag": "1"}), "--json")
        answer = run(*words)
        (noted,) = (tmp_path / "cache").rglob(".versions/*/*")
        noted.unlink()
        os.mkfifo(noted)
        forget()
        assert run(*words).out == answer.out
        noted.unlink()
        noted.parent.rmdir()
        noted.parent.symlink_to(elsewhere)
        forget()
        assert "is a link" in run(*words).line
    assert not [*elsewhere.iterdir()]


NOT_OURS = ("rank-0000٣", "rank-00000\n", "process-²", "attempt-٣", "tables\n", "manifest.json\n")


@pytest.mark.parametrize("name", NOT_OURS)
def test_names_with_other_digits_or_lines_are_not_ours(name: str) -> None:
    assert not is_of_run(name)
    assert not is_rank_dir(Path(name))
    assert rank_by_name(Path(name)) is (0 if name == "rank-00000\n" else None)
    assert not exported._NAME.fullmatch(f"{name}/step.parquet")


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/../../b", "a\0b", "..", "", "linked/a"])
def test_no_name_leaves_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to("/")
    with pytest.raises(RunFormatError):
        inside(tmp_path, name)


@pytest.mark.parametrize("base", ["bucket/job/..", "bucket/..", "..", "bucket/job"])
def test_a_copy_lies_in_its_folder(base: str, tmp_path: Path) -> None:
    for name in ("a", "../a", "b/../../a", "b\0a"):
        if (base, name) == ("bucket/job", "a"):
            assert remote._copy_of(tmp_path, Path(base).name, name) == tmp_path / "job" / "a"
            continue
        with pytest.raises(InputError):
            remote._copy_of(tmp_path, Path(base).name, name)
