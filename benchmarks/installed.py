"""What an installation without torch takes, and how soon its report of a small trace is written.

    python -m benchmarks.installed [--wheel FILE] [--json]

Installs a wheel (by default of this tree) with pip into an empty environment, which compiles
bytecode as for any user. Sizes are of files, in units of 10⁶ bytes. Reports are whole commands,
from start to end, with the files of the installation in the page cache. Ends with 1 when the
installation takes more than 510 MB. Needs a package index.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "tests" / "golden" / "own" / "fsdp2" / "rank-00000" / "trace.json.gz"
LIMIT_MB = 510
_REPEATS = 10
_SHOWN_MB = 2


def size_mb(path: Path) -> float:
    """Return the bytes of the files of a folder, or of a file, in 10⁶."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files if f.is_file() and not f.is_symlink()) / 1e6


def measure(wheel: Path, folder: Path) -> dict[str, Any]:
    """Install a wheel, and use it."""
    venv.create(folder, with_pip=False)
    before_mb = size_mb(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    command = folder / "bin" / "chopper"
    output = folder / "report.html"
    wall_s = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        subprocess.run(
            [str(command), "report", str(TRACE), "-o", str(output), "--force"],
            check=True,
            capture_output=True,
        )
        wall_s.append(time.perf_counter() - start)
    return {
        "wheel": wheel.name,
        "wheel_mb": size_mb(wheel),
        "installed_mb": size_mb(folder) - before_mb - size_mb(output),
        "packages_mb": {p.name: size_mb(p) for p in sorted(packages.iterdir())},
        "report_s": wall_s[1:],  # the first one brings the files into the page cache
        "version": subprocess.run(
            [str(command), "--version"], check=True, capture_output=True, text=True
        ).stdout,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="default: built from this tree")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel
        if wheel is None:
            build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT)]
            subprocess.run(build, check=True, capture_output=True)
            [wheel] = Path(folder).glob("*.whl")
        found = measure(wheel, Path(folder, "environment"))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(found["version"])
        for name, mb in sorted(found["packages_mb"].items(), key=lambda item: -item[1]):
            if mb >= _SHOWN_MB:
                print(f"{mb:8.1f} MB  {name}")
        print(f"{found['installed_mb']:8.1f} MB  all, without torch (limit {LIMIT_MB} MB)")
        low, *_, high = sorted(found["report_s"])
        middle = statistics.median(found["report_s"])
        print(f"chopper report of {TRACE.stat().st_size / 1e3:.0f} kB: median {middle:.2f} s")
        print(f"  of {_REPEATS}: {low:.2f} to {high:.2f} s, page cache warm")
    sys.exit(found["installed_mb"] > LIMIT_MB)


if __name__ == "__main__":
    main()
