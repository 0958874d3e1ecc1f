"""The recording that analyzers are given: a manifest, and declared tables by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.storage.manifest import RankManifest, RunManifest


class Recording(Protocol):
    """A recorded or imported run, as analyzers see it."""

    @property
    def manifest(self) -> RunManifest:
        """What the run says about itself."""
        ...

    @property
    def source(self) -> str:
        """What the user named, for messages and next commands."""
        ...

    @property
    def ranks(self) -> list[int]:
        """Ranks in the run, ascending."""
        ...

    def part(self, rank: int) -> RankManifest:
        """Return what one rank says about itself."""
        ...

    def table(self, rank: int, name: str) -> pa.Table:
        """Return a declared table of one rank, empty when nothing was recorded for it."""
        ...
