"""Ranks for tests: processes forked from one that has torch and Triton's interpreter loaded.

    with Ranks() as ranks:
        ranks.run("tests.workloads.primitive_cases", "swap", 4, steps=3)

Loading torch takes longer than most cases do. The interpreter is chosen at import, so that it needs
a process of its own anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from chopper.fresh_python import end_with_parent
from tests.waiting import PATIENCE_S


class Ranks:
    """A server that forks the ranks of each case."""

    def __enter__(self) -> Ranks:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.workloads.forked", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TRITON_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with self._server as server:
            server.kill() if kind else server.communicate(timeout=PATIENCE_S)

    def run(self, module: str, case: str, ranks: int, **arguments: object) -> list[Any]:
        """Call ``module.case(**arguments)`` in so many ranks; return what each returned.

        Fails with the traceback of the first rank that raised. None for one that was killed.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        request = {"module": module, "case": case, "ranks": ranks, "arguments": arguments}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        assert not answer["failed"], answer["failed"]
        return list(answer["returned"])


def _rank(request: dict[str, Any], rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=request["ranks"]
    )
    torch.manual_seed(rank)
    case = getattr(importlib.import_module(request["module"]), request["case"])
    answer = {"returned": case(**request["arguments"])}
    (folder / f"{rank}.json").write_text(json.dumps(answer), encoding="utf-8")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, children, server = Path(name), [], os.getpid()
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                end_with_parent(server, signal.SIGKILL)
                # A rank that is lost in a case must not keep the others from ending.
                try:
                    _rank(request, rank, folder)
                except BaseException:  # noqa: BLE001 - reported to the test
                    answer = {"failed": f"rank {rank}: {traceback.format_exc()}"}
                    (folder / f"{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        answers: list[dict[str, Any]] = [{} for _ in children]
        for rank, found in enumerate(answers):
            with contextlib.suppress(FileNotFoundError):
                found |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    failed = [answer["failed"] for answer in answers if "failed" in answer]
    return {
        "failed": "\n".join(failed),
        "returned": [answer.get("returned") for answer in answers],
    }


def main() -> None:
    """Answer one request per line until there are no more."""
    import torch

    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    torch.set_num_threads(1)  # a pool of threads would be lost in a fork
    for line in sys.stdin:
        request = json.loads(line)
        importlib.import_module(request["module"])
        print(json.dumps(_answer(request)), flush=True)


if __name__ == "__main__":
    main()
