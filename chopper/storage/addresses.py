"""Addresses (``s3://…``, ``https://…``): which names are some, and what may be told of them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_IN_TEXT = re.compile(
    r"([a-z0-9+.-]{0,32})((?::|%(?:25){0,3}3a)(?:/|%(?:25){0,3}2f){2})([^\s'\"<>`]+)", re.IGNORECASE
)
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
"""Addresses that were named in this process, and their secret parts → what is told instead."""


def is_address(name: object) -> bool:
    """Return whether a name is an address rather than a path."""
    return isinstance(name, str) and _ADDRESS.match(name) is not None


def scheme_of(address: str) -> str:
    """Return the kind of an address, in lower case."""
    return address.partition("://")[0].lower()


def remember(address: str) -> str:
    """Keep what must not be told of an address, whatever a library says of it; returns it.

    Its parts are found where they stand alone, too, and percent-encoded.
    """
    if (begin := _IN_TEXT.search(address)) is None:
        return address
    shown = address[: begin.start(3)] + _plain(begin[1], begin[2], address[begin.start(3) :])
    if shown == address:
        return address
    _hidden[address] = shown
    rest = address[begin.start(3) :]
    before, _, query = rest.partition("?")
    query, _, fragment = (query if query else before).partition("#")
    user = before.rpartition("@")[0]
    parts = [user, user.partition(":")[2], fragment]
    values = [query if "?" in rest else "", *(v for _, v in parse_qsl(query))]
    for part, least in [(p, _LEAST_PASSWORD) for p in parts] + [(v, _LEAST_VALUE) for v in values]:
        for form in (part, unquote(part), quote(part, safe=""), quote_plus(part), quote(part)):
            if len(form) >= least and form not in shown:
                _hidden.setdefault(form, "…")
    return address


def without_secrets(text: str) -> str:
    """Return a text, or an address, with addresses that lack user information, query and fragment.

    Everything that is printed or stored of an address goes through here.
    """
    for known in sorted(_hidden, key=len, reverse=True):
        if known in text:
            text = text.replace(known, _hidden[known])
    return _IN_TEXT.sub(lambda found: found[1] + found[2] + _plain(*found.groups()), text)


def json_without_secrets(document: bytes) -> bytes:
    """Return a JSON document whose texts went through :func:`without_secrets`.

    A damaged one is returned as it is: whoever reads it says what is wrong.
    """
    if not re.search(rb"//|%2f|\\/|\\u002f", document, re.IGNORECASE):
        return document
    import msgspec

    from chopper.errors import JSON_ERRORS

    try:
        return msgspec.json.encode(_cleaned(msgspec.json.decode(document)))
    except JSON_ERRORS:
        return document


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {without_secrets(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


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
    if signs and (scheme.lower() not in _CONTAINERS or port):
        text = text[signs[-1].end() :]
    query = _QUERY.search(text)
    return (text if query is None else text[: query.start()]) + after
