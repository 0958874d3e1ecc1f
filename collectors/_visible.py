"""Devices that the environment lets a job use, as the vendors' runtimes read it."""

from __future__ import annotations

import os

from chopper.errors import CollectorUnavailable
from chopper.hardware.environment import environment_count


class NothingVisible(CollectorUnavailable):
    """There are devices, and the environment hides all of them from this process."""

    def __init__(self, variable: str, runtime: str) -> None:
        value = os.environ.get(variable, "").strip()
        set_to = f"{variable}={value}" if value else f"{variable} is empty"
        super().__init__(f"{set_to}: {runtime} sees no device in this process")
        self.remedy = f"none where the program computes on the CPU; else unset {variable}"


def numbers_and_names(variable: str) -> list[str] | None:
    """The entries of a variable such as CUDA_VISIBLE_DEVICES; None where it is not set.

    A runtime takes them up to the first that it does not understand.
    """
    value = os.environ.get(variable)
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip()]


def ordinal(entry: str) -> int | None:
    """The number that an entry is; None for a name."""
    try:
        return int(entry)
    except ValueError:
        return None


def local_ranks() -> tuple[int, str | None]:
    """Ranks on this host as the launcher says, 0 where it does not; and what is wrong with that."""
    count = environment_count("LOCAL_WORLD_SIZE")
    value = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    if count is not None or not value:
        return count or 0, None
    return 0, (
        f"LOCAL_WORLD_SIZE={value!r} is no number: not known how many ranks share this host's "
        "devices"
    )
