"""What a person who read each program expects of its recording."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

PROGRAMS = Path(__file__).resolve().parent / "programs"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, slots=True)
class Client:
    """A program, and what a recording of it must say."""

    program: str
    """File in ``programs/``."""
    steps: tuple[int, ...]
    """Steps of each process that trains."""
    _: KW_ONLY
    library: str | None = None
    """Distribution whose version the table shows; None where it is torch alone."""
    launcher: tuple[str, ...] = (sys.executable,)
    ends: Literal["every optimizer step", "round of optimizers", "backward", "timed call"] = (
        "every optimizer step"
    )
    """What ends a step, in the words of the probe's events. A round begins with the optimizer
    that stepped first; others may leave rounds out. A timed call counts if an optimizer steps
    in it."""
    phases: frozenset[str] = frozenset({"forward", "backward", "optimizer"})
    """Phases that take time in the traced steps."""
    named: dict[str, str] = field(default_factory=dict)
    """Program phase → the timed function whose calls it must equal, from first to last step."""
    timed: tuple[str, ...] = ()
    """Functions that the probe times, as ``module:Class.method``."""
    causes: frozenset[str] = frozenset()
    """The largest cause is one of these or of their children; any where empty."""
    watch_forward: bool = True
    """Whether the probe times forward passes: hooks would disturb what compiles them."""
    spans_apart: bool = True
    """Whether forward, backward and optimizer do not lie within each other, as LBFGS's do."""
    pooled: bool = False
    """Whether the processes share the steps as it happens: only their sum is known."""
    same_losses: bool = True
    """Whether two runs of the program alone agree to the last bit."""
    reaches_limit: bool = False
    """Whether a trace of the default steps would be larger than a trace may be."""
    data_elsewhere: bool = False
    """Whether batches come from elsewhere than a DataLoader, where the probe does not look."""
    verdict: frozenset[str] = frozenset()
    """The first sentence is of one of these classes; of any where empty."""
    place: tuple[str, ...] = ()
    """Words of which the verdict or an action names at least one: a phase, a function, a remedy."""
    planted: tuple[float, float] | None = None
    """Least and greatest share of the loop that the program itself measures, run alone, for the
    cause that it was written to have; None where it measures none."""


_COMPUTING = frozenset({"compute", "idle.preparation.python", "idle.preparation.dispatch"})
_DATA = frozenset({"idle.preparation.data"})
_PYTHON = frozenset({"idle.preparation.python"})
_COMMUNICATION = frozenset({"communication", "idle.preparation.collective_wait"})

# Classes of the verdict, by the names of ``reports/verdicts.toml``.
COMPUTE = frozenset({"compute"})
MEMORY = frozenset({"memory"})
HOST_PYTHON = frozenset({"host_python"})
SMALL_OPERATORS = frozenset({"launches", "host_python", "host"})
DATA = frozenset({"data"})
COMMUNICATION = frozenset({"communication"})
LATE_RANK = frozenset({"late_rank", "straggler"})
EXPERTS = frozenset({"experts", "uneven_work"})
RING = frozenset({"ring", "uneven_work"})
PIPELINE = frozenset({"pipeline", "turns"})
CONTENTION = frozenset({"contention"})
EVALUATION = frozenset({"evaluation"})
CHECKPOINT = frozenset({"checkpoint"})
STARTUP = frozenset({"startup"})
COMPILATION = frozenset({"compilation", "startup"})
COLLECTION = frozenset({"garbage_collection"})
OPTIMIZER = frozenset({"optimizer"})
SYNCHRONIZATION = frozenset({"synchronization"})

CLIENTS = (
    Client(
        "transformers_trainer.py",
        (60,),
        library="transformers",
        timed=("transformers.trainer:Trainer.evaluate",),
        named={"evaluation": "Trainer.evaluate"},
        causes=_COMPUTING,
    ),
    Client(
        "trl_grpo.py",
        (12,),
        library="trl",
        phases=frozenset({"forward", "backward", "optimizer", "generation"}),
        timed=("transformers.generation.utils:GenerationMixin.generate",),
        named={"generation": "GenerationMixin.generate"},
        causes=_COMPUTING,
    ),
    Client("peft_lora.py", (40,), library="peft", causes=_COMPUTING),
    Client(
        "accelerate_loop.py",
        (60, 60),
        library="accelerate",
        launcher=(
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
            *("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
            *("--dynamo_backend", "no", "--main_process_port", "0"),
        ),
        causes=_COMPUTING | _COMMUNICATION,
    ),
    Client(
        "lightning_trainer.py",
        (80,),
        library="lightning",
        timed=("lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",),
        named={"evaluation": "_EvaluationLoop.run"},
        causes=_COMPUTING,
    ),
    Client("lightning_spawn.py", (40, 40), library="lightning", causes=_COMPUTING | _COMMUNICATION),
    Client("lightning_fabric.py", (80,), library="lightning", causes=_COMPUTING),
    Client(
        "deepspeed_zero.py",
        (20, 20),
        library="deepspeed",
        launcher=_TORCHRUN,
        ends="timed call",
        timed=("deepspeed.runtime.engine:DeepSpeedEngine.step",),
        causes=_COMPUTING | _COMMUNICATION,
    ),
    Client("ray_train.py", (80, 80), library="ray", causes=_COMPUTING | _COMMUNICATION),
    Client("nanogpt_accumulation.py", (12,), causes=_COMPUTING, reaches_limit=True),
    Client("gan.py", (60,), ends="round of optimizers", causes=_COMPUTING),
    Client(
        "sb3_sac.py",
        (120,),
        library="stable_baselines3",
        ends="round of optimizers",
        timed=(
            "stable_baselines3.common.off_policy_algorithm:OffPolicyAlgorithm.collect_rollouts",
        ),
        named={"rollout": "OffPolicyAlgorithm.collect_rollouts"},
        causes=_COMPUTING,
    ),
    Client(
        "sb3_ppo.py",
        (96,),
        library="stable_baselines3",
        timed=("stable_baselines3.common.on_policy_algorithm:OnPolicyAlgorithm.collect_rollouts",),
        named={"rollout": "OnPolicyAlgorithm.collect_rollouts"},
        causes=_COMPUTING,
    ),
    Client(
        "lbfgs.py", (20,), phases=frozenset({"optimizer"}), spans_apart=False, causes=_COMPUTING
    ),
    Client("joblib_sweep.py", (80, 80), library="joblib", pooled=True, causes=_COMPUTING),
    Client("hogwild.py", (40, 40), causes=_COMPUTING, same_losses=False),
    Client(
        "compile_recompile.py",
        (24,),
        watch_forward=False,
        spans_apart=False,
        causes=frozenset({"idle.preparation.compile"}),
        verdict=COMPILATION,
    ),
    Client(
        "manual_sgd.py",
        (60,),
        ends="backward",
        phases=frozenset({"forward", "backward"}),
        causes=_COMPUTING,
    ),
    Client("asyncio_threads.py", (80,), causes=_COMPUTING),
    Client("skorch_classifier.py", (60,), library="skorch", causes=_COMPUTING),
    Client("ignite_engine.py", (60,), library="pytorch-ignite", causes=_COMPUTING),
    Client(
        "keras_fit.py",
        (60,),
        library="keras",
        ends="backward",
        phases=frozenset({"forward", "backward"}),
        causes=_COMPUTING,
    ),
    # Programs with one planted cause, which measure it themselves where they can.
    Client(
        "loader_slow_workers.py",
        (60,),
        phases=frozenset({"data"}),
        causes=_DATA,
        verdict=DATA,
        place=("data",),
        planted=(0.7, 1.0),
    ),
    Client(
        "memory_mapped.py",
        (60,),
        causes=_PYTHON,
        # Read and decoded in the program's own function: either names it.
        verdict=DATA | HOST_PYTHON,
        place=("between", "batch"),
        planted=(0.55, 0.9),
    ),
    Client(
        "datasets_streaming.py",
        (60,),
        library="datasets",
        data_elsewhere=True,
        causes=_PYTHON | _DATA,
        verdict=DATA,
        planted=(0.75, 1.0),
    ),
    Client(
        "slow_callback.py",
        (60,),
        causes=_PYTHON,
        verdict=HOST_PYTHON,
        place=("between", "on_step_end", "WeightHistory"),
        planted=(0.4, 0.8),
    ),
    Client(
        "garbage_collection.py",
        (60,),
        phases=frozenset(),
        causes=frozenset({"idle.preparation.gc"}),
        verdict=COLLECTION,
        planted=(0.9, 1.0),
    ),
    Client("checkpoints.py", (60,), verdict=CHECKPOINT, planted=(0.25, 0.75)),
    Client("evaluations.py", (60,), verdict=EVALUATION, planted=(0.55, 0.9)),
    Client(
        "slow_optimizer.py",
        (60,),
        causes=_PYTHON | frozenset({"compute.optimizer"}),
        verdict=OPTIMIZER,
        place=("optimizer",),
        planted=(0.4, 0.75),
    ),
    Client(
        "forward_hooks.py",
        (60,),
        verdict=SMALL_OPERATORS,
        place=("forward", "hook"),
        planted=(0.35, 0.8),
    ),
    Client(
        "item_loop.py",
        (60,),
        verdict=SYNCHRONIZATION | SMALL_OPERATORS,
        place=("item", "between", "_local_scalar_dense", "forward"),
        planted=(0.45, 0.85),
    ),
    Client("tiny_kernels.py", (60,), causes=_COMPUTING, verdict=SMALL_OPERATORS),
    Client("large_products.py", (60,), causes=frozenset({"compute"}), verdict=COMPUTE),
    Client("elementwise_chain.py", (20,), causes=frozenset({"compute.vector"}), verdict=MEMORY),
    Client("memory_growth.py", (120,), causes=_COMPUTING, verdict=COMPUTE, place=("grows by",)),
    Client("core_contention.py", (60,), verdict=CONTENTION, planted=(0.3, 1.0)),
    Client(
        "compile_startup.py",
        (20,),
        watch_forward=False,
        spans_apart=False,
        verdict=STARTUP,
        planted=(0.6, 1.0),
    ),
    Client(
        "ddp_accumulation.py",
        (30, 30),
        launcher=_TORCHRUN,
        causes=_COMPUTING | _COMMUNICATION,
        verdict=COMMUNICATION,
        place=("no_sync",),
    ),
    Client("slow_rank.py", (30, 30), launcher=_TORCHRUN, verdict=LATE_RANK),
    Client("uneven_experts.py", (30, 30), launcher=_TORCHRUN, verdict=EXPERTS),
    Client("causal_ring.py", (30, 30), launcher=_TORCHRUN, verdict=RING),
    Client("two_stage_pipeline.py", (30, 30), launcher=_TORCHRUN, verdict=PIPELINE),
)
