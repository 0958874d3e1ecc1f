"""The one part that setuptools cannot read from pyproject.toml: a scanner in C, optional.

Where it cannot be compiled, traces are read in Python: the same tables, several times slower.
"""

from __future__ import annotations

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "chopper.collectors.kineto._scan",
            sources=["collectors/kineto/_scan.c"],
            extra_compile_args=["-std=c11", "-O2"],
            optional=True,
        )
    ]
)
