"""Tables that analysis derives."""

from __future__ import annotations

from chopper.tables._base import Column, Table

EVENT_LINK = Table(
    "event_link",
    1,
    "One row per device event, in its order: what launched it and where it belongs.",
    (
        Column(
            name="launch_row",
            type="int64",
            nullable=True,
            doc="Row of the launching call in `host_span`.",
        ),
        Column(
            name="op_row",
            type="int64",
            nullable=True,
            doc="Row of the innermost operator in `host_span`.",
        ),
        Column(name="op", type="string", nullable=True, doc="Name of that operator."),
        Column(
            name="annotation",
            type="string",
            nullable=True,
            doc="Innermost annotation of the user's around the launch.",
        ),
        Column(name="layer", type="string", nullable=True, doc="Module path of the layer."),
        Column(
            name="phase",
            type="string",
            doc="forward, recompute, backward, optimizer, data, evaluation, generation, rollout, "
            "inference, checkpoint, a name that the program gave (prof.phase), between (outside of "
            "them) or other.",
        ),
        Column(
            name="step_index",
            type="int32",
            nullable=True,
            doc="Index of its step's window; null before the first and after the last.",
        ),
        Column(
            name="work_class",
            type="string",
            doc="communication, copy, or compute; what level 1 sees.",
        ),
    ),
)

PIECE = Table(
    "piece",
    1,
    "The attribution itself: every nanosecond of every window in exactly one row. Sum of "
    "`time_ns` over a rank equals its observed time.",
    (
        Column(name="rank", type="int32", doc="Rank."),
        Column(name="step_index", type="int32", doc="Index of the step window of this rank."),
        Column(name="cause", type="string", doc="Id of a leaf cause."),
        Column(
            name="event_row",
            type="int64",
            nullable=True,
            doc="Device event that spent the time, or that ended the gap.",
        ),
        Column(
            name="phase",
            type="string",
            doc="Phase of that event; where the host was late, the phase that the host was in.",
        ),
        Column(
            name="layer",
            type="string",
            nullable=True,
            doc="Layer of that event; where the host was late, the one that the host was in.",
        ),
        Column(
            name="op",
            type="string",
            nullable=True,
            doc="Operator of that event; where the host was late, the outermost that it was in.",
        ),
        Column(
            name="kernel",
            type="string",
            nullable=True,
            doc="Name of that event; null where the host was late.",
        ),
        Column(name="time_ns", type="int64", unit="ns", doc="Time in this cause; may be 0."),
    ),
)

WINDOW = Table(
    "window",
    1,
    "Step windows of each rank; they tile the attributed device time.",
    (
        Column(name="rank", type="int32", doc="Rank."),
        Column(name="step_index", type="int32", doc="Index of the window."),
        Column(
            name="number", type="int64", nullable=True, doc="Step number; null for a whole trace."
        ),
        Column(name="start_ns", type="int64", unit="ns", doc="Start of the window, Unix time."),
        Column(name="end_ns", type="int64", unit="ns", doc="End of the window, Unix time."),
    ),
)

GAP = Table(
    "gap",
    1,
    "Idle time of each window, cut by cause: disjoint intervals in time order.",
    (
        Column(name="rank", type="int32", doc="Rank."),
        Column(name="step_index", type="int32", doc="Index of the window."),
        Column(name="start_ns", type="int64", unit="ns", doc="Start, Unix time."),
        Column(name="end_ns", type="int64", unit="ns", doc="End, Unix time."),
        Column(name="cause", type="string", doc="Id of a leaf cause under `idle`."),
        Column(
            name="event_row",
            type="int64",
            nullable=True,
            doc="Device event that ended the gap.",
        ),
    ),
)

COMMUNICATION = Table(
    "communication",
    1,
    "One row per communication event: what it was and, where all ranks of its group took part, "
    "which collective it belongs to. Arrivals and ends are in one clock for all ranks.",
    (
        Column(name="rank", type="int32", doc="Rank."),
        Column(name="event_row", type="int64", doc="Row in `device_event`."),
        Column(name="collective", type="string", doc="Normalized name: allreduce, sendrecv …"),
        Column(name="group", type="string", nullable=True, doc="Name of the process group."),
        Column(
            name="ranks",
            type="string",
            nullable=True,
            doc="Global ranks that take part, for example 0-7; null where not told.",
        ),
        Column(name="rank_count", type="int64", nullable=True, unit="count", doc="How many."),
        Column(
            name="sequence_id",
            type="int64",
            nullable=True,
            doc="Number within the group, where recorded.",
        ),
        Column(
            name="instance_id",
            type="int64",
            nullable=True,
            doc="The collective, the same number on all its ranks; null where not matched.",
        ),
        Column(name="arrival_ns", type="int64", unit="ns", doc="When this rank entered it."),
        Column(name="left_ns", type="int64", unit="ns", doc="When this rank left it."),
        Column(
            name="ready_ns",
            type="int64",
            nullable=True,
            unit="ns",
            doc="When the last rank entered it.",
        ),
        Column(
            name="message_bytes",
            type="int64",
            nullable=True,
            unit="bytes",
            doc="Size as nccl-tests count it: the whole array.",
        ),
        Column(
            name="bus_factor",
            type="float64",
            nullable=True,
            unit="factor",
            doc="nccl-tests' bus factor.",
        ),
        Column(
            name="link_bytes_per_s",
            type="float64",
            nullable=True,
            unit="bytes_per_s",
            doc="Peak of the link in one direction.",
        ),
    ),
)

ANALYSIS_TABLES = (EVENT_LINK, PIECE, WINDOW, GAP, COMMUNICATION)
