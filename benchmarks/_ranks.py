"""Traces of many ranks of one job, as Kineto JSON; each text is made once and numbered anew.

python -m benchmarks._ranks DIR --ranks 64 --events 10000 --different 64
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from isal import igzip

from benchmarks._synthetic import _BASE_NS, DEVICE, _json_events, tables

DIFFERENT = 8


def write_ranks(directory: Path, ranks: int, events: int, different: int = DIFFERENT) -> None:
    """Write the traces of ranks; the work of every eighth is the same, or of so many."""
    directory.mkdir(parents=True, exist_ok=True)
    for first in range(min(different, ranks)):
        made = tables(events, first, ranks)
        body = ",\n".join(json.dumps(event) for event in _json_events(made))
        for rank in range(first, ranks, different):
            head = {
                "schemaVersion": 1,
                "deviceProperties": [
                    {"id": 0, "name": DEVICE, "totalGlobalMem": 85_028_765_696, "numSms": 132}
                ],
                "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
                "baseTimeNanoseconds": _BASE_NS,
            }
            text = f'{json.dumps(head)[:-1]}, "traceEvents": [\n{body}\n]}}\n'
            packed = igzip.compress(text.encode(), 1)
            (directory / f"rank-{rank}.json.gz").write_bytes(packed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--different", type=int, default=DIFFERENT)
    told = parser.parse_args()
    write_ranks(told.directory, told.ranks, told.events, told.different)
