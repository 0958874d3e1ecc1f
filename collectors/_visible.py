"""Devices that a job may use, as its environment and torch say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from chopper.collectors.device_sources import Device
from chopper.errors import CollectorUnavailable
from chopper.hardware.launchers import environment_count

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_D = TypeVar("_D", bound=Device)


class NothingVisible(CollectorUnavailable):
    """There are devices, and the environment hides all of them from this process."""

    def __init__(self, variable: str, runtime: str) -> None:
        value = os.environ.get(variable, "").strip()
        set_to = f"{variable}={value}" if value else f"{variable} is empty"
        super().__init__(f"{set_to}: {runtime} sees no device in this process")
        self.remedy = f"none where the program computes on the CPU; else unset {variable}"


def chosen_by(
    variable: str,
    listed: list[_D],
    named: Callable[[str], list[_D] | None],
    *,
    numbers_known: bool = True,
) -> list[_D] | None:
    """The devices that a variable such as CUDA_VISIBLE_DEVICES chooses; None: not set, or unknown.

    A runtime takes its entries up to the first that it does not understand.

    Args:
        listed: all devices, in the runtime's order.
        named: returns those that a name stands for; None where that is not known.
        numbers_known: whether the order of ``listed`` is that of the runtime's numbers.
    """
    value = os.environ.get(variable)
    if value is None:
        return None
    chosen: dict[int, _D] = {}
    for entry in filter(None, map(str.strip, value.split(","))):
        try:
            number = int(entry)
        except ValueError:
            devices = named(entry)
        else:
            devices = listed[number : number + 1] if number >= 0 else []
            if devices and not numbers_known:
                return None
        if devices is None:
            return None
        if not devices:
            break
        chosen |= {device.index: device for device in devices}
    return [chosen[index] for index in sorted(chosen)]


def local_ranks() -> tuple[int, str | None]:
    """Ranks on this host as the launcher says, 0 where it does not; and what is wrong with that."""
    count = environment_count("LOCAL_WORLD_SIZE")
    value = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    if count is not None or not value:
        return count or 0, None
    return 0, (
        f"LOCAL_WORLD_SIZE={value!r} is not a number: how many ranks share this host's "
        "devices is unknown"
    )


NO_ACCELERATOR = "install a build of torch for this machine's accelerator, if it has one"
"""Remedy where there is none."""


def device_of_rank(named: str | None) -> torch.device:
    """Return the device that a rank named, else the machine's accelerator.

    Raises:
        CollectorUnavailable: no torch, no accelerator, or the rank computes on the host.
    """
    try:
        import torch
    except ImportError as exc:
        raise CollectorUnavailable("torch is not installed") from exc
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        raise CollectorUnavailable("torch sees no accelerator: the run computes on the host")
    device = torch.device(named) if named is not None else accelerator
    if device.type == "cpu":
        raise CollectorUnavailable("this rank computes on the host")
    return device
