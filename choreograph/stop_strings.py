"""Search for stop strings in generated text (Aho and Corasick, 1975).

One automaton finds all stop strings of a request. It reads every character once, so a token costs
time for its own text, however many strings there are and however long the answer is.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

ROOT = 0  # state of text that no stop string starts with


class StopAutomaton:
    """Immutable automaton of all stop strings of a request.

    A state is a prefix of a stop string: the longest one that the text read so far ends with.
    Building takes time linear in the total length of the strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._next: list[dict[str, int]] = [{}]  # of each state, the state after a character
        self._fallback = [ROOT]  # of each state, the longest shorter state that its text ends with
        self._match_length = [0]  # of each state, the length of the longest stop string that it ends with
        self._num_held = [0]  # of each state, the last characters that a stop string may still remove
        for string in strings:
            state = ROOT
            for character in string:
                children = self._next[state]
                if character not in children:
                    children[character] = len(self._next)
                    self._next.append({})
                    self._num_held.append(self._num_held[state] + 1)
                    self._fallback.append(ROOT)
                    self._match_length.append(0)
                state = children[character]
            self._match_length[state] = len(string)
        self._link()

    def __reduce__(self) -> tuple[object, ...]:
        return stop_automaton, (self._strings,)

    def _link(self) -> None:
        """Set the fallbacks, shorter states first."""
        states = list(self._next[ROOT].values())
        for state in states:  # grows: breadth first
            fallback = self._fallback[state]
            self._match_length[state] = self._match_length[state] or self._match_length[fallback]
            if not self._next[state]:  # no stop string goes on: what may still match is shorter
                self._num_held[state] = self._num_held[fallback]
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(fallback, character)
                states.append(child)

    def _step(self, state: int, character: str) -> int:
        while state != ROOT and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, ROOT)

    def read(self, state: int, text: str) -> tuple[int, int | None]:
        """Read text that follows a state.

        Returns:
            state: after the text.
            start: place in `text` of the first stop string that ends there, negative if it starts earlier; None if
                none ends there.
        """
        start: int | None = None
        for end, character in enumerate(text, 1):
            state = self._step(state, character)
            if (length := self._match_length[state]) and (start is None or end - length < start):
                start = end - length
        return state, start

    def num_held(self, state: int) -> int:
        """Return how many last characters a stop string may still remove."""
        return self._num_held[state]


# by strings, while a request uses them
_AUTOMATONS: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def stop_automaton(strings: Sequence[str]) -> StopAutomaton:
    """Return the automaton of stop strings; equal ones share it."""
    key = tuple(strings)
    automaton = _AUTOMATONS.get(key)
    if automaton is None:
        automaton = _AUTOMATONS[key] = StopAutomaton(key)
    return automaton
