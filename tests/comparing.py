"""Runs to compare: attributions by hand from times per cause and step, and small traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution, RankSummary
from chopper.causes import LEAVES
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests.attributing import assembled
from tests.kineto_writer import Trace

T0_NS = 1_760_000_000_000_000_000


def attribution(
    times: Mapping[str, Sequence[int] | np.ndarray],
    *,
    ranks: int = 1,
    first: int = 0,
    name: str = "run",
) -> Attribution:
    """Each rank spends ``times[cause][step]`` ns; all ranks do the same."""
    causes = list(times)
    assert set(causes) <= set(LEAVES)
    cube = np.array([list(times[c]) for c in causes], dtype=np.int64)
    steps = cube.shape[1]
    ends = T0_NS + np.cumsum(cube.sum(axis=0))
    starts = np.concatenate([[T0_NS], ends[:-1]])
    windows, pieces = [], []
    for rank in range(ranks):
        for s in range(steps):
            windows.append(
                {
                    "rank": rank,
                    "step_index": s,
                    "number": first + s,
                    "start_ns": int(starts[s]),
                    "end_ns": int(ends[s]),
                }
            )
            pieces += [
                {
                    "rank": rank,
                    "step_index": s,
                    "cause": cause,
                    "phase": "other",
                    "time_ns": int(cube[i, s]),
                }
                for i, cause in enumerate(causes)
            ]
    observed = int(cube.sum())
    manifest = m.RunManifest(
        kind="recorded",
        name=name,
        ranks=[m.RankManifest(rank=r, world_size=ranks) for r in range(ranks)],
    )
    recorded = [
        {
            "number": first + s,
            "start_ns": int(starts[s]),
            "end_ns": int(ends[s]),
            "source": "iteration",
            "traced": True,
            "profiled": True,
        }
        for s in range(steps)
    ]
    step = pa.Table.from_pylist(recorded, schema=TABLES["step"].arrow)
    return assembled(
        Run(manifest, None, {(r, "step"): step for r in range(ranks)}, source=f"runs/{name}"),
        pieces=pa.Table.from_pylist(pieces, schema=TABLES["piece"].arrow),
        windows=pa.Table.from_pylist(windows, schema=TABLES["window"].arrow),
        ranks=[
            RankSummary(
                rank=r,
                label=f"rank {r}",
                device=None,
                peak_source=None,
                observed_ns=observed,
                ideal_ns=0,
                steps=steps,
            )
            for r in range(ranks)
        ],
    ).of_kind()


def trace(
    path: Path,
    *,
    steps: int = 5,
    width: int = 64,
    matmul_ns: Sequence[int] = (4_000,),
    adds: int = 1,
    extra: str | None = None,
    world: int | None = None,
) -> Path:
    """Steps of 20 µs: a matrix product of ``width`` columns, ``adds`` additions of 1 µs each, and
    one kernel of 500 ns named ``extra``. Durations of the product repeat over the steps.
    """
    made = Trace(rank=None if world is None else 0, world=world)
    for s in range(steps):
        t = 40_000 * s
        made.step(s, t, 40_000)
        op = made.op("aten::mm", t + 1_000, 1_000, shapes=[[64, 32], [32, width]])
        duration = matmul_ns[s % len(matmul_ns)]
        made.launch("gemm", t + 1_200, 200, kernel_at=t + 2_000, kernel_for=duration, op=op)
        for i in range(adds):
            at = t + 4_000 + 400 * i
            op = made.op("aten::add", at, 300, shapes=[[64], [64]])
            begin = t + 20_000 + 1_200 * i
            made.launch("add", at + 50, 100, kernel_at=begin, kernel_for=1_000, op=op)
        if extra is not None:
            op = made.op("aten::relu", t + 12_000, 400, shapes=[[64]])
            made.launch(extra, t + 12_100, 100, kernel_at=t + 35_000, kernel_for=500, op=op)
    made.named("python", "thread 4711 (python)")
    path.write_bytes(made.encode())
    return path
