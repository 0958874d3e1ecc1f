"""One colour per cause, the same in every figure, in light and dark.

Families are told apart by hue (blue-green and blues for computing, orange to red for
communication, magenta for copies, yellow to grey for idle), members by lightness. The hues follow
Okabe and Ito's palette for colour-blind readers (https://jfly.uni-koeln.de/color/); wherever a
colour stands, a label or a tooltip says the same in words.
"""

from __future__ import annotations

from chopper.causes import CAUSES, parents

COLORS: dict[str, str] = {
    "compute": "#3b7dd8",
    "compute.ideal": "#12a17d",
    "compute.roofline": "#1d4fa3",
    "compute.clock": "#2457c5",
    "compute.clock.power_cap": "#2a4fd0",
    "compute.clock.thermal": "#4763d9",
    "compute.clock.application": "#6178de",
    "compute.clock.idle_ramp": "#7b8de4",
    "compute.clock.host_limited": "#95a3ea",
    "compute.clock.unlabelled": "#4a68b8",
    "compute.contention": "#0f7f9e",
    "compute.efficiency": "#3f86e0",
    "compute.efficiency.wave_quantization": "#2f6fc4",
    "compute.efficiency.instructions": "#5b9bd5",
    "compute.efficiency.tensor_core": "#74aee8",
    "compute.efficiency.rest": "#3f86e0",
    "compute.no_peak": "#5f9ee6",
    "compute.recompute": "#6a5acd",
    "compute.optimizer": "#9184e0",
    "compute.outside_training": "#b66a9c",
    "compute.fsdp_copy": "#2b6f8f",
    "compute.vector": "#59b2d9",
    "compute.vector.roofline": "#3d9fc9",
    "compute.vector.excess": "#86c9e8",
    "compute.vector.no_bytes": "#59b2d9",
    "compute.unmodelled": "#8da2bf",
    "compute.core_wait": "#7fa08a",
    "communication": "#e07b1a",
    "communication.wait": "#d1491b",
    "communication.transfer": "#eb9b3f",
    "communication.transfer.at_peak": "#f3bd7c",
    "communication.transfer.below_peak": "#e8862e",
    "communication.transfer.no_peak": "#eb9b3f",
    "communication.unseparated": "#df6f2b",
    "copy": "#c05a9c",
    "copy.host_to_device": "#b0478a",
    "copy.device_to_host": "#cf74b0",
    "copy.device_to_device": "#dc9ac6",
    "copy.memset": "#8f3f73",
    "copy.other": "#c05a9c",
    "idle": "#a8a08a",
    "idle.dependency": "#7d7768",
    "idle.launch_latency": "#98917f",
    "idle.call": "#b3ab96",
    "idle.preparation": "#c9a227",
    "idle.preparation.data": "#e9bd20",
    "idle.preparation.synchronization": "#c98a12",
    "idle.preparation.allocator": "#98792b",
    "idle.preparation.collective_wait": "#bf6a3a",
    "idle.preparation.gc": "#868b3a",
    "idle.preparation.compile": "#a39b4a",
    "idle.preparation.dispatch": "#cdb94f",
    "idle.preparation.runtime": "#b09a3e",
    "idle.preparation.profiler": "#9a9a9a",
    "idle.preparation.python": "#e3d08c",
    "idle.preparation.core_wait": "#a9b665",
    "idle.preparation.unobserved": "#c9c6bc",
    "idle.unlaunched": "#8b8b8b",
    "idle.no_step": "#cbc7bd",
}
_FALLBACK = "#8a8f98"

PHASES: dict[str, str] = {
    "forward": "#3f86e0",
    "recompute": "#6a5acd",
    "backward": "#12a17d",
    "optimizer": "#e8862e",
    "data": "#e3b71b",
    "other": "#98917f",
    "between": "#cbc7bd",
    "evaluation": "#c2569b",
    "generation": "#a8456f",
    "rollout": "#8c5a9e",
    "inference": "#d68ab8",
    "checkpoint": "#7a6a58",
}
"""Colours of the phases; those that only one program has take that of ``other``."""


def color(cause: str) -> str:
    """Colour of a cause; one that is newer than this table takes its parent's."""
    if cause in COLORS:
        return COLORS[cause]
    for parent in parents(cause) if cause in CAUSES else ():
        if parent in COLORS:
            return COLORS[parent]
    return COLORS.get(cause.partition(".")[0], _FALLBACK)


def ink(background: str) -> str:
    """Black or white, whichever reads better on a colour (WCAG 2 relative luminance)."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#101114" if luminance > 0.26 else "#ffffff"
