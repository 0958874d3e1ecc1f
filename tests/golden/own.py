"""Make the recordings of own/.

python -m tests.golden.own                  the known-cause model's, written anew
python -m tests.golden.own RUN NAME         a recorded run, without this machine's paths
"""

from __future__ import annotations

import gzip
import shutil
import sys
from pathlib import Path

from chopper.validation.model.job import simulate
from chopper.validation.model.plan import Dose, Plan
from chopper.validation.model.writer import write

OWN = Path(__file__).parent / "own"
ROOT = Path(__file__).resolve().parents[2]


def write_model(flavour: str) -> None:
    stall, slow = Dose(3e6), Dose(0.2, ranks=(1,))
    plan = Plan(flavour=flavour, layers=1, steps=3, telemetry_hz=100.0, data=stall, slow=slow)
    directory = OWN / f"model-{flavour}"
    shutil.rmtree(directory, ignore_errors=True)
    write(simulate(plan), directory)
    for trace in directory.rglob("trace.json"):
        trace.with_suffix(".json.gz").write_bytes(gzip.compress(trace.read_bytes(), mtime=0))
        trace.unlink()
    for manifest in directory.rglob("manifest.json"):
        manifest.write_text(manifest.read_text().replace('"trace.json"', '"trace.json.gz"'))


def keep(run: Path, name: str) -> None:
    """Copy a run without its derived tables, and with paths of no machine in particular."""
    directory = OWN / name
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(run, directory, ignore=shutil.ignore_patterns("tables"))
    places = {str(run.resolve().parent): "/home/user/runs", str(ROOT): "/home/user/chopper"}
    for file in (*directory.rglob("*.json"), *directory.rglob("*.json.gz")):
        compressed = file.suffix == ".gz"
        content = gzip.decompress(file.read_bytes()) if compressed else file.read_bytes()
        for place, neutral in places.items():
            content = content.replace(place.encode(), neutral.encode())
        file.write_bytes(gzip.compress(content, mtime=0) if compressed else content)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        keep(Path(sys.argv[1]), sys.argv[2])
    else:
        write_model("cuda")
        write_model("rocm")
