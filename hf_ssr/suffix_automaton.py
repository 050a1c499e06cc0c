"""The suffix automaton of a token sequence: which suffix of the text being written occurs in it, and what followed.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). Integers only; no tensors.
"""

from collections.abc import Iterable


class SuffixAutomaton:
    """
    Every substring of a growing token sequence, in at most `2 * len` states.

    A state stands for all substrings that end at the same set of positions. `extend` is amortised O(1).

    Example: the automaton of `a b c a b` knows that the suffix `a b` occurred before, ending at index 1, and that `c`
    (index 2) followed it.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # transitions of each state
        self._link = [-1]  # state of the longest suffix that ends at more positions
        self._length = [0]  # length of the longest substring of the state
        self._end = [-1]  # an index at which the state's substrings end
        self._last = 0  # state of the whole sequence
        for token in tokens:
            self.extend(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token: int) -> None:
        """Append one token to the sequence."""
        nexts, link, length = self._next, self._link, self._length
        end = len(self.tokens)
        if (repeated := link[self._last]) > 0:
            self._end[repeated] = end - 1  # `token` now follows it here: the freshest place to continue a repeat from
        self.tokens.append(token)
        state = self._add_state({}, length[self._last] + 1, end)
        walk = self._last
        while walk != -1 and token not in nexts[walk]:
            nexts[walk][token] = state
            walk = link[walk]
        if walk == -1:
            link[state] = 0
        else:
            target = nexts[walk][token]
            if length[walk] + 1 == length[target]:
                link[state] = target
            else:  # `target` also holds longer substrings that do not end here: split the shorter ones off
                clone = self._add_state(dict(nexts[target]), length[walk] + 1, self._end[target])
                link[clone] = link[target]
                while walk != -1 and nexts[walk].get(token) == target:
                    nexts[walk][token] = clone
                    walk = link[walk]
                link[target] = link[state] = clone
        self._last = state

    def _add_state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def longest_repeat(self) -> tuple[int, int]:
        """
        The longest suffix of the sequence that also occurs earlier in it.

        Returns:
            `tuple[int, int]`: its length in tokens, and the index of the token that followed an earlier occurrence;
            `(0, 0)` if its last token never occurred before.
        """
        state = self._link[self._last]
        return (self._length[state], self._end[state] + 1) if state > 0 else (0, 0)


class SuffixMatch:
    """
    Follows, token by token, the longest suffix of another text that occurs in `automaton`'s sequence. `advance` is
    amortised O(1). The sequence may grow meanwhile. A text matched against itself uses `longest_repeat`.
    """

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton = automaton
        self._state = 0
        self.length = 0

    def advance(self, token: int) -> None:
        """Take the next token of the other text into account."""
        automaton, state = self.automaton, self._state
        while state and automaton._length[automaton._link[state]] >= self.length:
            state = automaton._link[state]  # it was split since: this is where the match is now
        while state and token not in automaton._next[state]:
            state = automaton._link[state]
            self.length = automaton._length[state]
        following = automaton._next[state].get(token)
        if following is None:
            self._state, self.length = 0, 0
        else:
            self._state, self.length = following, self.length + 1

    def continuation(self) -> tuple[int, int]:
        """
        Where the matched text goes on.

        Returns:
            `tuple[int, int]`: the length in tokens of the longest matched suffix that something follows, and the index
            of the token that follows it; `(0, 0)` if there is none.
        """
        automaton, state, length = self.automaton, self._state, self.length
        while state:
            follow = automaton._end[state] + 1
            if follow < len(automaton.tokens):
                return length, follow
            state = automaton._link[state]  # it ends the sequence: a shorter suffix may occur earlier
            length = automaton._length[state]
        return 0, 0
