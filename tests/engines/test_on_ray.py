"""The engine of a Ray cluster: real nodes of `ray start` on this machine, of one core each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks._ranks import write_ranks
from chopper import pipeline, reports
from chopper.engines import Engine, Lost, Serial, on_ray
from chopper.engines.on_ray import OnRay
from chopper.errors import InputError
from chopper.storage.results import InFile
from tests.command import run
from tests.engines import tasks
from tests.engines.nodes import Nodes, started_nodes
from tests.engines.tasks import done
from tests.ingest.test_logs import trace
from tests.storage.test_planted import PLANTED
from tests.waiting import PATIENCE_S, until

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray", allow_module_level=True)

LARGE_ROWS = 400_000
"""Of a table that travels through the object store."""
OPENED = """
import os, sys
def look(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        name = os.path.basename(arguments[0])
        if name.startswith("rank-"):
            with open({log!r}, "a") as log:
                log.write(name + os.linesep)
sys.addaudithook(look)
"""
"""Site of the nodes: it notes each trace that is opened."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with started_nodes(site=OPENED) as cluster:
        yield cluster


def test_results_are_those_of_one_process_also_when_a_node_ends(
    nodes: Nodes, tmp_path: Path
) -> None:
    second = nodes.start()
    made = tmp_path / "made"
    made.mkdir()
    calls = [(30_000 * n if n % 2 else LARGE_ROWS + n, None, made) for n in range(12)]
    seen: list[int] = []
    with Serial() as serial, OnRay(nodes.address, progress=lambda _, n: seen.append(n)) as engine:
        assert engine.workers == 2
        both: tuple[Engine, ...] = (serial, engine)
        results = [[*one.map(tasks.noted_table, calls, label="")] for one in both]
        assert seen == [*range(1, 13)]
        for of in results:
            assert [number for number, _ in of] == [n for n, *_ in calls]
        assert {type(left) for _, left in results[1]} == {InFile}
        nodes.kill(second)
        later, refused = [], []
        for one, of in zip(both, results, strict=True):
            left = [({"left": result}, 1) for _, result in of]
            later.append([*one.map(tasks.nested, left, label="")])
            lost = one.map(tasks.refused, [(n,) for n in range(4)], label="")
            refused.append([r.reason for r in lost if isinstance(r, Lost)])
        assert later[1] == later[0]
        # Nothing goes with the node.
        assert len([*made.iterdir()]) == 2 * len(calls)
        assert refused[1] == refused[0]
        with pytest.raises(ZeroDivisionError):
            next(engine.map(tasks.wrong, [(1,)], label=""))
        once = [(n, 5, tmp_path / "once") for n in range(8)]
        assert done(engine.map(tasks.killed_once, once, label="")) == [*range(8)]
    # Files stay after the engine.
    assert results[1][0][1].get()["rows"].num_rows == LARGE_ROWS


@pytest.mark.parametrize("function", [tasks.filled, tasks.arrow_filled])
def test_a_task_that_takes_more_than_the_memory_is_lost_alone(
    nodes: Nodes, function: Callable[..., Any]
) -> None:
    with OnRay(nodes.address, memory_bytes=512 << 20) as engine:
        results = [*engine.map(function, [(1 << 20,), (1 << 30,), (2 << 20,)], label="")]
    assert done(results) in ([1, 1], [1 << 20, 2 << 20])
    assert isinstance(results[1], Lost)
    assert results[1].reason == "it takes more than --memory 537 MB: raise it"


@pytest.mark.long
def test_a_node_that_leaves_costs_an_analysis_a_rank_at_most(nodes: Nodes, tmp_path: Path) -> None:
    write_ranks(tmp_path / "traces", 8, 500)
    arguments = ("analyze", str(tmp_path / "traces"), "--json")
    second = nodes.start()
    command = [sys.executable, "-m", "chopper", *arguments, "--ray", nodes.address]
    environment = {**os.environ, "PYTHONPATH": str(nodes.guard)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as analysis:

        def opened() -> Counter[str]:
            return Counter(nodes.opened.read_text().split() if nodes.opened.exists() else ())

        until(lambda: analysis.poll() is not None or len(opened()) >= 4, "half of the ranks")
        nodes.kill(second)
        out, err = analysis.communicate(timeout=PATIENCE_S)
    assert analysis.returncode == 0, err
    assert json.loads(out) == json.loads(run(*arguments).out)
    every = opened()
    assert len(every) == 8
    each = min(every.values())
    assert sum(-(-count // each) - 1 for count in every.values()) <= 1, every


@pytest.mark.long
@pytest.mark.parametrize(
    ("site", "message"),
    [
        (
            "import sys\nsys.modules['chopper'] = None\n",
            "cannot import chopper .*; install chopper-profiler",
        ),
        (
            "import chopper.version\nchopper.version.__version__ = '0.0.1'\n",
            r"has chopper 0\.0\.1 and Python .* here are",
        ),
    ],
)
def test_a_node_without_this_chopper_is_named(
    nodes: Nodes, tmp_path: Path, site: str, message: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(site)
    other = nodes.start(path=tmp_path)
    try:
        with pytest.raises(InputError, match=message) as refused, OnRay(nodes.address) as engine:
            # Each goes on for ever: the second gets to the other node.
            [*engine.map(tasks.begun, [(tmp_path, n) for n in range(2)], label="begun")]
        assert "\n" not in str(refused.value)
    finally:
        nodes.kill(other)


def test_a_node_fetches_what_lies_at_an_address_itself(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed (chopper-profiler[remote])")
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        trace(folder / f"rank{rank}.json", rank, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        web = f"http://127.0.0.1:{served.server_address[1]}"
        addresses = [f"{web}/rank{rank}.json" for rank in range(2)]
        with OnRay(nodes.address) as engine:
            away = reports.document(pipeline.attribute(addresses, engine=engine))
        served.shutdown()
    own = reports.document(pipeline.attribute([folder / f"rank{rank}.json" for rank in range(2)]))
    named = ("source", "run", "name", "path")
    assert {k: v for k, v in away.items() if k not in named} == {
        k: v for k, v in own.items() if k not in named
    }
    assert {p.name for p in nodes.cache.rglob("rank*.json")} == {"rank0.json", "rank1.json"}


def test_a_cluster_of_another_ray_is_one_line(nodes: Nodes) -> None:
    script = (
        "import sys, ray\n"
        "ray.__version__ = '2.0.0'\n"
        "from chopper.engines.on_ray import OnRay\n"
        "from chopper.errors import ChopperError\n"
        "try:\n"
        "    OnRay(sys.argv[1])\n"
        "except ChopperError as exc:\n"
        "    print(exc)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, nodes.address],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(nodes.guard)},
    )
    (line,) = shown.stdout.splitlines()
    assert "Version mismatch" in line, shown.stderr
    assert "Ray: 2.0.0" in line


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a server of HTTP/2 says first: Ray then waits for its answers."""


@contextlib.contextmanager
def listener(says: bytes) -> Iterator[tuple[str, list[Any]]]:
    """A server that says this and no more; yields its address, and whom it accepted."""
    accepted: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])
                    accepted[-1].sendall(says)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", accepted
        server.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


CONNECTING = """
import sys
from chopper import cli
from chopper.engines import ray_cluster
ray_cluster.ANSWER_S = ray_cluster.CONNECT_S = float(sys.argv.pop(1))
cli.main()
"""


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"", "no answer in Ray's protocol within 1 s"),
        (SETTINGS, "did not connect to it within 1 s"),
    ],
)
def test_connecting_to_what_is_silent_ends_in_a_line(says: bytes, why: str, tmp_path: Path) -> None:
    file = trace(tmp_path / "rank0.json", 0, 1)
    with listener(says) as (where, _):
        ended = subprocess.run(
            [sys.executable, "-c", CONNECTING, "1", "analyze", str(file), "--ray", where],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, line.startswith(f"chopper: {where}: ")) == (1, True), line
    assert why in line


@pytest.mark.parametrize("says", [b"", SETTINGS])
def test_an_interrupt_ends_connecting(says: bytes, tmp_path: Path) -> None:
    file = trace(tmp_path / "rank0.json", 0, 1)
    command = [sys.executable, "-c", CONNECTING, str(PATIENCE_S), "analyze", str(file), "--ray"]
    with (
        listener(says) as (where, accepted),
        subprocess.Popen([*command, where], stderr=subprocess.PIPE, text=True) as connecting,
    ):
        # Ray connects again, after the first try has been answered.
        until(lambda: len(accepted) > bool(says), "a connection")
        connecting.send_signal(signal.SIGINT)
        _, err = connecting.communicate(timeout=60)
    assert (connecting.returncode, err.split()) == (130, ["chopper:", "interrupted"])


@pytest.mark.parametrize("plant", PLANTED)
def test_a_cluster_that_another_user_names_is_not_asked(
    plant: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, victim = tmp_path / "ray" / "ray_current_cluster", tmp_path / "victim"
    file.parent.mkdir()
    with listener(SETTINGS) as (where, accepted):
        victim.write_text(where)
        plant(file, victim)
        if file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1:
            file.write_text(where)
        assert on_ray._running() is None
        assert accepted == []
        file.unlink()
        file.write_text(where)
        assert on_ray._running() == where
        file.chmod(0o666)
        assert on_ray._running() is None


def test_the_address_of_a_client_is_one_line_that_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = trace(tmp_path / "rank0.json", 0, 1)
    line = run("analyze", file, "--ray", "ray://head:10001").line
    assert line.startswith("chopper: ray://head:10001: Ray's client and its dashboard are not")
    assert "give HOST:PORT, as `ray start --head` prints it" in line
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    assert run("analyze", file, "--ray").line.startswith("chopper: http://head:8265: Ray's client")
