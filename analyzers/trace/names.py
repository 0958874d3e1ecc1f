"""The meaning of names: the one place that knows how frameworks and libraries call things."""

from __future__ import annotations

import re
import sys

from chopper.analyzers.work.kernels import NameSearch

is_communication = NameSearch(
    r"(n|r|x|h|one|ms)ccl|\bccl(::|_)|\bhcom_|^(gloo|mpi|ucc):|multimem_|nvshmem|rocshmem|userbuffers_"
    r"|(one|two)_?shot_?(all|reduce)|deep_ep::|deepep::|internode::|intranode::"
    r"|cross_device_reduce|quick_?reduce|moeAllToAll|mnnvl::"
    r"|(?<![a-z_])(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?!_permute|_sum_rows)",
    excluded=r"copy_(in|out)|^Mem(cpy|set)|torch_scatter",
    ignore_case=True,
)
"""A kernel (or host span) that moves data between ranks."""

is_copy_kernel = NameSearch(r"^__amd_rocclr_(copy|fill)", ignore_case=True)
"""A kernel that is a copy or a fill in disguise (ROCm's blit kernels)."""

is_fill = NameSearch(r"^__amd_rocclr_fill|^Memset", ignore_case=True)
"""A copy-class event that fills memory."""

is_copy_to_device = NameSearch("HtoD|HostToDevice")
"""A copy from the host to the device."""

# Redispatched views are recorded a second time, without their namespace.
is_metadata_operator = NameSearch(
    r"^(aten::)?(view|reshape|_reshape_alias|as_strided|as_strided_|expand|expand_as|permute"
    r"|transpose|t|swapaxes|movedim|squeeze|squeeze_|unsqueeze|unsqueeze_|select|slice|narrow"
    r"|split|split_with_sizes|chunk|unbind|detach|detach_|alias|view_as|_unsafe_view|flatten"
    r"|unflatten|empty|empty_like|empty_strided|new_empty|new_empty_strided|resize_|resize_as_"
    r"|set_|resolve_conj|resolve_neg|is_nonzero|item|_local_scalar_dense|numpy_T|mT|mH"
    r"|result_type|can_cast|lift_fresh|lift_fresh_|requires_grad_|output_nr|_version"
    r"|retain_grad|is_same_size|_has_compatible_shallow_copy_type|broadcast_tensors"
    r"|broadcast_to|view_as_real|view_as_complex|_conj|real|imag|diagonal|unfold|size|stride"
    r"|is_pinned|record_stream|_nested_tensor_size|sym_size|data_ptr)$"
)
"""An operator that touches sizes and strides only: no device would run anything for it."""

_WRAPPER = re.compile(
    r"^autograd::engine::|Backward\d*$|^torch::autograd::|^torch::jit|^chopper::|^TorchDynamo"
    r"|^Torch-Compiled|^CompiledFunction|^AOTDispatcher|^## |^Call CompiledFxGraph"
    r"|^PythonSubclass|^Optimizer\.|^ProfilerStep|^enumerate\(DataLoader|^nn\.Module: "
)
_NAMESPACED = re.compile(r"^[A-Za-z_]\w*::|cpp_fused|triton_")


def is_wrapper(name: str) -> bool:
    """A span recorded as an operator that only contains others (autograd nodes among them).

    Operators have a namespace; what has none is a region that somebody named.
    """
    return bool(_WRAPPER.search(name)) or not _NAMESPACED.search(name)


is_leaf_work = NameSearch(r"^[A-Z]\w*$|^## Call CompiledFxGraph")
"""A span that works itself when it contains no operator: a compiled graph, an own Function."""

is_helper_operator = NameSearch(
    r"^aten::(fill_|zero_|copy_|to|_to_copy|clone|contiguous|zeros|ones)$"
)
"""An operator that others call to prepare or convert their memory."""

is_copying_composite = NameSearch(
    r"^aten::(dropout|ravel|empty_permuted|unsafe_chunk|conj|reshape_as|swapdims|moveaxis|zero_"
    r"|to|_to_copy|clone|contiguous|zeros|ones|full|zeros_like|ones_like|full_like|new_zeros"
    r"|new_ones|new_full|type_as|float|half|bfloat16|double|cpu|cuda)$"
)
"""An operator that does nothing itself: it calls a helper, or nothing at all."""

is_host_communication = NameSearch(
    r"^c10d::|^_c10d_functional::|^record_param_comms$|^([nrxh]ccl|gloo):"
)
"""The issuing side of a collective on the host."""

is_collective_span = NameSearch(r"^(gloo|mpi|ucc):")
"""A host span during which a CPU backend runs a collective."""

is_unscoped_span = NameSearch(r"^gloo:(send|recv|recvAnySource)$")
"""A span that begins in one call and ends in a later one: what lies within is not its child.

Gloo's point-to-point transfers, from ``isend`` and ``irecv`` to ``wait``.
"""

is_barrier = NameSearch(r"barrier|^c10d::(_?wait|monitored)|wait_tensor", ignore_case=True)
"""The host blocks until other ranks come."""

is_allocator_call = NameSearch(
    r"^(cuda|hip)(Malloc|Free|Host(Alloc|Malloc|Free|Register|Unregister)|ExtMallocWithFlags)"
    r"|^cuMem(Alloc|Free|Create|Release|Map|Unmap|AddressReserve|SetAccess|AddressFree)"
    r"|^hipMem(Create|Release|Map|Unmap)"
)
"""A runtime call that allocates or frees."""

is_host_allocation = NameSearch(r"^aten::(empty|empty_strided|resize_)$")
"""An operator that asks the allocator for memory and does nothing else."""

is_synchronizing_call = NameSearch(
    r"^(cuda|hip)(Device|Stream|Event|Ctx)Synchronize|^cu(Ctx|Stream|Event)Synchronize"
    r"|^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^hipMemcpyWithStream"
)
"""A runtime call that blocks until the device is done."""

is_waiting_copy = NameSearch(r"Pageable|^(?!.*Pinned).*(DtoH|DeviceToHost|Device-to-Host)")
"""A copy for which even an asynchronous call waits: of pageable memory, or to the host, unless that
is known to be pinned."""

is_driver_overhead = NameSearch(
    r"driver compiler|module loading|lazy function loading|command buffer full", ignore_case=True
)
"""Overhead in CUPTI's record that the driver has without a profiler as well."""

is_flush = NameSearch("flush", ignore_case=True)
"""The profiler empties its buffers, which it may do on a thread of its own."""

is_synchronizing_operator = NameSearch(r"^aten::(item|_local_scalar_dense|is_nonzero)$")
"""An operator that reads a value back."""

is_data_loading = NameSearch(
    r"^enumerate\(DataLoader\)|^chopper::data|DataLoaderIter.{0,60}__next__"
    r"|torch/utils/data/dataloader\.py.{0,60}: __next__"
)
"""Waiting for, or making, the next batch."""

# torch._dynamo.utils.dynamo_timed records every part of a compilation in this way, those of
# Inductor and Triton's autotuning too; the plain names are its events of the same.
is_compilation = NameSearch(
    r" \(dynamo_timed\)$|^(dynamo|entire_frame_compile|entire_backward_compile|inductor_compile"
    r"|backend_compile|compile_attempt_\d+)$"
)
"""A span of torch.compile at work: tracing, code generation, compiling, autotuning."""

is_gradient_reduction = NameSearch(
    r"^torch(\.|::)distributed(\.|::)(ddp\.)?reducer::(mul_out|copy_bucket_to_grad)$"
)
"""DDP's own work on its buckets, which its hooks do after the last node of backward too."""

is_forward = NameSearch(r"^chopper::forward$")
"""The forward of an outermost module, as chopper marks it."""

is_recomputation = NameSearch(r"^chopper::recompute::")
"""A forward that is run again within backward, as chopper marks it."""

is_backward = NameSearch(
    r"^autograd::engine::evaluate_function|Backward\d+$|^[A-Z]\w*Backward$|^torch::autograd::",
    excluded=r"^\w*(Forward|Fwd)Backward$",
)
"""A node of the autograd engine; PyTorch 1.8 wrote most of them without a number. A program's own
region may be called ForwardBackward."""

is_python_function = NameSearch(r"^(?!Compiled)[A-Z]\w*[A-Za-z_]$")
"""Forward or backward of the program's own ``autograd.Function``: Python around operators. Nodes
in C++ are numbered, but for those of PyTorch 1.8."""

is_numbered_node = NameSearch(r"Backward\d+$")

is_end_of_trace = NameSearch(r"^chopper::end$")
"""Chopper ends the trace."""

is_factory = NameSearch(
    r"^aten::(arange|empty|empty_strided|eye|full|ones|rand|randn|scalar_tensor|zeros)$"
)
"""An operator that takes no tensor: autograd never numbers it."""

is_optimizer = NameSearch(r"^Optimizer\.(step|zero_grad)#")
"""The optimizer's step, or zero_grad."""

is_garbage_collection = NameSearch(r"^chopper::gc|^Python GC$")
"""A span during which Python's collector ran."""

# FSDP and DDP name their hooks. DeepSpeed and Megatron do not: with Python stacks, the files do,
# except for the functions around a whole forward, backward or step.
is_sharding_region = NameSearch(
    r"^FSDP::|^FullyShardedDataParallel\._|^fsdp::"
    r"|^torch(\.|::)distributed(\.|::)(ddp\.)?reducer::|^aten::(un)?flatten_dense_tensors$"
    r"|deepspeed/runtime/zero/(stage|partition|parameter_offload|contiguous|mics|utils)\w*"
    r"\.py\(\d+\): (?!forward$|backward$|step$|__init__$|__call__$|wrapper$)"
    r"|megatron/core/distributed/(fsdp/|custom_fsdp/)?(src/)?(megatron_fsdp/)?"
    r"\w{0,40}(buffer|data_parallel|fsdp)\w{0,40}"
    r"\.py\(\d+\): (?!forward$|backward$|__init__$|__call__$)"
)
"""A span of the hooks of FSDP, DDP, ZeRO or Megatron's distributed optimizer."""

is_sharding_copy = NameSearch(
    r"^fsdp::|^aten::(copy_|_to_copy|_foreach_copy_?|cat|split_with_sizes_copy|_?chunk_cat"
    r"|fill_|zero_|_foreach_zero_|div_?|mul_?|_foreach_(mul|div)_|clone|constant_pad_nd)$"
)
"""An operator that copies, scales or casts, when it occurs inside such hooks."""

is_event_wait = NameSearch(r"^(cuda|hip|cu)StreamWaitEvent")
"""A call after which a stream waits for what another one has been given to do."""

is_backend_span = NameSearch(r"^[nrxh]ccl:")
"""A device backend's own span around the launch of a collective."""

is_graph_launch = NameSearch(r"^(cuda|hip)GraphLaunch|^cuGraphLaunch")
"""A call that replays a whole graph."""

is_kernel_launch = NameSearch(
    r"^(cuda|hip|cu)(Ext|Module|ExtModule|Graph)?Launch(?!HostFunc)"
    r"|^(ur|pi|zeCommandList)(Enqueue|Append)\w{0,20}(KernelLaunch|LaunchKernel)"
)
"""A call that starts kernels: one, or those of a graph."""

is_copy_call = NameSearch(r"^(cuda|hip|cu)Memcpy")
"""A call that copies memory."""

is_fill_call = NameSearch(r"^(cuda|hip|cu)Memset")
"""A call that fills memory."""

is_capture_begin = NameSearch(r"^(cuda|hip|cu)StreamBeginCapture")
"""From this call on, launches become nodes of a graph and start nothing."""

is_capture_end = NameSearch(r"^(cuda|hip|cu)StreamEndCapture")
"""After this call, launches start kernels again."""

# torch.distributed.pipelining writes PP:2F5 (stage, action, micro-batch), or Forward 5 where a rank
# has one stage; Megatron-LM's timers and ranges are called forward-compute, those of DeepSpeed's
# engine fwd_microstep.
_PIPELINE_ACTION = re.compile(
    r"(?:PP:)?(\d{1,6})((?:SEND_|RECV_)?[FB]|[IW])(\d{1,9})|PP:(\d{1,6})(?:UNSHARD|RESHARD|REDUCE_GRAD)"
    r"|(Forward|Backward) (\d{1,9})|(forward|backward)-(?:compute|send|recv)|(fwd|bwd)_microstep"
    r"|(?:PipelineEngine\.)?_exec_(forward|backward)_pass"
)
_PIPELINE_ACTIONS = {
    **dict.fromkeys(("F", "SEND_F", "RECV_F", "Forward", "forward", "fwd"), "forward"),
    **dict.fromkeys(("B", "SEND_B", "RECV_B", "Backward", "backward", "bwd"), "backward"),
    "I": "backward_input",
    "W": "backward_weight",
}

is_pipeline_action = NameSearch(f"^({_PIPELINE_ACTION.pattern})$")
"""A range around one action of a pipeline schedule."""


def pipeline_action(name: str) -> tuple[int, int, str | None]:
    """Stage, micro-batch (-1 for neither) and pass that the name of such a range tells."""
    match = _PIPELINE_ACTION.fullmatch(name)
    if match is None:
        return -1, -1, None
    stage, kind, batch, other_stage, torch_pass, torch_batch, *passes = match.groups()
    stage, batch = stage or other_stage, batch or torch_batch
    kind = kind or torch_pass or next(filter(None, passes), None)
    return int(stage or -1), int(batch or -1), _PIPELINE_ACTIONS.get(kind or "")


_PROGRAM_PHASE = "chopper::phase::"
_LAYER = re.compile(r"^chopper::(?:layer|recompute)::(.+)$")
_MODULE = re.compile(r"^nn\.Module: (.+)$")
_FIRST_INDEX = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def program_phase_of(name: str) -> str | None:
    """The phase that the program or its trainer named."""
    return name.removeprefix(_PROGRAM_PHASE) if name.startswith(_PROGRAM_PHASE) else None


def layer_of(name: str) -> str | None:
    """The layer that an annotation of chopper names: up to the first index of its path."""
    match = _LAYER.match(name)
    if match is None:
        return None
    indexed = _FIRST_INDEX.match("." + match[1])
    return indexed[1][1:] if indexed else match[1].split(".")[0]


def operation_of(name: str) -> str | None:
    """The path of the module that an annotation of chopper names, its indices as ``*``."""
    match = _LAYER.match(name)
    if match is None:
        return None
    return ".".join("*" if part.isdecimal() else part for part in match[1].split("."))


def module_of(name: str) -> str | None:
    """The module that a Python-stack row names, for example ``BertLayer_2``."""
    match = _MODULE.match(name)
    return match[1] if match else None


_FRAME = re.compile(r"([^(]*)\.py\(\d+\): ")
_INSTALLED = re.compile(r"(^|[\\/])(site-packages|dist-packages|torch|python3\.\d+)[\\/]|^<")
_MAY_BE_SCRIPTS = {"code", "profile", "test", "this", "trace"}
_MODULES = {"torch_guard", "typing_extensions"}
_LIBRARY = re.compile(
    r"(PIL|accelerate|aiter|albumentations|apex|chopper|cv2|datasets|deepspeed|diffusers|einops"
    r"|fbgemm_gpu|flash_attn|flashinfer|fsspec|google|huggingface_hub|hydra|ignite|imageio"
    r"|ipykernel|IPython|jax|lightning|lightning_fabric|matplotlib|mlflow|nemo|numba|numpy|nvidia"
    r"|omegaconf|packaging|pandas|peft|pkg_resources|pyarrow|pydantic|pytorch_lightning|ray"
    r"|safetensors|scipy|sgl_kernel|sglang|skimage|sklearn|streaming|tensorboard|tensordict"
    r"|tensorflow|timm|tokenizers|torch|torch(ao|audio|data|metrics|rec|text|vision|_guard)|tornado"
    r"|tqdm|transformer_engine|transformers|triton|triton_kernels|trl"
    r"|typing_extensions|vllm|wandb|webdataset|xformers|yaml|zmq)"
)


def is_program_frame(name: str) -> bool:
    """Tell whether a span is a Python frame of the program itself.

    PyTorch cuts a file's path at the entry of sys.path that it was found by: of a library, as of
    the program's own packages, the package's name comes first. So the standard library and common
    libraries are told by that name.
    """
    frame = _FRAME.match(name)
    if frame is None or _INSTALLED.search(name):
        return False
    package, *inner = re.split(r"[\\/]", frame[1])
    if package in sys.stdlib_module_names and package not in _MAY_BE_SCRIPTS:
        return False
    # A script may be called torch_train.py; a library is a folder, or a module that is known.
    return not _LIBRARY.fullmatch(package) or (not inner and package not in _MODULES)
