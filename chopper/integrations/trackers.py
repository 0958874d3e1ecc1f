"""A run in an experiment tracker: Weights & Biases, MLflow or TensorBoard.

A training script logs into the tracker's active run at its end, on one rank::

    log_safely("runs/mine", "wandb")

``chopper export RUN --to wandb`` logs later, into a run of its own. Names of what is logged:

- ``chopper/cause/<id>_ms``: time of a leaf cause in a traced step; they sum to ``observed_ms``.
- ``chopper/observed_ms``, ``chopper/ideal_ms``: a traced step's window, and its math at peak.
- ``chopper/step_ms``: length on the host of each recorded step, traced or not.
- ``chopper/sm_clock_mhz``, ``chopper/power_w``: of the devices in a traced step, where sampled.
- ``chopper/summary/…``: the step time, and the share of each leaf cause with its 95 % interval.

The x axis is the number of the step. All values are means over ranks; what is unknown is left out.
Times are integer nanoseconds divided by 10⁶ and the ranks, in 64 bits: multiplied again and
rounded, they are the same nanoseconds. TensorBoard keeps the nearest number of 32 bits, seven
digits: its server shows no others.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.columns import ints
from chopper.errors import ChopperError, OutputError, UsageError, say
from chopper.fresh_python import environment
from chopper.integrations import TRACKERS
from chopper.recording.finish import exception_text
from chopper.wording import UNKNOWN, ratio

if TYPE_CHECKING:
    from chopper.api import Runs

_NS_PER_MS = 1_000_000
_REPORT = "chopper-report.html"
_OF_CLOCKS = {"clock_mean_hz": ("sm_clock_mhz", 1e6), "power_mean_w": ("power_w", 1.0)}
"""Columns of the view ``clocks`` → name and divisor of a metric."""
_BATCH = 1000
"""Metrics that MLflow takes in one request."""
_REMEDIES = {
    "wandb": "run `wandb login` or set WANDB_API_KEY; with WANDB_MODE=offline the run stays on "
    "this disk, and `wandb sync` uploads it later",
    "mlflow": "check MLFLOW_TRACKING_URI and the login of its server; "
    "`chopper export RUN --to mlflow -o DIR` needs no server",
    "tensorboard": "choose a directory that can be written",
}
_PATIENCE = {
    "TERM": "dumb",  # W&B asks for a login where there is a terminal
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Environment while a tracker is called; MLflow waits for a server for minutes by default."""
_WANDB_PATIENCE = {"init_timeout": 30.0, "finish_timeout": 120.0, "finish_timeout_raises": True}


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step.

    Attributes:
        step: its number.
        end_ns: its end on the last rank, Unix time.
        values: metric → mean over ranks.
    """

    step: int
    end_ns: int
    values: dict[str, float]


def log_run(
    run: Runs,
    tracker: str,
    into: Any = None,
    *,
    directory: str | Path | None = None,
) -> str:
    """Log a run's causes over time, their shares and its report into an experiment tracker.

    Args:
        run: a run or its attribution, or anything that :func:`chopper.load` takes.
        tracker: ``wandb``, ``mlflow`` or ``tensorboard``.
        into: the tracker's run to log into: a W&B run, an MLflow run, a SummaryWriter. By default
            its active run; where none is active, a new one, as the tracker's own environment
            variables say (project, experiment, server).
        directory: of a new run: where W&B keeps its files, of MLflow's store, of TensorBoard's
            events. TensorBoard needs it.

    Returns:
        Where it is, for people.

    Raises:
        UsageError: no such tracker, its package is not installed, or no directory is named.
        InputError: ``run`` is neither a run nor traces.
        OutputError: the tracker refuses, cannot be reached, or its directory cannot be written.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tracker's package, for its own authors
        check(tracker, into, directory)
        return _logged(run, tracker, into, directory)


def _logged(run: Runs, tracker: str, into: Any, directory: str | Path | None) -> str:
    from chopper.api import attributed_of

    attributed = attributed_of(run)
    target = None if directory is None else Path(directory)
    try:
        # What the user set stays, but for the terminal.
        wanted = {n: v for n, v in _PATIENCE.items() if n == "TERM" or n not in os.environ}
        with environment(wanted):
            return _without_passwords(_LOGGERS[tracker](attributed, into, target))
    except ChopperError:
        raise
    except Exception as exc:
        why = _without_passwords(exception_text(exc))
        raise OutputError(f"{tracker}: {why}; {_REMEDIES[tracker]}") from exc


def _without_passwords(text: str) -> str:
    """Return a text whose addresses lack the user and password that they hold."""
    return re.sub(r"://[^/\s'\"]*@", "://", text)


def log_safely(
    run: Runs,
    tracker: str,
    into: Any = None,
    *,
    directory: str | Path | None = None,
) -> str | None:
    """Do what :func:`log_run` does, for programs that must go on: a failure is one line on stderr.

    Returns:
        Where it is, for people; None where it could not be logged.
    """
    try:
        return log_run(run, tracker, into, directory=directory)
    except Exception as exc:  # noqa: BLE001 - the profiler never ends the program
        say(f"{exception_text(exc)}; the training goes on")
        return None


def check(tracker: str, into: Any = None, directory: object = None) -> None:
    """Refuse what cannot be logged to, before minutes are spent on the run.

    Raises:
        UsageError: as :func:`log_run`.
    """
    if tracker not in TRACKERS:
        raise UsageError(f"tracker {tracker!r} unknown: one of {', '.join(TRACKERS)}")
    try:
        importlib.import_module(tracker)
    except Exception as exc:
        missing = isinstance(exc, ModuleNotFoundError) and exc.name == tracker
        why = "is not installed" if missing else f"cannot be imported ({exception_text(exc)})"
        raise UsageError(f"{tracker} {why}: pip install 'chopper-profiler[{tracker}]'") from exc
    if tracker == "tensorboard" and into is None and directory is None:
        raise UsageError("tensorboard: pass a SummaryWriter, or the directory for its events")
    if tracker == "wandb" and into is None and os.environ.get("WANDB_MODE") == "disabled":
        raise UsageError("wandb: WANDB_MODE=disabled logs nothing; unset it, or set it to offline")


# ---------------------------------------------------------------- what is logged


def metrics_of(run: Attribution) -> list[StepMetrics]:
    """Return the metrics of each numbered step, in order. WINDOW, PIECE, STEP -> metrics.

    A trace without steps has no numbered window, and so only a summary.
    """
    from chopper.views import view

    attribution = run.all_steps
    values: dict[int, dict[str, float]] = defaultdict(dict)
    windows = _lengths([attribution.windows])
    marks = _lengths([run.recording.table(rank, "step") for rank in run.recording.ranks])
    for number, (total_ns, count, _) in marks.items():
        values[number]["chopper/step_ms"] = total_ns / (count * _NS_PER_MS)
    has_peak = bool(run.ranks) and all(rank.peak_source is not None for rank in run.ranks)
    groups = attribution.by("step")
    causes = dict.fromkeys(cause for group in groups for cause in group.causes)
    for group in groups:
        if not isinstance(group.key, int):
            continue
        parts = {f"cause/{cause}_ms": group.causes.get(cause, 0) for cause in causes}
        parts["observed_ms"] = group.time_ns
        if has_peak:
            parts["ideal_ms"] = group.causes.get("compute.ideal", 0)
        scale = windows[group.key][1] * _NS_PER_MS
        values[group.key] |= {f"chopper/{name}": ns / scale for name, ns in parts.items()}
    of_steps = view(run, "clocks").filter(pc.field("level") == "step")
    clocks = of_steps.select(["number", *_OF_CLOCKS]).to_pylist()
    for column, (name, divisor) in _OF_CLOCKS.items():
        known: dict[int, list[float]] = defaultdict(list)
        for row in clocks:
            if row["number"] is not None and row[column] is not None:
                known[row["number"]].append(row[column] / divisor)
        for number, samples in known.items():
            values[number][f"chopper/{name}"] = sum(samples) / len(samples)
    ends = {number: end_ns for of in (windows, marks) for number, (_, _, end_ns) in of.items()}
    return [StepMetrics(number, ends[number], values[number]) for number in sorted(values)]


def _lengths(tables: list[pa.Table]) -> dict[int, tuple[int, int, int]]:
    """Return, for each number of a step, its length summed over ranks, their count, and its end."""
    columns = [
        np.concatenate([np.zeros(0, np.int64), *(ints(table, name) for table in tables)])
        for name in ("number", "start_ns", "end_ns")
    ]
    counts: dict[int, tuple[int, int, int]] = {}
    for number, start_ns, end_ns in zip(*(c.tolist() for c in columns), strict=True):
        if number >= 0:
            total_ns, count, last_ns = counts.get(number, (0, 0, end_ns))
            counts[number] = (total_ns + end_ns - start_ns, count + 1, max(last_ns, end_ns))
    return counts


def summary_of(run: Attribution) -> dict[str, float]:
    """Return the step time in ms, and the share of each leaf cause with its 95 % interval."""
    metrics: dict[str, float] = {}
    if run.step.headline_ns is not None:
        metrics["step_time_ms"] = run.step.headline_ns / _NS_PER_MS
    for row in run.leaves():
        if row.share_ratio is None:
            continue
        metrics[f"share/{row.id}"] = row.share_ratio
        if row.ci95_ns is not None:
            low_ns, high_ns = row.ci95_ns
            metrics[f"share_low/{row.id}"] = low_ns / run.observed_ns
            metrics[f"share_high/{row.id}"] = high_ns / run.observed_ns
    return {f"chopper/summary/{name}": value for name, value in metrics.items()}


def _with_summary(run: Attribution) -> list[StepMetrics]:
    """Return the metrics of all steps, and the summary as metrics of the last one."""
    logged = metrics_of(run)
    last = logged[-1] if logged else StepMetrics(0, 0, {})
    return [*logged, StepMetrics(last.step, last.end_ns, summary_of(run))]


def _write_report(run: Attribution, directory: Path) -> Path:
    from chopper.api import report

    return report(run, directory / _REPORT)


# ---------------------------------------------------------------- Weights & Biases


def _to_wandb(run: Attribution, into: Any, directory: Path | None) -> str:
    import wandb

    target = into or wandb.run
    if target is not None:
        _log_wandb(run, target)
        return str(target.url or target.dir)
    patience = {
        name: value
        for name, value in _WANDB_PATIENCE.items()
        if name in wandb.Settings.model_fields and f"WANDB_{name.upper()}" not in os.environ
    }
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    target = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "chopper",
        name=os.environ.get("WANDB_NAME") or run.recording.manifest.name,
        dir=directory,
        settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, **patience),
    )
    exit_code = 1
    try:
        _log_wandb(run, target)
        exit_code = 0
    finally:
        target.finish(exit_code=exit_code)
    folder = Path(target.dir).parent
    return f"{folder} (upload it: wandb sync {folder})" if target.offline else str(target.url)


def _log_wandb(run: Attribution, target: Any) -> None:
    import wandb

    from chopper.storage.caches import scratch

    target.define_metric("chopper/step", hidden=True)
    target.define_metric("chopper/*", step_metric="chopper/step")
    for of in metrics_of(run):
        target.log({"chopper/step": of.step, **of.values})
    target.summary.update(summary_of(run))
    with scratch("wandb") as folder:
        page = _write_report(run, folder)
        target.log({"chopper/report": wandb.Html(page.read_text(), inject=False)})
        artifact = wandb.Artifact(f"chopper-report-{target.id}", type="report")
        artifact.add_file(str(page))
        target.log_artifact(artifact)


# ---------------------------------------------------------------- MLflow


def _to_mlflow(run: Attribution, into: Any, directory: Path | None) -> str:
    import mlflow
    from mlflow import MlflowClient

    active = into or mlflow.active_run()
    uri = mlflow.get_tracking_uri()
    if active is None and directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{directory.resolve() / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri)
    run_id = os.environ.get("MLFLOW_RUN_ID") if active is None else active.info.run_id
    if run_id:
        _log_mlflow(run, client, run_id)
        return f"{uri}, run {run_id}"
    name = run.recording.manifest.name
    run_id = client.create_run(_experiment(client, directory), run_name=name).info.run_id
    status = "FAILED"
    try:
        _log_mlflow(run, client, run_id)
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status)
    return f"{uri}, run {run_id}"


def _experiment(client: Any, directory: Path | None) -> str:
    """Return the id of the experiment that the environment names, made where it is not there."""
    if named := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return named
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "chopper"
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    artifacts = None if directory is None else (directory.resolve() / "artifacts").as_uri()
    return str(client.create_experiment(name, artifact_location=artifacts))


def _log_mlflow(run: Attribution, client: Any, run_id: str) -> None:
    from mlflow.entities import Metric

    from chopper.storage.caches import scratch

    metrics = [
        Metric(name, value, of.end_ns // _NS_PER_MS, of.step)
        for of in _with_summary(run)
        for name, value in of.values.items()
    ]
    for first in range(0, len(metrics), _BATCH):
        client.log_batch(run_id, metrics=metrics[first : first + _BATCH])
    with scratch("mlflow") as folder:
        client.log_artifact(run_id, str(_write_report(run, folder)), "chopper")


# ---------------------------------------------------------------- TensorBoard


def _to_tensorboard(run: Attribution, into: Any, directory: Path | None) -> str:
    writer = into
    if writer is None:
        assert directory is not None
        directory.mkdir(parents=True, exist_ok=True)
        writer = _Events(directory)
    logged = _with_summary(run)
    for of in logged:
        for name, value in of.values.items():
            writer.add_scalar(name, value, of.step, walltime=of.end_ns / 1e9)
    page = _write_report(run, Path(writer.log_dir))
    last = logged[-1]
    writer.add_text("chopper/report", _text(run, page), last.step, walltime=last.end_ns / 1e9)
    writer.flush()
    if into is None:
        writer.close()
    return f"{writer.log_dir} (open it: tensorboard --logdir {writer.log_dir})"


def _text(run: Attribution, page: Path) -> str:
    """Return the causes as a table in Markdown, and where the report is."""
    rows = [f"Report: {page}", "", "| cause | share | 95 % interval |", "|---|---:|---:|"]
    for row in run.leaves():
        ends = () if row.ci95_ns is None else (ns / run.observed_ns for ns in row.ci95_ns)
        interval = " to ".join(map(ratio, ends)) or UNKNOWN
        rows.append(f"| {row.label} | {ratio(row.share_ratio)} | {interval} |")
    return "\n".join(rows)


class _Events:
    """A SummaryWriter of TensorBoard's own package: that of torch needs torch."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.log_dir = str(directory)
        file = EventFileWriter(self.log_dir)
        self._add_event, self.flush, self.close = file.add_event, file.flush, file.close

    def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
        """Write a number."""
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        self._add(scalar_pb(tag, value), step, walltime)

    def add_text(self, tag: str, text: str, step: int, walltime: float) -> None:
        """Write a text in Markdown."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(tag, text), step, walltime)

    def _add(self, summary: Any, step: int, walltime: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._add_event(Event(summary=summary, step=step, wall_time=walltime))


_LOGGERS: dict[str, Callable[[Attribution, Any, Path | None], str]] = {
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}
