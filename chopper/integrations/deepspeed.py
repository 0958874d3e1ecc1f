"""DeepSpeed: a hook of an engine, which records from here on.

from chopper.integrations.deepspeed import ChopperHook
hook = ChopperHook(engine, "runs/mine")
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from chopper.integrations.recording import TrainerRecording


class ChopperHook:
    """Records the training of an engine until ``close()``, the end of its block or the program.

    A step ends where ``engine.global_steps`` grew: in ``engine.step()``, or in
    ``engine.train_batch()`` of an engine of pipelines.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        output: the run directory, ``runs/<time>`` by default.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(self, engine: Any, output: str | Path | None = None, **options: Any) -> None:
        self._recording = TrainerRecording("deepspeed", "0.16", output, **options)
        self._recording.safely(self._hook, engine)

    def _hook(self, engine: Any) -> None:
        method = "train_batch" if hasattr(engine, "train_batch") else "step"
        if not hasattr(engine, "global_steps") or not hasattr(engine, method):
            raise TypeError(
                f"found a {type(engine).__name__}, expected the engine that "
                "deepspeed.initialize returns first"
            )
        function, reference = getattr(type(engine), method), weakref.ref(engine)

        @functools.wraps(function)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            engine = reference()
            before = getattr(engine, "global_steps", None)
            # As it is by now: the recording watches the class.
            result = getattr(type(engine), method)(engine, *args, **kwargs)
            if getattr(engine, "global_steps", None) != before:
                self._recording.step()
            return result

        # Of this engine alone, which does not live longer for it.
        setattr(engine, method, stepped)
        self._recording.begin()

    def close(self) -> None:
        """End the recording. Idempotent."""
        self._recording.end()

    def __enter__(self) -> ChopperHook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recording.end(exc)
