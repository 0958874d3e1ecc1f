"""The real trackers, each with its offline store, read back as the tracker itself reads it."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.errors import OutputError, UsageError
from chopper.integrations.trackers import log_run, log_safely, metrics_of, summary_of
from tests.command import run as run_command
from tests.golden.own import OWN
from tests.waiting import PATIENCE_S

Logged = dict[int, dict[str, float]]
"""Step → what was logged of it."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trackers, when they are imported


@pytest.fixture(scope="module", params=["model-cuda", "loading"])
def run(request: pytest.FixtureRequest) -> Attribution:
    return pipeline.attribute(OWN / request.param)


@pytest.fixture(scope="module")
def small() -> Attribution:
    return pipeline.attribute(OWN / "model-cuda")


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trackers read and write nothing of the user's, and send nothing."""
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("DIR", "CACHE_DIR", "DATA_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb-files"))
    (tmp_path / "wandb-files").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # which has read the environment once


def check(logged: Logged, run: Attribution, *, bits: int = 64) -> None:
    """Check that what was logged, in its own units, is the attribution to the nanosecond.

    With 32 bits, that it is the nearest number to it.
    """
    if bits == 32:
        wanted = {of.step: of.values for of in metrics_of(run)}
        check(wanted, run)
        assert logged == {
            number: {name: float(np.float32(value)) for name, value in values.items()}
            for number, values in wanted.items()
        }
        return
    numbers = {(w["rank"], w["step_index"]): w["number"] for w in run.all_steps.windows.to_pylist()}
    ranks: dict[int, int] = defaultdict(int)
    observed_ns: dict[int, int] = defaultdict(int)
    causes_ns: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for window in run.all_steps.windows.to_pylist():
        ranks[window["number"]] += 1
        observed_ns[window["number"]] += window["end_ns"] - window["start_ns"]
    for piece in run.all_steps.pieces.to_pylist():
        causes_ns[numbers[piece["rank"], piece["step_index"]]][piece["cause"]] += piece["time_ns"]
    recorded = [
        row for rank in run.recording.ranks for row in run.recording.table(rank, "step").to_pylist()
    ]
    assert {*logged} == {*ranks} | {row["number"] for row in recorded}
    for number, values in logged.items():
        marks = [r["end_ns"] - r["start_ns"] for r in recorded if r["number"] == number]
        if marks:
            assert round(values["chopper/step_ms"] * 1e6 * len(marks)) == sum(marks)
        of_causes = {
            name.removeprefix("chopper/cause/").removesuffix("_ms"): round(
                value * 1e6 * ranks[number]
            )
            for name, value in values.items()
            if name.startswith("chopper/cause/")
        }
        if number not in ranks:
            assert not of_causes
            assert "chopper/observed_ms" not in values
            continue
        assert {c: t for c, t in of_causes.items() if t} == {
            c: t for c, t in causes_ns[number].items() if t
        }
        assert sum(of_causes.values()) == observed_ns[number]
        assert round(values["chopper/observed_ms"] * 1e6 * ranks[number]) == observed_ns[number]
    if run.source.endswith("model-cuda"):
        assert all(1000 < values["chopper/sm_clock_mhz"] < 2000 for values in logged.values())
        assert all(100 < values["chopper/power_w"] < 1000 for values in logged.values())
        assert all(values["chopper/ideal_ms"] > 0 for values in logged.values())
    else:
        assert not any("chopper/sm_clock_mhz" in values for values in logged.values())


def check_summary(summary: dict[str, float], run: Attribution, *, bits: int = 64) -> None:
    if bits == 32:
        assert summary == {n: float(np.float32(v)) for n, v in summary_of(run).items()}
        summary = summary_of(run)
    assert run.step.headline_ns is not None
    assert round(summary["chopper/summary/step_time_ms"] * 1e6) == run.step.headline_ns
    shares = [v for name, v in summary.items() if name.startswith("chopper/summary/share/")]
    assert sum(shares) == pytest.approx(1)
    for row in run.leaves():
        share, low, high = (
            summary.get(f"chopper/summary/{name}/{row.id}")
            for name in ("share", "share_low", "share_high")
        )
        assert share == row.share_ratio
        assert (low is None, high is None) == (row.ci95_ns is None,) * 2


# ---------------------------------------------------------------- Weights & Biases


def wandb_records(path: Path) -> list[Any]:
    """Read a .wandb file: protobuf records in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, block = path.read_bytes(), 7, 1 << 15
    assert data[:4] == b":W&B"
    records, parts = [], b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, last
            records.append(Record.FromString(parts))
            parts = b""
    return records


def wandb_logged(file: Path) -> tuple[Logged, dict[str, Any], list[Any]]:
    import wandb

    wandb.teardown()  # its service has written all when it has ended
    logged: Logged = defaultdict(dict)
    summary: dict[str, Any] = {}
    records = wandb_records(file)
    for record in records:
        items = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        if (step := items.pop("chopper/step", None)) is not None:
            logged[step] |= {n: v for n, v in items.items() if n.startswith("chopper/")}
        for item in record.summary.update:
            summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return logged, summary, records


def test_wandb_has_steps_summary_and_report(run: Attribution, tmp_path: Path) -> None:
    where = log_run(run, "wandb", directory=tmp_path / "w")
    (file,) = (tmp_path / "w").rglob("*.wandb")
    assert where == f"{file.parent} (upload it: wandb sync {file.parent})"
    logged, summary, records = wandb_logged(file)
    check(logged, run)
    check_summary({n: v for n, v in summary.items() if n.startswith("chopper/summary/")}, run)
    (began,) = (r.run for r in records if r.WhichOneof("record_type") == "run")
    assert began.project == "chopper"
    (artifact,) = (
        r.request.log_artifact.artifact if r.HasField("request") else r.artifact
        for r in records
        if r.WhichOneof("record_type") == "artifact" or r.request.HasField("log_artifact")
    )
    assert [entry.path for entry in artifact.manifest.contents] == ["chopper-report.html"]
    (page,) = file.parent.rglob("*.html")
    assert "<html" in page.read_text()


def test_an_active_wandb_run_goes_on(small: Attribution, tmp_path: Path) -> None:
    import wandb

    with wandb.init(project="mine", settings=wandb.Settings(silent=True)) as active:
        active.log({"loss": 1.0})
        assert log_safely(small, "wandb") is not None
        active.log({"loss": 0.5})
        assert wandb.run is active
    (file,) = tmp_path.rglob("*.wandb")
    logged, _, records = wandb_logged(file)
    check(logged, small)
    losses = [
        i.value_json for r in records for i in r.history.item if "loss" in (i.key, *i.nested_key)
    ]
    assert losses == ["1", "0.5"]


def test_wandb_without_a_login_is_one_line_and_asks_nothing(tmp_path: Path) -> None:
    main, side = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "chopper", "export", OWN / "model-cuda", "--to", "wandb"],
        stdin=side,
        stderr=side,
        env={**os.environ, "WANDB_MODE": "online"},
    )
    os.close(side)
    said = b""
    try:
        while piece := os.read(main, 4096):
            said += piece
    except OSError:  # the terminal is gone with its last process
        pass
    assert done.wait(PATIENCE_S) == 1
    lines = [line for line in said.decode().splitlines() if "No API key" in line]
    assert len(lines) == 1
    assert "run `wandb login` or set WANDB_API_KEY; with WANDB_MODE=offline" in lines[0]
    assert "Traceback" not in said.decode()
    assert "Enter your choice" not in said.decode()


# ---------------------------------------------------------------- MLflow


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """MLflow's store in files, which is there at once: its database takes five seconds to make."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def mlflow_logged(uri: str, run_id: str) -> tuple[Logged, dict[str, float], list[str]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_run(run_id)
    logged: Logged = defaultdict(dict)
    for name in found.data.metrics:
        for metric in client.get_metric_history(run_id, name):
            if name.startswith("chopper/") and not name.startswith("chopper/summary/"):
                logged[metric.step][name] = metric.value
    files = [file.path for file in client.list_artifacts(run_id, "chopper")]
    summary = {n: v for n, v in found.data.metrics.items() if n.startswith("chopper/summary/")}
    return dict(logged), summary, files


def test_mlflow_has_steps_summary_and_report(run: Attribution, in_files: str) -> None:
    where = log_run(run, "mlflow")
    assert where.startswith(f"{in_files}, run ")
    logged, summary, files = mlflow_logged(in_files, where.rpartition(" ")[2])
    check(logged, run)
    check_summary(summary, run)
    assert files == ["chopper/chopper-report.html"]


def test_mlflow_needs_no_server(tmp_path: Path) -> None:
    done = run_command("export", OWN / "model-cuda", "--to", "mlflow", "-o", tmp_path / "m")
    assert done.code == 0, done.err
    uri, _, run_id = done.out.strip().partition(", run ")
    assert uri == f"sqlite:///{tmp_path / 'm' / 'mlflow.db'}"
    logged, _, files = mlflow_logged(uri, run_id)
    check(logged, pipeline.attribute(OWN / "model-cuda"))
    assert files == ["chopper/chopper-report.html"]
    assert [*(tmp_path / "m" / "artifacts").rglob("chopper-report.html")]


def test_an_active_mlflow_run_goes_on(small: Attribution, in_files: str) -> None:
    import mlflow

    mlflow.set_tracking_uri(in_files)
    try:
        with mlflow.start_run() as active:
            assert log_safely(small, "mlflow") is not None
            mlflow.log_metric("loss", 0.5)
        logged, _, _ = mlflow_logged(in_files, active.info.run_id)
    finally:
        mlflow.set_tracking_uri(None)
    check(logged, small)


# ---------------------------------------------------------------- TensorBoard


def tensorboard_logged(directory: Path) -> tuple[Logged, dict[str, float], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    logged: Logged = defaultdict(dict)
    summary: dict[str, float] = {}
    for tag in events.Tags()["scalars"]:  # as torch writes them
        for scalar in events.Scalars(tag):
            if tag.startswith("chopper/summary/"):
                summary[tag] = scalar.value
            elif tag.startswith("chopper/"):
                logged[scalar.step][tag] = scalar.value
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            value = make_ndarray(event.tensor_proto)
            if tag.startswith("chopper/summary/"):
                summary[tag] = value.item()
            elif value.dtype.kind == "f":
                assert value.dtype == np.float32, "its server shows no other"
                logged[event.step][tag] = value.item()
    (text,) = next(
        make_ndarray(e.tensor_proto).flatten()
        for tag in events.Tags()["tensors"]
        if tag.startswith("chopper/report")
        for e in events.Tensors(tag)
    )
    return dict(logged), summary, text.decode()


def test_tensorboard_has_steps_summary_and_report(run: Attribution, tmp_path: Path) -> None:
    done = run_command("export", run.source, "--to", "tensorboard", "-o", tmp_path / "t")
    assert done.code == 0, done.err
    logged, summary, text = tensorboard_logged(tmp_path / "t")
    check(logged, run, bits=32)
    check_summary(summary, run, bits=32)
    assert str(tmp_path / "t" / "chopper-report.html") in text
    assert (tmp_path / "t" / "chopper-report.html").is_file()
    assert f"| {run.leaves()[0].label} |" in text
    again = run_command("export", run.source, "--to", "tensorboard", "-o", tmp_path / "t")
    assert (again.code, "holds files" in again.line) == (1, True)


def test_a_summary_writer_of_torch_goes_on(small: Attribution, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        assert log_safely(small, "tensorboard", writer) is not None
        writer.add_scalar("loss", 0.5, 1)
    logged, summary, _ = tensorboard_logged(tmp_path)
    check(logged, small, bits=32)
    check_summary(summary, small, bits=32)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_server_that_is_not_there_is_one_line_and_soon(
    tracker: Any,
    small: Attribution,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")
    began_s = time.monotonic()
    with pytest.raises(OutputError) as refused:
        log_run(small, tracker)
    assert str(refused.value).startswith(f"{tracker}: ")
    assert "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert {"wandb": "WANDB_MODE=offline", "mlflow": "-o DIR"}[tracker] in str(refused.value)
    assert time.monotonic() - began_s < 40
    capsys.readouterr()
    assert log_safely(small, tracker) is None
    said = [n for n in capsys.readouterr().err.splitlines() if n.startswith("chopper: ")]
    assert len(said) == 1
    assert said[0].endswith("; the training goes on")
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "tensorboard"])
def test_a_package_that_is_not_there_is_named(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    done = run_command("export", OWN / "model-cuda", "--to", tracker, "-o", tmp_path / "x")
    assert done.code == 2
    assert f"{tracker} is not installed: pip install 'chopper-profiler[{tracker}]'" in done.line


def test_what_cannot_be_logged_is_refused(
    small: Attribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="tracker 'neptune' unknown: one of wandb, mlflow"):
        log_run(small, "neptune")
    with pytest.raises(UsageError, match="pass a SummaryWriter, or the directory"):
        log_run(small, "tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"tensorboard: FileExistsError.*choose a directory"):
        log_run(small, "tensorboard", directory=tmp_path / "file")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UsageError, match="WANDB_MODE=disabled logs nothing"):
        log_run(small, "wandb")


def test_a_run_that_is_not_there_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert log_safely(tmp_path / "none", "wandb") is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such file or directory; the training goes on" in line
