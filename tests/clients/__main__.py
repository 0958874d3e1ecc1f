"""Record training programs of real libraries and compare with a witness inside each.

    make clients
    make clients CLIENTS="gan.py item_loop.py"
    .venv/clients/bin/python -m tests.clients --page docs/concepts/clients.md [PROGRAM...]

Exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import tempfile
from pathlib import Path

from tests.clients.expected import CLIENTS, Client
from tests.clients.runner import Verdict, judge

FAILURES_OF = {"steps": ("steps", "ends"), "phases": ("phases", "shares")}
COLUMNS = {
    "steps": "steps recorded",
    "phases": "phases of traced steps",
    "named": "named phases (probe)",
    "data": "waiting for data (probe)",
    "cause": "largest cause",
    "planted": "planted (alone)",
    "verdict": "first sentence",
    "losses": "losses",
    "exit": "exit",
    "memory": "memory",
    "time": "time",
}
ON_PAGE = ("steps", "verdict")
"""Columns of the page's table; the terminal shows all."""
BEGIN, END = "<!-- begin: written by make clients -->", "<!-- end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description="Record training programs of real libraries.")
    parser.add_argument("programs", nargs="*", help="files in tests/clients/programs; all if none")
    parser.add_argument("--page", type=Path, help="document whose table is brought up to date")
    parser.add_argument("--keep", type=Path, help="keep what the programs and chopper wrote here")
    options = parser.parse_args()
    names = {client.program for client in CLIENTS}
    for name in options.programs:
        if name not in names:
            parser.error(f"{name}: no such client; there are {', '.join(sorted(names))}")
    chosen = [c for c in CLIENTS if not options.programs or c.program in options.programs]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="clients-") as scratch:
        for client in chosen:
            directory = (options.keep or Path(scratch)) / Path(client.program).stem
            verdict = judge(client, directory.resolve())
            verdicts.append(verdict)
            print(describe(verdict), flush=True)
    failed = [verdict for verdict in verdicts if verdict.failures]
    if options.page is not None:
        write_page(options.page, verdicts)
    print(f"{len(verdicts) - len(failed)} of {len(verdicts)} clients pass")
    return 1 if failed else 0


def describe(verdict: Verdict) -> str:
    """Return the lines that the terminal shows of a client."""
    lines = [f"{'FAIL' if verdict.failures else 'pass'}  {verdict.client.program}"]
    for column in COLUMNS:
        if column in verdict.cells:
            lines.append(f"      {column:8} {verdict.cells[column]}")
        lines += [f"    ! {column}: {message}" for message in failures(verdict, column)]
    lines.append(f"      ({verdict.seconds:.0f} s)")
    return "\n".join(lines)


def failures(verdict: Verdict, column: str) -> list[str]:
    """Return what is wrong in a column."""
    names = FAILURES_OF.get(column, (column,))
    return [message for name in names for message in verdict.failures.get(name, ())]


def write_page(page: Path, verdicts: list[Verdict]) -> None:
    """Write the rows of these clients into the page's table; those of others stay."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    for verdict in verdicts:
        cells = [f"`{verdict.client.program}`", version(verdict.client)]
        cells += [shorten(verdict.cells.get(column, "–")) for column in ON_PAGE]
        wrong = "; ".join(message for column in COLUMNS for message in failures(verdict, column))
        cells[-1] += f" **{wrong}**" if wrong else ""
        rows[verdict.client.program] = f"| {' | '.join(cells)} |"
    titles = ["program", "library", *(COLUMNS[column] for column in ON_PAGE)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [rows[client.program] for client in CLIENTS if client.program in rows]
    text = "\n".join(lines)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def shorten(cell: str) -> str:
    """Return a cell's number or class without what explains it."""
    return re.split(r"[:,;]| of the ", cell, maxsplit=1)[0].replace(" (", " ")


def version(client: Client) -> str:
    """Return the library and the version that was tried."""
    name = client.library or "torch"
    return f"{name} {importlib.metadata.version(name).partition('+')[0]}"


if __name__ == "__main__":
    sys.exit(main())
