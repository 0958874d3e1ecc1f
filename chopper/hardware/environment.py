"""Facts of a rank about the machine it runs on, without waking anything that sleeps.

Devices are asked only once the program has initialized them: a profiler must not create a context
on device 0 in every rank.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from chopper.hardware.launchers import process_group
from chopper.hardware.parallelism import coordinates
from chopper.storage.manifest import ClockAnchor, Device, RankManifest
from chopper.wording import ranges

_ENVIRONMENT_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MKL_NUM", "KMP_")
_ENVIRONMENT_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def clock_anchor() -> ClockAnchor:
    """This host's clocks, read together: the tightest of three, as any may be interrupted."""
    raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
    readings = []
    for _ in range(3):
        before_ns = time.monotonic_ns()
        realtime_ns = time.time_ns()
        raw_ns = time.clock_gettime_ns(raw) if raw is not None else None
        width_ns = time.monotonic_ns() - before_ns
        readings.append((width_ns, realtime_ns, before_ns + width_ns // 2, raw_ns))
    _, realtime_ns, monotonic_ns, raw_ns = min(readings, key=lambda reading: reading[0])
    return ClockAnchor(realtime_ns=realtime_ns, monotonic_ns=monotonic_ns, monotonic_raw_ns=raw_ns)


def current_device() -> str | None:
    """The accelerator that this rank has initialized, as ``cuda:0``; None for the host."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    module = getattr(torch, kind.type, None)
    initialized = getattr(module, "is_initialized", None)
    if initialized is None or not initialized():
        return None
    return f"{kind.type}:{torch.accelerator.current_device_index()}"


def cpu_model() -> str | None:
    """Return the processor's model as the kernel names it, None where it does not."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _allowed_cores() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _driver_version() -> str | None:
    with contextlib.suppress(OSError):
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        return line.removeprefix("NVRM version:").strip()
    with contextlib.suppress(OSError):
        return "amdgpu " + Path("/sys/module/amdgpu/version").read_text(encoding="utf-8").strip()
    return None


def affinity_nodes(root: str = "/") -> dict[int, int]:
    """NUMA node → how many of the cores that this process may use are on it; empty: not known."""
    allowed = _allowed_cores() or set()
    nodes: dict[int, int] = {}
    for folder in Path(root, "sys/devices/system/node").glob("node[0-9]*"):
        try:
            text = (folder / "cpulist").read_text().strip()
        except OSError:
            continue
        cores: set[int] = set()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cores |= {*range(int(first), int(last or first) + 1)}
        if count := len(allowed & cores):
            nodes[int(folder.name[4:])] = count
    return dict(sorted(nodes.items()))


def _pci_address(of: Any) -> str | None:
    """Domain:bus:device of a device; None where torch does not say."""
    try:
        return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}"
    except (AttributeError, TypeError, ValueError):
        return None


def device_numa_node(device: str, root: str = "/") -> int | None:
    """NUMA node that a device hangs on; None where torch or the machine does not say."""
    kind, _, index = device.partition(":")
    try:
        of = getattr(sys.modules["torch"], kind).get_device_properties(int(index))
        address = f"{_pci_address(of)}.0"
        node = int(Path(root, "sys/bus/pci/devices", address, "numa_node").read_text())
    except (AttributeError, AssertionError, OSError, RuntimeError, TypeError, ValueError):
        return None
    return node if node >= 0 else None


def environment() -> dict[str, str]:
    """Versions, the machine, and the variables that change how training runs."""
    allowed = _allowed_cores()
    values: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": allowed and len(allowed),
        "affinity": allowed and ranges(allowed),
        "cores_by_numa_node": " ".join(f"{n}:{c}" for n, c in affinity_nodes().items()) or None,
        "driver": _driver_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        if (device := current_device()) is not None:
            values["device_numa_node"] = device_numa_node(device)
        values |= {
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
        if torch.cuda.is_available():
            with contextlib.suppress(AttributeError, RuntimeError):
                values["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    for name, value in sorted(os.environ.items()):
        if name in _ENVIRONMENT_NAMES or name.startswith(_ENVIRONMENT_PREFIXES):
            values[name] = value
    return {name: str(value) for name, value in values.items() if value is not None}


def loopback() -> str | None:
    """Return the network namespace whose loopback joins its processes at full speed; None: unknown.

    Whatever address of its own a process uses, the kernel takes the loopback within a namespace.
    """
    try:
        namespace = str(Path("/proc/self/ns/net").readlink())
        queues = _queues(socket.if_nametoindex("lo"))
    except (AttributeError, OSError, struct.error):  # not Linux, or a sandbox
        return None
    return namespace if queues == [b"noqueue"] else None


_GET_QUEUES, _DUMP = 38, 0x301
_DONE, _ERROR = 3, 2


def _queues(interface: int) -> list[bytes]:
    """Return the kinds of an interface's queues, as rtnetlink lists them (linux/rtnetlink.h)."""
    found: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
        # The header: length, type, flags, two numbers; and an empty tcmsg: those of all interfaces.
        kernel.send(struct.pack("=IHHII20x", 36, _GET_QUEUES, _DUMP, 1, 0))
        while True:
            data, at = kernel.recv(1 << 16), 0
            while at < len(data):
                size, kind = struct.unpack_from("=IH", data, at)
                if kind in (_DONE, _ERROR):
                    return found
                (index,) = struct.unpack_from("=i", data, at + 20)
                (name_size,) = struct.unpack_from("=H", data, at + 36)  # the first attribute
                if index == interface:
                    found.append(data[at + 40 : at + 36 + name_size].rstrip(b"\0"))
                at += -(-size // 4) * 4


def _device(name: str) -> Device:
    kind, _, index = name.partition(":")
    try:
        properties = getattr(sys.modules["torch"], kind).get_device_properties(int(index))
    except (AttributeError, RuntimeError, AssertionError):
        return Device(device_id=int(index))
    uuid = getattr(properties, "uuid", None)
    return Device(
        device_id=int(index),
        name=getattr(properties, "name", None),
        memory_bytes=getattr(properties, "total_memory", None),
        multiprocessor_count=getattr(
            properties, "multi_processor_count", getattr(properties, "gpu_subslice_count", None)
        ),
        uuid=str(uuid) if uuid is not None else None,
        pci_address=_pci_address(properties),
    )


def _process_groups(dist: Any) -> list[dict[str, Any]]:
    try:
        groups = dist.distributed_c10d._world.pg_config_info
    except (AttributeError, RuntimeError):
        return []
    return [
        {str(key): value for key, value in group.items() if isinstance(value, str | int | list)}
        for group in groups
    ]


def describe(manifest: RankManifest) -> None:
    """Fill in known fields of the manifest; called at start, after each trace, and at the end."""
    manifest.environment = environment()
    manifest.loopback = loopback()
    device = current_device()
    if device is not None:
        manifest.devices = [_device(device)]
        manifest.device_id = manifest.devices[0].device_id
    dist = process_group()
    if dist is not None:
        manifest.world_size = dist.get_world_size()
        with contextlib.suppress(RuntimeError, ValueError):
            manifest.backend = dist.get_backend()
        manifest.process_groups = _process_groups(dist) or manifest.process_groups
        manifest.coordinates = coordinates(dist) or manifest.coordinates


def calibration(manifest: RankManifest) -> dict[str, Any] | None:
    """Find the calibration of this rank's device, in these conditions if any.

    What the host's cores achieve depends on how many processes and threads share them.
    """
    from chopper.errors import ChopperError
    from chopper.hardware import calibration as stored

    torch = sys.modules.get("torch")
    try:
        if manifest.device_id is None:
            match = stored.load(
                None,
                ranks=manifest.world_size,
                threads=torch.get_num_threads() if torch is not None else None,
            )
        else:
            match = stored.load(manifest.devices[0].name)
    except ChopperError:  # a damaged file: `chopper calibrate` says so
        return None
    return stored.to_manifest(match) if match is not None else None
