"""What is told of addresses, and what servers cannot do."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper import addresses, limits, pipeline
from chopper.addresses import message_without_secrets, remember, without_secrets
from chopper.errors import InputError, OutputError, RunFormatError
from chopper.storage import manifest as m
from chopper.storage import remote, web
from chopper.storage.files import json_without_secrets
from chopper.storage.layout import MANIFEST, foreign_files
from tests.command import run
from tests.ingest.test_logs import trace
from tests.storage.hostile_server import serving
from tests.storage.s3_server import BUCKET, forget

SECRET = "Sw0rdfish"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://bucket/run@v2/x: not found", "s3://bucket/run@v2/x: not found"),
        (f"(http://me:{SECRET}@h:8/x?s={SECRET}#{SECRET})", "(http://h:8/x)"),
        (f"next: chopper report 'sftp://me:{SECRET}@h/x'", "next: chopper report 'sftp://h/x'"),
        (f"ftp://me:{SECRET}/{SECRET}@h/x, hdfs://{SECRET}@h/x", "ftp://h/x, hdfs://h/x"),
        (f"s3://k:{SECRET}?{SECRET}@b/x", "s3://b/x"),
        (f"http%3A%2F%2Fme%3A{SECRET}%40h%2Fx%3Fsig%3D{SECRET}", "http%3A%2F%2Fh%2Fx"),
        (f"HTTPS%253a%252f%252fme%253a{SECRET}%2540h%252Fx", "HTTPS%253a%252f%252fh%252Fx"),
        ("abfs://box@account.net/x", "abfs://box@account.net/x"),
        (f"abfs://me:{SECRET}@account.net/x", "abfs://account.net/x"),
        ("hf://datasets/a/b@main/x", "hf://datasets/a/b@main/x"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        (f"--data=s3://k:{SECRET}@b,s3://k:{SECRET}@c/x", "--data=s3://b,s3://c/x"),
        (f"http://h/http://me:{SECRET}@i/x", "http://h/http://i/x"),
        (f"simplecache::s3://k:{SECRET}@b/x", "simplecache::s3://b/x"),
        (f"https:/me:{SECRET}@h/x: not found", "https:/h/x: not found"),
        (f"ftp://me:a'\"<{SECRET}@h/x", "ftp://h/x"),
        (f'{{"a": "ftp:\\/\\/me:{SECRET}@h"}}', '{"a": "ftp:\\/\\/h"}'),
        (f"http://me:{SECRET} (which was cut)", "http://me (which was cut)"),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/x", "s3://arn:aws:s3:us-west-2:1:accesspoint/x"),
        ("etcd://a:1,b:2/x C:/runs/rank?.json", "etcd://a:1,b:2/x C:/runs/rank?.json"),
    ],
)
def test_addresses_are_told_without_secrets(text: str, told: str) -> None:
    assert without_secrets(text) == told


def test_parts_of_an_address_that_was_named_are_not_told_either() -> None:
    forget()
    remember(f"https://me:{SECRET} x@h/f?X-Sig=abc/{SECRET}&t=1#frag {SECRET}")
    said = f"auth of me:{SECRET}%20x failed; abc%2F{SECRET}; frag%20{SECRET}, abc/{SECRET}&t=1"
    assert SECRET not in message_without_secrets(said)
    forget()


def test_a_run_is_whole_though_its_words_are_parts_of_its_address(
    hostile: Any, tmp_path: Path
) -> None:
    address = f"{hostile(user='me:imported@')}?kind=recorded&status=complete&in=trace.json"
    outcome = run("import", address, "-o", tmp_path / "imported")
    assert outcome.out == f"{tmp_path / 'imported'}\n"
    assert m.decode_run((tmp_path / "imported" / MANIFEST).read_bytes(), "").kind == "imported"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    with serving(trace(tmp_path / "rank0.json", 0, 2).read_bytes()) as address:
        yield address
    forget()


def parts_left(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "cache").rglob("*.part")]


def test_secrets_are_nowhere(hostile: Any, tmp_path: Path) -> None:
    address = f"{hostile(user=f'me:{SECRET}@')}?X-Amz-Signature={SECRET}#{SECRET}"
    bad = f"{hostile(user=f'me:{SECRET}@', body='no trace')}?X-Amz-Signature={SECRET}"
    for words in (
        ("analyze", address),
        ("analyze", bad),
        ("import", address, "-o", str(tmp_path / "run")),
        ("report", address, "-o", str(tmp_path / "page.json")),
        ("report", address, "-o", str(tmp_path / "page.html")),
        ("query", address),
        ("export", address, "--to", "csv", "-o", str(tmp_path / "csv")),
        ("compare", address, bad),
        ("analyse", address),
        ("report", "x", "-o", address),
        ("import", str(tmp_path / "rank0.json"), "-o", address),
        ("gather", bad, bad),
    ):
        outcome = run(*words)
        assert "Traceback" not in outcome.err
        assert SECRET not in outcome.out + outcome.err, words
    for file in tmp_path.rglob("*"):
        assert SECRET not in str(file)
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    assert json.loads((tmp_path / "run" / MANIFEST).read_bytes())["addresses"]
    assert {auth for *_, auth in hostile.asked} == {
        f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"
    }
    with pytest.raises(InputError) as caught:
        pipeline.read(f"{hostile(status=500, user=f'me:{SECRET}@')}?{SECRET}")
    shown: BaseException | None = caught.value
    while shown is not None:
        assert SECRET not in str(shown)
        shown = shown.__cause__


@pytest.mark.parametrize("address", ["file://u:p@/x", "file:///x?a", "file:///x#a"])
def test_a_path_has_no_query(address: str, tmp_path: Path) -> None:
    assert "has no user, query or fragment" in run("analyze", address).line
    assert "has no user, query or fragment" in run("import", "x", "-o", address).line


def test_manifests_hold_no_secrets_of_commands(tmp_path: Path) -> None:
    from chopper.storage import manifest as m

    command = ("train.py", f"--data=s3://me:{SECRET}@bucket/x?sig={SECRET}")
    part = m.RankManifest(rank=0, command=command)
    assert SECRET.encode() not in m.encode(part)
    forged = m.encode(m.RankManifest(rank=0)).replace(b"null", f'"ftp://{SECRET}@h"'.encode(), 1)
    assert SECRET not in str(m.decode_rank(forged, "x"))


@pytest.mark.parametrize("coding", ["gzip", None])
def test_what_a_server_packs_is_read_as_a_packed_file(hostile: Any, coding: str | None) -> None:
    assert pipeline.read(hostile(coding=coding)).ranks == [0]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"coding": "gzip", "bomb": 64 << 20}, "more than 200 times"),
        ({"endless": True}, "set by --max-input"),
        ({"endless": True, "untold": True}, "a file whose size the server has not told"),
        ({"endless": True, "size": 9}, "more arrives than the 9 B that the server told"),
        ({"headers": {"Content-Length": "99000000000"}}, "set by --max-input"),
        ({"drip": "body", "endless": True}, "bytes arrived in 0.3 s, expected at least"),
        ({"drip": "head"}, "no answer for 0.3 s"),
        ({"coding": "br"}, "packs the file in a way that was not asked for"),
        ({"headers": {"Content-Length": "-5"}}, "a length that is no number"),
        ({"more": 7}, "did not arrive"),
        ({"status": 500}, "HTTP status 500"),
        ({"status": 302}, "redirects to what is no http"),
    ],
)
def test_a_server_is_bounded(
    hostile: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    if "untold" in how:
        monkeypatch.setattr(limits, "UNTOLD_BYTES", 1 << 20)
    if "drip" in how:
        monkeypatch.setattr(limits, "SLOW_S", 0.3)
        monkeypatch.setattr(web, "_HEAD_S", 0.3)
    if "max-input" in said:
        monkeypatch.setenv(limits.VARIABLE, "5MB")
    assert said in run("analyze", hostile(**how)).line
    assert parts_left(tmp_path) == []


def test_a_download_leaves_half_of_the_disk(
    hostile: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = [100 << 20]
    usage = type(shutil.disk_usage("/"))

    def filling(_path: object) -> Any:
        free[0] -= 20 << 20
        return usage(1 << 30, 0, free[0])

    monkeypatch.setattr(shutil, "disk_usage", filling)
    assert "leave too little of the disk" in run("analyze", hostile(endless=True)).line
    assert parts_left(tmp_path) == []


def test_redirections_stay_on_the_server(hostile: Any, tmp_path: Path) -> None:
    to = hostile()
    assert pipeline.read(hostile(status=302, to=to.partition(hostile.place)[2])).ranks
    with serving(SECRET.encode()) as other:
        elsewhere = hostile(status=307, to=other(), user="me:pw12345@")
        line = run("analyze", elsewhere).line
        assert f"redirects to another server, {other.place}" in line
        assert other.asked == []
    loop = hostile(status=301, to="loop")
    assert "redirects more than 5 times" in run("analyze", loop).line


@pytest.mark.parametrize("to", ["http://169.254.169.254/", "http://h/x", "https://h:444/x", "x://"])
def test_no_redirection_leads_to_another_server(to: str) -> None:
    at = web._split("https://h/x", "x")
    with pytest.raises(InputError, match="redirects to"):
        web._redirected("https://h/x", at, to, 1)


def test_a_redirection_stays_at_the_address_that_was_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def connect(address: Any, *_: Any) -> Any:
        asked.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    for ip in (None, "192.0.2.1"):
        connection = web._connection(web._split("http://h/x", "x"), ip)
        with pytest.raises(TimeoutError):
            connection.connect()
    assert asked == [("h", 80), ("192.0.2.1", 80)]


def test_a_run_comes_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "made"
    assert run("import", str(trace(tmp_path / "rank0.json", 0, 1)), "-o", str(made)).code == 0
    copied = tmp_path / "www" / "run" / f"upload-{'0' * 16}"
    shutil.copytree(made, copied)
    sizes = {
        p.relative_to(copied).as_posix(): p.stat().st_size for p in copied.rglob("*") if p.is_file()
    }
    stored = m.encode_stored(m.Upload(folder=copied.name, files=sizes))
    (copied.parent / MANIFEST).write_bytes(stored)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    forget()
    handler = functools.partial(Quiet, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{served.server_address[1]}"
        counted = run("query", f"{base}/run/", "SELECT count(*) n FROM device_event")
        there = run("query", str(made), "SELECT count(*) n FROM device_event")
        assert (counted.code, counted.out) == (0, there.out)
        assert "web servers list no files; name a file" in run("analyze", f"{base}/").line
        served.shutdown()
    forget()


# ---------------------------------------------------------------- runs at addresses


@pytest.fixture
def made(tmp_path: Path) -> Path:
    trace(tmp_path / "rank0.json", 0, 1)
    assert run("import", str(tmp_path / "rank0.json"), "-o", str(tmp_path / "run")).code == 0
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["tables/x.parquet", "rank-00000/trace.json", "attempt-1/notes", "weights/a", MANIFEST]
)
@pytest.mark.parametrize("words", [(), ("--force",)])
def test_where_no_run_is_nothing_is_removed(
    s3: Any, made: Path, name: str, words: tuple[str, ...]
) -> None:
    s3.pipe(f"bucket/p/{name}", b"precious")
    outcome = run("import", str(made.parent / "rank0.json"), "-o", f"{BUCKET}/p", *words)
    assert "holds files that are no part of a run" in outcome.line
    assert s3.find("bucket/p") == [f"bucket/p/{name}"]
    assert s3.cat(f"bucket/p/{name}") == b"precious"


def test_a_run_that_another_program_copied_is_read_and_not_replaced(s3: Any, made: Path) -> None:
    s3.put(f"{made}/", "bucket/old/", recursive=True)
    assert pipeline.read(f"{BUCKET}/old").ranks == [0]
    words = ("import", str(made.parent / "rank0.json"), "-o", f"{BUCKET}/old")
    names = s3.find("bucket/old")
    for options in ((), ("--force",)):
        assert "holds a run that another program copied there" in run(*words, *options).line
    assert s3.find("bucket/old") == names


def test_of_two_uploads_at_once_one_whole_run_results(s3: Any, tmp_path: Path) -> None:
    runs = []
    for number, ranks in enumerate((1, 3)):
        folder = tmp_path / f"traces{number}"
        folder.mkdir()
        for rank in range(ranks):
            trace(folder / f"rank{rank}.json", rank, ranks)
        runs.append(tmp_path / f"run{number}")
        assert run("import", str(folder), "-o", str(runs[-1])).code == 0
    for turn in range(6):
        place = f"{BUCKET}/both{turn}"
        ended: list[str] = []

        def upload(folder: Path, place: str = place, ended: list[str] = ended) -> None:
            try:
                remote.upload(folder, place, force=bool(turn % 2))  # noqa: B023
                ended.append("done")
            except chopper.ChopperError as exc:
                ended.append(str(exc))

        threads = [threading.Thread(target=upload, args=(folder,)) for folder in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "done" in ended
        forget()
        assert len(pipeline.read(place).ranks) in (1, 3)
        (copy,) = remote.here([place])
        assert any(same_files(Path(copy), folder) for folder in runs)


@pytest.mark.parametrize("force", [True, False])
def test_an_upload_that_another_replaces_meanwhile_says_so(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    runs = []
    for number in range(2):
        file = trace(tmp_path / f"{number}.json", 0, 1)
        runs.append(tmp_path / f"run{number}")
        assert run("import", str(file), "-o", str(runs[-1])).code == 0
    place = f"{BUCKET}/meanwhile{force}"
    switch = remote._switch

    def switch_twice(*of_first: Any) -> None:
        monkeypatch.setattr(remote, "_switch", switch)
        switch(*of_first)
        remote.upload(runs[1], place, force=True)

    monkeypatch.setattr(remote, "_switch", switch_twice)
    with pytest.raises(OutputError, match=f"{place}: another command wrote a run there"):
        remote.upload(runs[0], place, force=force)
    forget()
    (copy,) = remote.here([place])
    assert same_files(Path(copy), runs[1])
    assert len({name.split("/")[2] for name in s3.find(place.removeprefix("s3://"))}) == 2


def same_files(a: Path, b: Path) -> bool:
    """Whether two folders hold the same."""
    one, other = (
        {p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in (a, b)
    )
    return one == other


def test_a_manifest_leads_to_no_other_place(s3: Any, made: Path) -> None:
    s3.pipe("bucket/p/other/x", b"mine")
    for upload in (
        {"folder": "../other", "files": {"x": 4}},
        {"folder": f"upload-{'0' * 16}", "files": {"../other/x": 4}},
        {"folder": f"upload-{'0' * 16}\n", "files": {"x": 4}},
    ):
        s3.pipe(
            f"bucket/q/{MANIFEST}", json.dumps({"schema_version": 2, "upload": upload}).encode()
        )
        words = ("import", str(made.parent / "rank0.json"), "-o", f"{BUCKET}/q", "--force")
        assert "holds files that are no part of a run" in run(*words).line
        assert run("analyze", f"{BUCKET}/q").code == 1
    assert s3.cat("bucket/p/other/x") == b"mine"


@pytest.mark.parametrize("name", ["rank-00000/notes.txt", "rank-00000/deep/x", "process-2/x.csv"])
def test_on_disk_the_same_files_stay(made: Path, name: str) -> None:
    (made / name).parent.mkdir(exist_ok=True)
    (made / name).write_text("mine")
    outcome = run("import", str(made.parent / "rank0.json"), "-o", str(made), "--force")
    assert f"files that chopper did not write ({name})" in outcome.line
    assert (made / name).read_text() == "mine"


def test_which_files_are_of_a_run() -> None:
    own = ["manifest.json", "rank-00000/trace.json.gz", "attempt-0/rank-00001/step.arrow"]
    assert foreign_files(own) == []
    others = ["rank-٠٠٠٠٠/step.arrow", "rank-00000/step.arrow\n", "tables/x", "rank-1/step.arrow"]
    assert foreign_files([*own, *others]) == sorted(others)
    assert foreign_files(["rank-00000/trace-a.csv"], {"rank-00000/trace-a.csv"}) == []


@pytest.mark.parametrize("odd", [b'"\xff"', b"1e999", b"[" * 9_000 + b"]" * 9_000])
@pytest.mark.parametrize("decode", [m.decode_run, m.decode_rank, m.decode_stored])
def test_a_damaged_manifest_with_an_address_is_one_error(decode: Any, odd: bytes) -> None:
    with pytest.raises(RunFormatError, match=r"^run/manifest\.json: (damaged|not a chopper)"):
        decode(b'{"schema_version": 1, "a": "s3://x", "b": ' + odd + b"}", "run/manifest.json")


@pytest.mark.parametrize("address", ["memory://b/..", "memory://b/../c/."])
@pytest.mark.parametrize("command", [["import", "trace.json"], ["record"]])
def test_a_run_is_not_written_to_an_address_that_leads_upwards(
    command: list[str], address: str, tmp_path: Path
) -> None:
    outcome = run(*command, "-o", address, "--", "false", cwd=tmp_path)
    assert outcome.code == 2
    assert "leads upwards; name the place itself" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_chained_addresses_are_refused() -> None:
    for address in ("zip://x::http://h/x", "simplecache::s3://b/x"):
        assert "is several addresses in one" in run("analyze", address).line


def test_addresses_are_found_in_linear_time() -> None:
    for text in ("a" * 200_000, "://" * 60_000, "%" * 200_000, "http://" + "@" * 200_000):
        without_secrets(text)
    assert addresses.is_address("s3://x")


def test_a_slash_that_json_escapes_hides_no_secret() -> None:
    shown = json_without_secrets(rb'{"a": "http:\/\/user:secret@host\/x?token=hidden"}')
    assert json.loads(shown) == {"a": "http://host/x"}
