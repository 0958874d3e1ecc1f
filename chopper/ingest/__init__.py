"""From files to a run: which belong together, which rank each is, and the tables of each rank."""

from __future__ import annotations

from chopper.ingest.read import read
from chopper.ingest.sources import check_page, find_sources
from chopper.ingest.write import carried, write_run

__all__ = ["carried", "check_page", "find_sources", "read", "write_run"]
