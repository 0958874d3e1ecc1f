"""Names of kernels as different tools write them, made comparable."""

from __future__ import annotations

import re


def base_name(kernel: str) -> str:
    """A kernel's function without what tools write differently around it.

    Return type, template and function arguments, and the suffixes that AMD's tools add are left
    out: ``void at::f<int>(int*) [clone .kd]`` is ``at::f``.
    """
    name = plain(kernel).replace("(anonymousnamespace)", "{anonymous}")
    parts: list[str] = []
    depth = 0
    for char in name:
        depth += char in "<("
        if not depth:
            parts.append(char)
        depth = max(depth - (char in ">)"), 0)
    return "".join(parts) or name


def without_suffixes(kernel: str) -> str:
    """Strip what AMD's tools and compilers add: ``f.kd``, ``f (.kd)``, ``f [clone .kd]``."""
    end = start = len(kernel)
    while True:
        while end and kernel[end - 1].isspace():
            end -= 1
        if kernel.endswith((".kd", "(.kd)"), 0, end):
            end = kernel.rfind("(" if kernel[end - 1] == ")" else ".", 0, end)
        elif kernel.endswith("]", 0, end):
            begin = kernel.rfind("[", 0, end)
            if not kernel.startswith("[clone ", begin) or "]" in kernel[begin : end - 1]:
                return kernel[:start]
            end = begin
        else:
            return kernel[:start]
        start = end = len(kernel[:end].rstrip())


_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|bool|long|char|short)\)(?=-?\w)")


def plain(kernel: str) -> str:
    """A name without blanks, casts of template arguments, return type and AMD's suffixes."""
    name = _CAST.sub("", without_suffixes(kernel).removeprefix("void "))
    return re.sub(r"\s+", "", name)
