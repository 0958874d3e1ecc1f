"""Make the recordings of own/.

python -m tests.golden.own                  the known-cause model's, written anew
python -m tests.golden.own RUN NAME         a recorded run, without this machine's paths
python -m tests.golden.own RUN NAME TABLE…  these tables alone, and less of the machine
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

from chopper.storage.streams import read_stream, write_table
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Dose, Plan
from tests.known_causes.model.writer import write

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


_SAID = ("python", "torch", "cuda", "driver")
"""What is kept of the environment."""
_NAMES_A_DEVICE = ("device_uuid", "uuid", "pci_address")


def reduce(directory: Path, tables: list[str]) -> None:
    """Leave of a run its trace and some tables, and of its machine the versions and the device."""
    for file in sorted(directory.glob("rank-*/*")):
        if file.suffix == ".arrow" and file.stem in tables:
            table, _ = read_stream(file, file.stem)
            unnamed = dict.fromkeys(_NAMES_A_DEVICE, [None] * table.num_rows)
            file.unlink()
            columns = {n: unnamed.get(n, table[n].to_pylist()) for n in table.column_names}
            write_table(file.parent, file.stem, columns)
        elif file.name == "trace.json.gz":
            trace = json.loads(gzip.decompress(file.read_bytes()))
            # Arrows repeat the numbers of calls and kernels.
            trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") != "ac2g"]
            file.write_bytes(
                gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)
            )
        elif file.name != "manifest.json":
            file.unlink()
    for file in directory.rglob("manifest.json"):
        manifest = json.loads(file.read_text())
        for part in manifest.get("ranks", [manifest]):
            part["machine"] = part["calibration"] = None
            part["environment"] = {k: part["environment"][k] for k in _SAID}
            part["devices"] = [{**d, **dict.fromkeys(_NAMES_A_DEVICE[1:])} for d in part["devices"]]
            kept = [c for c in part["collectors"] if c["name"] in ("nvml", "torch_trace")]
            for collector in kept:
                files = collector["files"]
                collector["files"] = [f for f in files if f.partition(".")[0] in (*tables, "trace")]
            part["collectors"] = kept
        file.write_text(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        keep(Path(sys.argv[1]), sys.argv[2])
        if sys.argv[3:]:
            reduce(OWN / sys.argv[2], sys.argv[3:])
    else:
        write_model("cuda")
        write_model("rocm")
