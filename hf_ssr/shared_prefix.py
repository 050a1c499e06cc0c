"""A fork that copies nothing: parent and child in one row of the cache, told apart by the attention mask."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from transformers.cache_utils import DynamicLayer

from .forking import PLACE_WISE
from .growable_layer import GrowableLayer
from .self_check import tells_texts_apart
from .target import Row, Target

MOST_HOLES = 64  # places: then they are closed


class SharedPrefixTarget(Target):
    """
    A [`Target`] of one prompt. On full attention, parent and child are two branches of a tree in one row of the cache:
    each sees the tokens before the fork and its own. In a forward either may have a block of any length.

    What is rejected, or belongs to a child that has gone, leaves holes that nobody sees; they are closed when the child
    goes, or when there are many. Other kinds of caches take the child as a second row.
    """

    def __init__(self, *args):
        super().__init__(*args)
        # of each row, behind the prefix, which all see: what is added to the scores of a place, 0 = it is seen
        self._sees: dict[Row, torch.Tensor] | None = None
        self._unseen = torch.finfo(self.model.dtype).min
        self._prefix = 0  # places
        self._padding: torch.Tensor | None = None  # the same for these, where there is padding in front
        self._branches: dict[Row, tuple[int, int, int]] = {}  # last forward: first place, cached before it, tokens fed

    @cached_property
    def can_share(self) -> bool:
        """Whether parent and child can share a row. Known after the prefill, and the same from then on."""
        kwargs = self.model_kwargs
        positions = kwargs.get("position_ids")
        return (
            self.batch_size == 1
            and self.holds_text_only
            and all(type(layer) in _FULL_ATTENTION and layer.is_initialized for layer in self.cache.layers)
            and positions is not None
            and positions.ndim == 2
            and not any(kwargs.get(name) is not None for name in PLACE_WISE if name not in _DESCRIBED)
            and tells_texts_apart(self.model)
        )

    @property
    def takes_uneven_blocks(self) -> bool:
        """Whether rows may be given differently many tokens in a forward."""
        return self._sees is not None or super().takes_uneven_blocks

    def fork(self, rows: Sequence[Row]) -> None:
        """New rows, forked from rows of the cache; nothing is copied where they can share one."""
        if self._sees is None and not self.can_share:
            return super().fork(rows)
        if self._sees is None:
            self._prefix = self._end
            self._sees = {self.rows[0]: self.rows[0].ids.new_zeros(0, dtype=self.model.dtype)}
            mask = self.model_kwargs.get("attention_mask")
            if mask is not None and not mask[0].all():
                mask = torch.nn.functional.pad(
                    mask[0, : self._prefix], (0, max(0, self._prefix - mask.shape[-1])), value=1
                )
                self._padding = mask.new_zeros(self._prefix, dtype=self.model.dtype).masked_fill(
                    mask == 0, self._unseen
                )
            self._first_position = int(self.model_kwargs["position_ids"][0, -1]) - (self._described - 1)
        for row in rows:
            self._sees[row] = self._sees[row.origin].clone()
        self._add(rows)

    def forward(
        self, phase: str, drafts: Mapping[Row, Sequence[int]], recording: bool = True
    ) -> dict[Row, torch.Tensor]:
        """As of [`Target`]: each row's text that is not cached yet, and a draft behind it."""
        if self._sees is None:
            return super().forward(phase, drafts, recording)
        device = self.rows[0].ids.device
        blocks, positions, begin, branches = [], [], 0, {}
        for row in self.rows:
            block = row.block(drafts.get(row, ()))
            blocks.append(block)
            count = block.shape[1]
            first = self._first_position + row.cached
            positions.append(torch.arange(first, first + count, device=device))
            branches[row] = (self._end + begin, row.cached, count)
            begin += count
        block, width = torch.cat(blocks, dim=1), begin
        kwargs = {**self.model_kwargs, "position_ids": torch.cat(positions)[None]}
        kwargs["attention_mask"] = block.new_ones((1, self._end + width))
        inputs = self.model.prepare_inputs_for_generation(block, next_sequence_length=width, **kwargs)
        inputs["attention_mask"] = self._mask(width, branches)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        with self.rollback.stepping(is_draft=True):
            outputs = self._run(phase, block, inputs)
        self._end += width
        self._branches = branches
        self._count_places(1)
        logits = {}
        for row, (place, cached, count) in branches.items():
            last = place - (self._end - width) + count
            logits[row] = outputs.logits[:, last - count + row.length - cached - 1 : last]
        return logits

    def shape_of(self, widths: Sequence[int]) -> tuple[int, int]:
        """As of [`Target`]: branches of a tree are one row."""
        return (1, sum(widths)) if self._sees is not None or self.can_share else super().shape_of(widths)

    def _mask(self, width: int, branches: Mapping[Row, tuple[int, int, int]]) -> torch.Tensor:
        """Added to the attention scores of a block: 0 at what a token sees; `(1, 1, width, end + width)`."""
        mask = self._sees[self.rows[0]].new_zeros((width, self._end + width))
        mask[:, self._prefix :] = self._unseen
        if self._padding is not None:
            mask[:, : self._prefix] = self._padding
        for row, (place, _, count) in branches.items():
            lines = slice(place - self._end, place - self._end + count)
            mask[lines, self._prefix : self._end] = self._sees[row]
            mask[lines, place : place + count] = mask.new_full((count, count), self._unseen).triu(1)
        return mask[None, None]

    def keep(self, rows: Sequence[Row]) -> None:
        """As of [`Target`]; places that nobody sees any more are holes."""
        if self._sees is None:
            return super().keep(rows)
        sees = {}
        for row in rows:
            seen = self._sees[row]
            mask = seen.new_full((self._end - self._prefix,), self._unseen)
            mask[: len(seen)] = seen
            if row in self._branches:
                place, cached, count = self._branches[row]
                kept = min(count, row.length - 1 - cached)
                mask[place - self._prefix : place - self._prefix + kept] = 0
                row.cached = cached + kept
            sees[row] = mask
        self.rows, self._sees, self._branches = list(rows), sees, {}
        self._close_holes()
        if len(rows) == 1:
            self._sees = None
        self._width, self._fed = 0, dict.fromkeys(self.rows, 0)

    def _close_holes(self) -> None:
        seen = (torch.stack(list(self._sees.values())) == 0).any(dim=0)
        places = seen.nonzero()[:, 0]
        count = int(places[-1]) + 1 if len(places) else 0
        holes = count - len(places)
        if holes > (MOST_HOLES if len(self.rows) > 1 else 0):
            count = len(places)
            for layer in self.cache.layers:
                index = places.to(layer.keys.device) + self._prefix
                for states in (layer.keys, layer.values):
                    states[..., self._prefix : self._prefix + count, :] = states.index_select(-2, index)
            self._sees = {row: mask[places] for row, mask in self._sees.items()}
        else:
            self._sees = {row: mask[:count] for row, mask in self._sees.items()}
        if (excess := self._end - self._prefix - count) > 0:
            for layer in self.cache.layers:
                layer.crop(-excess)
            self._end -= excess

    def _settle_one(self) -> None:
        if self._sees is not None:
            self.undo_forward()
            self.keep(self.rows[:1])
        super()._settle_one()


_FULL_ATTENTION = (DynamicLayer, GrowableLayer)
_DESCRIBED = ("attention_mask", "position_ids")
