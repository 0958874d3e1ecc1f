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


_COMPUTING = frozenset({"compute", "idle.preparation.python", "idle.preparation.dispatch"})
_DATA = frozenset({"idle.preparation.data"})
_COMMUNICATION = frozenset({"communication", "idle.preparation.collective_wait"})

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
    ),
    Client(
        program="pipeline.py",
        library=None,
        launcher=_TORCHRUN,
        steps=(30, 30),
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
)
