"""Rows of a cache that end at the same place: for models that make their masks themselves, and for states."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from .drafting import Draft, Evidence
from .forking import Rollback, select_rows, shift_rows
from .forwards import Forwards
from .rows import Row


class AlignedRows:
    """
    Each text, and each child, is a row of the cache. All end at the same place; in front of a shorter one is padding.
    What is rejected is rolled back.

    Args:
        forwards ([`Forwards`]): run the model.
        cache (`Cache`): after the prefill.
        rows (`list[Row]`): of the cache, in order; it holds the prompts.
        model_kwargs (`dict`): describe the places of the prompts.
    """

    def __init__(self, forwards: Forwards, cache, rows: list[Row], model_kwargs: dict[str, Any]):
        self.forwards = forwards
        self.cache = cache
        self.rows = rows
        self.model_kwargs = model_kwargs
        self._is_batch = len(rows) > 1
        self._end = rows[0].cached  # places of the cache
        self._width, self._fed = 0, dict.fromkeys(rows, 0)  # tokens of each row in the last forward, `_width` wide
        self._described = rows[0].prompt_length  # places that `model_kwargs` describe
        self._block_kwargs: dict[str, Any] | None = None  # of all places, as long as nothing has changed
        self.rollback = Rollback(forwards.model, cache, self._end)

    @property
    def takes_uneven_blocks(self) -> bool:
        """Whether rows may be given differently many tokens in a forward: each can go back by a count of its own."""
        return (
            type(self.cache) is DynamicCache
            and not self.rollback.holds_more
            and self.rollback.states.settles_rows
            and self.model_kwargs.get("position_ids") is not None
            and not getattr(self.forwards.model.config.get_text_config(decoder=True), "attn_temperature_tuning", False)
        )

    takes_trees = False

    def forward(self, phase: str, drafts: Mapping[Row, Draft]) -> dict[Row, Evidence]:
        """Shorter rows are filled up behind their tokens, where these do not see it, and which is rolled back."""
        ids = {row: drafts[row].ids if row in drafts else [] for row in self.rows}
        texts = {row: row.length - row.cached for row in self.rows}
        fed = {row: texts[row] + len(draft) for row, draft in ids.items()}
        width = max(fed.values())
        block = padded([row.block(draft) for row, draft in ids.items()], width)
        begin = min(texts.values())
        self._describe(self._end + begin)
        evidence = self._feed(phase, block, fed, keep=width - begin + 1)
        return {row: evidence.of(line, texts[row] - begin, fed[row] - begin + 1) for line, row in enumerate(self.rows)}

    def _feed(self, phase: str, block: torch.Tensor, fed: dict[Row, int], keep: int) -> Evidence:
        """A forward over a block of shape `(rows, width)`; the logits of its last `keep` places."""
        width = block.shape[1]
        kwargs = self.forwards.extended(self.model_kwargs, self._end + width - self._described)
        # a draft, or what fills up the shorter rows
        is_draft = any(row.cached + count > row.length or count < width for row, count in fed.items())
        with self.rollback.stepping(is_draft):
            evidence = self.forwards.run(phase, block, kwargs, keep)
        for row, count in fed.items():
            row.cached += count
        self._width, self._fed, self._block_kwargs = width, fed, kwargs
        self._end += width
        return evidence

    @property
    def extra_places(self) -> int:
        """Of the cache, beside the texts: all rows of it are as long as the longest."""
        return len(self.rows) * self._end - sum(row.length for row in self.rows if row.origin is None)

    def line_of(self, row: Row) -> Hashable:
        """Which row of the cache a text or a child lies in: its own."""
        return row

    def undo_forward(self) -> bool:
        """Puts the cache back to before a forward that failed on its way; `False` if some layer cannot go back."""
        return self.rollback.abandon(self._end)

    def keep(self, rows: Sequence[Row]) -> None:
        """The cache forgets every other row, rejected draft tokens, and what filled rows up."""
        rejected = {row: max(0, row.cached - (row.length - 1)) for row in rows}
        if not self.rollback.can_roll_back:  # a plain step beside a state, interrupted before its token was written
            rejected = dict.fromkeys(rows, 0)
        excess = {row: self._width - self._fed[row] + rejected[row] for row in rows}
        longest = max(row.cached - rejected[row] for row in rows)
        is_padded = not self._is_batch and self._end - min(excess.values()) > longest  # a longer row has gone
        if len(set(excess.values())) == 1 and not is_padded:
            count = self.rollback.roll_back(next(iter(excess.values())), self._width, len(self.rows))
            self._end -= count
            if len(rows) < len(self.rows):
                self._select([self.rows.index(row) for row in rows])
                self.rows = list(rows)
            for row in rows:
                row.cached -= max(0, count - (self._width - self._fed[row]))
        else:
            kwargs = dict(self._described_to_end())
            if kwargs.get("attention_mask") is None:  # dropped by `generate` where nothing is padded
                kwargs["attention_mask"] = rows[0].ids.new_ones((len(self.rows), self._end))
            places = [self.rows.index(row) for row in rows]
            # of rows that go it does not matter
            kept = [self._width - excess.get(row, min(excess.values())) for row in self.rows]
            self.rollback.states.settle(kept, self._width)
            self.rollback.states.select_rows(places)
            for row in rows:
                row.cached -= rejected[row]
            self._end = self._described = longest
            self.model_kwargs = shift_rows(self.cache, kwargs, places, len(self.rows), list(excess.values()), self._end)
            self.rows = list(rows)
        self._width, self._fed = 0, dict.fromkeys(self.rows, 0)  # all that is left is text
        self._block_kwargs = None

    def fork(self, rows: Sequence[Row]) -> None:
        """
        New rows, forked from rows of the cache.

        Raises:
            `torch.OutOfMemoryError`: if they do not fit; none of them is there then.
        """
        places = list(range(len(self.rows)))
        try:
            self._select(places + [self.rows.index(row.parent) for row in rows])
        except torch.OutOfMemoryError:
            self._select(places)  # some layers may have all rows already
            raise
        for row in rows:
            row.cached = row.parent.cached
        self.rows += rows
        self._fed = dict.fromkeys(self.rows, 0)

    def settle(self, row: Row, can_keep: bool, is_whole_wanted: bool) -> None:
        """Leaves one row, and in it all of the text but its last token if that is wanted and possible."""
        is_whole = self.undo_forward()
        if is_whole and can_keep:
            self.keep([row])
        elif len(self.rows) > 1:
            self._select([0])
            self.rows = [row]
        if is_whole and is_whole_wanted and row.cached < row.length - 1:
            missing = row.ids[:, row.cached : row.length - 1].clone()
            self._feed("speculate", missing, {row: missing.shape[1]}, keep=1)

    def _select(self, places: list[int]) -> None:
        self._describe(self._end)
        self.model_kwargs = select_rows(self.cache, self.model_kwargs, places, len(self.rows))

    def _described_to_end(self) -> dict[str, Any]:
        """`model_kwargs` of all places of the cache."""
        if self._block_kwargs is not None:
            return self._block_kwargs
        return self.forwards.extended(self.model_kwargs, self._end - self._described)

    def _describe(self, end: int) -> None:
        """Lets `model_kwargs` (positions, mask) describe the places before `end`."""
        if end > self._described:
            self.model_kwargs = self.forwards.extended(self.model_kwargs, end - self._described)
            self._described = end


def padded(blocks: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Blocks of shape `(1, tokens)` as one, filled up behind, of shape `(rows, width)`."""
    if len(blocks) == 1 and blocks[0].shape[1] == width:
        return blocks[0]
    return torch.cat([F.pad(block, (0, width - block.shape[1])) for block in blocks])
