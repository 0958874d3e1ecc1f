"""Databases: Nsight Systems' exports, rocprofv3's rocpd and rocmProfileData's rpd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chopper.collectors.formats import nsys, rocpd, rpd
from chopper.collectors.formats.database import MAGIC, opened
from chopper.collectors.formats.parsed import ParsedTrace
from chopper.collectors.formats.recording import traces_of
from chopper.errors import InputError


def sniff(head: bytes) -> bool:
    """Return whether a file begins as databases do."""
    return head.startswith(MAGIC)


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read one database.

    Raises:
        InputError: it is damaged from its start, or of a tool that nobody here knows.
    """
    (path,) = files
    with opened(path) as database:
        for knows, make in (
            (nsys.is_nsys, nsys.read),
            (rocpd.is_rocpd, rocpd.read),
            (rpd.is_rpd, rpd.read),
        ):
            if knows(database):
                recording = make(database)
                recording.findings += database.findings
                return traces_of(recording)
        listed = ", ".join(sorted(database.tables)[:6]) or "none"
        raise InputError(
            f"{path}: an SQLite database, but none of a profiler that chopper knows; expected "
            "CUPTI_ACTIVITY_KIND_KERNEL (nsys export), rocpd_kernel_dispatch (rocprofv3) or "
            f"rocpd_op (rpd) among its tables; found {listed}"
        )
