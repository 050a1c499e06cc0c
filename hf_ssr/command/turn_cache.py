"""The cache of a chat, kept from turn to turn."""

import copy
from collections.abc import Sequence

from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from ..forking import unsupported_cache
from ..running.comparing import agreeing


class TurnCache:
    """
    The cache of a text, kept for a next one that begins alike.

    Chat templates drop earlier thoughts, so the next turn's text parts from this one's where the thought began. Full
    attention goes back there. A window that has moved on and a recurrent state cannot: of these layers a copy is kept
    from the last place that a next turn shares for certain ([`remember`]).
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Nothing is kept."""
        self._cache: DynamicCache | None = None
        self._ids: list[int] = []
        self._copies: tuple[int, list] | None = None  # tokens of the text then, and each layer that cannot go back
        self.needs_copies = False  # whether the last text could not be gone back in

    def keep(self, cache: DynamicCache | None, ids: Sequence[int]) -> None:
        """`cache` holds the tokens `ids`. One that SSR does not know how to roll back is not kept."""
        if unsupported_cache(cache) is not None or type(cache) is not DynamicCache or _length(cache) != len(ids):
            self.clear()
            return
        self._cache, self._ids = cache, list(ids)

    def take(self, ids: Sequence[int]) -> tuple[DynamicCache | None, int]:
        """The cache, gone back to what it shares with `ids`, and how many tokens that is; it is not kept any more."""
        cache, held, self._cache = self._cache, self._ids, None
        shared = min(agreeing(held, ids), len(ids) - 1)
        if cache is None or shared == 0:
            self._copies = None  # the next text may be another
            return None, 0
        stuck = shared < len(held) and not all(map(_can_go_back, cache.layers))
        self.needs_copies = self.needs_copies or stuck
        copies = [None] * len(cache.layers)
        if stuck:
            if self._copies is None or self._copies[0] > shared:
                self._copies = None
                return None, 0
            shared, copies = self._copies
        for place, (layer, earlier) in enumerate(zip(cache.layers, copies, strict=True)):
            if earlier is not None:
                cache.layers[place] = copy.deepcopy(earlier)
            elif shared < len(held) and isinstance(layer, DynamicLayer):
                layer.crop(shared - len(held))
        return cache, shared

    def remember(self, cache: DynamicCache, length: int) -> None:
        """The text that the cache holds, `length` tokens, is one to go back to."""
        self._copies = length, [None if type(layer) in _CROPPED else copy.deepcopy(layer) for layer in cache.layers]


_CROPPED = (DynamicLayer, DummyLayer)


def _length(cache: DynamicCache) -> int | None:
    """Tokens that the cache holds; `None` where it is all states: `generate` cannot tell, and go on from it, either."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


def _can_go_back(layer) -> bool:
    """Whether a layer can forget its last tokens, although nothing was recorded."""
    in_window = type(layer) is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window
    return type(layer) in _CROPPED or in_window
