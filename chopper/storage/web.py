"""Files at ``http://`` and ``https://`` addresses, with the standard library.

What a server sends is bounded (:class:`chopper.limits.Arrival`). A redirection is followed to the
same server alone, at the address that it was first found at. What a refused one leads to is neither
asked nor quoted.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from chopper.addresses import without_secrets
from chopper.errors import InputError, printable
from chopper.limits import Arrival, within

if TYPE_CHECKING:
    import http.client
    import socket

_CONNECT_S, _READ_S = 10.0, 30.0
_HEAD_S = 60.0
"""Patience with the lines before the content, of which http.client takes some MB at most."""
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_PIECE_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
_SAFE = "/%:@!$&'()*+,;=~-._[]?"


class Web:
    """Reads files at addresses, with the functions of a file system of fsspec."""

    protocol: ClassVar[tuple[str, ...]] = ("http", "https")

    def info(self, name: str) -> dict[str, Any]:
        """Return the size and version of a file, as far as the server tells.

        Raises:
            OSError: there is none, or it cannot be read.
        """
        try:
            with self._answer("HEAD", name) as response:
                return _info(response)
        except (ConnectionError, TimeoutError):
            raise
        except OSError:  # an address that is signed for GET alone
            with self._answer("GET", name) as response:
                return _info(response)

    def get_file(self, name: str, path: str, arrival: Arrival) -> None:
        """Copy a file.

        Raises:
            InputError: it is beyond the limits.
            OSError: it cannot be read, or comes in part.
        """
        with self._answer("GET", name) as response, Path(path).open("wb") as file:
            length = response.getheader("Content-Length")
            arrival.expect(None if length is None else int(length))
            for piece in _content(response, arrival):
                file.write(piece)

    def cat_file(self, name: str) -> bytes:
        """Return a file."""
        arrival = Arrival(without_secrets(name))
        with self._answer("GET", name) as response:
            return b"".join(_content(response, arrival))

    @contextlib.contextmanager
    def _answer(self, method: str, address: str) -> Iterator[http.client.HTTPResponse]:
        """Ask a server, and those that it redirects to."""
        name, ip, hops = without_secrets(address), None, 0
        first = at = _split(address, name)
        while True:
            connection, response = _connection(at, ip), None
            try:
                target = (at.path or "/") + (f"?{at.query}" if at.query else "")
                headers = {"Accept-Encoding": "identity", "User-Agent": "chopper"}
                headers |= _authorization(first)  # the same server, wherever it redirects to
                connection.request(method, quote(target, safe=_SAFE), headers=headers)
                ip = connection.sock.getpeername()[0]
                response = within(_HEAD_S, connection.getresponse)
                if response.status not in _REDIRECTS:
                    _check_status(response, address)
                    yield response
                    return
                location = response.getheader("Location") or ""
            finally:
                if response is not None:
                    response.close()
                connection.close()
            hops += 1
            at = _redirected(name, at, location, hops)


def _split(address: str, name: str) -> SplitResult:
    """Return the parts of an address.

    Raises:
        InputError: it is none that can be asked.
    """
    with contextlib.suppress(ValueError):
        at = urlsplit(address)
        if at.scheme in _PORTS and at.hostname and (at.port is None or at.port > 0):
            return at
    raise InputError(f"{name}: is no valid http or https address")


def _origin(at: SplitResult) -> tuple[str, str | None, int]:
    return at.scheme, at.hostname, at.port or _PORTS[at.scheme]


def _is_same(at: SplitResult, to: SplitResult) -> bool:
    """Return whether an address is of the same server, or of that with encryption."""
    host = at.hostname
    upgraded = (_origin(at), _origin(to)) == (("http", host, 80), ("https", host, 443))
    return _origin(to) == _origin(at) or upgraded


def _authorization(at: SplitResult) -> dict[str, str]:
    if at.username is None:
        return {}
    user = f"{unquote(at.username)}:{unquote(at.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def _redirected(name: str, at: SplitResult, location: str, hops: int) -> SplitResult:
    """Return where a server redirects to.

    Raises:
        InputError: it is another server, or not encrypted any more.
    """
    try:
        to = _split(urljoin(at.geturl(), location) if location else "", name)
    except (ValueError, InputError):
        raise InputError(f"{name}: redirects to what is no http or https address") from None
    if hops > _MOST_REDIRECTS:
        raise InputError(f"{name}: redirects more than {_MOST_REDIRECTS} times")
    if not _is_same(at, to):
        _, host, port = _origin(to)
        raise InputError(
            f"{name}: redirects to another server, {printable(str(host)[:100])}:{port}, which is "
            "not followed; name that one"
        )
    return to


def _connection(at: SplitResult, ip: str | None) -> http.client.HTTPConnection:
    """Return a connection, not open yet, to this IP address of the server if one is given.

    Its name may lead elsewhere by now, for example into the network of this machine.
    """
    import http.client
    import socket

    def connect(address: tuple[str, int], timeout: float, _source: Any = None) -> socket.socket:
        sock = socket.create_connection((ip or address[0], address[1]), timeout)
        sock.settimeout(_READ_S)
        return sock

    kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    connection = kind(str(at.hostname), _origin(at)[2], timeout=_CONNECT_S)
    setattr(connection, "_create_connection", connect)  # noqa: B010 - which types do not know
    return connection


def _check_status(response: http.client.HTTPResponse, address: str) -> None:
    if response.status in (404, 410):
        raise FileNotFoundError(address)
    if response.status in (401, 403):
        raise PermissionError(f"HTTP status {response.status}")
    if response.status != 200:
        raise OSError(f"HTTP status {response.status}, expected 200")
    length = response.getheader("Content-Length")
    if length is not None and not (length.isascii() and length.isdigit()):
        raise OSError("the server tells a length that is no number")


def _info(response: http.client.HTTPResponse) -> dict[str, Any]:
    """Return what the head of an answer tells of a file."""
    length = response.getheader("Content-Length")
    marks = {"ETag": "ETag", "LastModified": "Last-Modified"}
    versions = {ours: response.getheader(theirs) for ours, theirs in marks.items()}
    return {"type": "file", "size": None if length is None else int(length), **versions}


def _content(response: http.client.HTTPResponse, arrival: Arrival) -> Iterator[bytes]:
    """Yield the content of an answer; what the server packed by gzip is read as a file of that."""
    coding = (response.getheader("Content-Encoding") or "identity").strip().lower()
    if coding not in ("identity", "gzip", "x-gzip"):
        raise OSError("the server packs the file in a way that was not asked for")
    while piece := response.read1(_PIECE_BYTES):
        arrival.at(arrival.sent_bytes + len(piece))
        yield piece
    if response.length:
        raise OSError(f"{response.length} bytes of it did not arrive")
