"""What setuptools cannot read from pyproject.toml: optional extensions in C, and the commit.

Where the extensions cannot be compiled, traces are read, devices sampled and host spans nested in
Python: the same results, many times slower. One build serves CPython 3.11 and newer (its stable
ABI); a free-threaded CPython has no stable ABI, so it gets a build of its own. With
``CHOPPER_EXTENSIONS=0`` none is built, and the wheel is for every platform.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_ROOT = Path(__file__).resolve().parent
_COMMIT = Path("chopper", "data", "commit.txt")
_EXTENSIONS = os.environ.get("CHOPPER_EXTENSIONS") != "0"
_STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")


def _write_commit(directory: Path) -> None:
    """Write which commit is built into a tree, unless it came with one (an sdist's)."""
    if not (_ROOT / ".git").exists() or not (directory / _COMMIT.parent).is_dir():
        return
    try:
        # A container that builds wheels mounts the clone of another user.
        git = ["git", "-c", "safe.directory=*", "-C", str(_ROOT)]
        command = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    (directory / _COMMIT).write_text(commit, encoding="utf-8")


class _BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            _write_commit(Path(self.build_lib))


class _Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _write_commit(Path(base_dir))


setup(
    cmdclass={"build_py": _BuildPy, "sdist": _Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp311"} if _EXTENSIONS and _STABLE_ABI else {}},
    ext_modules=[
        Extension(
            name,
            sources=[source],
            depends=headers,
            define_macros=[("Py_LIMITED_API", "0x030b0000")] if _STABLE_ABI else [],
            py_limited_api=_STABLE_ABI,
            extra_compile_args=["-std=c11", "-O2"],
            optional=True,
        )
        for name, source, headers in (
            ("chopper.analyzers.trace._forest", "analyzers/trace/_forest.c", []),
            ("chopper.analyzers.replay._longest", "analyzers/replay/_longest.c", []),
            (
                "chopper.collectors.formats.kineto._scan",
                "collectors/formats/kineto/_scan.c",
                ["collectors/formats/kineto/_scan_json.h"],
            ),
        )
        if _EXTENSIONS
    ],
)
