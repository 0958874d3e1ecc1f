"""Pipeline timers of Primus: ``pp_rank_R.json`` of each stage, and the job's ``config.json``.

Each iteration of a stage has the starts and ends of its forwards and backwards in ms since the
iteration began, in the order in which they ran, ``total`` (its length, ms) and ``memory`` (the
largest so far, GB). Without virtual stages, GPipe and 1F1B run both passes in the order of the
micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from chopper.collectors.formats.parsed import ParsedTrace
from chopper.collectors.formats.spans.columns import Spans
from chopper.collectors.formats.spans.traces import traces_of
from chopper.collectors.formats.unpack import read_bytes
from chopper.errors import JSON_ERRORS, InputError
from chopper.storage.manifest import Finding

_TIMERS = re.compile(rb'\s*\{\s*"\d{1,12}"\s*:\s*\{[^{}]{0,4096}"(?:fwd|bwd)_(?:start|end)"')
_CONFIG = re.compile(rb'\s*\{(?=[^{}]{0,4096}"pp_size")(?=[^{}]{0,4096}"num_mbs")')
_STAGE = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_NAMES = ["forward-compute", "backward-compute"]


class _Iteration(msgspec.Struct):
    """Times of one iteration in ms."""

    fwd_start: list[float]
    fwd_end: list[float]
    bwd_start: list[float]
    bwd_end: list[float]
    total: float | None = None
    memory: float | None = None

    def spans(self) -> np.ndarray:
        """Return starts and ends of all passes in ms, forwards first; shape (2, passes)."""
        return np.array([self.fwd_start + self.bwd_start, self.fwd_end + self.bwd_end])


class _Config(msgspec.Struct):
    """The job's configuration, as far as it tells what the timers are of."""

    num_mbs: int | None = None


def sniff(head: bytes) -> bool:
    """Return whether a file is one of them."""
    return bool(_TIMERS.match(head) or _CONFIG.match(head))


def group_of(path: Path) -> str:
    """Return the folder, which holds the files of one job."""
    return f"{path.parent}/pipeline timers"


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read the timers of all stages of a job.

    Raises:
        InputError: a file cannot be read, or two are of one stage.
    """
    findings: list[Finding] = []
    config = _Config()
    stages: dict[int, tuple[Path, dict[int, _Iteration]]] = {}
    for path in sorted(files):
        data, found = read_bytes(path)
        findings += found
        try:
            if _CONFIG.match(data):
                config = msgspec.json.decode(data, type=_Config)
                continue
            iterations = msgspec.json.decode(data, type=dict[int, _Iteration])
        except JSON_ERRORS as exc:
            raise InputError(f"{path}: not whole pipeline timers of Primus ({exc})") from exc
        match = _STAGE.search(path.name)
        stage = int(match[1]) if match else len(stages)
        if stage in stages:
            raise InputError(
                f"{path}: timers of stage {stage}, as {stages[stage][0]}; pass those of one job"
            )
        _check(path, iterations)
        stages[stage] = path, iterations
    if not stages:
        raise InputError(f"{files[0]}: the configuration of a job without its pp_rank_*.json")
    return traces_of(_spans(stages, config, findings))


def _check(path: Path, iterations: dict[int, _Iteration]) -> None:
    """Refuse lists of different lengths.

    Raises:
        InputError: some are.
    """
    for number, one in iterations.items():
        for start, end in ((one.fwd_start, one.fwd_end), (one.bwd_start, one.bwd_end)):
            if len(start) != len(end):
                raise InputError(
                    f"{path}: iteration {number} has {len(start)} starts and {len(end)} ends of a "
                    "pass, expected as many; the file was cut, or written by another version"
                )


def _spans(
    stages: dict[int, tuple[Path, dict[int, _Iteration]]],
    config: _Config,
    findings: list[Finding],
) -> Spans:
    """Return the timers of all stages as columns."""
    columns: dict[str, list[np.ndarray]] = {n: [] for n in ("rank", "step", "op", "batch", "time")}
    lengths_ns: dict[int, int] = {}
    counters = []
    in_order = True
    for stage, (_, iterations) in stages.items():
        for number, one in iterations.items():
            forwards, backwards = len(one.fwd_start), len(one.bwd_start)
            in_order &= forwards == backwards == (config.num_mbs or forwards)
            columns["rank"].append(np.full(forwards + backwards, stage))
            columns["step"].append(np.full(forwards + backwards, number))
            columns["op"].append(np.repeat([0, 1], [forwards, backwards]))
            columns["batch"].append(np.append(np.arange(forwards), np.arange(backwards)))
            columns["time"].append(one.spans())
            if one.total is not None:
                lengths_ns[number] = max(lengths_ns.get(number, 0), round(one.total * 1e6))
            if one.memory is not None:
                counters.append((stage, number, "memory", one.memory))
    rank = np.concatenate(columns["rank"]).astype(np.int64)
    start_ns, end_ns = np.rint(np.concatenate(columns["time"], axis=1) * 1e6).astype(np.int64)
    lacks = ["data-parallel ranks"]
    return Spans(
        path=next(iter(stages.values()))[0],
        tool="pipeline timers of Primus",
        rank=rank,
        op=np.concatenate(columns["op"]).astype(np.int64),
        names=_NAMES,
        start_ns=start_ns,
        end_ns=end_ns,
        step=np.concatenate(columns["step"]).astype(np.int64),
        stage=rank,
        micro_batch=np.concatenate(columns["batch"]).astype(np.int64) if in_order else None,
        lengths_ns=lengths_ns,
        counters=counters,
        sources={"stage": "names of the files of pipeline timers"},
        lacks=lacks if in_order else [*lacks, "micro-batches"],
        findings=findings,
    )
