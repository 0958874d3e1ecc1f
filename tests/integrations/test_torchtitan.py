"""torchtitan's component. Its requirements contradict those of this environment: elsewhere only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chopper.storage.run import Run
from tests.integrations.test_examples import TWO_RANKS, Example, compare
from tests.recording.conftest import clean_environment  # noqa: F401 - a fixture
from tests.recording.make import TRACE_ONLY, Task, steps_of

# torch says of its own code that it is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

pytest.importorskip("torchtitan.tools.profiler", reason="torchtitan is not installed")


def test_the_component_stands_where_the_profiler_does(tmp_path):
    from torchtitan.tools.profiler import Profiler
    from torchtitan.trainer import Trainer

    from chopper.integrations.torchtitan import ChopperProfiler

    options = {"collect": TRACE_ONLY, "trace": False}
    config = Trainer.Config(profiler=ChopperProfiler.Config(output="run", options=options))
    task = Task()
    with config.profiler.build(global_step=0, base_folder=str(tmp_path)) as profiler:
        assert isinstance(profiler, Profiler)
        for _ in range(3):
            task.step()
            profiler.step()
    assert [row["source"] for row in steps_of("run")] == ["optimizer"] * 3


@pytest.mark.slow
@pytest.mark.long
def test_a_whole_training_is_what_the_command_records(tmp_path):
    timed = {"evaluation": "torchtitan.components.validate:Validator.validate"}
    program = Path(__file__).parent / "programs/torchtitan_debugmodel.py"
    phases = {"evaluation": 3, "checkpoint": 2}
    compare(Example("torchtitan", 12, 2, phases, timed, TWO_RANKS, 2, program), tmp_path)


def test_an_error_is_in_the_run(tmp_path):
    from chopper.integrations.torchtitan import ChopperProfiler

    options = {"collect": TRACE_ONLY, "trace": False}
    config = ChopperProfiler.Config(output="run", options=options)
    with pytest.raises(torch.OutOfMemoryError), config.build(global_step=0, base_folder="."):
        raise torch.OutOfMemoryError("of the program")
    assert Run.open(tmp_path / "run").part(0).status == "failed"


def test_the_functions_that_every_recording_watches_are_there():
    program = (
        "import json, sys, torchtitan.trainer, torchtitan.components.validate\n"
        "from pathlib import Path\n"
        "import chopper.recording.trainers as trainers\n"
        "text = Path(trainers.__file__).with_suffix('.json').read_text()\n"
        "for module, functions in json.loads(text).items():\n"
        "    for path in functions if module.startswith('torchtitan') else ():\n"
        "        kind, name = path.split('.')\n"
        "        assert callable(vars(vars(sys.modules[module])[kind])[name])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
