"""Traces and runs at addresses: a real S3 server, and HTTP servers that fail."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.errors import InputError, OutputError
from chopper.reports import document
from chopper.storage import remote
from chopper.storage import web as web_files
from chopper.storage.layout import MANIFEST
from tests.cli.test_import_again import PROGRAM
from tests.command import Outcome, process, run
from tests.ingest.test_logs import trace
from tests.recording.test_gather import node
from tests.storage.s3_server import BUCKET, forget
from tests.waiting import PATIENCE_S, until

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed (chopper-profiler[remote])")


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
    one, other = ({k: v for k, v in document(r).items() if k not in names} for r in (a, b))
    return json.dumps(one, default=str) == json.dumps(other, default=str)


@pytest.mark.parametrize("address", ["/job/rank*.json*", "/job", "/job/"])
def test_traces_of_a_bucket_are_those_of_the_disk(s3: Any, traces: Path, address: str) -> None:
    s3.put(f"{traces}/", "bucket/job/", recursive=True)
    away = pipeline.attribute(BUCKET + address)
    assert same(away, pipeline.attribute(traces))
    assert away.source == BUCKET + address


def test_what_did_not_change_is_not_fetched_again(s3: Any, traces: Path) -> None:
    s3.put(str(traces / "rank0.json"), "bucket/one.json")
    pipeline.read(f"{BUCKET}/one.json")
    copy = Path(*remote.here([f"{BUCKET}/one.json"]))
    before = copy.stat().st_ino
    forget()
    pipeline.read(f"{BUCKET}/one.json")
    assert copy.stat().st_ino == before
    forget()
    s3.put(str(traces / "rank1.json.gz"), "bucket/one.json")
    pipeline.read(f"{BUCKET}/one.json")
    assert copy.read_bytes() == (traces / "rank1.json.gz").read_bytes()


def test_a_run_is_written_and_read_at_an_address(s3: Any, traces: Path, tmp_path: Path) -> None:
    s3.put(f"{traces}/", "bucket/job/", recursive=True)
    made = run("import", f"{BUCKET}/job/*", "-o", f"{BUCKET}/runs/job", cwd=tmp_path)
    assert made.code == 0, made.err
    assert made.out.strip() == f"{BUCKET}/runs/job"
    assert f"chopper analyze {BUCKET}/runs/job" in made.err.replace("'", "")
    assert same(pipeline.attribute(f"{BUCKET}/runs/job"), pipeline.attribute(traces))
    again = run("import", str(traces), "-o", f"{BUCKET}/runs/job", cwd=tmp_path)
    assert again.code == 1
    assert "holds a run already; pass --force" in again.err
    forced = run("import", str(traces / "rank0.json"), "-o", f"{BUCKET}/runs/job", "--force")
    assert forced.code == 0, forced.err
    forget()
    assert len(pipeline.read(f"{BUCKET}/runs/job").ranks) == 1


def test_an_import_between_addresses_that_was_killed_goes_on(
    s3: Any, traces: Path, tmp_path: Path
) -> None:
    s3.put(f"{traces}/", "bucket/job/", recursive=True)
    arguments = ("import", f"{BUCKET}/job", "-o", f"{BUCKET}/runs/job", "--workers", "1")

    def imported(log: str, killed_at: int) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", PROGRAM, str(tmp_path / log), str(killed_at)]
        return subprocess.run([*program, *arguments], capture_output=True, text=True)

    def copies() -> dict[str, int]:
        return {p.name: p.stat().st_ino for p in (tmp_path / "cache").rglob("rank*.json*")}

    assert imported("first", 1).returncode == -9
    assert not s3.exists(f"bucket/runs/job/{MANIFEST}")
    before = copies()
    again = imported("again", -1)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "first").read_text().split() == ["rank0.json"]
    assert (tmp_path / "again").read_text().split() == ["rank1.json.gz"]
    assert len(before) == 2
    assert before.items() <= copies().items()
    assert not [*(tmp_path / "cache").rglob("*.chopper-read")]
    assert same(pipeline.attribute(f"{BUCKET}/runs/job"), pipeline.attribute(traces))


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
    monkeypatch.undo()
    assert s3.find("bucket/runs/half") == []
    # What a killed one leaves is no run, in nobody's way, and not removed: it may be another's.
    left = "bucket/runs/half/upload-0123456789abcdef/step.parquet"
    s3.pipe(left, b"left")
    remote.check_upload(f"{BUCKET}/runs/half", force=False)
    remote.upload(tmp_path / "run", f"{BUCKET}/runs/half")
    assert len(pipeline.read(f"{BUCKET}/runs/half").ranks) == 2
    assert s3.cat(left) == b"left"


def test_a_file_that_arrives_in_part_is_no_run(
    s3: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("import", str(traces), "-o", str(tmp_path / "run")).code == 0

    def cuts(fs: Any, file: Path, path: str) -> None:
        fs.pipe(path, file.read_bytes()[:-1])

    monkeypatch.setattr(remote, "_put", cuts)
    with pytest.raises(OutputError, match=r"cannot be written \(OSError: .* bytes arrived\)"):
        remote.upload(tmp_path / "run", f"{BUCKET}/runs/cut")
    assert not s3.exists(f"bucket/runs/cut/{MANIFEST}")


_STEPS = """
import sys, chopper
with chopper.profile(trace=False, collect=[]) as prof:
    for _ in range(int(sys.argv[1])): prof.step()
    if len(sys.argv) > 2: prof.measure("loss", float(sys.argv[2]))
"""


def test_a_recording_without_a_step_replaces_no_run_at_an_address(s3: Any, tmp_path: Path) -> None:
    address = f"{BUCKET}/runs/mine"

    def recorded(steps: int, place: Path, *loss: str) -> Outcome:
        place.mkdir()
        command = ("--", sys.executable, "-c", _STEPS, str(steps), *loss)
        return run("record", "-o", address, "--no-trace", "--force", *command, cwd=place)

    assert recorded(3, tmp_path / "a").code == 0
    before = s3.find("bucket/runs/mine")
    outcome = recorded(0, tmp_path / "b")
    assert outcome.code == 1
    assert outcome.lines[-1] == (
        f"chopper: {address}: no step was recorded, so the run that was there stays; the run is in "
        "runs/mine"
    )
    assert s3.find("bucket/runs/mine") == before
    assert recorded(2, tmp_path / "c").code == 0
    forget()
    assert pipeline.read(address).table(0, "step").num_rows == 2
    assert len(s3.find("bucket/runs/mine")) == len(before)
    assert recorded(0, tmp_path / "d", "1.5").code == 1
    address = f"{BUCKET}/runs/measured"
    for loss in ("2.5", "1.5"):  # neither has a step: the later replaces the earlier
        assert recorded(0, tmp_path / loss, loss).code == 0
    forget()
    assert [m.value for m in pipeline.read(address).manifest.ranks[0].measures] == [1.5]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3://", "names no place"),
        ("s3:///", "names no place"),
        (f"{BUCKET}/a*", "has \\*, by which"),
        (f"{BUCKET}/a[0]", "has \\[, by which"),
        (f"{BUCKET}/a?version=1", "has \\?, by which"),
        (f"{BUCKET}/a#1", "has #, by which"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(
    s3: Any, traces: Path, tmp_path: Path, place: str, said: str
) -> None:
    outcome = run("import", str(traces), "-o", place, cwd=tmp_path)
    assert outcome.code in (1, 2)
    assert re.search(said, outcome.err)
    assert (s3.find("bucket"), [*tmp_path.glob("s3*")]) == ([], [])


@pytest.mark.parametrize("is_written", [True, False])
def test_a_server_that_does_not_answer_to_a_manifest_loses_no_run(
    s3: Any,
    server: dict[str, str],
    traces: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_written: bool,
) -> None:
    at = f"{BUCKET}/runs/one"
    assert run("import", str(traces), "-o", at).code == 0

    class Deaf(http.server.BaseHTTPRequestHandler):
        """Passes on what is asked, but answers nothing to the manifest that names a run."""

        protocol_version = "HTTP/1.1"  # of clients that wait for a 100

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            is_manifest = self.command == "PUT" and self.path.endswith(f"/one/{MANIFEST}")
            self.close_connection = True
            if is_manifest and not is_written:
                return
            behind = http.client.HTTPConnection(server["AWS_ENDPOINT_URL"].partition("://")[2])
            behind.request(self.command, self.path, body, dict(self.headers))
            answer = behind.getresponse()
            if not is_manifest:
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.read())

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Deaf) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        with monkeypatch.context() as deaf:
            deaf.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{served.server_address[1]}")
            s3.clear_instance_cache()
            outcome = run("import", str(traces / "rank0.json"), "-o", at, "--force")
        served.shutdown()
    s3.clear_instance_cache()
    assert outcome.code == (0 if is_written else 1)
    forget()
    assert len(pipeline.read(at).ranks) == (1 if is_written else 2)


@pytest.mark.parametrize("words", [(), ("--force",)])
def test_what_is_no_part_of_a_run_is_never_removed(
    s3: Any, traces: Path, words: tuple[str, ...]
) -> None:
    assert run("import", str(traces / "rank0.json"), "-o", BUCKET).code == 0
    s3.pipe("bucket/weights/model.bin", b"precious")
    outcome = run("import", str(traces / "rank0.json"), "-o", BUCKET, *words)
    assert outcome.code == 1
    assert f"{BUCKET}: holds files that are no part of a run (weights)" in outcome.err
    assert s3.cat("bucket/weights/model.bin") == b"precious"


def test_an_upload_removes_only_what_is_of_a_run(s3: Any, traces: Path, tmp_path: Path) -> None:
    assert run("import", str(traces), "-o", str(tmp_path / "run")).code == 0
    s3.pipe("bucket/runs/one/notes.txt", b"mine")  # since it was looked at
    remote.upload(tmp_path / "run", f"{BUCKET}/runs/one")
    before = s3.find("bucket/runs/one")
    remote.upload(tmp_path / "run", f"{BUCKET}/runs/one", force=True)
    assert len(s3.find("bucket/runs/one")) == len(before)
    assert s3.cat("bucket/runs/one/notes.txt") == b"mine"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://127.0.0.1:9/run", "is only read"),
        ("s3://nobucket/run", "cannot be written (NoSuchBucket"),
    ],
)
def test_where_no_run_can_be_written_is_said_before(
    s3: Any, traces: Path, address: str, said: str
) -> None:
    outcome = run("import", str(traces / "rank0.json"), "-o", address)
    assert outcome.code == 1
    assert outcome.line.startswith(f"chopper: {address}: {said}")
    assert not s3.exists("nobucket")


def test_findings_and_manifests_name_addresses(s3: Any, traces: Path, tmp_path: Path) -> None:
    (traces / "rank2.json").write_text("not a trace")
    s3.put(f"{traces}/", "bucket/job/", recursive=True)
    bad = f"{BUCKET}/job/rank2.json"
    assert run("import", bad).line.startswith(f"chopper: {bad}: not JSON")
    made = run("import", f"{BUCKET}/job", "-o", str(tmp_path / "run"))
    assert f"left out: {bad}: not JSON" in made.err
    text = (tmp_path / "run" / MANIFEST).read_text()
    assert json.loads(text)["addresses"] == [f"{BUCKET}/job"]
    page = tmp_path / "report.html"
    assert run("report", f"{BUCKET}/job", "-o", str(page)).code == 0
    for said in (made.err, text, page.read_text()):
        assert str(tmp_path / "cache") not in said


def test_nodes_are_gathered_from_addresses(s3: Any, tmp_path: Path) -> None:
    for number in range(2):
        own = [2 * number, 2 * number + 1]
        folder = node(tmp_path / f"node{number}", own, run_id="1")
        s3.put(f"{folder}/", f"bucket/node{number}/", recursive=True)
    outcome = run("gather", f"{BUCKET}/node0", f"{BUCKET}/node1", "-o", f"{BUCKET}/runs/all")
    assert outcome.code == 0, outcome.err
    assert [p.rank for p in pipeline.read(f"{BUCKET}/runs/all").manifest.ranks] == [0, 1, 2, 3]
    assert run("gather", f"{BUCKET}/none", "x").line.endswith(f"{BUCKET}/none: not found")


def test_what_another_command_copies_stays(s3: Any, traces: Path) -> None:
    s3.put(str(traces / "rank0.json"), "bucket/one.json")
    pipeline.read(f"{BUCKET}/one.json")
    copy = Path(*remote.here([f"{BUCKET}/one.json"]))
    theirs = copy.with_name(".one.json.1-1.part")
    theirs.touch()
    dead = copy.with_name(".one.json.1-2.part")
    dead.touch()
    os.utime(dead, (0, 0))
    forget()
    pipeline.read(f"{BUCKET}/one.json")
    assert theirs.exists()
    assert not dead.exists()


def test_a_copy_that_was_cut_off_is_fetched_again(s3: Any, traces: Path) -> None:
    s3.put(str(traces / "rank0.json"), "bucket/one.json")
    whole = (traces / "rank0.json").read_bytes()
    for path in remote.here([f"{BUCKET}/one.json"]):
        Path(path).write_bytes(whole[:100])
    forget()
    (copy,) = remote.here([f"{BUCKET}/one.json"])
    assert Path(copy).read_bytes() == whole


def test_access_that_is_denied_is_one_line(s3: Any, traces: Path) -> None:
    s3.put(str(traces / "rank0.json"), "bucket/one.json")
    endpoint = os.environ["AWS_ENDPOINT_URL"]

    def requests_without_rights(count: str) -> None:
        request = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth",
            data=count.encode(),
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(request).close()

    requests_without_rights("0")
    try:
        for words in (
            ("analyze", f"{BUCKET}/one.json"),
            ("import", str(traces / "rank0.json"), "-o", f"{BUCKET}/runs/one"),
        ):
            assert re.search(
                rf"^chopper: {BUCKET}/.*: access is denied \(.*\); check the credentials$",
                run(*words).line,
            )
    finally:
        requests_without_rights("inf")


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_server_that_never_answers_is_one_line(
    s3: Any, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server}")
        monkeypatch.setattr(remote, "_READ_S", 0.5)
        monkeypatch.setattr(web_files, "_READ_S", 0.5)
        fsspec.filesystem("s3").clear_instance_cache()
        address = f"http://{server}/one.json" if scheme == "http" else f"{BUCKET}/one.json"
        line = run("analyze", address).line
        fsspec.filesystem("s3").clear_instance_cache()
    assert re.search(rf"^chopper: {address}: cannot be read \(.*[Tt]imeout", line)


def test_a_file_address_is_a_path(traces: Path) -> None:
    assert same(pipeline.attribute(f"file://{traces}"), pipeline.attribute(traces))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://nobucket/trace.json", r"cannot be read \(NoSuchBucket: .*does not exist"),
        ("s3://bucket/none.json", r"not found"),
        ("s3://bucket/none*.json", r"no file is there, or the pattern matches none"),
        ("nope://bucket/a.json", r"nope is no known kind of address; expected s3, gs"),
        ("S3://bucket/none.json", r"not found"),
        ("gs://bucket/a.json", r"pip install 'chopper-profiler\[gs\]'"),
        ("http://127.0.0.1:9/trace.json", r"cannot be read \(ConnectionRefusedError"),
    ],
)
def test_what_cannot_be_read_is_one_line(s3: Any, address: str, said: str) -> None:
    outcome = run("analyze", address)
    assert outcome.code == 1
    (line,) = [one for one in outcome.err.splitlines() if not one.endswith("…")]
    assert line.startswith(f"chopper: {address}")
    assert re.search(said, line)


def test_without_credentials_it_says_so(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3.clear_instance_cache()
    line = run("analyze", f"{BUCKET}/one.json").line
    s3.clear_instance_cache()
    assert "(NoCredentialsError: Unable to locate credentials); check the credentials" in line


def test_ten_thousand_files_are_too_many(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MOST_FILES", 2)
    for i in range(3):
        s3.pipe(f"bucket/job/{i}.json", b"{}")
    with pytest.raises(InputError, match="the pattern matches 3 files, expected at most 2"):
        pipeline.read(f"{BUCKET}/job/*.json")


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
    address = f"{web}/rank0.json?signature=a/b".replace("://", "://me:secret@")
    away = pipeline.attribute(address)
    assert same(away, pipeline.attribute(traces / "rank0.json"))
    assert away.source == f"{web}/rank0.json"


@pytest.mark.parametrize(
    ("path", "said"), [("half.json", "cannot be read"), ("secret.json", "access is denied")]
)
def test_a_partial_download_is_no_truncated_trace(
    web: str, path: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"^{web}/{path}: {said}"):
        pipeline.read(f"{web}/{path}")
    assert not [*(tmp_path / "cache").rglob("*.json"), *(tmp_path / "cache").rglob("*.part")]


class _Slow(_Server):
    """Serves a file a little at a time, never to its end; any disk has room for the length told."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 30))
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.ended.wait(0.02):  # type: ignore[attr-defined]
                self.wfile.write(b" " * (1 << 16))

    do_HEAD = _Server.do_HEAD


def test_an_interrupt_ends_a_download(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as served:
        served.ended = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=served.serve_forever, daemon=True).start()
        started = subprocess.Popen(
            [
                *(sys.executable, "-m", "chopper", "analyze"),
                f"http://127.0.0.1:{served.server_address[1]}/endless.json",
            ],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until(
                lambda: [*tmp_path.rglob("*.part")] or started.poll() is not None,
                "the download begins",
            )
            started.send_signal(signal.SIGINT)
            _, err = started.communicate(timeout=PATIENCE_S)
        finally:
            started.kill()
            served.ended.set()  # type: ignore[attr-defined]
            served.shutdown()
    assert started.returncode == 130, err
    assert err.splitlines()[-1] == "chopper: interrupted"
    assert not [*tmp_path.rglob("*.part")]


def test_without_fsspec_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    forget()
    with pytest.raises(InputError, match=r"pip install 'chopper-profiler\[remote\]'"):
        pipeline.read("s3://bucket/trace.json")


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
    assert pipeline.read(f"{BUCKET}/runs/mine").manifest.ranks[0].steps_count == 12
    again = process(*words, cwd=tmp_path)
    assert again.code == 1
    assert "holds a run already; pass --force" in again.err
