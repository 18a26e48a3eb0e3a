"""Waiting prompts as a tree of their blocks' names, in depth-first order: large families of prompts come first.

A node is a stretch of names that the same sequences share, compressed. Its weight is how many have come to it or below
since it was last empty: a family keeps its weight while its members start, so that it is not left for another that has
become the larger one meanwhile. Those that end at a node come before its children; children go by weight, larger first,
then by the arrival of the first that came to them. Adding and removing touch the path of one prompt only.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from services.engine.sequence import Sequence


class _Node:
    __slots__ = ("children", "end", "first", "here", "names", "num_waiting", "parent", "ranked", "start", "weight")

    def __init__(self, names: list[bytes], start: int, end: int, parent: _Node | None) -> None:
        self.names, self.start, self.end, self.parent = names, start, end, parent  # names[start:end] lead here
        self.children: dict[bytes, _Node] = {}  # by their first name
        self.ranked: list[tuple[int, int, _Node]] = []  # (−weight, first, child), ascending
        self.here: list[tuple[int, Sequence]] = []  # (arrival, sequence) of those that end here
        self.weight = self.num_waiting = 0
        self.first = -1  # arrival of the first that came

    @property
    def rank(self) -> tuple[int, int]:
        return -self.weight, self.first

    def unrank(self, child: _Node) -> None:
        """Take a child out of the order; call before its weight changes."""
        del self.ranked[bisect.bisect_left(self.ranked, child.rank, key=lambda entry: entry[:2])]

    def put(self, child: _Node) -> None:
        at = bisect.bisect_left(self.ranked, child.rank, key=lambda entry: entry[:2])
        self.ranked.insert(at, (*child.rank, child))


class PromptTree:
    """A line of waiting sequences; see `services.engine.waiting.Line`."""

    def __init__(self) -> None:
        self._root = _Node([], 0, 0, None)
        self._node_of: dict[str, _Node] = {}

    def add(self, seq: Sequence) -> None:
        node = self._node_for(seq.names)
        bisect.insort(node.here, (seq.arrival, seq))
        self._node_of[seq.seq_id] = node
        while node.parent is not None:
            if node.num_waiting:
                node.parent.unrank(node)
            else:
                node.first = seq.arrival
            node.weight += 1
            node.num_waiting += 1
            node.parent.put(node)
            node = node.parent

    def remove(self, seq: Sequence) -> None:
        node = self._node_of.pop(seq.seq_id)
        del node.here[bisect.bisect_left(node.here, seq.arrival, key=lambda entry: entry[0])]
        while node.parent is not None:
            parent = node.parent
            node.num_waiting -= 1
            if not node.num_waiting:
                parent.unrank(node)
                del parent.children[node.names[node.start]]
            node = parent

    def first(self, count: int, clock: int) -> list[Sequence]:
        found: list[Sequence] = []
        for seq in self._walk():
            if len(found) >= count:
                break
            found.append(seq)
        return found

    def _walk(self) -> Iterator[Sequence]:
        yield from (seq for _, seq in self._root.here)
        ahead = [iter(self._root.ranked)]
        while ahead:
            entry = next(ahead[-1], None)
            if entry is None:
                ahead.pop()
                continue
            node = entry[2]
            yield from (seq for _, seq in node.here)
            ahead.append(iter(node.ranked))

    def _node_for(self, names: list[bytes]) -> _Node:
        """The node at which these names end, made where there is none."""
        node, depth = self._root, 0
        while depth < len(names):
            child = node.children.get(names[depth])
            if child is None:
                child = _Node(names, depth, len(names), node)
                node.children[names[depth]] = child
                return child
            common = _common(child, names, depth)
            if common < child.end - child.start:
                child = _split(child, common)
            node, depth = child, child.end
        return node


def _common(node: _Node, names: list[bytes], depth: int) -> int:
    """How many names of a node these ones share from ``depth`` on: a bisection, for each name tells of all before."""
    low, high = 1, min(node.end - node.start, len(names) - depth)
    while low < high:
        middle = (low + high + 1) // 2
        if node.names[node.start + middle - 1] == names[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(node: _Node, count: int) -> _Node:
    """Put a node for its first names above it; returns that one."""
    parent = node.parent
    assert parent is not None
    above = _Node(node.names, node.start, node.start + count, parent)
    above.weight, above.num_waiting, above.first = node.weight, node.num_waiting, node.first
    parent.unrank(node)
    parent.put(above)
    parent.children[node.names[node.start]] = above
    node.start, node.parent = above.end, above
    above.children[node.names[node.start]] = node
    above.put(node)
    return above
