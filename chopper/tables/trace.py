"""Tables that a kernel trace becomes: one set per rank."""

from __future__ import annotations

from chopper.tables._base import Column, Table

_START = Column(name="start_ns", type="int64", unit="ns", doc="Start, Unix time.")
_DUR = Column(name="dur_ns", type="int64", unit="ns", doc="Duration.")
_NAME = Column(name="name", type="string", doc="Name as recorded.")


def _id(name: str, doc: str) -> Column:
    return Column(name=name, type="int64", nullable=True, doc=doc)


def _string(name: str, doc: str) -> Column:
    return Column(name=name, type="string", nullable=True, doc=doc)


HOST_SPAN = Table(
    "host_span",
    1,
    "What host threads did: operators, annotations, runtime calls, Python functions. "
    "Sorted by start, then longest first.",
    (
        _START,
        _DUR,
        Column(name="pid", type="int64", doc="Process that ran it."),
        Column(name="tid", type="int64", doc="Thread that ran it (key into `thread`)."),
        Column(
            name="category",
            type="string",
            doc="cpu_op, annotation, runtime, driver, python, overhead, sync, gc or other.",
        ),
        _NAME,
        _id("correlation_id", "Joins a runtime call to the device events that it launched."),
        _id("external_id", "The profiler's id of the operator (or of the launching operator)."),
        _id("sequence_id", "Autograd sequence number; a backward node carries its forward's."),
        _id("forward_tid", "On backward nodes: the thread of the forward."),
        _string("input_dims", "Shapes of the inputs, JSON as recorded."),
        _string("input_types", "Data types of the inputs, JSON as recorded."),
        _string("concrete_inputs", "Values of scalar inputs, JSON as recorded."),
    ),
)

THREAD = Table(
    "thread",
    1,
    "Host threads and device streams that occur in the trace.",
    (
        Column(name="pid", type="int64", doc="Process, or device for stream rows."),
        Column(name="tid", type="int64", doc="Thread or stream."),
        _string("process_name", "Name of the process as recorded."),
        _string("thread_name", "Name of the thread as recorded."),
    ),
)

DEVICE_EVENT = Table(
    "device_event",
    1,
    "What devices did: kernels, copies, memsets. Sorted by start, then longest first. On a trace "
    "without a device the compute threads' leaf operators and the communication threads' spans "
    "stand here, with kind `host_op` and `host_collective`.",
    (
        _START,
        _DUR,
        Column(name="device_id", type="int32", doc="Device ordinal; -1 for the host itself."),
        Column(name="stream_id", type="int64", doc="Stream; the thread for host rows."),
        Column(
            name="kind",
            type="string",
            doc="kernel, memcpy, memset, host_op or host_collective.",
        ),
        _NAME,
        _id("correlation_id", "Joins to the launching runtime call."),
        _id("external_id", "The launching operator's id, where recorded."),
        _id("bytes_count", "Bytes that a copy or memset moved, as recorded."),
        _string("grid", "Blocks per grid, JSON as recorded."),
        _string("block", "Threads per block, JSON as recorded."),
        _id("registers_count", "Registers per thread."),
        _id("shared_memory_bytes", "Shared memory per block."),
        Column(
            name="occupancy_ratio",
            type="float64",
            nullable=True,
            unit="ratio",
            doc="Estimated achieved occupancy.",
        ),
        _id("graph_id", "Graph that replayed this kernel."),
        _id("graph_node_id", "Node in that graph."),
    ),
)

COLLECTIVE = Table(
    "collective",
    2,
    "Metadata of collectives, from device events or from the operators that issued them.",
    (
        Column(name="source", type="string", doc="device_event or host_span."),
        Column(name="row", type="int64", doc="Row in that table."),
        _string("collective", "Name of the collective as recorded: allreduce, _allgather_base …"),
        _id("in_elements_count", "Elements of the input message on this rank."),
        _id("out_elements_count", "Elements of the output message on this rank."),
        _string("dtype", "Element type as recorded: Float, BFloat16 …"),
        _id("group_size_count", "Ranks in the process group."),
        _string("group_name", "Name of the process group."),
        _string("group_ranks", "Ranks of the process group, JSON as recorded."),
        _id("sequence_id", "Sequence number within the group, where recorded."),
        _id("first_rank_id", "First global rank of the group, where its ranks are evenly spaced."),
        _id("rank_stride_count", "Distance of its ranks, where they are evenly spaced."),
        _id("source_rank_id", "Global rank that sends, on a receive."),
        _id("target_rank_id", "Global rank that receives, on a send."),
    ),
)

STEP = Table(
    "step",
    2,
    "Training steps as the host saw them.",
    (
        Column(name="number", type="int64", doc="Number of the step as the program counts."),
        _START,
        Column(name="end_ns", type="int64", unit="ns", doc="End, Unix time."),
        Column(
            name="source",
            type="string",
            doc="profiler_step (ProfilerStep#N), mark (prof.step()), optimizer (hooks), or backward "
            "(a backward pass ended, in a program in which no optimizer of torch steps). Where a "
            "program trains several models in turn, the steps of the second are of 'optimizer 2': "
            "of another class, or of parameters of other shapes.",
        ),
        Column(name="traced", type="bool", doc="Whether the kernel trace covers this step."),
        Column(
            name="profiled",
            type="bool",
            nullable=True,
            doc="Whether a trace was being taken during some part of this step, kept or not; steps "
            "without one ran at the program's own speed. Null before version 2.",
        ),
    ),
)

MEMORY_EVENT = Table(
    "memory_event",
    1,
    "Allocator events ([memory] instants).",
    (
        Column(name="time_ns", type="int64", unit="ns", doc="Unix time."),
        Column(name="tid", type="int64", doc="Thread."),
        _id("device_type", "0 CPU, 1 CUDA/HIP, as c10::DeviceType."),
        _id("device_id", "Device ordinal."),
        _id("address_id", "Address of the block."),
        _id("bytes_count", "Bytes allocated (positive) or freed (negative)."),
        _id("allocated_bytes", "Total allocated after the event."),
        _id("reserved_bytes", "Total reserved after the event."),
    ),
)

COUNTER = Table(
    "counter",
    1,
    "Counter samples found inside the trace (ph C), for example sclk.",
    (
        Column(name="time_ns", type="int64", unit="ns", doc="Unix time."),
        Column(name="track", type="string", doc="Process or device of the counter."),
        _NAME,
        Column(name="value", type="float64", nullable=True, doc="Value as recorded."),
    ),
)

KERNEL_COUNTER = Table(
    "kernel_counter",
    1,
    "Hardware counters of single kernels, as a counter tool measured them in a run of its own "
    "(rocprofv3, Nsight Compute). One row for each kernel and counter, in the tool's order.",
    (
        Column(name="source", type="string", doc="File that it comes from: one pass of the tool."),
        Column(name="dispatch_id", type="int64", doc="Number of the kernel within that file."),
        Column(name="kernel", type="string", doc="Name of the kernel as the tool wrote it."),
        Column(
            name="occurrence_id",
            type="int64",
            doc="How many kernels of this name came before it in that file.",
        ),
        Column(name="device", type="string", nullable=True, doc="Device as the tool names it."),
        Column(name="counter", type="string", doc="Name of the counter."),
        Column(
            name="value",
            type="float64",
            nullable=True,
            doc="Value in the unit's base (bytes, not Kbyte); null where the tool wrote n/a.",
        ),
        Column(name="unit", type="string", nullable=True, doc="Unit, where the tool names one."),
    ),
)

SYNCHRONIZATION = Table(
    "synchronization",
    1,
    "What host threads and streams waited for, where the trace says it (CUDA's cuda_sync records). "
    "Sorted by start, then longest first.",
    (
        _START,
        _DUR,
        Column(
            name="name",
            type="string",
            doc="Stream Wait Event, Event Sync, Stream Sync or Context Sync.",
        ),
        Column(name="device_id", type="int32", doc="Device ordinal."),
        _id("stream_id", "Stream that waits, or that is waited for as a whole."),
        _id("correlation_id", "Joins to the runtime call that asked for it."),
        _id("event_stream_id", "Stream whose event is waited for."),
        _id("event_correlation_id", "Joins to the runtime call that recorded that event."),
    ),
)

LAYER_SEQUENCE = Table(
    "layer_sequence",
    1,
    "Autograd sequence numbers that each call of a layer took: a backward node belongs to the "
    "innermost call with sequence_low_id <= its sequence_id < sequence_high_id on the thread of "
    "its forward (the counter is per thread). Written as the trace is taken, in order of return: "
    "inner calls come before the ones around them.",
    (
        Column(name="layer", type="string", doc="Name of the module, wrappers stripped."),
        Column(
            name="recompute",
            type="bool",
            doc="Called within backward: activation checkpointing ran the forward again.",
        ),
        Column(name="tid", type="int64", doc="Thread that called it."),
        Column(name="sequence_low_id", type="int64", doc="First sequence number of the call."),
        Column(name="sequence_high_id", type="int64", doc="One past its last."),
        _START,
        Column(name="end_ns", type="int64", unit="ns", doc="End, Unix time."),
    ),
)

PROGRAM_PHASE = Table(
    "program_phase",
    2,
    "Phases that the program names with prof.phase(…), or that its trainer is known to be in "
    "(evaluation, generation, rollout, checkpoint), whether a trace was being taken or not. Rows "
    "overlap where phases nest or coroutines take turns: the one that began last has the time.",
    (
        Column(name="name", type="string", doc="Name of the phase."),
        Column(name="tid", type="int64", doc="Thread that was in it."),
        _START,
        Column(name="end_ns", type="int64", unit="ns", doc="End, Unix time."),
    ),
)

TRACE_TABLES = (
    HOST_SPAN,
    THREAD,
    DEVICE_EVENT,
    COLLECTIVE,
    STEP,
    MEMORY_EVENT,
    COUNTER,
    KERNEL_COUNTER,
    SYNCHRONIZATION,
    LAYER_SEQUENCE,
    PROGRAM_PHASE,
)
