"""The part that setuptools cannot read from pyproject.toml: extensions in C, optional.

Where they cannot be compiled, traces are read and devices sampled in Python and host spans are
nested in Python: the same results, many times slower.
"""

from __future__ import annotations

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            name,
            sources=[source],
            depends=headers,
            extra_compile_args=["-std=c11", "-O2", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name, source, headers in (
            ("chopper.analyzers.trace._forest", "analyzers/trace/_forest.c", []),
            ("chopper.analyzers.replay._longest", "analyzers/replay/_longest.c", []),
            ("chopper.collectors._fast", "collectors/_fast.c", ["collectors/_fast_read.h"]),
            (
                "chopper.collectors.formats.kineto._scan",
                "collectors/formats/kineto/_scan.c",
                ["collectors/formats/kineto/_scan_json.h"],
            ),
        )
    ]
)
