"""The meaning of names: the one place that knows how frameworks and libraries call things."""

from __future__ import annotations

import re

from chopper.analyzers.work.name_search import NameSearch

_COMMUNICATION = re.compile(
    r"nccl|rccl|mscclkernel|^(gloo|mpi|ucc|xccl|hccl):|multimem_|nvshmem|rocshmem|userbuffers_"
    r"|(one|two)_?shot_?(all|reduce)|deep_ep::|deepep::|internode::|intranode::"
    r"|cross_device_reduce|quick_?reduce|moeAllToAll|mnnvl::"
    r"|(?<![a-z_])(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?!_permute|_sum_rows)",
    re.IGNORECASE,
)
# FSDP's copies into and out of communication buffers carry the collective's name.
_NOT_COMMUNICATION = re.compile(r"copy_(in|out)|^Mem(cpy|set)|torch_scatter", re.IGNORECASE)
_COPY_KERNEL = re.compile(r"^__amd_rocclr_(copy|fill)", re.IGNORECASE)
_FILL_KERNEL = re.compile(r"^__amd_rocclr_fill|^Memset", re.IGNORECASE)

_METADATA_OPERATORS = frozenset(
    (
        "view",
        "reshape",
        "_reshape_alias",
        "as_strided",
        "as_strided_",
        "expand",
        "expand_as",
        "permute",
        "transpose",
        "t",
        "swapaxes",
        "movedim",
        "squeeze",
        "squeeze_",
        "unsqueeze",
        "unsqueeze_",
        "select",
        "slice",
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "detach",
        "detach_",
        "alias",
        "view_as",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
        "resolve_conj",
        "resolve_neg",
        "is_nonzero",
        "item",
        "_local_scalar_dense",
        "numpy_T",
        "mT",
        "mH",
        "result_type",
        "can_cast",
        "lift_fresh",
        "lift_fresh_",
        "requires_grad_",
        "output_nr",
        "_version",
        "retain_grad",
        "is_same_size",
        "_has_compatible_shallow_copy_type",
        "broadcast_tensors",
        "broadcast_to",
        "view_as_real",
        "view_as_complex",
        "_conj",
        "real",
        "imag",
        "diagonal",
        "unfold",
        "size",
        "stride",
        "is_pinned",
        "record_stream",
        "_nested_tensor_size",
        "sym_size",
        "data_ptr",
    )
)
"""Operators that touch sizes and strides only: no device would run anything for them."""

_WRAPPER = re.compile(
    r"^autograd::engine::|Backward\d*$|^torch::autograd::|^torch::jit|^chopper::|^TorchDynamo"
    r"|^Torch-Compiled|^CompiledFunction|^AOTDispatcher|^## |^Call CompiledFxGraph"
    r"|^PythonSubclass|^Optimizer\.|^ProfilerStep|^enumerate\(DataLoader|^nn\.Module: "
)
_NAMESPACED = re.compile(r"^[A-Za-z_]\w*::|cpp_fused|triton_")
_LEAF_WORK = re.compile(r"^[A-Z]\w*$|^## Call CompiledFxGraph")
_HELPERS = frozenset(
    (
        "aten::fill_",
        "aten::zero_",
        "aten::copy_",
        "aten::to",
        "aten::_to_copy",
        "aten::clone",
        "aten::contiguous",
        "aten::zeros",
        "aten::ones",
    )
)
_COPYING_COMPOSITES = frozenset(
    (
        "aten::dropout",
        "aten::ravel",
        "aten::empty_permuted",
        "aten::unsafe_chunk",
        "aten::conj",
        "aten::reshape_as",
        "aten::swapdims",
        "aten::moveaxis",
        "aten::zero_",
        "aten::to",
        "aten::_to_copy",
        "aten::clone",
        "aten::contiguous",
        "aten::zeros",
        "aten::ones",
        "aten::full",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::full_like",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
        "aten::type_as",
        "aten::float",
        "aten::half",
        "aten::bfloat16",
        "aten::double",
        "aten::cpu",
        "aten::cuda",
    )
)
_UNSCOPED = frozenset({"gloo:send", "gloo:recv", "gloo:recvAnySource"})
_HOST_COMMUNICATION = re.compile(r"^c10d::|^_c10d_functional::|^record_param_comms$|^nccl:|^gloo:")
_BARRIER = re.compile(
    r"barrier|^_c10d_functional::wait_tensor|^c10d::(_?wait|monitored)|wait_tensor", re.IGNORECASE
)
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free|Host(Alloc|Malloc|Free|Register|Unregister)|ExtMallocWithFlags)"
    r"|^cuMem(Alloc|Free|Create|Release|Map|Unmap|AddressReserve|SetAccess|AddressFree)"
    r"|^hipMem(Create|Release|Map|Unmap)",
)
_HOST_ALLOCATION = re.compile(r"^aten::(empty|empty_strided|resize_)$")
_DRIVER_OVERHEAD = re.compile(
    r"driver compiler|module loading|lazy function loading|command buffer full", re.IGNORECASE
)
_SYNCHRONIZATION = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Ctx)Synchronize|^cu(Ctx|Stream|Event)Synchronize"
    r"|^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^hipMemcpyWithStream"
)
_SYNCHRONIZING_OPERATOR = re.compile(r"^aten::(item|_local_scalar_dense|is_nonzero)$")
_DATA = re.compile(
    r"^enumerate\(DataLoader\)|^chopper::data|DataLoaderIter.{0,60}__next__"
    r"|torch/utils/data/dataloader\.py.{0,60}: __next__"
)
# torch._dynamo.utils.dynamo_timed records every part of a compilation in this way, those of
# Inductor and Triton's autotuning too; the plain names are its events of the same.
_COMPILATION = re.compile(
    r" \(dynamo_timed\)$|^(dynamo|entire_frame_compile|entire_backward_compile|inductor_compile"
    r"|backend_compile|compile_attempt_\d+)$"
)
_GRADIENT_REDUCTION = re.compile(
    r"^torch(\.|::)distributed(\.|::)(ddp\.)?reducer::(mul_out|copy_bucket_to_grad)$"
)
_PROGRAM_PHASE = "chopper::phase::"
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d+$|^torch::autograd::")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
# FSDP and DDP name their hooks. DeepSpeed and Megatron do not: with Python stacks, the files do,
# except for the functions around a whole forward, backward or step.
_SHARDING_REGION = re.compile(
    r"^FSDP::|^FullyShardedDataParallel\._|^fsdp::"
    r"|^torch(\.|::)distributed(\.|::)(ddp\.)?reducer::|^aten::(un)?flatten_dense_tensors$"
    r"|deepspeed/runtime/zero/(stage|partition|parameter_offload|contiguous|mics|utils)\w*"
    r"\.py\(\d+\): (?!(forward|backward|step|__init__|__call__|wrapper)$)"
    r"|megatron/core/distributed/(fsdp/|custom_fsdp/)?(src/)?(megatron_fsdp/)?"
    r"\w{0,40}(buffer|data_parallel|fsdp)\w{0,40}"
    r"\.py\(\d+\): (?!(forward|backward|__init__|__call__)$)"
)
_SHARDING_COPY = re.compile(
    r"^fsdp::|^aten::(copy_|_to_copy|_foreach_copy_?|cat|split_with_sizes_copy|_?chunk_cat|fill_|zero_"
    r"|_foreach_zero_|div_?|mul_?|_foreach_(mul|div)_|clone|constant_pad_nd)$"
)
_EVENT_WAIT = re.compile(r"^(cuda|hip|cu)StreamWaitEvent")
_GRAPH_LAUNCH = re.compile(r"^(cuda|hip)GraphLaunch|^cuGraphLaunch")
_KERNEL_LAUNCH = re.compile(r"^(cuda|hip|cu)(Ext|Module|ExtModule|Graph)?Launch(?!HostFunc)")
_CAPTURE = re.compile(r"^(?:cuda|hip|cu)Stream(Begin|End)Capture")


is_communication = NameSearch(_COMMUNICATION, _NOT_COMMUNICATION)
"""A kernel (or host span) that moves data between ranks."""


def is_copy_kernel(name: str) -> bool:
    """A kernel that is a copy or a fill in disguise (ROCm's blit kernels)."""
    return bool(_COPY_KERNEL.match(name))


def is_fill(name: str) -> bool:
    """A copy-class event that fills memory."""
    return bool(_FILL_KERNEL.match(name))


def is_metadata_operator(name: str) -> bool:
    """An operator that touches no data."""
    # Redispatched views are recorded a second time, without their namespace.
    return name.removeprefix("aten::") in _METADATA_OPERATORS


def is_wrapper(name: str) -> bool:
    """A span recorded as an operator that only contains others (autograd nodes among them).

    Operators have a namespace; what has none is a region that somebody named.
    """
    return bool(_WRAPPER.search(name)) or not _NAMESPACED.search(name)


def is_leaf_work(name: str) -> bool:
    """A span that works itself when it contains no operator: a compiled graph, an own Function."""
    return bool(_LEAF_WORK.match(name))


def is_helper_operator(name: str) -> bool:
    """An operator that others call to prepare or convert their memory."""
    return name in _HELPERS


def is_copying_composite(name: str) -> bool:
    """An operator that does nothing itself: it calls a helper, or nothing at all."""
    return name in _COPYING_COMPOSITES


def is_host_communication(name: str) -> bool:
    """The issuing side of a collective on the host."""
    return bool(_HOST_COMMUNICATION.search(name))


def is_collective_span(name: str) -> bool:
    """A host span during which a CPU backend runs a collective."""
    return name.startswith(("gloo:", "mpi:", "ucc:"))


def is_unscoped_span(name: str) -> bool:
    """A span that begins in one call and ends in a later one: what lies within is not its child.

    Gloo's point-to-point transfers, from ``isend`` and ``irecv`` to ``wait``.
    """
    return name in _UNSCOPED


def is_barrier(name: str) -> bool:
    """The host blocks until other ranks come."""
    return bool(_BARRIER.search(name))


def is_allocator_call(name: str) -> bool:
    """A runtime call that allocates or frees."""
    return bool(_ALLOCATOR.match(name))


def is_host_allocation(name: str) -> bool:
    """An operator that asks the allocator for memory and does nothing else."""
    return bool(_HOST_ALLOCATION.match(name))


def is_synchronizing_call(name: str) -> bool:
    """A runtime call that blocks until the device is done."""
    return bool(_SYNCHRONIZATION.match(name))


def is_driver_overhead(name: str) -> bool:
    """Overhead in CUPTI's record that the driver has without a profiler as well."""
    return bool(_DRIVER_OVERHEAD.search(name))


def is_flush(name: str) -> bool:
    """The profiler empties its buffers, which it may do on a thread of its own."""
    return "flush" in name.lower()


def is_synchronizing_operator(name: str) -> bool:
    """An operator that reads a value back."""
    return bool(_SYNCHRONIZING_OPERATOR.match(name))


def is_data_loading(name: str) -> bool:
    """Waiting for, or making, the next batch."""
    return bool(_DATA.search(name))


def is_compilation(name: str) -> bool:
    """A span of torch.compile at work: tracing, code generation, compiling, autotuning."""
    return bool(_COMPILATION.search(name))


def is_gradient_reduction(name: str) -> bool:
    """DDP's own work on its buckets, which its hooks do after the last node of backward too."""
    return bool(_GRADIENT_REDUCTION.match(name))


def is_forward(name: str) -> bool:
    """The forward of an outermost module, as chopper marks it."""
    return name == "chopper::forward"


def program_phase_of(name: str) -> str | None:
    """The phase that the program or its trainer named."""
    return name.removeprefix(_PROGRAM_PHASE) if name.startswith(_PROGRAM_PHASE) else None


def is_backward(name: str) -> bool:
    """A node of the autograd engine."""
    return bool(_BACKWARD.search(name))


_FACTORY = frozenset(
    f"aten::{name}"
    for name in (
        "arange",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "ones",
        "rand",
        "randn",
        "scalar_tensor",
        "zeros",
    )
)


def is_factory(name: str) -> bool:
    """An operator that takes no tensor: autograd never numbers it."""
    return name in _FACTORY


def is_optimizer(name: str) -> bool:
    """The optimizer's step, or zero_grad."""
    return bool(_OPTIMIZER.match(name))


def is_garbage_collection(name: str) -> bool:
    """A span during which Python's collector ran."""
    return name.startswith("chopper::gc") or name == "Python GC"


def is_sharding_region(name: str) -> bool:
    """A span of the hooks of FSDP, DDP, ZeRO or Megatron's distributed optimizer."""
    return bool(_SHARDING_REGION.search(name))


def is_sharding_copy(name: str) -> bool:
    """An operator that copies, scales or casts, when it occurs inside such hooks."""
    return bool(_SHARDING_COPY.match(name))


def is_event_wait(name: str) -> bool:
    """A call after which a stream waits for what another one has been given to do."""
    return bool(_EVENT_WAIT.match(name))


def is_backend_span(name: str) -> bool:
    """A device backend's own span around the launch of a collective."""
    return name.startswith(("nccl:", "rccl:"))


def is_graph_launch(name: str) -> bool:
    """A call that replays a whole graph."""
    return bool(_GRAPH_LAUNCH.match(name))


def is_kernel_launch(name: str) -> bool:
    """A call that starts kernels: one, or those of a graph."""
    return bool(_KERNEL_LAUNCH.match(name))


def is_capture_begin(name: str) -> bool:
    """From this call on, launches become nodes of a graph and start nothing."""
    return (found := _CAPTURE.match(name)) is not None and found[1] == "Begin"


def is_capture_end(name: str) -> bool:
    """After this call, launches start kernels again."""
    return (found := _CAPTURE.match(name)) is not None and found[1] == "End"


_LAYER = re.compile(r"^chopper::(?:layer|recompute)::(.+)$")
_MODULE = re.compile(r"^nn\.Module: (.+)$")
_FIRST_INDEX = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def layer_of(name: str) -> str | None:
    """The layer that an annotation of chopper names: up to the first index of its path."""
    match = _LAYER.match(name)
    if match is None:
        return None
    path = match.group(1)
    indexed = _FIRST_INDEX.match("." + path)
    if indexed:
        return indexed.group(1)[1:]
    return path.split(".")[0]


def module_of(name: str) -> str | None:
    """The module that a Python-stack row names, for example ``BertLayer_2``."""
    match = _MODULE.match(name)
    return match.group(1) if match else None
