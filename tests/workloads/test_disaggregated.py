from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from chopper.engines import ray_cluster
from chopper.fresh_python import environment, own_python
from chopper.workloads import disaggregated as d
from chopper.workloads.planning import Cost, Planner
from chopper.workloads.sources import SourceError, without_latency
from tests.listening import listening_addresses, reachable_from_outside
from tests.waiting import PATIENCE_S, until
from tests.workloads.small_mixtures import draw, sources

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'chopper-profiler[ray]'", allow_module_level=True)

pytestmark = pytest.mark.slow

STEPS, RANKS = 24, 2


def setup(name, *, fault="none", latency_s=2e-3, **changes):
    specs = sources(fault, 6, state_bytes=40_000, latency_s=latency_s)
    options: dict[str, Any] = {
        "name": name,
        "draw": draw(specs, seed=5, method="kk", cost=Cost(1, 0.1)),
        "width": 64,
        "loaders": 2,
        "most_loaders": 2,
        "threads": 16,
        "prefetch": 4,
        "nodes": ((d.this_node(), tuple(range(RANKS))),),
    }
    return d.Setup(**(options | changes))


def planned(made, steps):
    plans, contents = Planner(made.draw), without_latency(made.draw.sources)
    return [
        [Counter(contents.marked(plans.plan(step).of(rank))) for rank in range(RANKS)]
        for step in steps
    ]


@pytest.fixture(scope="module")
def ray():
    """A cluster for all tests of this file; nothing of it is left when they are done."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.MonkeyPatch.context() as patch:
        for what in ("raylet_start_wait_time_s", "worker_register_timeout_seconds"):
            patch.setenv(f"RAY_{what}", str(round(PATIENCE_S)))
        with ray_cluster.cluster():
            import ray

            homes = {Path(tempfile.gettempdir()), Path("/tmp")}
            started = f"{ray_cluster.PREFIX}{os.getpid()}-*"
            directory = next(path for home in homes for path in home.glob(started))
            yield ray
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert psutil.wait_procs(left, timeout=PATIENCE_S)[1] == []
    assert not directory.exists()


@pytest.fixture
def started(ray):
    """Start the actors of a setup; they end with the test."""
    actors = []

    def start(made):
        actors.append(d.start_actors(made))
        return actors[-1]

    yield start
    for pair in actors:
        d.stop_actors(pair)


def read(constructor, *, first=0, steps=STEPS, prefetch=4, at=None):
    """Batches of all ranks, and something done at a step in the middle."""
    streams = [
        d.batches(constructor, rank=rank, first=first, steps=steps, prefetch=prefetch)
        for rank in range(RANKS)
    ]
    out = []
    for step in range(steps):
        if at is not None and step == steps // 2:
            at()
        out.append([next(stream) for stream in streams])
    assert all(next(stream, None) is None for stream in streams)
    return out


def pid(ray, actor):
    """Process of an actor."""
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def samples(read_steps):
    return [[Counter(batch.marked()) for batch in ranks] for ranks in read_steps]


@pytest.fixture(scope="module")
def whole(ray):
    """All steps of a setup, read once."""
    actors = d.start_actors(setup("whole"))
    found = read(actors[1])
    d.stop_actors(actors)
    return found


def test_every_rank_gets_what_was_planned_whole_and_once(whole):
    assert samples(whole) == planned(setup("whole"), range(STEPS))
    for ranks in whole:
        total = sum(sum(map(sum, batch.documents)) for batch in ranks)
        for batch in ranks:
            assert batch.step_tokens == total
            assert batch.tokens.shape == (len(batch.documents), 64)
            for row, lengths in zip(batch.tokens, batch.documents, strict=True):
                assert (row[: sum(lengths)] > 0).all()
                assert (row[sum(lengths) :] == 0).all()


def test_a_restart_goes_on_where_it_was_left(started, whole):
    later = read(started(setup("later"))[1], first=10, steps=STEPS - 10)
    for a, b in zip(whole[10:], later, strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.samples == other.samples
            assert one.documents == other.documents
            assert (one.tokens == other.tokens).all()


@pytest.mark.parametrize(
    "role",
    ["loader", *(pytest.param(r, marks=pytest.mark.long) for r in ("planner", "constructor"))],
)
def test_no_sample_is_lost_or_repeated_when_an_actor_is_killed(ray, started, role, capfd):
    made = setup(f"killed {role}")
    planner_actor, constructor = started(made)
    killed: list[psutil.Process] = []

    def kill():
        loader = ray.get(planner_actor.loaders.remote())[0]
        actor = {"loader": loader, "planner": planner_actor, "constructor": constructor}[role]
        killed.append(psutil.Process(pid(ray, actor)))
        killed[0].kill()

    assert samples(read(constructor, first=60, at=kill)) == planned(made, range(60, 60 + STEPS))
    assert "raylet" not in capfd.readouterr().out
    assert killed
    assert psutil.wait_procs(killed, timeout=PATIENCE_S)[1] == []


@pytest.mark.long
def test_loaders_are_added_when_trainers_wait_and_the_sequence_stays(ray, started):
    made = setup("scaled", loaders=1, most_loaders=3, threads=1, latency_s=2e-2)
    planner_actor, constructor = started(made)
    first, loaders = 0, 1
    while loaders == 1 and first < 20 * STEPS:
        # Trainers that take batches at once wait for 8 documents from one thread of 20 ms.
        found = read(constructor, first=first)
        assert samples(found) == planned(made, range(first, first + STEPS))
        first += STEPS
        loaders = len(ray.get(planner_actor.loaders.remote()))
    assert loaders > 1
    held = opened(ray, planner_actor)
    assert sorted(s for here in held for s in here) == list(range(6))


def opened(ray, planner_actor):
    """Sources that each loader has open."""
    return [
        ray.get(loader.__ray_call__.remote(lambda self: sorted(self._sources._open)))
        for loader in ray.get(planner_actor.loaders.remote())
    ]


def test_a_source_is_open_in_one_loader_only(ray, started):
    planner_actor, constructor = started(setup("opened"))
    read(constructor, steps=8)
    held = opened(ray, planner_actor)
    assert len(held) == 2
    assert sorted(s for here in held for s in here) == list(range(6))


def test_one_of_the_ranks_that_share_a_batch_reads_it(started, whole):
    made = setup("tensor", tensor=2, nodes=((d.this_node(), tuple(range(2 * RANKS))),))
    constructor = started(made)[1]
    assert made.readers(0) == [0, 2]
    for data, rank in enumerate(made.readers(0)):
        batch = next(d.batches(constructor, rank=rank, first=0, steps=1, prefetch=0))
        assert batch.marked() == whole[0][data].marked()


@pytest.fixture
def second_node(ray):
    """Another node of the cluster, on this machine: a raylet and an object store of its own."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    head = ray._private.worker._global_node
    directory = Path(head.get_session_dir_path()).parent
    words: dict[str, Any] = {"num_cpus": 8, "num_gpus": 0, "object_store_memory": 80 << 20}
    words |= {"include_log_monitor": False}
    words |= dict.fromkeys(("min_worker_port", "max_worker_port", "node_manager_port"), 0)
    params = RayParams(
        gcs_address=head.gcs_address,
        redis_address=head.gcs_address,
        node_ip_address="127.0.0.1",
        temp_dir=str(directory),
        **words,
    )
    params.dashboard_agent_listen_port = None  # any
    with environment({"PYTHONPATH": str(directory / "without-amdsmi")}):
        node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
    named = node.node_id
    until(lambda: {n["NodeID"] for n in ray.nodes() if n["Alive"]} >= {named}, "another node")
    yield named
    node.kill_all_processes(check_alive=False, allow_graceful=False)


def test_each_node_of_trainers_has_a_constructor_that_loads_for_its_ranks(
    ray, started, second_node
):
    made = setup("nodes", nodes=((d.this_node(), (0,)), (second_node, (1,))))
    _, *constructors = started(made)
    nodes = [ray.get(one.__ray_call__.remote(lambda _: d.this_node())) for one in constructors]
    assert nodes == [d.this_node(), second_node]
    streams = [
        d.batches(d.constructor(made, rank), rank=rank, first=0, steps=6, prefetch=0)
        for rank in range(RANKS)
    ]
    found = [[next(stream) for stream in streams] for _ in range(6)]
    assert samples(found) == planned(made, range(6))


@pytest.mark.parametrize(
    ("fault", "message"),
    [("raises", r"source code-01, sample \d+: FileNotFoundError: .*images.bin")],
)
def test_what_a_source_fails_of_comes_in_one_line(started, fault, message):
    _, constructor = started(setup(f"fault {fault}", fault=fault))
    with pytest.raises(SourceError, match=message) as refused:
        read(constructor)
    assert "\n" not in str(refused.value)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ray_cluster.LoaderError, match=r"pip install 'chopper-profiler\[ray\]'$"):
        ray_cluster.load_ray()


def test_a_ray_that_cannot_be_imported_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name == "ray" else None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ray_cluster.LoaderError, match="is installed and cannot be imported"):
        ray_cluster.load_ray()


def test_a_cluster_that_does_not_answer_is_one_line():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ray_cluster.LoaderError, match=f"{where}: no Ray cluster answers"):
            ray_cluster.answers(where)
    with pytest.raises(ray_cluster.LoaderError, match="here: no Ray cluster answers"):
        ray_cluster.answers("here")


def test_what_listens_and_is_no_cluster_is_given_up_on(monkeypatch):
    monkeypatch.setattr(ray_cluster, "ANSWER_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            ray_cluster.LoaderError, match=f"{where}: .*no answer in Ray's protocol within 1 s"
        ) as refused:
            ray_cluster.answers(where)
    assert "\n" not in str(refused.value)


def test_what_speaks_another_protocol_is_no_cluster():
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        with pytest.raises(ray_cluster.LoaderError, match="does not speak Ray's protocol"):
            ray_cluster.answers(f"127.0.0.1:{web.server_address[1]}")
        web.shutdown()


def test_leftovers_of_a_run_that_was_killed_are_ended(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ray_cluster, "PREFIX", f"chopper-ray-test{os.getpid()}-")
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    mine, other = (tmp_path / f"{ray_cluster.PREFIX}{pid}-x" for pid in (gone, os.getpid()))
    mine.mkdir()
    other.mkdir()
    sleeps = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", str(path)])
        for path in (mine, other)
    ]
    # As a worker, which wrote its role over its command line.
    for path in (mine, other):
        with (path / "log").open("w") as log:
            role, sleep = ["ray::SourceLoader", "3600"], shutil.which("sleep")
            sleeps.append(subprocess.Popen(role, executable=sleep, stdout=log))
    try:
        assert sorted(ray_cluster.clear_leftovers()) == sorted(p.pid for p in sleeps[::2])
        for ended in sleeps[::2]:
            ended.wait(PATIENCE_S)  # its code is whose wait came first
        assert [p.poll() for p in sleeps[1::2]] == [None, None]
    finally:
        for process in sleeps:
            process.kill()
            process.wait()
    assert not mine.exists()
    assert other.exists()


def test_what_starts_the_ranks_clears_away_what_they_could_not(tmp_path):
    gone = 2**22 + 1  # more than Linux gives
    left = tmp_path / f"{ray_cluster.PREFIX}{gone}-x"
    left.mkdir()
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "chopper.workloads.processes", str(os.getpid())),
            *("1", "chopper.workloads.dataloader", "--no-such-option"),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2, ran.stderr
    assert not left.exists()


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_leaves_nothing(tmp_path, hostile_directory, number, code):
    words = [
        "--repetitions",
        "3",
        "--state",
        "1",
        "--sources",
        "4",
        "--batch",
        "2",
        "--steps",
        "200",
        "--latency",
        "50",
    ]
    run = ["bench", "dataloader", "--variants", "balanced", "-o", str(tmp_path / "run")]
    run += ["--", *words]
    with subprocess.Popen(
        own_python("chopper", *run),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=hostile_directory,
    ) as process:
        assert process.stdout is not None
        said = next((x for x in process.stdout if x.startswith("balanced: loader 1 of 3")), None)
        started = psutil.Process(process.pid).children(recursive=True)
        addresses = listening_addresses(started)
        homes = [
            home
            for place in {tempfile.gettempdir(), "/tmp"}
            for rank in started
            for home in Path(place).glob(f"{ray_cluster.PREFIX}{rank.pid}-*")
        ]
        process.send_signal(number)
        rest = process.stdout.read()
    assert said is not None
    assert process.returncode == code
    assert "Traceback" not in rest
    assert len(addresses) > 5
    assert reachable_from_outside(addresses) == []
    assert psutil.wait_procs(started, timeout=PATIENCE_S)[1] == []
    assert len(homes) == 2  # of the sources, and Ray's
    assert not any(home.exists() for home in homes)
