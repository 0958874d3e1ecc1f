"""Run one of chopper's own modules in a new Python that imports nothing from where it stands.

    python -P chopper/fresh_python.py MODULE [arguments]

``python -m`` and ``python -c`` put the current directory first on ``sys.path``: a ``torch.py``
there would be executed. This file is run by its path, and finds chopper beside itself, also in a
clone that is not installed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
"""Directory that chopper is imported from."""
_PR_SET_PDEATHSIG = 1


def own_python(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of chopper as ``python -m`` would, without ``-m``'s path."""
    return [sys.executable, "-P", os.path.abspath(__file__), module, *arguments]  # noqa: PTH100


@contextlib.contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, which processes inherit, for the length of the block."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an exception, so that it cleans up.

    Not where they are ignored (``nohup``), or somebody handles them.
    """

    def leave(number: int, frame: object) -> None:  # noqa: ARG001
        raise SystemExit(128 + number)

    known = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))  # Windows has one
    taken = [n for n in known if n is not None and signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def open_standard_streams() -> None:
    """Give a process whose stdin, stdout or stderr is closed (``2>&-``) the null device for it.

    Otherwise the next file that is opened takes the descriptor, and what is printed goes there. The
    descriptors are not inherited: what this process starts finds them closed, as without chopper.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            if opened != descriptor:
                os.dup2(opened, descriptor, inheritable=False)
                os.close(opened)
        if getattr(sys, name) is None:
            stream = open(  # noqa: SIM115 - lives as long as the process
                descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its ``parent`` dies (Linux only).

    Raises:
        SystemExit: it has died already.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        sys.exit(128 + number)


class _WithoutPandas:
    """An import hook for which pandas cannot be imported, but looked up, as torch's compiler does.

    None in its place in ``sys.modules`` is what pyarrow takes for the module.
    """

    def find_spec(self, name: str, *_more: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "pandas" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        raise ModuleNotFoundError("pandas is left out of this process", name=spec.name)

    def exec_module(self, module: object) -> None:
        """Never called."""


def leave_out_pandas() -> None:
    """Let this process find no pandas, unless it has loaded it: commands and workers need none.

    Wherever it is installed, pyarrow imports it (0.3 s and more) for the first array that it makes,
    only to ask whether what it is made of is a Series.
    """
    if "pandas" not in sys.modules and not any(
        isinstance(f, _WithoutPandas) for f in sys.meta_path
    ):
        sys.meta_path.insert(0, _WithoutPandas())


def keep_current_directory_last() -> None:
    """Prefer installed packages to files of the same name in the current directory.

    For ``python -m chopper``, which Python starts with the current directory first. It stays on the
    path, at its end, so that a clone works that is not installed.
    """
    with contextlib.suppress(OSError):
        if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():  # noqa: PTH109
            sys.path.append(sys.path.pop(0))


def _main() -> None:
    import runpy

    open_standard_streams()
    del sys.argv[0]
    sys.path.append(PACKAGE_PARENT)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
