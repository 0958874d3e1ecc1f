"""Tables that a kernel trace becomes: one set per rank."""

from __future__ import annotations

from chopper.tables._base import Table, column, ns, optional

_START = ns("start_ns", "Start, Unix time.")
_DUR = ns("dur_ns", "Duration.")
_NAME = column("name", "string", "Name as recorded.")


HOST_SPAN = Table(
    "host_span",
    1,
    "What host threads did: operators, annotations, runtime calls, Python functions. "
    "Sorted by start, then longest first.",
    (
        _START,
        _DUR,
        column("pid", "int64", "Process that ran it."),
        column("tid", "int64", "Thread that ran it (key into `thread`)."),
        column(
            "category",
            "string",
            "cpu_op, annotation, runtime, driver, python, overhead, sync, gc or other.",
        ),
        _NAME,
        optional(
            "correlation_id", "int64", "Joins a runtime call to the device events that it launched."
        ),
        optional(
            "external_id",
            "int64",
            "The profiler's id of the operator (or of the launching operator).",
        ),
        optional(
            "sequence_id",
            "int64",
            "Autograd sequence number; a backward node carries its forward's.",
        ),
        optional("forward_tid", "int64", "On backward nodes: the thread of the forward."),
        optional("input_dims", "string", "Shapes of the inputs, JSON as recorded."),
        optional("input_types", "string", "Data types of the inputs, JSON as recorded."),
        optional("concrete_inputs", "string", "Values of scalar inputs, JSON as recorded."),
    ),
)

THREAD = Table(
    "thread",
    1,
    "Host threads and device streams that occur in the trace.",
    (
        column("pid", "int64", "Process, or device for stream rows."),
        column("tid", "int64", "Thread or stream."),
        optional("process_name", "string", "Name of the process as recorded."),
        optional("thread_name", "string", "Name of the thread as recorded."),
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
        column("device_id", "int32", "Device ordinal; -1 for the host itself."),
        column("stream_id", "int64", "Stream; the thread for host rows."),
        column("kind", "string", "kernel, memcpy, memset, host_op or host_collective."),
        _NAME,
        optional("correlation_id", "int64", "Joins to the launching runtime call."),
        optional("external_id", "int64", "The launching operator's id, where recorded."),
        optional("bytes_count", "int64", "Bytes that a copy or memset moved, as recorded."),
        optional("grid", "string", "Blocks per grid, JSON as recorded."),
        optional("block", "string", "Threads per block, JSON as recorded."),
        optional("registers_count", "int64", "Registers per thread."),
        optional("shared_memory_bytes", "int64", "Shared memory per block."),
        optional("occupancy_ratio", "float64", "Estimated achieved occupancy."),
        optional("graph_id", "int64", "Graph that replayed this kernel."),
        optional("graph_node_id", "int64", "Node in that graph."),
    ),
)

COLLECTIVE = Table(
    "collective",
    2,
    "Metadata of collectives, from device events or from the operators that issued them.",
    (
        column("source", "string", "device_event or host_span."),
        column("row", "int64", "Row in that table."),
        optional(
            "collective",
            "string",
            "Name of the collective as recorded: allreduce, _allgather_base …",
        ),
        optional("in_elements_count", "int64", "Elements of the input message on this rank."),
        optional("out_elements_count", "int64", "Elements of the output message on this rank."),
        optional("dtype", "string", "Element type as recorded: Float, BFloat16 …"),
        optional("group_size_count", "int64", "Ranks in the process group."),
        optional("group_name", "string", "Name of the process group."),
        optional("group_ranks", "string", "Ranks of the process group, JSON as recorded."),
        optional("sequence_id", "int64", "Sequence number within the group, where recorded."),
        optional(
            "first_rank_id",
            "int64",
            "First global rank of the group, where its ranks are evenly spaced.",
        ),
        optional(
            "rank_stride_count", "int64", "Distance of its ranks, where they are evenly spaced."
        ),
        optional("source_rank_id", "int64", "Global rank that sends, on a receive."),
        optional("target_rank_id", "int64", "Global rank that receives, on a send."),
    ),
)

STEP = Table(
    "step",
    2,
    "Training steps as the host saw them.",
    (
        column("number", "int64", "Number of the step as the program counts."),
        _START,
        ns("end_ns", "End, Unix time."),
        column(
            "source",
            "string",
            "profiler_step (ProfilerStep#N), mark (prof.step()), optimizer (hooks), or backward "
            "(a backward pass ended, in a program in which no optimizer of torch steps). Where a "
            "program trains several models in turn, the steps of the second are of 'optimizer 2': "
            "of another class, or of parameters of other shapes.",
        ),
        column("traced", "bool", "Whether the kernel trace covers this step."),
        optional(
            "profiled",
            "bool",
            "Whether a trace was being taken during some part of this step, kept or not; steps "
            "without one ran at the program's own speed. Null before version 2.",
        ),
    ),
)

MEMORY_EVENT = Table(
    "memory_event",
    1,
    "Allocator events ([memory] instants).",
    (
        ns("time_ns", "Unix time."),
        column("tid", "int64", "Thread."),
        optional("device_type", "int64", "0 CPU, 1 CUDA/HIP, as c10::DeviceType."),
        optional("device_id", "int64", "Device ordinal."),
        optional("address_id", "int64", "Address of the block."),
        optional("bytes_count", "int64", "Bytes allocated (positive) or freed (negative)."),
        optional("allocated_bytes", "int64", "Total allocated after the event."),
        optional("reserved_bytes", "int64", "Total reserved after the event."),
    ),
)

COUNTER = Table(
    "counter",
    1,
    "Counter samples found inside the trace (ph C), for example sclk.",
    (
        ns("time_ns", "Unix time."),
        column("track", "string", "Process or device of the counter."),
        _NAME,
        optional("value", "float64", "Value as recorded."),
    ),
)

KERNEL_COUNTER = Table(
    "kernel_counter",
    1,
    "Hardware counters of single kernels, as a counter tool measured them in a run of its own "
    "(rocprofv3, Nsight Compute). One row for each kernel and counter, in the tool's order.",
    (
        column("source", "string", "File that it comes from: one pass of the tool."),
        column("dispatch_id", "int64", "Number of the kernel within that file."),
        column("kernel", "string", "Name of the kernel as the tool wrote it."),
        column(
            "occurrence_id", "int64", "How many kernels of this name came before it in that file."
        ),
        optional("device", "string", "Device as the tool names it."),
        column("counter", "string", "Name of the counter."),
        optional(
            "value",
            "float64",
            "Value in the unit's base (bytes, not Kbyte); null where the tool wrote n/a.",
        ),
        optional("unit", "string", "Unit, where the tool names one."),
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
        column("name", "string", "Stream Wait Event, Event Sync, Stream Sync or Context Sync."),
        column("device_id", "int32", "Device ordinal."),
        optional("stream_id", "int64", "Stream that waits, or that is waited for as a whole."),
        optional("correlation_id", "int64", "Joins to the runtime call that asked for it."),
        optional("event_stream_id", "int64", "Stream whose event is waited for."),
        optional(
            "event_correlation_id", "int64", "Joins to the runtime call that recorded that event."
        ),
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
        column("layer", "string", "Name of the module, wrappers stripped."),
        column(
            "recompute",
            "bool",
            "Called within backward: activation checkpointing ran the forward again.",
        ),
        column("tid", "int64", "Thread that called it."),
        column("sequence_low_id", "int64", "First sequence number of the call."),
        column("sequence_high_id", "int64", "One past its last."),
        _START,
        ns("end_ns", "End, Unix time."),
    ),
)

PROGRAM_PHASE = Table(
    "program_phase",
    2,
    "Phases that the program names with prof.phase(…), or that its trainer is known to be in "
    "(evaluation, generation, rollout, checkpoint), whether a trace was being taken or not. Rows "
    "overlap where phases nest or coroutines take turns: the one that began last has the time.",
    (
        column("name", "string", "Name of the phase."),
        column("tid", "int64", "Thread that was in it."),
        _START,
        ns("end_ns", "End, Unix time."),
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
