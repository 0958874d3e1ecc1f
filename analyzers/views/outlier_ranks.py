"""Ranks whose own step time differs from the median rank's by more than chance, and why.

All ranks end a step with the slowest one, so their step times are equal; what differs is a rank's
own time, a step without waiting for other ranks. It is compared with the median rank in each step.
A rank stands out if its deviations differ from zero over steps (t test, with Benjamini and
Hochberg's correction over ranks, at 5 %) by more than a thousandth of a step. Ranks are alike if
the times of their causes differ by at most a twentieth of a step in total.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.collectives import WAIT
from chopper.analyzers.trace.columns import compact, dictionary, ints, strings
from chopper.analyzers.views import View, column, optional
from chopper.statistics import discoveries, t_test
from chopper.storage.run import ranks_of

VIEW = View(
    "outlier_ranks",
    __doc__,
    (
        column("rank", "Global rank.", "int32"),
        optional("host", "Host that it ran on.", "string"),
        column("step_ns", "Mean observed time of its steps."),
        column("own_ns", "Mean of its steps without waiting for other ranks."),
        column("deviation_ns", "Own time minus the median rank's, mean over steps."),
        optional("p_value", "p-value of the t test; null with fewer than three steps.", "float64"),
        optional("stands_out", "late or early; null where it may be chance.", "string"),
        optional(
            "cause", "Leaf cause with the largest excess (late) or deficit (early).", "string"
        ),
        optional("cause_ns", "Mean time per step in that cause beyond the median rank's."),
        column("waiting_ns", "Mean time per step that it waits for other ranks."),
        column("alike", "Index of its group of similar ranks.", "int32"),
        column("alike_count", "Ranks of that group."),
    ),
    title="Outlier ranks",
    section="Steps and host",
    needs="no step was attributed",
    of_all_ranks=True,
)
_LEAST_RATIO = 0.001
_ALIKE_RATIO = 0.05


def outlier_ranks(run: Attribution) -> pa.Table:
    """WINDOW, totals of causes -> OUTLIER_RANKS, those furthest from the median first."""
    time_ns, numbers, causes = cube(run)
    if not time_ns.size:
        return VIEW.empty()
    observed = time_ns.sum(axis=2)
    recorded = observed > 0
    wait = causes.index(WAIT) if WAIT in causes else None
    waiting = np.zeros_like(observed) if wait is None else time_ns[:, :, wait]
    own = np.where(recorded, observed - waiting, np.nan)
    deviation = own - np.nanmedian(own, axis=0)
    count = np.maximum(recorded.sum(axis=1), 1)
    mean = np.nansum(deviation, axis=1) / count
    p = t_test(deviation)
    known = ~np.isnan(p)
    out = np.zeros(len(p), dtype=bool)
    out[known] = discoveries(p[known])
    out &= np.abs(mean) > _LEAST_RATIO * np.nanmean(own)
    per_step = time_ns.sum(axis=1) / count[:, None]
    excess = per_step - np.median(per_step, axis=0)
    if wait is not None:
        excess[:, wait] = 0
    mainly = np.argmax(excess * np.sign(mean)[:, None], axis=1)
    rows = np.arange(len(mean))
    group = _alike(per_step, float(observed[recorded].mean()))
    order = np.lexsort((numbers, -np.abs(mean)))
    hosts = {row["rank"]: row["hostname"] for row in ranks_of(run.recording.manifest).to_pylist()}
    columns = {
        "rank": numbers,
        "host": pa.array([hosts.get(rank) for rank in numbers.tolist()]).dictionary_encode(),
        "step_ns": _whole(observed.sum(axis=1) / count),
        "own_ns": _whole((observed - waiting).sum(axis=1) / count),
        "deviation_ns": _whole(mean),
        "p_value": pa.array(p, from_pandas=True),
        "stands_out": dictionary(np.where(out, (mean < 0).astype(np.int64), -1), ("late", "early")),
        "cause": dictionary(np.where(out, mainly, -1), causes),
        "cause_ns": pa.array(_whole(excess[rows, mainly]), mask=~out),
        "waiting_ns": _whole(waiting.sum(axis=1) / count),
        "alike": group,
        "alike_count": np.bincount(group)[group],
    }
    return VIEW.of(columns).take(pa.array(order))


def cube(run: Attribution) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the time of each rank and step by leaf cause, (ranks, steps, causes), in ns.

    Returns:
        The times; the ranks; the causes.
    """
    table = run.totals.causes
    ranks, rank = compact(ints(table, "rank"))
    steps, step = compact(ints(table, "number"))
    cause, causes = strings(table, "cause")
    time_ns = np.zeros((len(ranks), len(steps), len(causes)))
    np.add.at(time_ns, (rank, step, cause), ints(table, "time_ns"))
    return time_ns, ranks, causes


def _alike(per_step: np.ndarray, step_ns: float) -> np.ndarray:
    """Number groups of ranks whose causes differ by little, the largest group first."""
    label = _complete_linkage(per_step, _ALIKE_RATIO * step_ns)
    sizes = np.bincount(label)
    first = np.full(len(sizes), len(label))
    np.minimum.at(first, label, np.arange(len(label)))
    place = np.empty(len(sizes), dtype=np.int64)
    place[np.lexsort((first, -sizes))] = np.arange(len(sizes))
    numbered: np.ndarray = place[label]
    return numbered


def _complete_linkage(points: np.ndarray, limit: float) -> np.ndarray:
    """Number the clusters of points none of which are further than the limit apart.

    Agglomerates the two nearest clusters first, by chains of nearest neighbours (Murtagh 1983);
    the distance of two clusters is that of their furthest points, by the sum of differences.
    """
    distance = np.zeros((len(points), len(points)))
    for feature in points.T:
        distance += np.abs(feature[:, None] - feature)
    np.fill_diagonal(distance, np.inf)
    label = np.arange(len(points))
    chain: list[int] = []
    merged = np.zeros(len(points), dtype=bool)
    for _ in range(len(points) - 1):
        chain = chain or [int(np.argmin(merged))]
        while True:
            near = int(np.argmin(distance[chain[-1]]))
            if len(chain) > 1 and distance[chain[-1], chain[-2]] <= distance[chain[-1], near]:
                break
            chain.append(near)
        gone, kept = sorted((chain.pop(), chain.pop()))
        if distance[gone, kept] <= limit:
            label[label == label[gone]] = label[kept]
        furthest = np.maximum(distance[gone], distance[kept])
        furthest[[gone, kept]] = np.inf
        distance[kept] = distance[:, kept] = furthest
        distance[gone] = distance[:, gone] = np.inf
        merged[gone] = True
    return np.unique(label, return_inverse=True)[1]


def _whole(values: np.ndarray) -> np.ndarray:
    return np.round(values).astype(np.int64)
