"""Traces and runs at addresses: a real S3 server, and HTTP servers that fail."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper.errors import InputError, OutputError
from chopper.ingest import remote
from chopper.storage.layout import MANIFEST
from tests.command import process, run
from tests.ingest.test_logs import trace
from tests.waiting import until

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed (chopper-profiler[remote])")
BUCKET = "s3://bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3 server on the loopback (moto's), and the variables with which it is found."""
    pytest.importorskip("s3fs", reason="s3fs is not installed (chopper-profiler[s3])")
    pytest.importorskip("moto.server", reason="moto is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as out:
        started = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=out,
            stderr=out,
        )
    try:
        until(lambda: _answers(port), "moto answers")
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        started.terminate()
        started.wait()


def _answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The server's file system, with an empty bucket; and a cache of its own."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    if not fs.exists("bucket"):
        fs.mkdir("bucket")
    yield fs
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    forget()


def forget() -> None:
    """As a new process would begin."""
    remote._copies.cache_clear()
    remote._fetched.clear()


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """The traces of two ranks, one packed by gzip."""
    folder = tmp_path / "traces"
    folder.mkdir()
    trace(folder / "rank0.json", 0, 2)
    whole = trace(folder / "rank1.json", 1, 2)
    (folder / "rank1.json.gz").write_bytes(gzip.compress(whole.read_bytes()))
    whole.unlink()
    return folder


def same(a: Any, b: Any) -> bool:
    """Whether two attributions say the same, but for their names."""
    names = ("source", "run", "name", "path")
    one, other = ({k: v for k, v in r.to_dict().items() if k not in names} for r in (a, b))
    return json.dumps(one, default=str) == json.dumps(other, default=str)


@pytest.mark.parametrize("address", ["/job/rank*.json*", "/job", "/job/"])
def test_traces_of_a_bucket_are_those_of_the_disk(s3: Any, traces: Path, address: str) -> None:
    s3.put(f"{traces}/", "bucket/job/", recursive=True)
    away = chopper.attribute(BUCKET + address)
    assert same(away, chopper.attribute(traces))
    assert away.source == BUCKET + address


def test_what_did_not_change_is_not_fetched_again(s3: Any, traces: Path, tmp_path: Path) -> None:
    s3.put(str(traces / "rank0.json"), "bucket/one.json")
    chopper.load(f"{BUCKET}/one.json")
    (copy,) = (tmp_path / "cache").rglob("one.json")
    before = copy.stat().st_ino
    forget()
    chopper.load(f"{BUCKET}/one.json")
    assert copy.stat().st_ino == before
    forget()
    s3.put(str(traces / "rank1.json.gz"), "bucket/one.json")
    chopper.load(f"{BUCKET}/one.json")
    assert copy.read_bytes() == (traces / "rank1.json.gz").read_bytes()


def test_files_that_are_gone_are_not_read(s3: Any, traces: Path) -> None:
    s3.put(f"{traces}/", "bucket/job/", recursive=True)
    assert len(chopper.load(f"{BUCKET}/job").ranks) == 2
    forget()
    s3.rm("bucket/job/rank1.json.gz")
    assert len(chopper.load(f"{BUCKET}/job").ranks) == 1


def test_a_run_is_written_and_read_at_an_address(s3: Any, traces: Path, tmp_path: Path) -> None:
    s3.put(f"{traces}/", "bucket/job/", recursive=True)
    made = run("import", f"{BUCKET}/job/*", "-o", f"{BUCKET}/runs/job", cwd=tmp_path)
    assert made.code == 0, made.err
    assert made.out.strip() == f"{BUCKET}/runs/job"
    assert f"chopper analyze {BUCKET}/runs/job" in made.err.replace("'", "")
    assert same(chopper.attribute(f"{BUCKET}/runs/job"), chopper.attribute(traces))
    again = run("import", str(traces), "-o", f"{BUCKET}/runs/job", cwd=tmp_path)
    assert again.code == 1
    assert "holds a run already; pass --force" in again.err
    forced = run("import", str(traces / "rank0.json"), "-o", f"{BUCKET}/runs/job", "--force")
    assert forced.code == 0, forced.err
    forget()
    assert len(chopper.load(f"{BUCKET}/runs/job").ranks) == 1


def test_a_run_that_is_copied_in_part_never_looks_whole(
    s3: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("import", str(traces), "-o", str(tmp_path / "run")).code == 0
    put = remote._put

    def breaks(fs: Any, file: Path, path: str) -> None:
        if file.suffix == ".parquet":
            raise OSError("no space left")
        put(fs, file, path)

    monkeypatch.setattr(remote, "_put", breaks)
    with pytest.raises(OutputError, match=r"cannot be written \(OSError: no space left\)"):
        remote.upload(tmp_path / "run", f"{BUCKET}/runs/half")
    assert not s3.exists(f"bucket/runs/half/{MANIFEST}")


def test_a_file_address_is_a_path(traces: Path) -> None:
    assert same(chopper.attribute(f"file://{traces}"), chopper.attribute(traces))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://nobucket/trace.json", r"cannot be read \(NoSuchBucket: .*does not exist"),
        ("s3://bucket/none.json", r"nothing is there"),
        ("s3://bucket/none*.json", r"no file is there, or the pattern matches none"),
        ("nope://bucket/a.json", r"nope is no known kind of address; expected s3, gs"),
        ("gs://bucket/a.json", r"pip install 'chopper-profiler\[gs\]'"),
        ("http://127.0.0.1:9/trace.json", r"cannot be read \(ClientConnectorError"),
    ],
)
def test_what_cannot_be_read_is_one_line(s3: Any, address: str, said: str) -> None:
    outcome = run("analyze", address)
    assert outcome.code == 1
    (line,) = [one for one in outcome.err.splitlines() if not one.endswith("…")]
    assert line.startswith(f"chopper: {address}")
    assert re.search(said, line)


def test_ten_thousand_files_are_too_many(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MOST_FILES", 2)
    for i in range(3):
        s3.pipe(f"bucket/job/{i}.json", b"{}")
    with pytest.raises(InputError, match="the pattern matches 3 files, expected at most 2"):
        chopper.load(f"{BUCKET}/job/*.json")


def test_a_bad_file_is_named_by_its_address(s3: Any) -> None:
    s3.pipe("bucket/job/bad.json", b"not a trace")
    with pytest.raises(InputError, match=rf"^{BUCKET}/job/bad.json: not JSON"):
        chopper.load(f"{BUCKET}/job/bad.json")


class _Server(http.server.BaseHTTPRequestHandler):
    """Serves a trace; of ``/half`` the first half, while it says that it is whole."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(403 if self.path.startswith("/secret") else 200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        half = len(self.body) // 2 if self.path.startswith("/half") else None
        self.wfile.write(self.body[:half])

    def do_HEAD(self) -> None:
        self.send_response(403 if self.path.startswith("/secret") else 200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web(traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_Server, "body", (traces / "rank0.json").read_bytes())
    forget()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()
    forget()


def test_a_trace_comes_over_http(web: str, traces: Path) -> None:
    away = chopper.attribute(f"{web}/rank0.json?signature=a/b")
    assert same(away, chopper.attribute(traces / "rank0.json"))


@pytest.mark.parametrize("path", ["half.json", "secret.json"])
def test_a_partial_download_is_no_truncated_trace(web: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^{web}/{path}: cannot be read"):
        chopper.load(f"{web}/{path}")
    assert not [*(tmp_path / "cache").rglob("*.json"), *(tmp_path / "cache").rglob("*.part")]


def test_without_fsspec_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    forget()
    with pytest.raises(InputError, match=r"pip install 'chopper-profiler\[remote\]'"):
        chopper.load("s3://bucket/trace.json")


def test_a_page_is_not_written_to_an_address() -> None:
    outcome = run("report", os.devnull, "-o", "s3://bucket/report.html")
    assert outcome.code == 2
    assert "is an address, expected a path on this machine" in outcome.err


@pytest.mark.slow
def test_a_recording_is_copied_to_its_address(s3: Any, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(12):\n"
        "    model(torch.ones(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    words = ("record", "-o", f"{BUCKET}/runs/mine", "--", sys.executable, str(program))
    outcome = process(*words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert f"copied to {BUCKET}/runs/mine" in outcome.err
    assert chopper.load(f"{BUCKET}/runs/mine").manifest.ranks[0].steps_count == 12
    again = process(*words, cwd=tmp_path)
    assert again.code == 1
    assert "holds a run already; pass --force" in again.err
