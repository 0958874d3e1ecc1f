"""What the allocator held, over time, by owner and step."""

from __future__ import annotations

from chopper.tables._base import Table
from chopper.tables.views._columns import column, count, maybe, ns

MEMORY = Table(
    "memory",
    1,
    "Memory by rank, device and phase. Counts and times are per step; peaks are the highest of all "
    "steps.",
    (
        column("rank", "int32", "Rank."),
        column("device", "string", "`device N`, or `host`."),
        column(
            "phase",
            "string",
            "forward, recompute, backward, optimizer, data, other; `all` for whole steps.",
        ),
        maybe("peak_allocated_bytes", "int64", "Most that tensors held.", "bytes"),
        maybe("peak_reserved_bytes", "int64", "Most that the allocator held.", "bytes"),
        maybe(
            "fragmentation_ratio",
            "float64",
            "(reserved − allocated) / reserved at the peak of allocated.",
            "ratio",
        ),
        maybe(
            "median_fragmentation_ratio", "float64", "Median of the same over all events.", "ratio"
        ),
        maybe("allocation_count", "int64", "Allocations per step.", "count"),
        maybe("requested_bytes", "int64", "Bytes allocated per step, reused blocks too.", "bytes"),
        maybe(
            "allocator_call_count",
            "float64",
            "Runtime calls that allocate or free (cudaMalloc, hipFree …) per step.",
            "count",
        ),
        maybe("allocator_ns", "int64", "Host time in these calls per step.", "ns"),
        column("source", "string", "What the figures come from."),
    ),
)

MEMORY_OVER_TIME = Table(
    "memory_over_time",
    1,
    "Most memory of each kind in each step (in each of equal spans, where there are no steps): what "
    "torch's allocator says, what the driver says, and the host's.",
    (
        column("rank", "int32", "Rank."),
        maybe("step", "int64", "Step number; null for spans."),
        ns("since_ns", "Start, since the first row's."),
        ns("dur_ns", "Length of the step or span."),
        maybe("allocated_bytes", "int64", "Held by tensors.", "bytes"),
        maybe("reserved_bytes", "int64", "Held by the allocator.", "bytes"),
        maybe("device_used_bytes", "int64", "In use on the device, by all processes.", "bytes"),
        maybe(
            "host_process_bytes",
            "int64",
            "Resident on the host: the rank and the processes that it started.",
            "bytes",
        ),
        maybe("host_available_bytes", "int64", "Least that the host had left.", "bytes"),
    ),
)

MEMORY_SEGMENTS = Table(
    "memory_segments",
    1,
    "What the allocator held from the driver when a snapshot was taken, and the gaps in it.",
    (
        column("rank", "int32", "Rank."),
        column("device", "string", "`device N`."),
        maybe("kind", "string", "small (blocks of up to 1 MiB) or large."),
        maybe("stream_id", "int64", "Stream that the segments serve."),
        count("segment_count", "Segments."),
        column("reserved_bytes", "int64", "Their size.", "bytes"),
        column("allocated_bytes", "int64", "Of that, held by tensors.", "bytes"),
        maybe("fragmentation_ratio", "float64", "(reserved − allocated) / reserved.", "ratio"),
        count("gap_count", "Gaps between tensors, free segments included."),
        column("largest_gap_bytes", "int64", "The largest: more needs a new segment.", "bytes"),
        column(
            "whole_free_bytes",
            "int64",
            "In segments that no tensor uses: torch.cuda.empty_cache() returns these.",
            "bytes",
        ),
        maybe(
            "rounding_bytes",
            "int64",
            "Held beyond what was asked for; null where that was not recorded.",
            "bytes",
        ),
    ),
)

MEMORY_HOLDERS = Table(
    "memory_holders",
    1,
    "Memory in use when a snapshot was taken, by the line of Python that allocated it.",
    (
        column("rank", "int32", "Rank."),
        column("device", "string", "`device N`."),
        column("held_bytes", "int64", "Held by its tensors.", "bytes"),
        column("share_ratio", "float64", "Of all in use on the device.", "ratio"),
        count("block_count", "Blocks."),
        column("largest_bytes", "int64", "The largest of them.", "bytes"),
        maybe("where", "text", "file:line: function; null where no stack was recorded."),
    ),
)

MEMORY_STEPS = Table(
    "memory_steps",
    1,
    "Allocations of each traced step by rank and device, and the device's clock in it.",
    (
        column("rank", "int32", "Rank."),
        column("device", "string", "`device N`, or `host`."),
        column("step", "int64", "Number of the step."),
        maybe(
            "similarity_ratio",
            "float64",
            "To the step before: Dice's coefficient of runs of three successive events.",
            "ratio",
        ),
        maybe("same_as_previous", "bool", "The same sizes in the same order as the step before."),
        count("event_count", "Allocations and frees."),
        count("distinct_sizes_count", "Different sizes of blocks among them."),
        column("requested_bytes", "int64", "Bytes allocated.", "bytes"),
        maybe("peak_allocated_bytes", "int64", "Most that tensors held.", "bytes"),
        maybe("peak_reserved_bytes", "int64", "Most that the allocator held.", "bytes"),
        count("clock_count", "Clock samples in the step."),
        maybe("clock_mean_hz", "int64", "Mean of the device's clock.", "hz"),
        maybe("clock_std_hz", "int64", "Standard deviation of its samples.", "hz"),
        column("sequence", "text", "Hash of the signed sizes in order: equal for equal steps."),
    ),
)

MEMORY_DETERMINISM = Table(
    "memory_determinism",
    1,
    "How much the allocations of steps vary, by rank and device, and whether the device's clock "
    "varies with them.",
    (
        column("rank", "int32", "Rank."),
        column("device", "string", "`device N`, or `host`."),
        count("steps_count", "Traced steps."),
        maybe(
            "similarity_ratio", "float64", "Mean similarity of a step to the one before.", "ratio"
        ),
        maybe(
            "identical_ratio",
            "float64",
            "Share of steps that allocate exactly as the one before.",
            "ratio",
        ),
        count("event_count", "Allocations and frees per step."),
        count("distinct_sizes_count", "Different sizes of blocks per step."),
        maybe("peak_mean_bytes", "int64", "Mean over steps of the most tensors held.", "bytes"),
        maybe("peak_std_bytes", "int64", "Standard deviation of it over steps.", "bytes"),
        maybe("clock_mean_hz", "int64", "Mean of the steps' mean clocks.", "hz"),
        maybe("clock_std_hz", "int64", "Mean of the clock's deviations within steps.", "hz"),
        maybe(
            "clock_correlation",
            "float64",
            "Pearson's r over steps of 1 − similarity and the clock's deviation.",
        ),
        maybe("no_correlation", "text", "Why there is no correlation."),
    ),
)
