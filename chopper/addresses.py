"""Addresses (``s3://…``, ``https://…``): which names are some, and what may be told of them."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, quote_plus, unquote

_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_ONE_SLASH, _ONE_COLON = r"(?:\\?/|%(?:25){0,3}2f)", r"(?::|%(?:25){0,3}3a)"
_IN_TEXT = re.compile(
    rf"([a-z0-9+.-]{{0,32}})"
    # One slash where the address was taken for a path; C:/ is a disk.
    rf"({_ONE_COLON}(?:{_ONE_SLASH}{{2}}|(?<=[a-z0-9+.-]{{2}}:){_ONE_SLASH}))"
    r"((?:[^\s/]{0,80}@)?[^\s'\"<>`]+)",
    re.IGNORECASE,
)
_MOST_NESTED = 16
_AT = re.compile(r"@|%(?:25){0,3}40")
_COLON = re.compile(r":|%(?:25){0,3}3a", re.IGNORECASE)
_SLASH = {
    False: re.compile(r"[/\\]"),
    True: re.compile(r"[/\\]|%(?:25){0,3}2f", re.IGNORECASE),
}
"""End of the host's part, by whether the address is encoded as a whole."""
_QUERY = re.compile(r"[?#]|%(?:25){0,3}(?:3f|23)", re.IGNORECASE)
_AFTER = ":;,.)]}…"
"""What may follow an address in a sentence."""
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
"""Their addresses are ``abfs://CONTAINER@ACCOUNT/…``: a name before the host is no secret."""
_LEAST_PASSWORD, _LEAST_VALUE = 4, 8
"""Characters: shorter words occur in what libraries say for other reasons."""

_hidden: dict[str, str] = {}
"""Addresses that were named in this process → what is told instead."""
_parts: set[str] = set()
"""Secret parts of these addresses."""


def is_address(name: object) -> bool:
    """Return whether a name is an address rather than a path."""
    return isinstance(name, str) and _ADDRESS.match(name) is not None


def scheme_of(address: str) -> str:
    """Return the kind of an address, in lower case."""
    return address.partition("://")[0].lower()


def remember(address: str) -> str:
    """Keep what must not be told of an address, whatever a library says of it; returns it."""
    if (begin := _IN_TEXT.search(address)) is None:
        return address
    rest = address[begin.start(3) :]
    masked = address[: begin.start(3)] + _mask(_plain(begin[1], begin[2], rest))
    if masked == address:
        return address
    _hidden[address] = masked
    before, _, query = rest.partition("?")
    query, _, fragment = (query if query else before).partition("#")
    user = before.rpartition("@")[0]
    parts = [user, user.partition(":")[2], fragment]
    values = [query if "?" in rest else "", *(v for _, v in parse_qsl(query))]
    for part, least in [(p, _LEAST_PASSWORD) for p in parts] + [(v, _LEAST_VALUE) for v in values]:
        for form in (part, unquote(part), quote(part, safe=""), quote_plus(part), quote(part)):
            if len(form) >= least and form not in masked:
                _parts.add(form)
    return address


def without_secrets(text: str) -> str:
    """Return a text, or an address, with addresses that lack user information, query and fragment.

    Everything that is printed or stored of an address goes through here.
    """
    for known in sorted(_hidden, key=len, reverse=True):
        text = text.replace(known, _hidden[known])
    return _mask(text)


def message_without_secrets(text: str) -> str:
    """Return a message, of whatever library, in which no part of a named address stands alone.

    Percent-encoded neither. Only messages: any word may be somebody's password.
    """
    text = without_secrets(text)
    for part in sorted(_parts, key=len, reverse=True):
        text = text.replace(part, "…")
    return text


def _mask(text: str, nested: int = _MOST_NESTED) -> str:
    """Return a text whose addresses are plain, those within others, too (``http://a,http://b``)."""
    return _IN_TEXT.sub(
        lambda match: (
            f"{match[1]}{match[2]}"
            + (_mask(_plain(*match.groups()), nested - 1) if nested else "…")
        ),
        text,
    )


def _plain(scheme: str, separator: str, rest: str) -> str:
    """Return what may be told of what follows ``://``."""
    text = rest.rstrip(_AFTER)
    after = rest[len(text) :]
    slash = _SLASH["%" in separator].search(text)
    host_end = min((m.start() for m in (slash, _QUERY.search(text)) if m), default=len(text))
    signs = [*_AT.finditer(text, 0, host_end)]
    name, *port = _COLON.split(text[:host_end], 1)
    if not signs and port and not name.startswith("[") and not port[0].isdecimal():
        signs = [*_AT.finditer(text)]  # of a password with a slash in it
        if not signs and name != "arn" and not port[0].partition(",")[0].isdecimal():
            text = name + text[host_end:]  # of an address that was cut
    if signs and (scheme.lower() not in _CONTAINERS or port):
        text = text[signs[-1].end() :]
    query = _QUERY.search(text)
    return (text if query is None else text[: query.start()]) + after
