"""Names of kernels as different tools write them, made comparable."""

from __future__ import annotations

import re


def base_name(kernel: str) -> str:
    """A kernel's function without what tools write differently around it.

    Return type, template and function arguments, and the suffixes that AMD's tools add are left
    out: ``void at::f<int>(int*) [clone .kd]`` is ``at::f``.
    """
    name = plain(kernel).replace("(anonymousnamespace)", "{anonymous}")
    kept: list[str] = []
    depth = 0
    for char in name:
        depth += char in "<("
        if not depth:
            kept.append(char)
        depth = max(depth - (char in ">)"), 0)
    return "".join(kept) or name


_SUFFIX = re.compile(r"\s*(?:\(\.kd\)|\[clone [^\]]*\]|\.kd)\s*$")
_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|bool|long|char|short)\)(?=-?\w)")


def plain(kernel: str) -> str:
    """A name without blanks, casts of template arguments, return type and AMD's suffixes."""
    name = kernel
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter
    name = _CAST.sub("", name.removeprefix("void "))
    return re.sub(r"\s+", "", name)
