"""Stop strings in text that comes in pieces: what may still become a stop is held back, the rest goes out at once.

The first stop to be complete wins, at one character the longest one; so the cut depends on the text alone, never on
how it came in pieces. One automaton per stop string (Source: Knuth, Morris, Pratt 1977) makes the cost of a character
independent of the length of the strings.
"""

from __future__ import annotations

from collections.abc import Sequence


def _borders(stop: str) -> list[int]:
    """[len(stop)] length of the longest proper prefix of stop[:i+1] that is also its suffix."""
    table, length = [0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = table[length - 1]
        length += stop[length] == char
        table.append(length)
    return table


class _Automaton:
    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0  # characters of `stop` that end the text so far
        self._borders = _borders(stop)

    def feed(self, char: str) -> bool:
        """True when ``char`` completes the stop string. Must not be fed again after that."""
        length = self.length
        while length and self.stop[length] != char:
            length = self._borders[length - 1]
        self.length = length + (self.stop[length] == char)
        return self.length == len(self.stop)


class StopMatcher:
    """Text goes in by `push`; what comes out, joined, is the text before the stop. `matched` names the stop found."""

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: none empty."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that can go out now. After a match: nothing more, whatever comes."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [a.stop for a in self._automata if a.feed(char)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return buffer[: end - len(self.matched)]
        cut = len(buffer) - max(a.length for a in self._automata)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held
