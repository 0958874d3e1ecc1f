"""Tables that analysis derives."""

from __future__ import annotations

from chopper.tables._base import Table, column, ns, optional

EVENT_LINK = Table(
    "event_link",
    1,
    "One row per device event, in its order: what launched it and where it belongs.",
    (
        optional("launch_row", "int64", "Row of the launching call in `host_span`."),
        optional("op_row", "int64", "Row of the innermost operator in `host_span`."),
        optional("op", "string", "Name of that operator."),
        optional("annotation", "string", "Innermost annotation of the user's around the launch."),
        optional("layer", "string", "Module path of the layer."),
        column(
            "phase",
            "string",
            "forward, recompute, backward, optimizer, data, evaluation, generation, rollout, "
            "inference, checkpoint, a name that the program gave (prof.phase), between (outside of "
            "them) or other.",
        ),
        optional(
            "step_index",
            "int32",
            "Index of its step's window; null before the first and after the last.",
        ),
        column("work_class", "string", "communication, copy, or compute; what level 1 sees."),
    ),
)

PIECE = Table(
    "piece",
    1,
    "The attribution itself: every nanosecond of every window in exactly one row. Sum of "
    "`time_ns` over a rank equals its observed time.",
    (
        column("rank", "int32", "Rank."),
        column("step_index", "int32", "Index of the step window of this rank."),
        column("cause", "string", "Id of a leaf cause."),
        optional("event_row", "int64", "Device event that spent the time, or that ended the gap."),
        column(
            "phase",
            "string",
            "Phase of that event; where the host was late, the phase that the host was in.",
        ),
        optional(
            "layer",
            "string",
            "Layer of that event; where the host was late, the one that the host was in.",
        ),
        optional(
            "op",
            "string",
            "Operator of that event; where the host was late, the outermost that it was in.",
        ),
        optional("kernel", "string", "Name of that event; null where the host was late."),
        ns("time_ns", "Time in this cause; may be 0."),
    ),
)

WINDOW = Table(
    "window",
    1,
    "Step windows of each rank; they tile the attributed device time.",
    (
        column("rank", "int32", "Rank."),
        column("step_index", "int32", "Index of the window."),
        optional("number", "int64", "Step number; null for a whole trace."),
        ns("start_ns", "Start of the window, Unix time."),
        ns("end_ns", "End of the window, Unix time."),
    ),
)

GAP = Table(
    "gap",
    1,
    "Idle time of each window, cut by cause: disjoint intervals in time order.",
    (
        column("rank", "int32", "Rank."),
        column("step_index", "int32", "Index of the window."),
        ns("start_ns", "Start, Unix time."),
        ns("end_ns", "End, Unix time."),
        column("cause", "string", "Id of a leaf cause under `idle`."),
        optional("event_row", "int64", "Device event that ended the gap."),
    ),
)

COMMUNICATION = Table(
    "communication",
    1,
    "One row per communication event: what it was and, where all ranks of its group took part, "
    "which collective it belongs to. Arrivals and ends are in one clock for all ranks.",
    (
        column("rank", "int32", "Rank."),
        column("event_row", "int64", "Row in `device_event`."),
        column("collective", "string", "Normalized name: allreduce, sendrecv …"),
        optional("group", "string", "Name of the process group."),
        optional(
            "ranks", "string", "Global ranks that take part, for example 0-7; null where not told."
        ),
        optional("rank_count", "int64", "How many."),
        optional("sequence_id", "int64", "Number within the group, where recorded."),
        optional(
            "instance_id",
            "int64",
            "The collective, the same number on all its ranks; null where not matched.",
        ),
        ns("arrival_ns", "When this rank entered it."),
        ns("left_ns", "When this rank left it."),
        optional("ready_ns", "int64", "When the last rank entered it."),
        optional("message_bytes", "int64", "Size as nccl-tests count it: the whole array."),
        optional("bus_factor", "float64", "nccl-tests' bus factor."),
        optional("link_bytes_per_s", "float64", "Peak of the link in one direction."),
    ),
)

ANALYSIS_TABLES = (EVENT_LINK, PIECE, WINDOW, GAP, COMMUNICATION)
