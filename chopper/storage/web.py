"""Files at ``http://`` and ``https://`` addresses, with the standard library.

What a server sends is bounded (:class:`chopper.limits.Arrival`). A redirection is followed to the
same host; to another one only where the user allows it, and never to a network that is nearer to
this machine than the one that was named. What a refused one leads to is neither asked nor quoted.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import io
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from chopper.addresses import without_secrets
from chopper.errors import InputError, printable
from chopper.limits import Arrival

ALLOW_REDIRECTS = "CHOPPER_ALLOW_REDIRECTS"
"""In the environment, for the processes that a command starts, too."""
_CONNECT_S, _READ_S = 10.0, 30.0
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_MOST_HEAD_BYTES = 16 << 20
"""Of an answer, beyond its content."""
_PIECE_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
_SAFE = "/%:@!$&'()*+,;=~-._[]?"
_METADATA = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("169.254.0.0/16", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("fd00:ec2::/32", "fd20:ce::254"),
    )
)
"""What machines of clouds ask who they are, and for credentials."""
_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48")))
"""Addresses of IPv4 in the last bits of IPv6, besides those that Python knows."""
_HERE, _LINK, _PRIVATE, _INTERNET = range(4)


def distance_of(address: str) -> int:
    """Return how far a network is: 0 this machine, 1 its link, 2 a private one, 3 the internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if any(ip in network for network in _METADATA):
        return _LINK
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if inner is None and int(ip) > 1 and any(ip in network for network in _EMBEDDING):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return distance_of(str(inner))
    if ip.is_loopback or ip.is_unspecified or (ip.version == 4 and ip.packed[0] == 0):
        return _HERE
    if ip.is_link_local or ip.is_multicast or ip.is_reserved:
        return _LINK
    is_site = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local
    return _INTERNET if ip.is_global and not is_site else _PRIVATE


class _Paced(io.RawIOBase):
    """What a socket receives, counted; also the lines before the content."""

    def __init__(self, raw: Any, arrival: Arrival) -> None:
        self._raw, self._arrival = raw, arrival
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count: int = self._raw.readinto(buffer)
        self._count += count
        self._arrival.at(self._count, 0)
        if self._count > _MOST_HEAD_BYTES + 8 * self._arrival.content_bytes:
            raise OSError("the server sends much that is no content")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Socket:
    """As much of a socket as an answer is read from."""

    def __init__(self, sock: socket.socket, arrival: Arrival) -> None:
        self._sock, self._arrival = sock, arrival

    def makefile(self, *_args: object) -> io.BufferedReader:
        return io.BufferedReader(_Paced(self._sock.makefile("rb", buffering=0), self._arrival))


def _response(
    arrival: Arrival, sock: socket.socket, *args: Any, **more: Any
) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_Socket(sock, arrival), *args, **more)  # type: ignore[arg-type]


class Web:
    """Reads files at addresses, with the functions of a file system of fsspec."""

    protocol: ClassVar[tuple[str, ...]] = ("http", "https")

    def info(self, name: str) -> dict[str, Any]:
        """Return the size and version of a file, as far as the server tells.

        Raises:
            OSError: there is none, or it cannot be read.
        """
        try:
            with self._answer("HEAD", name, Arrival(without_secrets(name))) as response:
                return _info(response)
        except (ConnectionError, TimeoutError):
            raise
        except OSError:  # an address that is signed for GET alone
            with self._answer("GET", name, Arrival(without_secrets(name))) as response:
                return _info(response)

    def get_file(self, name: str, path: str, arrival: Arrival) -> None:
        """Copy a file.

        Raises:
            InputError: it is beyond the limits.
            OSError: it cannot be read, or comes in part.
        """
        with self._answer("GET", name, arrival) as response, Path(path).open("wb") as file:
            length = response.getheader("Content-Length")
            arrival.expect(None if length is None else int(length))
            for piece in _content(response, arrival):
                file.write(piece)

    def cat_file(self, name: str) -> bytes:
        """Return a file."""
        arrival = Arrival(without_secrets(name))
        with self._answer("GET", name, arrival) as response:
            return b"".join(_content(response, arrival))

    @contextlib.contextmanager
    def _answer(
        self, method: str, address: str, arrival: Arrival
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask a server, and those that it redirects to."""
        name, least, hops = without_secrets(address), _HERE, 0
        first = at = _split(address, name)
        while True:
            connection, response = _connection(at, least, hops, arrival, name), None
            try:
                target = (at.path or "/") + (f"?{at.query}" if at.query else "")
                headers = {"Accept-Encoding": "identity", "User-Agent": "chopper"}
                if _is_same(first, at):
                    headers |= _authorization(first)
                connection.request(method, quote(target, safe=_SAFE), headers=headers)
                if not hops:
                    least = distance_of(connection.sock.getpeername()[0])
                response = connection.getresponse()
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
            at = _redirected(name, first, at, location, hops)


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


def _is_same(first: SplitResult, at: SplitResult) -> bool:
    """Return whether an address is of the same server, or of that with encryption."""
    host = first.hostname
    upgraded = (_origin(first), _origin(at)) == (("http", host, 80), ("https", host, 443))
    return _origin(at) == _origin(first) or upgraded


def _authorization(at: SplitResult) -> dict[str, str]:
    if at.username is None:
        return {}
    user = f"{unquote(at.username)}:{unquote(at.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def _redirected(
    name: str, first: SplitResult, at: SplitResult, location: str, hops: int
) -> SplitResult:
    """Return where a server redirects to.

    Raises:
        InputError: it is another host, or less safe.
    """
    try:
        to = _split(urljoin(at.geturl(), location) if location else "", name)
    except (ValueError, InputError):
        raise InputError(f"{name}: redirects to what is no http or https address") from None
    if hops > _MOST_REDIRECTS:
        raise InputError(f"{name}: redirects more than {_MOST_REDIRECTS} times")
    if (at.scheme, to.scheme) == ("https", "http"):
        raise InputError(f"{name}: redirects from https to http, which anybody on the way reads")
    if not _is_same(first, to) and not os.environ.get(ALLOW_REDIRECTS):
        _, host, port = _origin(to)
        raise InputError(
            f"{name}: redirects to another server, {printable(str(host)[:100])}:{port}, which is "
            "not followed; name that one, or put `chopper --allow-redirects` before the command"
        )
    return to


def _connection(
    at: SplitResult, least: int, hops: int, arrival: Arrival, name: str
) -> http.client.HTTPConnection:
    """Return a connection, not open yet; of a redirection only to where it may lead."""

    def connect(address: tuple[str, int], timeout: Any, _source: Any = None) -> socket.socket:
        endpoints = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        for *_, (ip, *_more) in endpoints if hops else ():
            distance = distance_of(str(ip))
            if distance < least or (distance == _LINK != least):
                raise InputError(
                    f"{name}: redirects to {printable(address[0][:100])}, which lies in a network "
                    "nearer to this machine, and is not followed"
                )
        error: OSError | None = None
        for family, kind, protocol, _, endpoint in endpoints:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(timeout)
                sock.connect(endpoint)
                sock.settimeout(_READ_S)
            except OSError as exc:
                error = exc
                sock.close()
            else:
                return sock
        raise error or OSError("the host has no address")

    kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    connection = kind(str(at.hostname), _origin(at)[2], timeout=_CONNECT_S)
    setattr(connection, "_create_connection", connect)  # noqa: B010 - which types do not know
    setattr(connection, "response_class", functools.partial(_response, arrival))  # noqa: B010
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
        arrival.content_bytes += len(piece)
        arrival.at(arrival.sent_bytes, arrival.content_bytes)
        yield piece
    if response.length:
        raise OSError(f"{response.length} bytes of it did not arrive")
