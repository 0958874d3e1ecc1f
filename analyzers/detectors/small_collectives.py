"""Collectives so small that their latency is most of their time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.groups import reals
from chopper.analyzers.trace.columns import ints, strings

_FEWEST = 8
_FACTOR = 10
_BUCKET_BYTES = 25_000_000
_SMALL_BYTES = 250_000
DETECTOR = detector("small_collectives", fewest=_FEWEST)


def small_collectives(run: Attributed) -> Iterator[Sighting]:
    """COMMUNICATION -> a sighting for each kind of collective."""
    table = run.communication
    if not table.num_rows:
        return
    rank, row = ints(table, "rank"), ints(table, "event_row")
    kind, kinds = strings(table, "collective")
    size, took = reals(table, "message_bytes"), _transfer_ns(table)
    factor = reals(table, "bus_factor")
    link = np.nan_to_num(reals(table, "link_bytes_per_s")) / 1e9
    for code, name in enumerate(kinds):
        rows, run_ns, many = {}, {}, []
        for one in np.unique(rank[kind == code]).tolist():
            known = (rank == one) & ~np.isnan(size)
            bus = np.where(known, size * np.nan_to_num(factor, nan=1.0), 0.0)
            dur = ints(run.joined[one].device_event, "dur_ns")
            merged, lengths = [], []
            for at in _in_steps(run, one, np.flatnonzero(known & (kind == code))):
                buckets = math.ceil(size[at].sum() / _BUCKET_BYTES) or 1
                quickest = at[took[at].argmin()]
                rate = _rate(bus[known], took[known], link[known], bus[quickest])
                latency_ns = took[quickest] - bus[quickest] / rate if rate else 0.0
                fits = len(at) >= _FEWEST and buckets <= len(at) / 2
                if not fits or latency_ns * len(at) <= took[at].sum() / 2:
                    continue
                bucketed_ns = dur[row[at]] - latency_ns * (1 - buckets / len(at))
                merged.append(row[at])
                lengths.append(np.maximum(np.rint(bucketed_ns), 1).astype(np.int64))
                many.append((len(at), size[at].sum(), latency_ns * len(at)))
            if merged:
                rows[one] = np.concatenate(merged)
                run_ns[one] = (rows[one], np.concatenate(lengths))
        if rows:
            calls, sent, latency_ns = np.sum(many, axis=0).tolist()
            yield Sighting(
                detector="small_collectives",
                events=rows,
                run_ns=run_ns,
                evidence={
                    "count": round(calls / len(many)),
                    "collective": name,
                    "bytes": sent / calls,
                    "latency_ns": round(latency_ns / calls),
                },
            )


def _rate(sizes: np.ndarray, took_ns: np.ndarray, link: np.ndarray, size: float) -> float:
    """Return the bytes per nanosecond that are surely not slower by latency; 0 for unknown."""
    largest = (sizes >= sizes.max()) & (took_ns > 0)
    if sizes.max() >= _FACTOR * size and largest.any():
        return float(np.median(sizes[largest] / took_ns[largest]))
    return float(link.max()) / _FACTOR if size <= _SMALL_BYTES else 0.0


def _in_steps(run: Attributed, rank: int, at: np.ndarray) -> list[np.ndarray]:
    """Split rows of `communication` of one rank by step and group; without those in no step."""
    table = run.communication
    row, group = ints(table, "event_row"), strings(table, "group")[0]
    links = run.links[rank]
    at = at[links["step_index"].is_valid().to_numpy()[row[at]]]
    step = ints(links, "step_index")[row[at]]
    order = np.lexsort((group[at], step))
    new = (np.diff(step[order]) != 0) | (np.diff(group[at][order]) != 0)
    return [part for part in np.split(at[order], np.flatnonzero(new) + 1) if len(part)]


def _transfer_ns(table: pa.Table) -> np.ndarray:
    """Return how long each collective took from the last rank's arrival, its own if not matched."""
    arrival, left_ns = ints(table, "arrival_ns"), ints(table, "left_ns")
    ready = np.where(table["ready_ns"].is_valid().to_numpy(), ints(table, "ready_ns"), arrival)
    begin = np.where(ready <= left_ns, np.maximum(ready, arrival), arrival)
    took: np.ndarray = left_ns - begin
    return took
