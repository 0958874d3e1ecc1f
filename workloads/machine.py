"""Choice of the device that a rank computes on, and of what that device can do."""

from __future__ import annotations

import os

import torch


def choose_device(asked: str, *, local_ranks: int) -> tuple[str, str]:
    """Choose the kind of device for ``local_ranks`` ranks on this host, and say why.

    Raises:
        ValueError: GPUs were asked for, and there is not one for each.
    """
    gpus = torch.cuda.device_count()
    found = f"{gpus} GPU{'' if gpus == 1 else 's'} visible to torch {torch.__version__}"
    if asked == "cpu":
        return "cpu", "requested"
    if gpus >= local_ranks:
        return "cuda", f"{found}, one for each of {local_ranks} ranks"
    need = f"{local_ranks} ranks need {local_ranks} GPUs"
    if local_ranks == 1:
        need = "a rank needs a GPU"
    if asked == "cuda":
        raise ValueError(f"{need}, found {found}: ask for fewer ranks, or for --device cpu")
    return "cpu", f"{found}, {need}"


def own_device(asked: str) -> torch.device:
    """The device of this rank, or of the only process, that ``choose_device`` chose."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind, _ = choose_device(asked, local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device(f"cuda:{local_rank}")


def dtype_problem(device_type: str, dtype: str) -> str | None:
    """Say what this kind of device lacks to compute in ``dtype``, or None."""
    if device_type == "cpu" or dtype != "bfloat16":
        return None
    # Emulated bfloat16 is slower than float32: nobody wants to measure that.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return f"{torch.cuda.get_device_name()} does not compute in bfloat16: use --dtype float32"
