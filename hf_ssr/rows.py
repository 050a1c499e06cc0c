"""A text that is being written, and how much of it the cache holds."""

import math
from collections.abc import Sequence

import torch


class Row:
    """
    A text and how much of it its row of the cache holds.

    Args:
        ids (`torch.LongTensor` of shape `(1, length)`): the text so far.
        max_length (`int`): most tokens of the text. The last of them is never fed.
        origin (`Row`, *optional*): the row that it was forked from.
    """

    def __init__(self, ids: torch.Tensor, max_length: int, origin: "Row | None" = None):
        self.length = self.prompt_length = ids.shape[1]
        self.max_length = max_length
        self.most_places: float = math.inf  # of the cache and of a table of positions, filled up or not
        self.cached = 0  # tokens of the text whose keys and values in the cache are right
        self.origin = origin
        self._ids = ids.new_zeros((1, self.length + 1024), dtype=torch.long)  # as plain `generate` returns, from any
        self._ids[:, : self.length] = ids

    @property
    def ids(self) -> torch.Tensor:
        """The text so far, shape `(1, length)`."""
        return self._ids[:, : self.length]

    @property
    def last(self) -> torch.Tensor:
        """The last token, shape `(1,)`."""
        return self._ids[0, self.length - 1 : self.length]

    @property
    def parent(self) -> "Row":
        """The row that a child's was forked from."""
        assert self.origin is not None, "it was not forked"
        return self.origin

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.max_length - self.length

    @property
    def widest(self) -> float:
        """Tokens that may be fed behind the text, whether they count or fill the row up."""
        return self.most_places - self.length

    def append(self, token: int) -> None:
        """The text grows by one token."""
        if self.length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], dim=1)
        self._ids.select(1, self.length).fill_(token)
        self.length += 1

    def block(self, draft: Sequence[int]) -> torch.Tensor:
        """What the cache does not hold yet, and a draft behind it, shape `(1, length)`."""
        block = self._ids[:, self.cached : self.length]
        return torch.cat([block, block.new_tensor([draft])], dim=1) if draft else block

    def fork(self) -> "Row":
        """A row with the same text, which is not in the cache yet."""
        row = Row(self.ids, self.max_length, self)
        row.most_places = self.most_places
        return row
