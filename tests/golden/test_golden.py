"""Recordings and the numbers that are expected of them, equal to the nanosecond.

``pytest tests/golden --update-golden`` writes the numbers anew; see README.md.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import math
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.causes import LEVELS
from chopper.errors import InputError
from tests.golden.fetch import blank, catalogue, fetch
from tests.golden.numbers import EXPECTED, HEADER, Row, numbers

OWN = Path(__file__).parent / "own"
_ONE_RUN = "param/v100-dlrm-8ranks"
_NOT_ATTRIBUTED = (
    "reference-reports",
    "zeus/",
    "telemetry-nvidia/",
    "amd-mi300x",
    "memory-snapshots/",
)


def public() -> list[str]:
    names = (row["name"] for row in catalogue())
    wanted = (n for n in names if not any(part in n for part in _NOT_ATTRIBUTED))
    return list(dict.fromkeys(_ONE_RUN if n.startswith(_ONE_RUN) else n for n in wanted))


def closes(attribution: Attribution) -> None:
    """Causes sum to the observed time of each step, at every level."""
    windows = attribution.windows
    spans = windows["end_ns"].to_numpy() - windows["start_ns"].to_numpy()
    assert attribution.observed_ns == spans.sum()
    assert sum(leaf.time_ns for leaf in attribution.leaves()) == attribution.observed_ns
    for level in LEVELS:
        groups = attribution.by(level)
        assert sum(g.time_ns for g in groups) == attribution.observed_ns, level
        assert all(sum(g.causes.values()) == g.time_ns for g in groups), level
    time_ns = attribution.pieces["time_ns"].to_numpy()
    per_step: Counter[tuple[int, int]] = Counter()
    for piece in attribution.pieces.select(["rank", "step_index", "time_ns"]).to_pylist():
        per_step[piece["rank"], piece["step_index"]] += piece["time_ns"]
    for window in windows.to_pylist():
        length_ns = window["end_ns"] - window["start_ns"]
        assert per_step[window["rank"], window["step_index"]] == length_ns
    assert (time_ns >= 0).all()
    gap_ns = attribution.gaps["end_ns"].to_numpy() - attribution.gaps["start_ns"].to_numpy()
    assert gap_ns.sum() == sum(c.time_ns for c in attribution.causes() if c.id == "idle")


def verdicts() -> list[dict[str, str]]:
    with (Path(__file__).parent / "verdicts.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


VERDICTS = {row["recording"]: row for row in verdicts()}


def judge(attribution: Attribution, expected: dict[str, str]) -> None:
    """The class, the first cause with its share, and the first action are as an expert says."""
    document = reports.document(attribution)
    found, actions = document["verdict"], document["actions"] or []
    first = next(iter(found["largest_causes"]), {"cause": "", "share_ratio": None})
    assert found["class"] == expected["class"], found["sentence"]
    assert first["cause"] == expected["first_cause"]
    share = float(expected["share_ratio"]) if expected["share_ratio"] else None
    assert first["share_ratio"] == (None if share is None else pytest.approx(share, abs=0.015))
    assert next((a["detector"] for a in actions), "") == expected["first_action"]


def test_every_recording_has_a_verdict() -> None:
    named = {*VERDICTS}
    assert all(row["reason"] for row in VERDICTS.values())
    attributed = {name for name in public() if (EXPECTED / f"{name}.csv").exists()}
    own = {f"own/{path.name}" for path in OWN.iterdir() if path.is_dir()}
    assert attributed | own == named


def check(source: Path, name: str, update: bool) -> None:
    run = pipeline.read(source)
    shown = pipeline.attribute(run)
    for attribution in {id(a): a for a in (shown, shown.all_steps)}.values():
        closes(attribution)
    judge(shown, VERDICTS[name])
    rows = numbers(run, shown.all_steps)
    file = EXPECTED / f"{name}.csv"
    if update:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", newline="") as out:
            csv.writer(out, lineterminator="\n").writerows([HEADER, *rows])
        return
    with file.open(newline="") as expected:
        header, *wanted = (tuple(row) for row in csv.reader(expected))
    assert header == HEADER
    assert [_exact(row) for row in rows] == [_exact(tuple(row)) for row in wanted]  # type: ignore[arg-type]


def _exact(row: Row) -> tuple[str, ...]:
    """A row whose ratio is shown with as many digits as any machine computes alike."""
    *where, value = row
    ratio = "." in value and row[2].startswith("coverage.")
    return (*where, f"{float(value):.9g}" if ratio else value)


@pytest.mark.parametrize("name", sorted(p.name for p in OWN.iterdir() if p.is_dir()))
def test_own_recordings_have_their_numbers(name: str, update_golden: bool, tmp_path: Path) -> None:
    check(Path(shutil.copytree(OWN / name, tmp_path / name)), f"own/{name}", update_golden)


@pytest.mark.parametrize("name", public())
def test_public_recordings_have_their_numbers(
    name: str, traces_dir: Path, update_golden: bool
) -> None:
    if not (traces_dir / name).exists():
        pytest.skip(f"{name} is not in CHOPPER_TRACES: `make traces` downloads it")
    if not update_golden and not (EXPECTED / f"{name}.csv").exists():
        with pytest.raises(InputError):
            pipeline.attribute(traces_dir / name)
        return
    try:
        check(traces_dir / name, name, update_golden)
    except InputError:
        if not update_golden:
            raise


def test_downloads_are_checked_and_credentials_blanked(tmp_path: Path) -> None:
    at = tmp_path / "owner/name/abc"
    at.mkdir(parents=True)
    (at / "a b.json").write_bytes(b'{"token": "secret!!"}')
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        entry = tarfile.TarInfo("inner/one.json")
        entry.size = 2
        tar.addfile(entry, io.BytesIO(b"{}"))
    (at / "all.tar.gz").write_bytes(archive.getvalue())
    row = {"repository": "owner/name", "commit": "abc", "member": "", "blanked": ""}
    blanked = b'{"token": "GONE****"}'
    rows = [
        row | {"name": "x/a.json.gz", "path": "a b.json", "blanked": "11:8:GONE*"},
        row | {"name": "x/one.json", "path": "all.tar.gz", "member": "one.json"},
        row | {"name": "x/other.json", "path": "a b.json"},
        row | {"name": "x/absent.json", "path": "absent.json"},
    ]
    for entry_row, content in zip(rows, (blanked, b"{}", b"other", b""), strict=True):
        entry_row["sha256"] = hashlib.sha256(content).hexdigest()
    problems = fetch(tmp_path / "traces", rows, tmp_path.as_uri())
    assert gzip.decompress((tmp_path / "traces/x/a.json.gz").read_bytes()) == blanked
    assert (tmp_path / "traces/x/one.json").read_bytes() == b"{}"
    assert [p.split(":")[0] for p in problems] == ["x/other.json", "x/absent.json"]
    assert blank(b"0123", "") == b"0123"


def test_the_catalogue_names_each_file_once_with_its_source() -> None:
    rows = catalogue()
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert math.log2(int(row["commit"], 16)) > 100
        assert len(row["sha256"]) == 64
        assert row["licence"] in {"MIT", "Apache-2.0", "BSD-3-Clause"}
