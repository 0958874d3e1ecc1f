"""Files at addresses (``s3://…``, ``https://…``): read as copies, written whole.

Copies lie in ``$XDG_CACHE_HOME/chopper/remote`` (``~/.cache`` by default) and are taken again only
where the file has changed (size, ETag or time); :mod:`chopper.storage.caches` says how long they
stay. Credentials and endpoints are those of each file system's own library; all but HTTP's come
from fsspec.

A run at an address lies below a folder of its own, ``upload-0123456789abcdef``, which
``manifest.json`` names with its files. That is written last, and the files of the run that it
replaces go then: of two uploads at once, one whole run results.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import queue
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from chopper.addresses import (
    is_address,
    message_without_secrets,
    remember,
    scheme_of,
    without_secrets,
)
from chopper.errors import ChopperError, InputError, OutputError, RunFormatError
from chopper.limits import Arrival, within
from chopper.storage import manifest as m
from chopper.storage.caches import cache_folder
from chopper.storage.files import inside, read_bytes, write_atomic
from chopper.storage.layout import MANIFEST, is_upload
from chopper.storage.parts import Content, content_of
from chopper.storage.web import Web
from chopper.wording import bytes_, some

_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "abfs"),
    "hf": "hf",
}
_LOCAL = ("file", "local")
_SCHEMES = "s3, gs, abfs, hf, http, https or file"
_MOST_FILES = 10_000
_ATTEMPTS = 3
_THREADS = 8
_CONNECT_S, _READ_S = 10, 30
_LOOK_S = 120.0
"""Patience with a server that is asked what there is."""
_POLL_S = 0.2
_MOST_MANIFEST_BYTES = 1 << 30
_STOP_S = 1.0
"""Patience with files on their way when one has failed or the user interrupts."""
_DEAD_PART_S = 86_400
_VERSIONS = Path(".versions")
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
    directory: Path | None
    """Copy of the directory, where the address is one."""


_shown_by_key: dict[str, str] = {}
"""Name of a folder of copies → the address that it stands for, of this process."""
_address_by_folder: dict[Path, str] = {}
"""Folder of copies → the address as it was named."""


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


def in_addresses(text: str) -> str:
    """Return a message with addresses in place of the copies that it names, on any machine."""
    for folder in _address_by_folder:  # may have spaces in it
        text = text.replace(str(folder), f"/chopper/remote/{folder.name}")
    for key, folder_address in _shown_by_key.items():
        text = re.sub(rf"[^\s'\"(]*/chopper/remote/{key}", lambda _, s=folder_address: s, text)  # type: ignore[misc]
    return message_without_secrets(text)


def origin(path: Path) -> tuple[str, str] | None:
    """Return the address that a copy was fetched from, and its path among the copies of that.

    None for what is no copy.
    """
    for folder, address in _address_by_folder.items():
        if path.is_relative_to(folder):
            return address, path.relative_to(folder).as_posix()
    return None


def restored(address: str, below: str) -> Path:
    """Return the local copy of a file or directory; missing files are fetched.

    Raises:
        InputError: it cannot be read.
    """
    with _explained(address, InputError, "read"):
        listing = _listing(address)
        copy = inside(listing.folder, below)
        _fetch(listing, [n for n, p in listing.places.items() if p.is_relative_to(copy)])
        return copy


def _copies(address: str, tell: Tell) -> tuple[str | Path, ...]:
    with _explained(address, InputError, "read"):
        if (path := on_this_machine(remember(address))) is not None:
            return (path,)
        for attempt in range(2):
            listing = _listing(address)
            if address in _address_by_folder.values():
                break
            try:
                _fetch(listing, listing.files, tell)
            except BaseException as exc:
                _listing.cache_clear()  # a next try looks again
                if not isinstance(exc, FileNotFoundError) or attempt:
                    raise
                continue  # the run was replaced meanwhile
            _address_by_folder[listing.folder] = address
            _remove_others(listing)
            break
        return tuple(listing.places.values()) if listing.directory is None else (listing.directory,)


@functools.cache
def _listing(address: str) -> _Listing:
    fs, path = opened(address)
    names, base, is_whole = within(_LOOK_S, lambda: _listed(fs, path, address))
    folder = cache_folder("remote", address)
    _shown_by_key[folder.name] = without_secrets(_folder_address(address, fs, base))
    top = PurePosixPath(_below_host(base)).name
    places = {name: _copy_of(folder, top, below) for name, (_, below) in names.items()}
    files = {name: info for name, (info, _) in names.items()}
    return _Listing(fs, files, places, folder, folder / top if is_whole else None)


def name_of(address: str) -> str:
    """Return a name for the run at an address."""
    return PurePosixPath(_below_host(address)).name or "run"


def on_this_machine(address: str) -> Path | None:
    """Return the path of a ``file://`` or ``local://`` address; None for any other address.

    Raises:
        InputError: it has user information, a query or a fragment.
    """
    if scheme_of(address) not in _LOCAL:
        return None
    if without_secrets(address) != address:
        raise InputError(
            f"{without_secrets(address)}: a path has no user, query or fragment, but this address "
            "has one; name the path itself"
        )
    return Path(address.partition("://")[2])


def opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address, as fsspec has it, and the path in it.

    Raises:
        InputError: fsspec is not installed, or the address is none that is read.
    """
    scheme = scheme_of(remember(address))
    address = scheme + address[len(scheme) :]
    if scheme in Web.protocol:
        return Web(), address.partition("#")[0]
    name = without_secrets(address)
    if "::" in address:
        raise InputError(f"{name}: is several addresses in one (::), expected one")
    try:
        import fsspec
    except ImportError:
        raise InputError(
            f"{name}: needs fsspec, which is not installed: pip install 'chopper-profiler[remote]'"
        ) from None
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        times = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S}
        options = {"config_kwargs": {**times, "retries": {"max_attempts": 1}}}
    fs, path = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
    if scheme in ("s3", "s3a"):
        fs.retries = 1  # of botocore's own; a server that hangs would be tried ten times
    return fs, str(path)


def _below_host(path: str) -> str:
    """Return a path in a file system, without the server, the query and the fragment of one."""
    path = without_secrets(path)
    return path.partition("://")[2] if is_address(path) else path


def _listed(
    fs: Any, path: str, address: str
) -> tuple[dict[str, tuple[dict[str, Any], str]], str, bool]:
    """Return the files that an address means, the folder that they are in, and whether it is that.

    Each with what is said of it and its path in that folder. Of a folder that is no run, files
    deeper in it are left out.
    """
    is_web = isinstance(fs, Web)
    magic = None if is_web else re.search(r"[*?\[]", path)
    plain = path.partition("?")[0] if is_web else path
    if magic:
        info_by_name = fs.glob(path, detail=True)
        base = path[: magic.start()].rpartition("/")[0]
    elif plain.endswith("/") or (not is_web and fs.isdir(path)):
        base = plain.rstrip("/")
        run = _run_at(fs, base)
        if isinstance(run, m.Upload):
            return (
                {
                    f"{base}/{run.folder}/{name}": (_told_of(run, size), name)
                    for name, size in run.files.items()
                },
                base,
                True,
            )
        if is_web:
            raise InputError(
                f"{without_secrets(address)}: no run that chopper copied there, and web servers "
                "list no files; name a file"
            )
        info_by_name = fs.find(base, detail=True)
        if run is None:
            info_by_name = {n: i for n, i in info_by_name.items() if "/" not in n[len(base) + 1 :]}
    else:
        base, _, name = plain.rpartition("/")
        return {path: (fs.info(path), name)}, base, False
    files = {
        name: (info, name[len(base) :].lstrip("/"))
        for name, info in info_by_name.items()
        if info.get("type") == "file"
    }
    if not files:
        raise InputError(
            f"{without_secrets(address)}: no file is there, or the pattern matches none"
        )
    if magic and len(files) > _MOST_FILES:
        raise InputError(
            f"{without_secrets(address)}: the pattern matches {len(files)} files, expected at most "
            f"{_MOST_FILES}; name fewer"
        )
    return files, base, not magic


def _told_of(run: m.Upload, size: int) -> dict[str, Any]:
    """Return size and version of an uploaded file; nobody changes it there."""
    return {"type": "file", "size": size, "ETag": run.folder}


def _run_at(fs: Any, base: str) -> m.Upload | m.RunManifest | None:
    """Return what the manifest of a folder says; None where no run is."""
    path = f"{base}/{MANIFEST}"
    shown_path = without_secrets(path)
    try:
        size = fs.info(path).get("size")
        if (size or 0) > _MOST_MANIFEST_BYTES:
            raise RunFormatError(f"{shown_path}: has {bytes_(size)}, too large for a manifest")
        if isinstance(fs, Web):
            data = fs.cat_file(path)
        else:
            data = fs.cat_file(path, start=0, end=size) if size else b""
    except FileNotFoundError as exc:
        if exc.__cause__ is not None:  # no bucket, or no answer
            raise
        return None
    try:
        return m.decode_stored(data, shown_path)
    except m.NewerRunError:
        raise
    except RunFormatError:
        return None


def _fetch(listing: _Listing, names: Collection[str], tell: Tell = lambda _: None) -> None:
    """Copy those files that are not there as they are now, within the limits."""
    listing.folder.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in names if not _is_current(listing, name)]
    arrivals: dict[str, tuple[Arrival, Path]] = {}

    def copy(name: str, is_over: Callable[[], bool]) -> None:
        target, info = listing.places[name], listing.files[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")

        def begin() -> Arrival:
            arrival = Arrival(in_addresses(str(target)), listing.folder)
            arrival.expect(info.get("size"))
            arrivals[name] = arrival, part
            return arrival

        try:
            _download(listing.fs, name, part, info.get("size"), begin, is_over)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        noted = _noted(listing, name)
        noted.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(noted, (_version(info) or "").encode())

    def watch(count: int) -> None:
        for arrival, part in [*arrivals.values()]:
            with contextlib.suppress(FileNotFoundError):
                arrival.at(part.stat().st_size)
        so_far_bytes = sum(arrival.sent_bytes for arrival, _ in [*arrivals.values()])
        tell(f" ({count} of {len(wanted)} files copied, {bytes_(so_far_bytes)})")

    try:
        _each(copy, wanted, watch)
    finally:
        for _, part in [*arrivals.values()]:  # of threads that hang
            part.unlink(missing_ok=True)


def _is_current(listing: _Listing, name: str) -> bool:
    """Return whether the copy of a file is what the file is now."""
    copy, info = listing.places[name], listing.files[name]
    version = _version(info)
    try:
        return (
            version is not None
            and read_bytes(_noted(listing, name), error=OSError) == version.encode()
            and copy.stat().st_size == info.get("size", copy.stat().st_size)
        )
    except OSError:
        return False


def _noted(listing: _Listing, name: str) -> Path:
    return inside(listing.folder, _VERSIONS / listing.places[name].relative_to(listing.folder))


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


def _each(
    move: Callable[[str, Callable[[], bool]], None],
    names: Collection[str],
    watch: Callable[[int], None] = lambda _: None,
) -> None:
    """Move files, several at a time; where one fails or the user interrupts, all stop.

    Args:
        move: is given a name, and what tells that it shall stop.
        names: of the files.
        watch: is told how many are done, often; what it raises stops them.
    """
    stop = threading.Event()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def work() -> None:
        while not stop.is_set():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                move(name, stop.is_set)
            except BaseException as exc:  # noqa: BLE001  (raised by who waits for it)
                ended.put(exc)
            else:
                ended.put(None)

    # Those of a pool would be waited for when the interpreter ends.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(names)))]
    try:
        for thread in threads:
            thread.start()
        count = 0
        while count < len(names):
            with contextlib.suppress(queue.Empty):
                if (error := ended.get(timeout=_POLL_S)) is not None:
                    raise error
                count += 1
            watch(count)
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
    try:
        inside(folder, name)
        return inside(folder, str(PurePosixPath(base) / name))
    except RunFormatError as exc:
        raise InputError(
            f"{without_secrets(name)}: not a file name below {without_secrets(base)}"
        ) from exc


def _version(info: Mapping[str, Any]) -> str | None:
    """Return what tells one content of a file from another; None where nothing does."""
    names = ("ETag", "etag", "md5Hash", "sha256", "mtime", "LastModified")
    mark = next((str(info[name]) for name in names if info.get(name)), None)
    return None if mark is None else f"{info.get('size')} {mark}"


def _download(
    fs: Any,
    name: str,
    part: Path,
    size: int | None,
    begin: Callable[[], Arrival],
    is_over: Callable[[], bool],
) -> None:
    """Copy a file; one that comes in part is tried again, and never lies there as if whole."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            _get(fs, name, part, begin(), is_over)
            got = part.stat().st_size
            if size is not None and got != size:
                raise OSError(f"{got} of {size} bytes arrived")
        except (FileNotFoundError, PermissionError, ChopperError, _Stopped):
            raise
        except Exception:
            if not attempts_left or is_over():
                raise
        else:
            return


def _get(fs: Any, name: str, part: Path, arrival: Arrival, is_over: Callable[[], bool]) -> None:
    if isinstance(fs, Web):
        fs.get_file(name, str(part), arrival)
        return
    import fsspec

    def check(_size: object = None, value: object = None, **_more: object) -> None:
        if is_over():
            raise _Stopped
        arrival.at(value if isinstance(value, int) else 0)

    fs.get_file(name, str(part), callback=fsspec.Callback(hooks={"limits": check}))


def _folder_address(address: str, fs: Any, base: str) -> str:
    """Return the address of the folder that holds a base, as the user writes it."""
    if isinstance(fs, Web):
        return base.rpartition("/")[0]
    return f"{scheme_of(address)}://{base}".rpartition("/")[0]


def upload(folder: Path, address: str, *, force: bool = False) -> None:
    """Copy a run directory to an address: below a folder of its own, and its manifest last.

    Then the files of the run that it replaces are removed, and nothing else.

    Raises:
        OutputError: it cannot be written, or a run is there now that is not to be replaced, or may
            not be, as ``folder`` holds no step, or is another command's.
    """
    with _explained(address, OutputError, "written"):
        fs, path = opened(address)
        path = path.rstrip("/")
        folder_name = f"upload-{secrets.token_hex(8)}"
        sizes = {
            file.relative_to(folder).as_posix(): file.stat().st_size
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not file.is_symlink()
        }
        names = {f"{path}/{folder_name}/{name}": folder / name for name in sizes}
        try:
            _each(lambda name, _: _put(fs, names[name], name), names)
            info_by_name = fs.find(f"{path}/{folder_name}", detail=True)
            for name, size in sizes.items():
                got = info_by_name.get(f"{path}/{folder_name}/{name}", {}).get("size")
                if got != size:
                    raise OSError(f"{name}: {got} of {size} bytes arrived")
            replaced = _replaceable(fs, path, address, force=force)
            if replaced and not _may_replace(folder, fs, path, replaced):
                raise OutputError(
                    f"{address}: no step was recorded, so the run that was there stays"
                )
        except BaseException:
            with contextlib.suppress(Exception):
                within(_LOOK_S, lambda: _remove(fs, names))
            raise
        run = m.Upload(folder=folder_name, files=sizes)
        _switch(fs, path, run)
        try:
            if replaced:
                _remove(fs, [f"{path}/{replaced.folder}/{name}" for name in replaced.files])
        except Exception as exc:
            raise OutputError(
                f"{address}: holds the new run, but files of the one that it replaced are left "
                f"({_named(exc)}); remove them, or allow chopper to"
            ) from exc
        fs.invalidate_cache()
        if _run_at(fs, path) != run:
            _remove(fs, names)
            raise OutputError(
                f"{address}: another command wrote a run there at the same time, which replaced "
                "this one; write this one to another address"
            )


def _switch(fs: Any, path: str, run: m.Upload) -> None:
    """Write the manifest that names a run, whose files stay from here on.

    A server that does not answer may have written it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        manifest = Path(temporary, MANIFEST)
        manifest.write_bytes(m.encode_stored(run))
        try:
            _put(fs, manifest, f"{path}/{MANIFEST}")
        except Exception:
            if within(_LOOK_S, lambda: _run_at(fs, path)) != run:
                raise


def _may_replace(folder: Path, fs: Any, path: str, upload: m.Upload) -> bool:
    """Return whether a recording holds no less than the run at an address, and some of it."""
    content = content_of(folder)
    if content is not Content.UNSTEPPED:
        return content is Content.STEPS
    run = _run_at(fs, f"{path}/{upload.folder}")
    return isinstance(run, m.RunManifest) and not any(
        part.steps_source is not None or part.status == "imported" for part in run.ranks
    )


def _replaceable(fs: Any, path: str, address: str, *, force: bool) -> m.Upload | None:
    """Return the upload at an address that may be replaced; None without one.

    Raises:
        OutputError: a run is there that was not uploaded by chopper, or ``force`` is not given.
    """
    run = _run_at(fs, path)
    if isinstance(run, m.RunManifest):
        raise OutputError(
            f"{address}: holds a run that another program copied there, which is not replaced; "
            "remove it, or choose another -o"
        )
    if run is not None and not force:
        raise OutputError(
            f"{address}: holds a run already; pass --force to replace it, or choose another -o"
        )
    return run


def _remove(fs: Any, names: Collection[str]) -> None:
    def remove(name: str, _is_over: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(name)

    _each(remove, names)


def check_upload(address: str, *, force: bool) -> None:
    """Refuse an address where a run must not be written, or that cannot be looked at.

    Raises:
        OutputError: it is none that could be read again, holds a run and ``force`` is not given, or
            files that are no part of a run.
    """
    with _explained(address, OutputError, "written"):
        fs, path = opened(address)
        if isinstance(fs, Web):
            raise OutputError(f"{address}: is only read; choose a path or a store for -o")
        if odd := re.search(r"[*?\[#]", path):
            raise OutputError(
                f"{address}: has {odd[0]}, by which it would be read as a pattern or in part; "
                "choose another -o"
            )
        within(_LOOK_S, lambda: _check_upload(fs, path.rstrip("/"), address, force=force))


def _check_upload(fs: Any, path: str, address: str, *, force: bool) -> None:
    try:
        listed = fs.ls(path, detail=False)
    except FileNotFoundError as exc:
        if exc.__cause__ is not None:  # no bucket, or no answer
            raise
        return
    names = {PurePosixPath(name).name for name in listed if name.rstrip("/") != path}
    upload = _replaceable(fs, path, address, force=True) if MANIFEST in names else None
    foreign = sorted(n for n in names if not is_upload(n) and not (upload and n == MANIFEST))
    if foreign:
        raise OutputError(
            f"{address}: holds files that are no part of a run ({some(foreign)}); choose another -o"
        )
    if upload:
        _replaceable(fs, path, address, force=force)


def _put(fs: Any, file: Path, path: str) -> None:
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(file), path)


@contextlib.contextmanager
def _explained(address: str, error: type[ChopperError], verb: str) -> Iterator[None]:
    """Have whatever a file system raises said in a line."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001  (libraries of file systems raise what they like)
        message = f"{type(exc).__name__}: {exc} {exc.__cause__}"
        raised = error(message_without_secrets(_error_text(exc, address, verb)))
        # Python shows the cause, too.
        raise raised from (exc if message_without_secrets(message) == message else None)


def _error_text(exc: Exception, address: str, verb: str) -> str:
    """Return what an error of any library means."""
    if isinstance(exc, ChopperError):
        return str(exc)
    if isinstance(exc, FileNotFoundError):
        if exc.__cause__ is None:
            return f"{address}: not found"
        # fsspec's, of a server that refuses or does not answer
        denied = getattr(exc.__cause__, "status", None) in (401, 403)
        reason = "access is denied" if denied else f"cannot be {verb}"
        return f"{address}: {reason} ({_named(exc.__cause__)})"
    if isinstance(exc, PermissionError):
        return f"{address}: access is denied ({_named(exc)}); check the credentials"
    if isinstance(exc, ImportError):
        extra = _EXTRAS.get(scheme_of(address), "remote")
        return (
            f"{address}: needs a package that is not installed: pip install "
            f"'chopper-profiler[{extra}]'"
        )
    if isinstance(exc, ValueError) and "rotocol" in str(exc):
        return f"{address}: {scheme_of(address)} is no known kind of address; expected {_SCHEMES}"
    remedy = "; check the credentials" if "Credentials" in type(exc).__name__ else ""
    return f"{address}: cannot be {verb} ({_named(exc)}){remedy}"


def _named(exc: BaseException) -> str:
    """Return the kind of an error, and its first line."""
    text = message_without_secrets(str(exc)).strip()  # before an address is cut
    return f"{type(exc).__name__}: {text.partition(chr(10))[0][:200]}"
