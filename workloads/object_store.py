"""Storage at a distance: a process that answers reads of files over the loopback, at its own rate.

Each answer takes as long as its request says that the source is away, and all together come no
faster than the storage's rate, a token bucket of one request. Readers wait at a socket, as they do
for object storage; how many requests they have under way, and no core, decides what they get.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from chopper.fresh_python import own_python

_BACKLOG = 4096
_AT_ONCE = struct.pack("ii", 1, 0)
"""To close without the minute that a port is kept for."""


@contextlib.contextmanager
def object_store(folder: Path, requests_per_s: int) -> Iterator[int]:
    """Serve the files of a folder on a port of the loopback; 0 requests per second: no limit."""
    words = own_python(__name__, str(folder), str(requests_per_s))
    # It ends when its standard input does: with the block, or with this process.
    with subprocess.Popen(
        words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.communicate()


def fetch(port: int, path: Path, offset: int, size: int, delay_s: float) -> bytes:
    """Read a part of a file from the storage; an empty part is a request all the same."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        line.sendall(json.dumps([str(path), offset, size, delay_s]).encode() + b"\n")
        with line.makefile("rb") as answer:
            return answer.read()


async def _serve(folder: Path, requests_per_s: int) -> None:
    loop = asyncio.get_running_loop()
    interval_s, turn_s = 1 / requests_per_s if requests_per_s else 0.0, 0.0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turn_s
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            path, offset, size, delay_s = json.loads(await reader.readline())
            began_s = loop.time()
            turn_s = max(turn_s + interval_s, began_s)
            await asyncio.sleep(max(turn_s, began_s + delay_s) - began_s)
            if size and (file := Path(path).resolve()).is_relative_to(folder):
                with file.open("rb", buffering=0) as stored:
                    writer.write(os.pread(stored.fileno(), size, offset))
                await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=_BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Path(sys.argv[1]).resolve(), int(sys.argv[2])))
