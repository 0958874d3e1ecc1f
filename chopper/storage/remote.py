"""Files at addresses (``s3://…``, ``https://…``), through fsspec: read as copies, written whole.

Copies lie in ``$XDG_CACHE_HOME/chopper/remote`` (``~/.cache`` by default) and are taken again only
where the file has changed (size, ETag or time); :mod:`chopper.storage.caches` says how long they
stay. Credentials and endpoints are those of each file system's own library.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from chopper.errors import ChopperError, InputError, OutputError, RunFormatError
from chopper.storage.caches import cache_folder
from chopper.storage.destination import is_of_run
from chopper.storage.files import inside, write_atomic
from chopper.storage.layout import MANIFEST
from chopper.wording import some

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "abfs"),
    "hf": "hf",
}
_SCHEMES = "s3, gs, abfs, hf, http, https or file"
_MOST_FILES = 10_000
_ATTEMPTS = 3
_THREADS = 8
_CONNECT_S, _READ_S = 10, 30
_STOP_S = 1.0
"""Patience with files on their way when one has failed or the user interrupts."""
_DEAD_PART_S = 86_400
_VERSIONS = ".versions"
"""Folder of what tells the contents of copies apart, one file for each copy."""

Tell = Callable[[str], object]
"""Is told how far the copying is, to be shown behind what is being done."""


@dataclass(frozen=True)
class _Listing:
    """The files at an address, and the places of their copies."""

    fs: Any
    files: Mapping[str, Mapping[str, Any]]
    """What the file system says of each, by name."""
    places: Mapping[str, Path]
    """Of each file's copy."""
    folder: Path
    whole: Path | None
    """Copy of the directory, where the address is one."""


_shown_by_key: dict[str, str] = {}
"""Name of a folder of copies → the address that it stands for, of this process."""
_address_by_folder: dict[Path, str] = {}
"""Folder of copies → the address as it was named."""


def is_address(name: object) -> bool:
    """Return whether a name is an address rather than a path."""
    return isinstance(name, str) and _ADDRESS.match(name) is not None


def here(named: Sequence[str | Path], tell: Tell = lambda _: None) -> list[str | Path]:
    """Return names with local copies in place of addresses.

    An address is looked at once per process: what changes there later is not seen.

    Raises:
        InputError: nothing is at an address, or it cannot be read.
    """
    return [
        copy
        for item in named
        for copy in (_copies(item, tell) if isinstance(item, str) and is_address(item) else (item,))
    ]


def files_of(named: Sequence[str | Path], tell: Tell = lambda _: None) -> list[Path]:
    """Return the files that names may mean, without opening them; to know how much there is.

    Of addresses these are copies; ``tell`` is told how far the copying is.

    What cannot be looked at is left out: who reads it says why.

    Raises:
        InputError: an address cannot be read.
    """
    files: list[Path] = []
    for item in map(Path, here(named, tell)):
        with contextlib.suppress(OSError, ValueError):
            if item.is_dir():
                files += [f for f in (*item.glob("*"), *item.glob("rank-*/*")) if f.is_file()]
            elif glob.has_magic(str(item)):
                files += map(Path, glob.glob(str(item), recursive=True))  # noqa: PTH207
            else:
                files.append(item)
    return files


def without_secrets(name: str) -> str:
    """Return an address without the password and the signature that it may hold."""
    if _scheme(name) not in ("http", "https") or not is_address(name):
        return name
    scheme, _, rest = name.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def in_addresses(text: str) -> str:
    """Return a message with addresses in place of the copies that it names, on any machine."""
    for folder in _address_by_folder:  # may have spaces in it
        text = text.replace(str(folder), f"/chopper/remote/{folder.name}")
    for key, shown in _shown_by_key.items():
        text = re.sub(rf"[^\s'\"(]*/chopper/remote/{key}", lambda _, s=shown: s, text)  # type: ignore[misc]
    return text


def origin(path: Path) -> tuple[str, str] | None:
    """Return the address that a copy was fetched from, and its path among the copies of that.

    None for what is no copy.
    """
    for folder, address in _address_by_folder.items():
        if path.is_relative_to(folder):
            return address, path.relative_to(folder).as_posix()
    return None


def restored(address: str, below: str) -> Path:
    """Return a copy on this machine, of a file or a directory; what is missing of it is fetched.

    Raises:
        InputError: it cannot be read.
    """
    with _explained(address, InputError, "read"):
        listing = _listing(address)
        place = inside(listing.folder, below)
        _fetch(listing, [n for n, p in listing.places.items() if p.is_relative_to(place)])
        return place


def _copies(address: str, tell: Tell) -> tuple[str | Path, ...]:
    with _explained(address, InputError, "read"):
        if _scheme(address) in ("file", "local"):
            return (opened(address)[1],)
        listing = _listing(address)
        if address not in _address_by_folder.values():
            try:
                _fetch(listing, listing.files, tell)
            except BaseException:
                _listing.cache_clear()  # a next try looks again
                raise
            _address_by_folder[listing.folder] = address
            _remove_others(listing)
        return tuple(listing.places.values()) if listing.whole is None else (listing.whole,)


@functools.cache
def _listing(address: str) -> _Listing:
    fs, path = opened(address)
    files, base, is_whole = _listed(fs, path, address)
    folder = cache_folder("remote", address)
    _shown_by_key[folder.name] = without_secrets(_shown(address, fs, base))
    return _Listing(
        fs,
        files,
        {name: _copy_of(folder, base, name) for name in files},
        folder,
        folder.joinpath(*PurePosixPath(base).parts[-1:]) if is_whole else None,
    )


def opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address, as fsspec has it, and the path in it.

    Raises:
        InputError: fsspec is not installed.
    """
    try:
        import fsspec
    except ImportError:
        raise InputError(
            f"{address}: needs fsspec, which is not installed: "
            "pip install 'chopper-profiler[remote]'"
        ) from None
    options: dict[str, Any] = {}
    scheme = _scheme(address)
    address = scheme + address[len(scheme) :]
    if scheme in ("s3", "s3a"):
        times = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S}
        options = {"config_kwargs": {**times, "retries": {"max_attempts": 1}}}
    elif scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
        options = {"client_kwargs": {"timeout": timeout}}
    fs, path = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
    if scheme in ("s3", "s3a"):
        fs.retries = 1  # of botocore's own; a server that hangs would be tried ten times
    return fs, str(path)


def _scheme(address: str) -> str:
    return address.partition("://")[0].lower()


def _names_of(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _listed(fs: Any, path: str, address: str) -> tuple[dict[str, dict[str, Any]], str, bool]:
    """Return the files that an address means, the folder that they are in, and whether it is that.

    Of a folder that is no run, files deeper in it are left out.
    """
    magic = re.search(r"[*?\[]", path.partition("?")[0] if "http" in _names_of(fs) else path)
    if magic:
        found = fs.glob(path, detail=True)
        base = path[: magic.start()].rpartition("/")[0]
    elif path.endswith("/") or ("http" not in _names_of(fs) and fs.isdir(path)):
        base = path.rstrip("/")
        found = fs.find(base, detail=True)
        if f"{base}/{MANIFEST}" not in found:
            found = {n: i for n, i in found.items() if "/" not in n[len(base) + 1 :]}
    else:
        return {path: fs.info(path)}, path.rpartition("/")[0], False
    files = {name: info for name, info in found.items() if info.get("type") == "file"}
    if not files:
        raise InputError(f"{address}: no file is there, or the pattern matches none")
    if magic and len(files) > _MOST_FILES:
        raise InputError(
            f"{address}: the pattern matches {len(files)} files, expected at most {_MOST_FILES}; "
            "name fewer"
        )
    return files, base, not magic


def _fetch(listing: _Listing, names: Collection[str], tell: Tell = lambda _: None) -> None:
    """Copy those files that are not there as they are now."""
    listing.folder.mkdir(parents=True, exist_ok=True)

    def copy(name: str, progress: Any) -> None:
        place, info = listing.places[name], listing.files[name]
        _download(listing.fs, name, place, info.get("size"), progress)
        noted = _noted(listing, name)
        noted.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(noted, (_version(info) or "").encode())

    _each(copy, [name for name in names if not _is_current(listing, name)], tell)


def _is_current(listing: _Listing, name: str) -> bool:
    """Return whether the copy of a file is what the file is now."""
    place, info = listing.places[name], listing.files[name]
    version = _version(info)
    try:
        return (
            version is not None
            and _noted(listing, name).read_bytes() == version.encode()
            and place.stat().st_size == info.get("size", place.stat().st_size)
        )
    except OSError:
        return False


def _noted(listing: _Listing, name: str) -> Path:
    return listing.folder / _VERSIONS / listing.places[name].relative_to(listing.folder)


def _remove_others(listing: _Listing) -> None:
    """Remove copies of files that are there no more, and what killed commands left.

    Files that another command is copying stay.
    """
    wanted = {*listing.places.values(), *(_noted(listing, name) for name in listing.files)}
    for path in listing.folder.rglob("*"):
        with contextlib.suppress(OSError):
            is_part = path.suffix in (".part", ".tmp")
            if path in wanted or not path.is_file():
                continue
            if not is_part or time.time() - path.stat().st_mtime > _DEAD_PART_S:
                path.unlink()


def _each(move: Callable[[str, Any], None], names: Collection[str], tell: Tell) -> None:
    """Move files, several at a time; where one fails or the user interrupts, all stop."""
    import fsspec

    stop = threading.Event()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def check(*_: object, **__: object) -> None:
        if stop.is_set():
            raise _Stopped

    def work() -> None:
        while not stop.is_set():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                move(name, fsspec.Callback(hooks={"stop": check}))
            except BaseException as exc:  # noqa: BLE001  (raised by who waits for it)
                ended.put(exc)
            else:
                ended.put(None)

    # Those of a pool would be waited for when the interpreter ends.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(names)))]
    try:
        for thread in threads:
            thread.start()
        for count in range(1, len(names) + 1):
            if (error := ended.get()) is not None:
                raise error
            tell(f" ({count} of {len(names)} files copied)")
    finally:
        stop.set()
        until_s = time.monotonic() + _STOP_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))


class _Stopped(Exception):
    """The copying of a file was stopped."""


def _copy_of(folder: Path, base: str, name: str) -> Path:
    """Return the place of a file's copy: in the folder of copies, below its folder's own name."""
    below = PurePosixPath(name[len(base) :].lstrip("/").partition("?")[0])
    try:
        inside(folder, str(below))
        return inside(folder, str(PurePosixPath(*PurePosixPath(base).parts[-1:]) / below))
    except RunFormatError as exc:
        raise InputError(f"{name}: not a file name below {base}") from exc


def _version(info: Mapping[str, Any]) -> str | None:
    """Return what tells one content of a file from another; None where nothing does."""
    names = ("ETag", "etag", "md5Hash", "sha256", "mtime", "LastModified")
    mark = next((str(info[name]) for name in names if info.get(name)), None)
    return None if mark is None else f"{info.get('size')} {mark}"


def _download(fs: Any, name: str, place: Path, size: int | None, progress: Any) -> None:
    """Copy a file; one that comes in part is tried again, and never lies there as if whole."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        for left in reversed(range(_ATTEMPTS)):
            try:
                fs.get_file(name, str(part), callback=progress)
                got = part.stat().st_size
                if size is not None and got != size:
                    raise OSError(f"{got} of {size} bytes arrived")
            except (FileNotFoundError, PermissionError, _Stopped):
                raise
            except Exception:
                if not left:
                    raise
            else:
                part.replace(place)
                return
    finally:
        part.unlink(missing_ok=True)


def _shown(address: str, fs: Any, base: str) -> str:
    """Return the address of the folder that holds a base, as the user writes it."""
    if "http" in _names_of(fs):
        return base.rpartition("/")[0]
    return f"{_scheme(address)}://{base}".rpartition("/")[0]


def upload(folder: Path, address: str) -> None:
    """Copy a run directory to an address; its manifest comes last, so that no part looks whole.

    A run that is there is replaced; what is no part of a run stays.

    Raises:
        OutputError: it cannot be written.
    """
    with _explained(address, OutputError, "written"):
        fs, path = opened(address)
        path = path.rstrip("/")
        place = f"{path}/{MANIFEST}"
        if fs.exists(place):
            fs.rm_file(place)
        stale = {name for name in fs.find(path) if is_of_run(name[len(path) + 1 :].split("/")[0])}
        files = {
            f"{path}/{file.relative_to(folder).as_posix()}": file
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file != folder / MANIFEST
        }
        _each(lambda name, progress: _put(fs, files[name], name, progress), files, lambda _: None)
        if stale := stale - files.keys():
            fs.rm(sorted(stale))
        sizes = {name: info.get("size") for name, info in fs.find(path, detail=True).items()}
        for name, file in files.items():
            if sizes.get(name) != file.stat().st_size:
                raise OSError(f"{name}: {sizes.get(name)} of {file.stat().st_size} bytes arrived")
        _put(fs, folder / MANIFEST, place)


def check_upload(address: str, *, force: bool) -> None:
    """Refuse an address where a run must not be written, or that cannot be looked at.

    Raises:
        OutputError: it holds a run and ``force`` is not given, or files that are no part of a run.
    """
    with _explained(address, OutputError, "written"):
        fs, path = opened(address)
        if "http" in _names_of(fs):
            raise OutputError(f"{address}: is only read; choose a path or a store for -o")
        path = path.rstrip("/")
        try:
            listed = fs.ls(path, detail=False)
        except FileNotFoundError as exc:
            if exc.__cause__ is not None:  # no bucket, or no answer
                raise
            return
        names = {PurePosixPath(name).name for name in listed if name.rstrip("/") != path}
        if others := sorted(name for name in names if not is_of_run(name)):
            raise OutputError(
                f"{address}: holds files that are no part of a run ({some(others)}); choose "
                "another -o"
            )
        if MANIFEST in names and not force:
            raise OutputError(
                f"{address}: holds a run already; pass --force to replace it, or choose another -o"
            )


def _put(fs: Any, file: Path, path: str, progress: Any = None) -> None:
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(file), path, **({} if progress is None else {"callback": progress}))


@contextlib.contextmanager
def _explained(address: str, error: type[ChopperError], verb: str) -> Iterator[None]:
    """Have whatever a file system raises said in a line."""
    try:
        yield
    except ChopperError as exc:
        raise error(str(exc)) from exc
    except FileNotFoundError as exc:
        if exc.__cause__ is None:
            raise error(f"{address}: not found") from exc
        # fsspec's, of a server that refuses or does not answer
        denied = getattr(exc.__cause__, "status", None) in (401, 403)
        said = "access is denied" if denied else f"cannot be {verb}"
        raise error(f"{address}: {said} ({_named(exc.__cause__)})") from exc
    except PermissionError as exc:
        raise error(f"{address}: access is denied ({_named(exc)}); check the credentials") from exc
    except ImportError as exc:
        extra = _EXTRAS.get(_scheme(address), "remote")
        raise error(
            f"{address}: needs a package that is not installed: pip install "
            f"'chopper-profiler[{extra}]'"
        ) from exc
    except Exception as exc:  # libraries of file systems raise what they like
        if isinstance(exc, ValueError) and "rotocol" in str(exc):
            raise error(
                f"{address}: {_scheme(address)} is no known kind of address; expected {_SCHEMES}"
            ) from exc
        remedy = "; check the credentials" if "Credentials" in type(exc).__name__ else ""
        raise error(f"{address}: cannot be {verb} ({_named(exc)}){remedy}") from exc


def _named(exc: BaseException) -> str:
    """Return the kind of an error, and its first line."""
    return f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"
