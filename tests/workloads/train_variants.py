"""Run variants of the training workloads one after another, within one launch by torchrun.

    torchrun … tests/workloads/train_variants.py DIRECTORY WORKLOAD:OPTION,OPTION… …

Starting two ranks takes longer than training three steps in them. Rank 0's output of each variant
goes to DIRECTORY/WORKLOAD:OPTION,….txt.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from chopper.workloads import ranks


def main() -> None:
    """Join the other ranks once, and give each variant's ``main`` that group."""
    directory, variants = Path(sys.argv[1]), sys.argv[2:]
    words = ["--steps", "3", "--batch", "1", "--sequence", "32", "--device", "cpu"]
    with ranks.joined("cpu", prog="train_variants") as device:
        joined: Any = lambda asked, prog: contextlib.nullcontext(device)  # noqa: E731
        ranks.joined = joined
        for variant in variants:
            name, _, options = variant.partition(":")
            workload: Any = importlib.import_module(f"chopper.workloads.{name}")
            output = ["--output", str(directory / variant)]
            sys.argv = [name, *words, *output, *filter(None, options.split(","))]
            printed = directory / f"{variant}.txt" if os.environ["RANK"] == "0" else os.devnull
            with Path(printed).open("w") as file, contextlib.redirect_stdout(file):
                workload.main()


if __name__ == "__main__":
    main()
