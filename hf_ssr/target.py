"""The target: the model, its cache, and the texts in it. What a forward is given, and what the cache keeps of it."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from .cache_slots import as_plain, into_slots
from .config import SSRConfig
from .drafting import Draft, Evidence
from .forking import Rollback
from .forwards import Forwards, most_positions
from .host import is_of_user, prefill
from .metrics import SSRMetrics
from .rows import Row
from .self_trials import tolerance
from .target_rows import AlignedRows
from .target_slots import RowsInSlots


class Target:
    """
    The model and one cache for all texts and their children. They lie in slots if the model takes our masks
    ([`RowsInSlots`]), else in rows that end at the same place ([`AlignedRows`]).

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): the prompts, padded on the left.
        config ([`SSRConfig`]): as `generate` prepares it.
        metrics ([`SSRMetrics`]): counts forwards and seconds.
        model_kwargs (`dict`): as `generate` prepares them.
    """

    def __init__(
        self,
        model,
        input_ids: torch.Tensor,
        config: SSRConfig,
        metrics: SSRMetrics,
        model_kwargs: dict[str, Any],
    ):
        self.model = model
        self.config = config
        self.metrics = metrics
        self.batch_size = len(input_ids)
        self._model_kwargs = model_kwargs
        self._prompts = [Row(ids, config.max_length) for ids in input_ids.split(1)]
        self._forwards = Forwards(model, metrics)
        self._layout: AlignedRows | RowsInSlots | None = None
        self._next_logits: torch.Tensor | None = None

    @property
    def rows(self) -> list[Row]:
        """All that is written: the texts, then their children."""
        return self._prompts if self._layout is None else self._layout.rows

    @property
    def _prefilled(self) -> AlignedRows | RowsInSlots:
        assert self._layout is not None, "the prompts have not been read"
        return self._layout

    @property
    def last_shape(self) -> tuple[int, int]:
        """Rows and tokens of the last forward."""
        return self._forwards.last_shape

    @property
    def last_seconds(self) -> float:
        """What the last forward took."""
        return self._forwards.last_seconds

    @property
    def has_logits(self) -> bool:
        """Whether the next tokens can be picked without a forward: only after the prefill."""
        return self._next_logits is not None

    @property
    def takes_uneven_blocks(self) -> bool:
        """Whether rows may be given differently many tokens in a forward."""
        return self._prefilled.takes_uneven_blocks

    @property
    def takes_trees(self) -> bool:
        """Whether a draft may be a tree."""
        return self._prefilled.takes_trees

    @property
    def is_inexact(self) -> bool:
        """Whether what a forward rounds depends on its size and may decide between two tokens."""
        return tolerance(self.model, self.cache) is None

    def ask_for(self, layers: Iterable[int]) -> None:
        """Whose hidden states are wanted of the forwards to come, the prompt's not among them."""
        self._forwards.layers = tuple(sorted(set(layers)))

    def try_branches(self) -> None:
        """Before a fork: whether the model takes a child as a branch. The first time, that needs some forwards."""
        _ = self._prefilled.takes_uneven_blocks

    def prefill(self) -> None:
        """The forward over the prompts."""
        rows = self._prompts
        ids = torch.cat([row.ids for row in rows])
        count, width = ids.shape
        with self.metrics.timed_forward("prefill", count, width, ids.device):
            outputs = prefill(self.model, ids, self.config, self._model_kwargs)
        self.cache = self._model_kwargs["cache"] = outputs.cache
        self._next_logits = outputs.logits[:, -1:]
        self._forwards.last_shape = count, width
        if type(self.cache) is DynamicCache:
            into_slots(self.cache, self.config.setting("grow_in_place"))
        rollback = Rollback(self.model, self.cache, width)
        most = width + rollback.spare_places, most_positions(self.model) - rollback.places_ahead
        for row in rows:
            row.cached = row.length
            row.max_length = int(min(row.max_length, min(most) + 1))
            # a row of a batch need not wait for what fills up another, which has more room
            row.most_places = row.max_length - 1 if len(rows) == 1 else min(most)
        self._layout = self._first_layout(rows)

    def _first_layout(self, rows: list[Row]) -> AlignedRows | RowsInSlots:
        if RowsInSlots.fits(self._forwards, self.cache, rows, self._model_kwargs):
            in_slots = RowsInSlots(self._forwards, self.cache, list(rows), self._model_kwargs)
            if len(rows) == 1 or in_slots.takes_masks:
                return in_slots
        return AlignedRows(self._forwards, self.cache, list(rows), self._model_kwargs)

    def forward(self, phase: str, drafts: Mapping[Row, Draft]) -> dict[Row, Evidence]:
        """
        One forward over what the cache does not hold of each row yet, and over a draft behind it.

        Args:
            phase (`str`): of the metrics.
            drafts (`Mapping[Row, Draft]`): of rows that have any. A tree only if [`Target.takes_trees`].

        Returns:
            `dict[Row, Evidence]`: of each row, what comes after the text, and after each draft token.
        """
        if self._next_logits is not None:  # left over from the prefill
            logits, self._next_logits = self._next_logits, None
            return dict(zip(self.rows, map(Evidence, logits.split(1)), strict=True))
        evidence = self._prefilled.forward(phase, drafts)
        self._count_places()
        return evidence

    def line_of(self, row: Row) -> Hashable:
        """Which row of the cache a text or a child lies in: they may share one."""
        return self._prefilled.line_of(row)

    @property
    def least_shape(self) -> tuple[int, int]:
        """Rows and tokens of a forward that gives every text and child one token."""
        lines = Counter(map(self.line_of, self.rows))
        return len(lines), max(lines.values())

    def undo_forward(self) -> bool:
        """Puts the cache back to before a forward that failed on its way; `False` if some layer cannot go back."""
        return self._prefilled.undo_forward()

    def keep(self, rows: Sequence[Row]) -> None:
        """The cache forgets every other row, and rejected draft tokens."""
        self._prefilled.keep(rows)

    def fork(self, rows: Sequence[Row]) -> None:
        """
        New rows, forked from rows of the cache.

        Raises:
            `torch.OutOfMemoryError`: if they do not fit; none of them is there then.
        """
        layout = self._prefilled
        if type(layout) is RowsInSlots and not layout.takes_masks:
            layout.align()
            self._layout = layout = AlignedRows(self._forwards, self.cache, layout.rows, self._model_kwargs)
        layout.fork(rows)

    def settle(self) -> None:
        """Leaves the cache of one text as plain `generate` leaves it: one row, all of the text but its last token."""
        if self._layout is None:
            return
        is_handed_out = self.config.return_dict_in_generate or is_of_user(self.cache)
        try:
            if self.batch_size == 1:
                self._layout.settle(self.rows[0], not self.has_logits, is_handed_out)
                self._count_places()
        finally:
            as_plain(self.cache)

    def _count_places(self) -> None:
        self.metrics.extra_places = max(self.metrics.extra_places, self._prefilled.extra_places)
