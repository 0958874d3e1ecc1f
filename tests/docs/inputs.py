"""Files that commands of the documentation name, small, under those names."""

from __future__ import annotations

import shutil
from pathlib import Path

from chopper.recording.finish import finalize
from tests import recordings, span_jobs
from tests.docs.blocks import ROOT
from tests.fuzz import bases

OWN = Path(__file__).resolve().parents[1] / "golden" / "own"
MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256))
"""
TRAIN = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ZEUS = """start_time,window_name,elapsed_time,gpu0_energy
1700000000.0,0_step,6.5,2234.1
1700000006.5,1_step,6.4,2241.0
"""
SPANS = {"rank": "worker", "step": "it", "optype": "what", "start_ts": "t0", "duration": "took"}
"""Columns of spans → the names that options map."""
RUNS = {
    "model-cuda": ("mine", "before", "after", "demo", "fsdp1"),
    "fsdp2": ("fsdp2",),
}
"""Recorded run in tests/golden/own → names of its copies in runs/."""

CUDA = "model-cuda/rank-00000/trace.json.gz"
TRACES = {
    CUDA: (
        "trace.json.gz",
        "before.json.gz",
        "after.json.gz",
        "h100.json.gz",
        "h100-qwen1.5-0.5b-inference.json.gz",
        "v100-ddp-rank1of2.json.gz",
        "logs/rank0.json.gz",
        "traces/rank0.json.gz",
        "base/rank0.json.gz",
        "new/rank0.json.gz",
        "v100-dlrm-8ranks/rank0.json.gz",
    ),
    "model-cuda/rank-00001/trace.json.gz": (
        "logs/rank1.json.gz",
        "traces/rank1.json.gz",
        "base/rank1.json.gz",
        "new/rank1.json.gz",
        "v100-dlrm-8ranks/rank1.json.gz",
    ),
    "model-rocm/rank-00000/trace.json.gz": (
        "mi300x.json.gz",
        "mi300x-qwen1.5-0.5b-inference.json.gz",
        "mi300x-vllm-graph-capture.json.gz",
    ),
}
MADE = {
    "database/report.sqlite": ("report.sqlite",),
    "table/counters.csv": ("counters.csv",),
    "table/smi.csv": ("nvidia-smi.csv", "smi.csv"),
    "table/snapshot.pickle": ("snapshot.pickle",),
    "document/config.json": ("config.json",),
}
"""Written by tests/fuzz/bases.py → names."""


def prepare(folder: Path, made: Path) -> None:
    """Fill a folder; ``made`` is one for what is written on the way."""
    bases.make(made)
    for name, copies in RUNS.items():
        for copy in copies:
            shutil.copytree(OWN / name, folder / "runs" / copy)
    for origin, names in TRACES.items():
        for name in names:
            _copy(OWN / origin, folder / name)
    for origin, names in MADE.items():
        for name in names:
            _copy(made / origin, folder / name)
    for side in ("cpu", "mi300x"):
        shutil.copytree(ROOT / "docs/recordings/overlap", folder / f"runs/grid-{side}")
    shutil.copytree(made / "rocprof", folder / "out")
    for node in range(2):
        parts = folder / f"runs/mine-node{node}"
        shutil.copytree(OWN / f"model-cuda/rank-{node:05}", parts / f"rank-{node:05}")
        finalize(parts)
        shutil.copytree(parts, folder / f"node{node}/run")
    (folder / "runs/with-counters").mkdir()
    shutil.copy(folder / "trace.json.gz", folder / "runs/with-counters")
    shutil.copy(folder / "counters.csv", folder / "runs/with-counters")
    recordings.write_rpd(folder / "trace.rpd", recordings.small())
    span_jobs.parquet(folder, span_jobs.job(), "spans.parquet")
    span_jobs.parquet(folder, span_jobs.job(stages=4, replicas=1), "job.parquet")
    rows = span_jobs.renamed(span_jobs.job(), SPANS, 1e3)
    span_jobs.as_csv(folder, rows, "spans.csv")
    (folder / "zeus.csv").write_text(ZEUS)
    (folder / "my_view.sql").write_text(
        "SELECT kernel, sum(dur_ns) AS time_ns FROM step_event GROUP BY ALL"
    )
    (folder / "clock.sql").write_text("SELECT max(sm_clock_hz) FROM device_clock")
    (folder / "train.py").write_text(TRAIN)
    (folder / "model.py").write_text(MODEL)


def _copy(origin: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(origin, target)
