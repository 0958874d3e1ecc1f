"""An HTTP server on the loopback that does what its addresses say, mostly what none should."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.server
import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar


class Hostile(http.server.BaseHTTPRequestHandler):
    """Does what the address says: its path is ``/BASE64(JSON)/name``."""

    trace: ClassVar[bytes] = b""
    ended: ClassVar[threading.Event]
    asked: ClassVar[list[tuple[str, str, str | None]]]

    def do_GET(self) -> None:
        self.asked.append((self.command, self.path, self.headers["Authorization"]))
        asked = self.path.split("/")[1]
        how: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            how = json.loads(base64.urlsafe_b64decode(asked))
        body = self.trace if how.get("body") is None else how["body"].encode()
        if "file" in how:
            body = Path(how["file"]).read_bytes()
        coding = how.get("coding")
        if coding == "gzip":
            body = gzip.compress(body)
        elif coding == "deflate":
            body = zlib.compress(body)
        if bomb := how.get("bomb"):
            body = gzip.compress(bytes(bomb))
        with contextlib.suppress(OSError):
            self._send(how, body, coding)

    do_HEAD = do_GET

    def _send(self, how: dict[str, Any], body: bytes, coding: str | None) -> None:
        self.send_response(how.get("status", 200))
        if coding is not None:
            self.send_header("Content-Encoding", coding)
        if "to" in how:
            self.send_header("Location", how["to"])
        for name, value in how.get("headers", {}).items():
            self.send_header(name, value)
        endless = how.get("endless")
        if self.command == "HEAD" and "size" in how:
            self.send_header("Content-Length", str(how["size"]))
        if not endless and "Content-Length" not in how.get("headers", {}):
            self.send_header("Content-Length", str(len(body) + how.get("more", 0)))
        if how.get("drip") == "head":
            while not self.ended.wait(0.05):
                self.wfile.write(b"X")
        self.end_headers()
        if self.command == "HEAD":
            return
        if how.get("drip"):
            while not self.ended.wait(0.05):
                self.wfile.write(b" ")
        while endless and not self.ended.is_set():
            self.wfile.write(b" " * (1 << 16))
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(body: bytes) -> Iterator[Any]:
    """A function that returns addresses of what a server on the loopback does."""

    class Handler(Hostile):
        trace = body
        ended = threading.Event()
        asked: ClassVar[list[tuple[str, str, str | None]]] = []

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_args: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as served:
        served.daemon_threads = True
        threading.Thread(target=served.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{served.server_address[1]}"

        def address(name: str = "rank0.json", user: str = "", host: str = place, **how: Any) -> str:
            packed = base64.urlsafe_b64encode(json.dumps(how).encode()).decode()
            return f"http://{user}{host}/{packed}/{name}"

        address.asked = Handler.asked  # type: ignore[attr-defined]
        address.place = place  # type: ignore[attr-defined]
        yield address
        Handler.ended.set()
        served.shutdown()
