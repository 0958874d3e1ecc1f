"""Files at addresses (``s3://…``, ``https://…``), through fsspec: read as copies, written whole.

Copies lie in ``$XDG_CACHE_HOME/chopper/remote`` (``~/.cache`` by default) and are taken again only
where the file has changed (size, ETag or time); what nobody used for a week is removed. Credentials
and endpoints are those of each file system's own library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from chopper.errors import ChopperError, InputError, OutputError
from chopper.storage.files import write_atomic
from chopper.storage.layout import MANIFEST

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
_CONNECT_S, _READ_S = 10, 60
_KEPT_S = 7 * 86_400
_VERSIONS = ".versions.json"
_fetched: dict[str, str] = {}
"""Folder of copies → the address that it stands for, of this process."""


def is_address(name: object) -> bool:
    """Return whether a name is an address rather than a path."""
    return isinstance(name, str) and _ADDRESS.match(name) is not None


def here(named: Sequence[str | Path]) -> list[str | Path]:
    """Return names with local copies in place of addresses, each fetched once per process.

    Raises:
        InputError: nothing is at an address, or it cannot be read.
    """
    return [
        copy
        for item in named
        for copy in (_copies(item) if isinstance(item, str) and is_address(item) else (item,))
    ]


def in_addresses(text: str) -> str:
    """Return a message with addresses in place of the copies that it names."""
    for folder, address in _fetched.items():
        text = text.replace(f"{folder}/", f"{address}/").replace(folder, address)
    return text


@functools.cache
def _copies(address: str) -> tuple[str | Path, ...]:
    with _explained(address, InputError, "read"):
        fs, path = _opened(address)
        if "file" in _names_of(fs):
            return (path,)
        files, base, is_whole = _listed(fs, path, address)
        folder = _folder(address)
        copies = _fetch(fs, files, base, folder)
        _fetched[str(folder)] = _shown(address, fs, base)
        return (folder / "-".join(PurePosixPath(base).parts[-1:]),) if is_whole else tuple(copies)


def _opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise InputError(
            f"{address}: needs fsspec, which is not installed: "
            "pip install 'chopper-profiler[remote]'"
        ) from None
    options: dict[str, Any] = {}
    scheme = _scheme(address)
    if scheme in ("s3", "s3a"):
        times = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S}
        options = {"config_kwargs": {**times, "retries": {"max_attempts": 2}}}
    elif scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
        options = {"client_kwargs": {"timeout": timeout}}
    fs, path = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
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


def _fetch(fs: Any, files: Mapping[str, Mapping[str, Any]], base: str, folder: Path) -> list[Path]:
    """Copy the files that are not there as they are now; return where all are, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    noted = folder / _VERSIONS
    try:
        known = json.loads(noted.read_bytes())
    except (OSError, ValueError):
        known = {}
    places = {name: folder / _inside(base, name) for name in files}
    for left in {p for p in folder.rglob("*") if p.is_file()} - {noted, *places.values()}:
        left.unlink(missing_ok=True)
    versions = {name: _version(info) for name, info in files.items()}
    missing = [
        name
        for name, place in places.items()
        if versions[name] is None or known.get(name) != versions[name] or not place.is_file()
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = [
            pool.submit(_download, fs, name, places[name], files[name].get("size"))
            for name in missing
        ]
        for job in jobs:
            job.result()
    write_atomic(noted, json.dumps(known | versions).encode())
    return list(places.values())


def _inside(base: str, name: str) -> PurePosixPath:
    """Return the path of a file below its folder's own name."""
    below = PurePosixPath(name[len(base) :].lstrip("/").partition("?")[0])
    if not below.parts or ".." in below.parts:
        raise InputError(f"{name}: no name of a file")
    return PurePosixPath(*PurePosixPath(base).parts[-1:]) / below


def _version(info: Mapping[str, Any]) -> str | None:
    """Return what tells one content of a file from another; None where nothing does."""
    names = ("ETag", "etag", "md5Hash", "sha256", "mtime", "LastModified")
    mark = next((str(info[name]) for name in names if info.get(name)), None)
    return None if mark is None else f"{info.get('size')} {mark}"


def _download(fs: Any, name: str, place: Path, size: int | None) -> None:
    """Copy a file; one that comes in part is tried again, and never lies there as if whole."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        for left in reversed(range(_ATTEMPTS)):
            try:
                fs.get_file(name, str(part))
                got = part.stat().st_size
                if size is not None and got != size:
                    raise OSError(f"{got} of {size} bytes came")
            except (FileNotFoundError, PermissionError):
                raise
            except Exception:
                if not left:
                    raise
            else:
                part.replace(place)
                return
    finally:
        part.unlink(missing_ok=True)


def _folder(address: str) -> Path:
    """Return the folder of an address's copies; remove those that nobody used for a week."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "chopper", "remote")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / hashlib.sha256(address.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    for other in cache.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def _shown(address: str, fs: Any, base: str) -> str:
    """Return the address of the folder that holds a base, as the user writes it."""
    parent = base.rpartition("/")[0]
    return parent if "http" in _names_of(fs) else f"{_scheme(address)}://{parent}"


def upload(folder: Path, address: str) -> None:
    """Copy a run directory to an address; its manifest comes last, so that no part looks whole.

    A run that is there is replaced.

    Raises:
        OutputError: it cannot be written.
    """
    with _explained(address, OutputError, "written"):
        fs, path = _opened(address)
        path = path.rstrip("/")
        if fs.exists(f"{path}/{MANIFEST}"):
            fs.rm(path, recursive=True)
        files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
        with ThreadPoolExecutor(_THREADS) as pool:
            jobs = [
                pool.submit(_put, fs, file, f"{path}/{file.relative_to(folder).as_posix()}")
                for file in files
            ]
            for job in jobs:
                job.result()
        _put(fs, folder / MANIFEST, f"{path}/{MANIFEST}")


def check_upload(address: str, *, force: bool) -> None:
    """Refuse an address that holds a run already, or that cannot be looked at.

    Raises:
        OutputError: as said.
    """
    with _explained(address, OutputError, "written"):
        fs, path = _opened(address)
        if not force and fs.exists(f"{path.rstrip('/')}/{MANIFEST}"):
            raise OutputError(
                f"{address}: holds a run already; pass --force to replace it, or choose another -o"
            )


def _put(fs: Any, file: Path, path: str) -> None:
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(file), path)


@contextlib.contextmanager
def _explained(address: str, error: type[ChopperError], verb: str) -> Iterator[None]:
    """Have whatever a file system raises said in a line."""
    try:
        yield
    except ChopperError as exc:
        raise error(str(exc)) from exc
    except FileNotFoundError as exc:
        if exc.__cause__ is not None:  # fsspec's of a server that refuses or does not answer
            raise error(f"{address}: cannot be {verb} ({_named(exc.__cause__)})") from exc
        raise error(f"{address}: nothing is there") from exc
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
        raise error(f"{address}: cannot be {verb} ({_named(exc)})") from exc


def _named(exc: BaseException) -> str:
    """Return the kind of an error, and its first line."""
    return f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"
