"""Ranges of the numbers in documents: what nobody measures is refused when it is decoded.

Each number of a document's type is declared with one of these types, or with a range of its own
(``tests/test_ranges.py``). A forged one is then one line, like any other damage.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

TIME_MOST_NS = 1 << 61
"""Differences of times must fit into 64 bits."""
TOTAL_MOST_NS = 1 << 57
"""Four years, which the times of a rank's table cover at most; sums over ranks then fit, too."""
NUMBER_MOST = 1 << 53
"""Whole numbers up to it are exact as floats."""
MOST_RANKS = 1 << 20
VALUE_MOST = 1e30

Time = Annotated[int, Meta(ge=-TIME_MOST_NS, le=TIME_MOST_NS)]
"""A moment, or a difference of two, in ns."""
Duration = Annotated[int, Meta(ge=0, le=TOTAL_MOST_NS)]
Count = Annotated[int, Meta(ge=0, le=NUMBER_MOST)]
"""Of things, or of bytes."""
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A code, or a number that the program gave."""
Ordinal = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
"""Of a device; -1 stands for the host in traces."""
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
"""Number of the ranks, processes or cores of something."""
Version = Annotated[int, Meta(ge=1, lt=1 << 31)]
Share = Annotated[float, Meta(ge=0, le=1.001)]
"""Of a whole, rounded."""
Ratio = Annotated[float, Meta(ge=0, le=1e6)]
Rate = Annotated[float, Meta(ge=0, le=1e18)]
"""Per second: of samples, of FLOP, of bytes."""
FileName = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\0]*\Z")]
"""Of a file, with or without its folders; systems take no others."""
Value = Annotated[float, Meta(ge=-VALUE_MOST, le=VALUE_MOST)]
"""A number that the program measured, in a unit of its own."""
