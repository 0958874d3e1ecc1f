"""Regular expressions over names and headers take no time, whatever a file holds."""

from __future__ import annotations

import time

from chopper import wording
from chopper.analyzers.trace import names
from chopper.analyzers.work import kernels
from chopper.collectors.formats import telemetry_csv


def test_attacks_take_no_time() -> None:
    """The texts that stopped an import before, at a length that took minutes."""
    blanks = " " * 100_000
    begin = time.process_time()
    assert not telemetry_csv.sniff(f"timestamp,gpu,power [{blanks}x".encode())
    for name in (
        f"void f<{blanks}x>{blanks}x",
        f"f[clone {blanks}",
        f"f{'.kd' * 30_000}x",
        f"f{blanks}x",
    ):
        wording.plain(name)
        wording.base_name(name)
        wording.kernel_name(name)
        names.is_communication(name)
        kernels.kernel_families([name])
        kernels.matmul_dtype(None, name)
    assert time.process_time() - begin < 20
