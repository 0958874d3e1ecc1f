"""Ray for the length of a run: started here and ended with it, or joined and left."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper.errors import ChopperError, tell
from chopper.fresh_python import PACKAGE_PARENT, environment
from chopper.limits import within
from chopper.quantities import digits
from chopper.storage.files import is_users

if TYPE_CHECKING:
    import psutil

PREFIX = "chopper-ray-"
_SOCKET = "/sockets/plasma_store"
"""The longest name of a socket below a session's directory (ray 2.60)."""
_SOCKET_PATH_BYTES = 107
_KILLED_S = 5.0
"""Patience with the kernel for ending what is killed."""
ANSWER_S = 8
"""Patience with a named cluster for its answer."""
CONNECT_S = 20.0
"""Patience with one that answers, until it is joined: Ray ends this process after 30 s."""
_DIAL_S = 5
_LEAVE_S = 5.0
_SETTINGS, _FRAME_BYTES = 4, 9
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""What a client of gRPC begins with: HTTP/2's preface, and a frame of no settings (RFC 9113, 3.4
and 6.5); a server answers with its own settings."""


class LoaderError(ChopperError):
    """The actors could not be started, or did not come back; one line."""


@contextlib.contextmanager
def cluster(
    address: str | None = None,
    namespace: str = "",
    token: str | None = None,
    *,
    cpus: int = 64,
    store_bytes: int = 100 << 20,
) -> Iterator[str]:
    """Start Ray, or join a cluster, for the length of the block; yields its address.

    Nothing outlives it: the processes end with the one that started them, also when that is
    killed; the directory is removed here, or by the next one that starts. Without ``token``, one is
    made, so that nobody else of this machine's users can give it work.
    """
    if address is None and token is None:
        token = new_token()
    if address is not None:
        _within(ANSWER_S + _DIAL_S, address, lambda: answers(address))
    ray = load_ray(token, address)
    options: dict[str, Any] = {
        "namespace": namespace or f"chopper-{os.getpid()}",
        "log_to_driver": False,
        "logging_level": "FATAL",
    }
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    # An interrupt is followed by SIGTERM from what started this, in the middle of all this.
    _handle(signal.SIGTERM, _leave)
    directory, joined = None, False
    if address is None:
        if ended := clear_leftovers():
            tell(f"ended {len(ended)} Ray processes of an earlier run")
        directory = _new_directory()
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        options |= {"object_store_memory": store_bytes, "_temp_dir": str(directory)}
    else:
        options["address"] = address
    try:
        _start(ray, directory, options)
        joined = directory is None
        # Ray's own handler prints a stack, and leaves its directory behind.
        _handle(signal.SIGTERM, _leave)
        yield ray.get_runtime_context().gcs_address
    except BaseException:
        _go_on_whatever_comes()
        clear_leftovers()  # of the rank that started Ray, where that was killed
        raise
    finally:
        _go_on_whatever_comes()
        try:
            if joined:
                _within(_LEAVE_S, str(address), ray.shutdown)
            elif directory is not None:
                ray.shutdown()
        except LoaderError:
            pass  # it notices by itself that this process has gone
        finally:
            if directory is not None:
                _end_all_of(directory)
            for number, handler in handlers.items():
                _handle(number, handler)


def _handle(number: int, handler: Any) -> None:
    """Set what a signal does, where this thread may."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def _start(ray: Any, directory: Path | None, options: dict[str, Any]) -> None:
    # Ray puts the current directory first on its workers' sys.path (ray 2.60): a torch.py there
    # would be executed. Chopper is what they need.
    with _quiet_environment(directory), contextlib.chdir(PACKAGE_PARENT):
        _without_lines_of_raylets()
        try:
            if directory is None:
                _within(CONNECT_S, options["address"], lambda: ray.init(**options))
            else:
                ray.init(**options)
        except LoaderError:
            raise
        except Exception as exc:  # Ray raises whatever its parts do
            said = " ".join(str(exc).split()) or type(exc).__name__
            raise LoaderError(f"Ray did not start ({said})") from exc


def _within(limit_s: float, address: str, work: Callable[[], object]) -> None:
    """Do what waits for a cluster.

    Raises:
        LoaderError: it takes longer.
    """
    try:
        within(limit_s, work)
    except BaseException as exc:
        if (ray := sys.modules.get("ray")) is not None:
            atexit.unregister(ray.shutdown)  # which would wait for it when this process ends
        if not isinstance(exc, TimeoutError):
            raise
        raise LoaderError(
            f"{address}: Ray did not connect to it within {limit_s:.0f} s; `ray status --address "
            f"{address}`, on a node of the cluster, shows whether that works"
        ) from None


def _without_lines_of_raylets() -> None:
    """Keep Ray from printing what its services report of each worker that dies (ray 2.60)."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_args, **_named: None


def _go_on_whatever_comes() -> None:
    """Whoever is told to end is ending already; an interrupt comes more than once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        _handle(number, signal.SIG_IGN)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def new_token() -> str:
    """Return one for a cluster that is started here: Ray keeps the first that a process used."""
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


def load_ray(token: str | None = None, address: str | None = None) -> Any:
    """Import Ray, and tell it the cluster's token before it looks for one.

    A cluster that is started here (no ``address``) listens on the loopback only, unless the ranks
    are on several hosts.
    """
    if importlib.util.find_spec("ray") is None:
        raise LoaderError(
            "this needs Ray, which is not installed: pip install 'chopper-profiler[ray]'"
        )
    if token is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ["RAY_AUTH_TOKEN"] = token
    one_host = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    if one_host and (address is None or address.startswith("127.")):
        # Ray's services listen on all interfaces, and a cluster at 127.0.0.1 is given the host's
        # address, unless clusters are off, as they are outside Linux (read when it is imported).
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    hidden = _amdsmi_is_broken()
    if hidden:
        sys.modules["amdsmi"] = None  # type: ignore[assignment]
    try:
        import ray
    except ImportError as exc:
        raise LoaderError(
            f"this needs Ray, which is installed and cannot be imported ({exc}): install it again"
        ) from exc
    finally:
        if hidden:
            del sys.modules["amdsmi"]
    return ray


def answers(address: str) -> None:
    """Require that a Ray cluster answers there, or at least a server of its protocol.

    Ray itself would try for a minute, and warn.

    Raises:
        LoaderError: no cluster is there.
    """
    if "://" in address:
        raise LoaderError(
            f"{address}: Ray's client and its dashboard are not supported; on a node of the "
            "cluster give HOST:PORT, as `ray start --head` prints it; from elsewhere `ray job "
            "submit --address http://HOST:8265 -- chopper analyze RUN --ray`"
        )
    host, _, port = address.rpartition(":")
    if digits(port) is None:
        raise _no_cluster(address, "it names no port")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _DIAL_S) as asked:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            asked.settimeout(ANSWER_S)
            asked.sendall(_GREETING)
            frame = asked.recv(_FRAME_BYTES, socket.MSG_WAITALL)
    except TimeoutError as exc:
        raise _no_cluster(address, f"no answer in Ray's protocol within {ANSWER_S:.0f} s") from exc
    except (OSError, OverflowError) as exc:
        raise _no_cluster(address, str(exc)) from exc
    if len(frame) < _FRAME_BYTES or frame[3] != _SETTINGS:
        raise _no_cluster(address, "what answers does not speak Ray's protocol")


def _no_cluster(address: str, found: str) -> LoaderError:
    return LoaderError(
        f"{address or '--ray'}: no Ray cluster answers there ({found}); it is HOST:PORT as "
        "`ray start --head` prints it"
    )


def _amdsmi_is_broken() -> bool:
    """Tell that AMD's package is there without its library: it fails in each of Ray's processes."""
    if importlib.util.find_spec("amdsmi") is None:
        return False
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it misses
            import amdsmi  # noqa: F401
    except ImportError:
        return False
    except Exception:  # noqa: BLE001 - whatever it raises, Ray would fall over it
        return True
    return False


def _quiet_environment(directory: Path | None) -> AbstractContextManager[None]:
    """Set what Ray and its processes inherit."""
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # A process more than there are actors would wait for tasks that never come.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Else each of a loader's threads may keep freed memory to itself.
        "MALLOC_ARENA_MAX": "2",
        # Else Ray warns that it will stop hiding GPUs from actors that ask for none.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if directory is not None and _amdsmi_is_broken():
        guard = directory / "without-amdsmi"
        guard.mkdir()
        (guard / "amdsmi.py").write_text('raise ImportError("its library is not installed")\n')
        wanted["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(guard), os.environ.get("PYTHONPATH")))
        )
    return environment(wanted)


def _new_directory() -> Path:
    """Choose a short path: Ray puts sockets below it, whose paths may have 107 bytes."""
    pid, home = os.getpid(), tempfile.gettempdir()
    longest = f"{home}/{PREFIX}{pid}-{8 * 'x'}/session_2000-01-01_00-00-00_000000_{pid}{_SOCKET}"
    fits = len(os.fsencode(longest)) <= _SOCKET_PATH_BYTES
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{pid}-", dir=home if fits else "/tmp"))


def _end_all_of(directory: Path) -> list[int]:
    """End Ray's processes that were started for a directory, and remove it; returns their ids."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if _is_of(directory, process, process.info["cmdline"] or ()):
                process.send_signal(signal.SIGKILL)
                found.append(process)
    _await_end(found)
    shutil.rmtree(directory, ignore_errors=True)
    return [process.pid for process in found]


def _await_end(killed: Sequence[psutil.Process]) -> None:
    import psutil

    until = time.monotonic() + _KILLED_S
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
                time.sleep(0.01)


def _is_of(directory: Path, process: psutil.Process, cmdline: Sequence[str]) -> bool:
    if any(str(directory) in word for word in cmdline):
        return True
    # Workers write their role over their command line. Whose service is gone waits for it, and is
    # told by its log.
    if not cmdline or not cmdline[0].startswith("ray::"):
        return False
    return any(directory in Path(file.path).parents for file in process.open_files())


def clear_leftovers() -> list[int]:
    """End Ray's processes of a directory whose owner is gone; returns their process ids."""
    import psutil

    ended: list[int] = []
    for home in {tempfile.gettempdir(), "/tmp"}:
        for directory in Path(home).glob(f"{PREFIX}*"):
            if not is_users(directory.lstat()):
                continue
            owner = digits(directory.name.removeprefix(PREFIX).split("-")[0])
            if owner is not None and owner < 1 << 31 and not psutil.pid_exists(owner):
                ended += _end_all_of(directory)
    return ended
