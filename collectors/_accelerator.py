"""The device that a rank computes on, as torch sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    import torch

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
