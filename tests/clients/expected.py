"""What a person who read each program expects of its recording."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PROGRAMS = Path(__file__).resolve().parent / "programs"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A program, and what a recording of it must say."""

    program: str
    """File in ``programs/``."""
    library: str | None
    """Distribution whose version the table shows; None where it is torch alone."""
    steps: tuple[int, ...]
    """Steps of each process that trains."""
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
    waits_for_data: float | None = None
    """Least share of the time that the loader takes, where that is the point."""
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
        program="transformers_trainer.py",
        library="transformers",
        steps=(60,),
        timed=("transformers.trainer:Trainer.evaluate",),
        named={"evaluation": "Trainer.evaluate"},
        causes=_COMPUTING,
    ),
    Client(program="trl_sft.py", library="trl", steps=(30,), causes=_COMPUTING),
    Client(
        program="trl_grpo.py",
        library="trl",
        steps=(12,),
        phases=frozenset({"forward", "backward", "optimizer", "generation"}),
        timed=("transformers.generation.utils:GenerationMixin.generate",),
        named={"generation": "GenerationMixin.generate"},
        causes=_COMPUTING,
    ),
    Client(program="peft_lora.py", library="peft", steps=(40,), causes=_COMPUTING),
    Client(
        program="accelerate_loop.py",
        library="accelerate",
        launcher=(
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
            *("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
            *("--dynamo_backend", "no", "--main_process_port", "0"),
        ),
        steps=(60, 60),
        causes=_COMPUTING | _COMMUNICATION,
    ),
    Client(
        program="lightning_trainer.py",
        library="lightning",
        steps=(80,),
        timed=("lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",),
        named={"evaluation": "_EvaluationLoop.run"},
        causes=_COMPUTING,
    ),
    Client(
        program="lightning_spawn.py",
        library="lightning",
        steps=(40, 40),
        causes=_COMPUTING | _COMMUNICATION,
    ),
    Client(program="lightning_fabric.py", library="lightning", steps=(80,), causes=_COMPUTING),
    Client(
        program="deepspeed_zero.py",
        library="deepspeed",
        launcher=_TORCHRUN,
        steps=(20, 20),
        ends="timed call",
        timed=("deepspeed.runtime.engine:DeepSpeedEngine.step",),
        causes=_COMPUTING | _COMMUNICATION,
    ),
    Client(
        program="ray_train.py",
        library="ray",
        steps=(80, 80),
        causes=_COMPUTING | _COMMUNICATION,
    ),
    Client(
        program="nanogpt_accumulation.py",
        library=None,
        steps=(12,),
        causes=_COMPUTING,
        reaches_limit=True,
    ),
    Client(
        program="gan.py", library=None, steps=(60,), ends="round of optimizers", causes=_COMPUTING
    ),
    Client(
        program="sb3_sac.py",
        library="stable_baselines3",
        steps=(120,),
        ends="round of optimizers",
        timed=(
            "stable_baselines3.common.off_policy_algorithm:OffPolicyAlgorithm.collect_rollouts",
        ),
        named={"rollout": "OffPolicyAlgorithm.collect_rollouts"},
        causes=_COMPUTING,
    ),
    Client(
        program="sb3_td3.py",
        library="stable_baselines3",
        steps=(120,),
        ends="round of optimizers",
        timed=(
            "stable_baselines3.common.off_policy_algorithm:OffPolicyAlgorithm.collect_rollouts",
        ),
        named={"rollout": "OffPolicyAlgorithm.collect_rollouts"},
        causes=_COMPUTING,
    ),
    Client(
        program="sb3_ppo.py",
        library="stable_baselines3",
        steps=(96,),
        timed=("stable_baselines3.common.on_policy_algorithm:OnPolicyAlgorithm.collect_rollouts",),
        named={"rollout": "OnPolicyAlgorithm.collect_rollouts"},
        causes=_COMPUTING,
    ),
    Client(
        program="lbfgs.py",
        library=None,
        steps=(20,),
        phases=frozenset({"optimizer"}),
        spans_apart=False,
        causes=_COMPUTING,
    ),
    Client(
        program="joblib_sweep.py", library="joblib", steps=(80, 80), pooled=True, causes=_COMPUTING
    ),
    Client(program="optuna_sweep.py", library="optuna", steps=(60, 60), causes=_COMPUTING),
    Client(
        program="hogwild.py",
        library=None,
        steps=(40, 40),
        causes=_COMPUTING,
        same_losses=False,
    ),
    Client(
        program="two_scripts.sh",
        library=None,
        launcher=("sh",),
        steps=(40, 40),
        causes=_COMPUTING,
    ),
    Client(
        program="compile_recompile.py",
        library=None,
        steps=(24,),
        watch_forward=False,
        spans_apart=False,
        causes=frozenset({"idle.preparation.compile"}),
        verdict=COMPILATION,
    ),
    Client(
        program="manual_sgd.py",
        library=None,
        steps=(60,),
        ends="backward",
        phases=frozenset({"forward", "backward"}),
        causes=_COMPUTING,
    ),
    Client(
        program="torch_func.py",
        library=None,
        steps=(60,),
        ends="backward",
        phases=frozenset({"forward", "backward"}),
        causes=_COMPUTING,
    ),
    Client(program="asyncio_threads.py", library=None, steps=(80,), causes=_COMPUTING),
    Client(
        program="slow_loader.py",
        library=None,
        steps=(60,),
        phases=frozenset({"data"}),
        causes=_DATA,
        waits_for_data=0.8,
        verdict=DATA,
    ),
    Client(
        program="pipeline.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
        verdict=PIPELINE,
        causes=_COMPUTING | _COMMUNICATION,
    ),
    Client(
        program="sentence_transformer.py",
        library="sentence_transformers",
        steps=(30,),
        causes=_COMPUTING,
    ),
    Client(program="skorch_classifier.py", library="skorch", steps=(60,), causes=_COMPUTING),
    Client(program="ignite_engine.py", library="pytorch-ignite", steps=(60,), causes=_COMPUTING),
    Client(
        program="keras_fit.py",
        library="keras",
        steps=(60,),
        ends="backward",
        phases=frozenset({"forward", "backward"}),
        causes=_COMPUTING,
    ),
    # Programs with one planted cause, which measure it themselves where they can.
    Client(
        program="loader_slow_workers.py",
        library=None,
        steps=(60,),
        phases=frozenset({"data"}),
        causes=_DATA,
        verdict=DATA,
        place=("data",),
        planted=(0.7, 1.0),
    ),
    Client(
        program="loader_uneven.py",
        library=None,
        steps=(60,),
        phases=frozenset({"data"}),
        causes=_DATA,
        verdict=DATA,
        place=("data",),
        planted=(0.9, 1.0),
    ),
    Client(
        program="memory_mapped.py",
        library=None,
        steps=(60,),
        causes=_PYTHON,
        # Read and decoded in the program's own function: either names it.
        verdict=DATA | HOST_PYTHON,
        place=("between", "batch"),
        planted=(0.55, 0.9),
    ),
    Client(
        program="datasets_streaming.py",
        library="datasets",
        steps=(60,),
        data_elsewhere=True,
        causes=_PYTHON | _DATA,
        verdict=DATA,
        planted=(0.75, 1.0),
    ),
    Client(
        program="slow_callback.py",
        library=None,
        steps=(60,),
        causes=_PYTHON,
        verdict=HOST_PYTHON,
        place=("between", "on_step_end", "WeightHistory"),
        planted=(0.4, 0.8),
    ),
    Client(
        program="trainer_slow_callback.py",
        library="transformers",
        steps=(60,),
        causes=_PYTHON,
        verdict=HOST_PYTHON,
        place=("between", "on_step_end"),
        planted=(0.35, 0.75),
    ),
    Client(
        program="environment_step.py",
        library=None,
        steps=(60,),
        causes=_PYTHON,
        verdict=HOST_PYTHON,
        place=("between", "distances"),
        planted=(0.5, 0.9),
    ),
    Client(
        program="garbage_collection.py",
        library=None,
        steps=(60,),
        phases=frozenset(),
        causes=frozenset({"idle.preparation.gc"}),
        verdict=COLLECTION,
        planted=(0.9, 1.0),
    ),
    Client(
        program="checkpoints.py",
        library=None,
        steps=(60,),
        verdict=CHECKPOINT,
        planted=(0.25, 0.75),
    ),
    Client(
        program="evaluations.py",
        library=None,
        steps=(60,),
        verdict=EVALUATION,
        planted=(0.55, 0.9),
    ),
    Client(
        program="slow_optimizer.py",
        library=None,
        steps=(60,),
        causes=_PYTHON | frozenset({"compute.optimizer"}),
        verdict=OPTIMIZER,
        place=("optimizer",),
        planted=(0.4, 0.75),
    ),
    Client(
        program="forward_hooks.py",
        library=None,
        steps=(60,),
        verdict=SMALL_OPERATORS,
        place=("forward", "hook"),
        planted=(0.35, 0.8),
    ),
    Client(
        program="item_loop.py",
        library=None,
        steps=(60,),
        verdict=SYNCHRONIZATION | SMALL_OPERATORS,
        place=("item", "between", "_local_scalar_dense", "forward"),
        planted=(0.45, 0.85),
    ),
    Client(
        program="tiny_kernels.py",
        library=None,
        steps=(60,),
        causes=_COMPUTING,
        verdict=SMALL_OPERATORS,
    ),
    Client(
        program="large_products.py",
        library=None,
        steps=(60,),
        causes=frozenset({"compute"}),
        verdict=COMPUTE,
    ),
    Client(
        program="elementwise_chain.py",
        library=None,
        steps=(20,),
        causes=frozenset({"compute.vector"}),
        verdict=MEMORY,
    ),
    Client(
        program="memory_growth.py",
        library=None,
        steps=(120,),
        causes=_COMPUTING,
        verdict=COMPUTE,
        place=("grows by",),
    ),
    Client(
        program="core_contention.py",
        library=None,
        steps=(60,),
        verdict=CONTENTION,
        planted=(0.3, 1.0),
    ),
    Client(
        program="compile_startup.py",
        library=None,
        steps=(20,),
        watch_forward=False,
        spans_apart=False,
        verdict=STARTUP,
        planted=(0.6, 1.0),
    ),
    Client(
        program="ddp_accumulation.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
        causes=_COMPUTING | _COMMUNICATION,
        verdict=COMMUNICATION,
        place=("no_sync",),
    ),
    Client(
        program="ddp_communication.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
        causes=_COMPUTING | _COMMUNICATION,
        verdict=COMMUNICATION,
    ),
    Client(
        program="slow_rank.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
        verdict=LATE_RANK,
    ),
    Client(
        program="uneven_experts.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
        verdict=EXPERTS,
    ),
    Client(
        program="causal_ring.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
        verdict=RING,
    ),
    Client(
        program="two_stage_pipeline.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
        verdict=PIPELINE,
    ),
)
