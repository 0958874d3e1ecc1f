"""Download the public traces of catalogue.csv, and check each by its SHA-256.

    python tests/golden/fetch.py DIRECTORY

The hash is of the uncompressed bytes, after credentials that were published by mistake are blanked.
What is there and right is not downloaded again.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

CATALOGUE = Path(__file__).with_name("catalogue.csv")
HOST = "https://raw.githubusercontent.com"


def catalogue(path: Path = CATALOGUE) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plain(content: bytes) -> bytes:
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def blank(content: bytes, ranges: str) -> bytes:
    """Overwrite ``offset:length:filler``, whose last character fills the rest of the length."""
    blanked = bytearray(content)
    for place in ranges.split():
        offset, length, filler = place.split(":")
        text = filler.ljust(int(length), filler[-1]).encode()
        blanked[int(offset) : int(offset) + int(length)] = text
    return bytes(blanked)


def is_right(row: dict[str, str], content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == row["sha256"]


def fetch(directory: Path, rows: list[dict[str, str]], host: str = HOST) -> list[str]:
    """Download what is missing; return a sentence for each file that could not be had."""
    problems = []
    downloads: dict[str, bytes] = {}
    for row in rows:
        file = directory / row["name"]
        if file.is_file() and is_right(row, plain(file.read_bytes())):
            continue
        url = "/".join((host, row["repository"], row["commit"], urllib.parse.quote(row["path"])))
        try:
            if url not in downloads:
                with urllib.request.urlopen(url) as response:
                    downloads = {url: response.read()}
            content = plain(downloads[url])
            if row["member"]:
                with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                    (member,) = (m for m in archive if Path(m.name).name == row["member"])
                    extracted = archive.extractfile(member)
                    assert extracted is not None
                    content = extracted.read()
        except (OSError, ValueError, tarfile.TarError) as exc:
            problems.append(f"{row['name']}: {url}: {exc}")
            continue
        content = blank(content, row["blanked"])
        if not is_right(row, content):
            problems.append(f"{row['name']}: {url}: not the bytes of the catalogue")
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        compressed = gzip.compress(content, mtime=0) if file.suffix == ".gz" else content
        file.write_bytes(compressed)
        print(file)
    return problems


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    failed = fetch(Path(sys.argv[1]), catalogue())
    print(*failed, sep="\n", file=sys.stderr)
    sys.exit(bool(failed))
