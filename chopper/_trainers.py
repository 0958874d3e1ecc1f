"""What trainers call their phases: functions of known libraries, each wrapped to name its phase."""

from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

from chopper._hook.early import ImportWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_LIGHTNING = (
    ("loops.evaluation_loop", "_EvaluationLoop.run", "evaluation"),
    ("loops.prediction_loop", "_PredictionLoop.run", "inference"),
    ("trainer.trainer", "Trainer.save_checkpoint", "checkpoint"),
)
FUNCTIONS: tuple[tuple[str, str, str], ...] = (
    ("torch", "save", "checkpoint"),
    ("torch.serialization", "save", "checkpoint"),
    ("torch.distributed.checkpoint", "save", "checkpoint"),
    ("torch.distributed.checkpoint", "async_save", "checkpoint"),
    ("torch.distributed.checkpoint.state_dict_saver", "save", "checkpoint"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save", "checkpoint"),
    ("transformers.trainer", "Trainer._evaluate", "evaluation"),
    ("transformers.trainer", "Trainer.evaluate", "evaluation"),
    ("transformers.trainer", "Trainer.evaluation_loop", "evaluation"),
    ("transformers.trainer", "Trainer.predict", "inference"),
    ("transformers.trainer", "Trainer._save_checkpoint", "checkpoint"),
    ("transformers.trainer", "Trainer.save_model", "checkpoint"),
    ("transformers.generation.utils", "GenerationMixin.generate", "generation"),
    *(
        (f"trl.trainer.{module}_trainer", f"{name}Trainer.{method}", "rollout")
        for module, name in (("grpo", "GRPO"), ("rloo", "RLOO"), ("distillation", "Distillation"))
        for method in ("_generate_and_score_completions", "_generate")
    ),
    ("vllm.entrypoints.llm", "LLM.generate", "generation"),
    ("accelerate.accelerator", "Accelerator.save_state", "checkpoint"),
    ("accelerate.accelerator", "Accelerator.save_model", "checkpoint"),
    *((f"lightning.pytorch.{m}", f, phase) for m, f, phase in _LIGHTNING),
    *((f"pytorch_lightning.{m}", f, phase) for m, f, phase in _LIGHTNING),
    ("lightning.fabric.fabric", "Fabric.save", "checkpoint"),
    ("lightning_fabric.fabric", "Fabric.save", "checkpoint"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.step", "optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.save_checkpoint", "checkpoint"),
    (
        "stable_baselines3.common.on_policy_algorithm",
        "OnPolicyAlgorithm.collect_rollouts",
        "rollout",
    ),
    (
        "stable_baselines3.common.off_policy_algorithm",
        "OffPolicyAlgorithm.collect_rollouts",
        "rollout",
    ),
    ("stable_baselines3.common.evaluation", "evaluate_policy", "evaluation"),
    ("ultralytics.engine.validator", "BaseValidator.__call__", "evaluation"),
    ("ultralytics.engine.trainer", "BaseTrainer.save_model", "checkpoint"),
)
"""Module, function in it, phase. What a version of a library lacks is left alone."""


class TrainerPhases:
    """Names the phases that trainers are in, from the import of their modules on.

    A wrapped function has the name, the signature and the attributes of its own, and passes on
    whatever it is called with, returns and raises.

    Args:
        phase: makes the block of a phase of that name.
    """

    def __init__(self, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._phase: Callable[[str], AbstractContextManager[Any]] | None = phase
        self._watches: list[ImportWatch] = []
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        """Owner, attribute, the function of its own, its wrapper."""
        self._wrapper_of: dict[Any, Any] = {}

    def begin(self) -> None:
        """Wrap what is imported; watch the imports of the rest."""
        for module in dict.fromkeys(name for name, _, _ in FUNCTIONS):
            if module in sys.modules:
                self._wrap_module(module)
            else:
                watch = ImportWatch(module, functools.partial(self._wrap_module, module))
                watch.begin()
                self._watches.append(watch)

    def end(self) -> None:
        """Put back what nobody has replaced since. Idempotent."""
        self._phase = None
        for watch in self._watches:
            watch.end()
        self._watches = []
        for owner, attribute, original, wrapper in self._wrapped:
            if vars(owner).get(attribute) is wrapper:
                setattr(owner, attribute, original)
        self._wrapped = []
        self._wrapper_of = {}

    def _wrap_module(self, module: str) -> None:
        for name, path, phase in FUNCTIONS:
            if name == module and self._phase is not None:
                *classes, attribute = path.split(".")
                owner: Any = sys.modules[module]
                for part in classes:
                    owner = vars(owner).get(part)
                original = None if owner is None else vars(owner).get(attribute)
                if isinstance(original, FunctionType):
                    self._wrap(owner, attribute, original, phase)

    def _wrap(self, owner: Any, attribute: str, original: FunctionType, phase: str) -> None:
        # A function that two modules show stays one: the second may have imported the wrapper.
        originals = {wrapper: function for function, wrapper in self._wrapper_of.items()}
        original = originals.get(original, original)
        if original not in self._wrapper_of:
            self._wrapper_of[original] = self._in_phase(original, phase)
        wrapper = self._wrapper_of[original]
        setattr(owner, attribute, wrapper)
        self._wrapped.append((owner, attribute, original, wrapper))

    def _in_phase(self, original: FunctionType, phase: str) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = self._phase
            if begin is None:
                return original(*args, **kwargs)
            with begin(phase):
                return original(*args, **kwargs)

        return wrapper
