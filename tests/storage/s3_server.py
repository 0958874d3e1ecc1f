"""An S3 server on the loopback (moto's), for the tests of what is read and written at addresses."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chopper import addresses
from chopper.storage import remote
from tests.waiting import until

BUCKET = "s3://bucket"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3 server on the loopback (moto's), and the variables with which it is found."""
    pytest.importorskip("s3fs")
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
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
    fsspec = pytest.importorskip("fsspec")
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
    remote._listing.cache_clear()
    remote._address_by_folder.clear()
    remote._shown_by_key.clear()
    addresses._hidden.clear()
    addresses._parts.clear()
