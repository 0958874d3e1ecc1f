"""Proof that a regular expression takes linear time: no two of its loops can share a text.

A backtracking matcher tries every way through its pattern. The number of ways grows with the text
exactly when some text w leads from a loop p back to p, from p to another loop q, and from q back to
q: every repetition of w then has one more place at which p was left for q. A search adds the loop
that skips what stands before the match. The pattern is turned into its position automaton
(Glushkov's: a state for each character of the pattern), in which such a pair is looked for.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from re import _compiler, _parser  # type: ignore[attr-defined]
from typing import Any

_BEGIN, _END = 1, 2
"""Bits of the two characters that stand around every text."""
_MOST_COPIES = 80
"""A bounded repetition is written out up to this; beyond, it counts as unbounded."""
_SKIP = 0
"""The state that skips what stands before a match."""
_OTHERS = "éÀ²٣\u2003\u00a0\u0085\u2028µ°−×→\U0001f600İıſK"


@dataclass
class _Part:
    """A piece of a pattern: whether it may be empty, and the states that begin and end it."""

    nullable: bool = True
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


class _Automaton:
    """The position automaton of a pattern."""

    def __init__(self, pattern: str, flags: int, how: str) -> None:
        self._tree = _parser.parse(pattern, flags)
        self._flags = self._tree.state.flags
        self._chars = sorted({*map(chr, range(128)), *_OTHERS, *pattern})
        # Bits 0 and 1 are what stands around the text.
        every = (1 << (len(self._chars) + 2)) - 1
        self.classes = [every & ~_END]
        self.follow: list[Counter[int]] = [Counter()]
        whole = self._sequence(list(self._tree))
        if how == "fullmatch":
            whole = self._then(whole, self._state(_END))
        if how == "search":
            self.follow[_SKIP][_SKIP] += 1
            for state in whole.first:
                self.follow[_SKIP][state] += 1
        self.accepting = set(whole.last)

    def _state(self, allowed: int) -> _Part:
        self.classes.append(allowed)
        self.follow.append(Counter())
        return _Part(False, [len(self.classes) - 1], [len(self.classes) - 1])

    def _then(self, left: _Part, right: _Part) -> _Part:
        for a in left.last:
            for b in right.first:
                self.follow[a][b] += 1
        return _Part(
            left.nullable and right.nullable,
            left.first + (right.first if left.nullable else []),
            right.last + (left.last if right.nullable else []),
        )

    def _either(self, parts: list[_Part]) -> _Part:
        return _Part(
            any(p.nullable for p in parts),
            [s for p in parts for s in p.first],
            [s for p in parts for s in p.last],
        )

    def _sequence(self, nodes: list[Any]) -> _Part:
        found = _Part()
        for node in nodes:
            found = self._then(found, self._node(node))
        return found

    def _node(self, node: tuple[Any, Any]) -> _Part:
        op, value = node
        match str(op):
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                return self._repeat(*value)
            case "SUBPATTERN":
                return self._sequence(list(value[3]))
            case "ATOMIC_GROUP":
                return self._sequence(list(value))
            case "BRANCH":
                return self._either([self._sequence(list(b)) for b in value[1]])
            case "AT" if str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
                multiline = self._flags & re.MULTILINE and str(value) == "AT_BEGINNING"
                return self._state(_BEGIN | (self._class_of("\n") if multiline else 0))
            case "AT" if str(value) in ("AT_END", "AT_END_STRING"):
                return self._state(_END)
            case "AT":
                # A word boundary may fail at the end: what ends with it does not accept at once.
                return self._either([_Part(), self._state(_END)])
            case "ASSERT" | "ASSERT_NOT":
                # What is looked at is read, and leads nowhere.
                body = self._then(self._sequence(list(value[1])), self._state(0))
                body.last = []
                return self._either([_Part(), body])
            case "GROUPREF" | "GROUPREF_EXISTS":
                raise ValueError("a reference to a group")
        return self._state(self._class_of_node(node))

    def _repeat(self, least: int, most: Any, body: Any) -> _Part:
        nodes = list(body)
        if most is _parser.MAXREPEAT or most > _MOST_COPIES:
            found = _Part()
            for _ in range(min(least, _MOST_COPIES) - 1):
                found = self._then(found, self._sequence(nodes))
            loop = self._sequence(nodes)
            for a in loop.last:
                for b in loop.first:
                    self.follow[a][b] += 1
            loop.nullable = loop.nullable or least == 0
            return self._then(found, loop)
        found = _Part()
        for i in range(most):
            copy = self._sequence(nodes)
            copy.nullable = copy.nullable or i >= least
            found = self._then(found, copy)
        return found

    def _class_of(self, chars: str) -> int:
        return sum(1 << (i + 2) for i, c in enumerate(self._chars) if c in chars)

    def _class_of_node(self, node: tuple[Any, Any]) -> int:
        one = _parser.SubPattern(self._tree.state, [node])
        matcher = _compiler.compile(one, self._flags)
        return sum(1 << (i + 2) for i, c in enumerate(self._chars) if matcher.fullmatch(c))

    def _component(self, start: int) -> set[int]:
        """States that a state leads to and that lead back to it."""
        return self._reached(start, self.follow) & self._reached(start, self._before())

    def _before(self) -> list[Counter[int]]:
        before: list[Counter[int]] = [Counter() for _ in self.follow]
        for a, ends in enumerate(self.follow):
            for b in ends:
                before[b][a] += 1
        return before

    @staticmethod
    def _reached(start: int, edges: list[Counter[int]]) -> set[int]:
        seen: set[int] = set()
        waiting = [start]
        while waiting:
            for state in edges[waiting.pop()]:
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)
        return seen

    def shared_text(self) -> str | None:
        """A text that two loops can share, or None for a pattern of linear time."""
        before = self._before()
        forward = [self._reached(s, self.follow) for s in range(len(self.follow))]
        loops = [s for s in range(len(self.follow)) if s in forward[s]]
        for a in loops:
            for b in self.follow[a]:
                if self.follow[a][b] > 1 and a in forward[b]:
                    return self._word([self.classes[b]])
        for q in loops:
            if q in self.accepting:
                continue  # once there, the match has succeeded
            leads_to_q = self._reached(q, before) | {q}
            for p in loops:
                if p != q and q in forward[p]:
                    word = self._pumped(p, q, forward, leads_to_q)
                    if word is not None:
                        return self._word(word)
        return None

    def _pumped(
        self, p: int, q: int, forward: list[set[int]], leads_to_q: set[int]
    ) -> list[int] | None:
        start, goal = (p, p, q), (p, q, q)
        came: dict[tuple[int, int, int], tuple[tuple[int, int, int], int]] = {}
        waiting = deque([start])
        while waiting:
            at = waiting.popleft()
            for x in self.follow[at[0]]:
                if p not in forward[x]:
                    continue
                for z in self.follow[at[2]]:
                    shared = self.classes[x] & self.classes[z]
                    if not shared or q not in forward[z]:
                        continue
                    for y in self.follow[at[1]]:
                        common = shared & self.classes[y]
                        if not common or y not in leads_to_q or (x, y, z) in came:
                            continue
                        came[x, y, z] = at, common
                        if (x, y, z) == goal:
                            return self._path(came, start, goal)
                        waiting.append((x, y, z))
        return None

    @staticmethod
    def _path(
        came: dict[tuple[int, int, int], tuple[tuple[int, int, int], int]],
        start: tuple[int, int, int],
        at: tuple[int, int, int],
    ) -> list[int]:
        word: list[int] = []
        while not word or at != start:
            at, common = came[at]
            word.append(common)
        return word[::-1]

    def _word(self, classes: list[int]) -> str:
        return "".join(
            next((c for i, c in enumerate(self._chars) if common >> (i + 2) & 1), "␄")
            for common in classes
        )


def shared_text(pattern: str, flags: int = 0, how: str = "search") -> str | None:
    """Return a text whose repetition takes more than linear time, or None where there is none.

    Args:
        pattern: the regular expression.
        flags: as ``re.compile`` takes them.
        how: "search" (also for ``sub``, ``findall`` and the like), "match" or "fullmatch".

    Raises:
        ValueError: it refers to its own groups, of which nothing can be proved.
    """
    return _Automaton(pattern, flags, how).shared_text()
