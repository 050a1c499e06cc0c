"""The target: the model, its cache, and the rows in it. What a forward is given, and what the cache keeps of it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from .config import SSRConfig
from .forking import PLACE_WISE, Rollback, select_rows, shift_rows
from .growable_layer import as_dynamic, grow_in_place
from .metrics import SSRMetrics


class Row:
    """
    A text and how much of it its row of the cache holds.

    Args:
        ids (`torch.LongTensor` of shape `(1, length)`): the text so far.
        max_length (`int`): most tokens of the text. The last of them is never fed.
        origin (`Row`, *optional*): the row that it was forked from.
    """

    def __init__(self, ids: torch.LongTensor, max_length: int, origin: "Row | None" = None):
        self.length = ids.shape[1]
        self.max_length = max_length
        self.cached = 0  # tokens of the text that the cache holds
        self.origin = origin
        self._ids = ids.new_zeros((1, self.length + 1024), dtype=torch.long)  # as plain `generate` returns, from any
        self._ids[:, : self.length] = ids

    @property
    def ids(self) -> torch.LongTensor:
        """The text so far, shape `(1, length)`."""
        return self._ids[:, : self.length]

    @property
    def last(self) -> torch.LongTensor:
        """The last token, shape `(1,)`."""
        return self._ids[0, self.length - 1 : self.length]

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.max_length - self.length

    def append(self, token: int) -> None:
        """The text grows by one token."""
        if self.length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], dim=1)
        self._ids.select(1, self.length).fill_(token)
        self.length += 1

    def block(self, draft: Sequence[int]) -> torch.LongTensor:
        """What the cache does not hold yet, and a draft behind it, shape `(1, length)`."""
        block = self._ids[:, self.cached : self.length]
        return torch.cat([block, block.new_tensor([draft])], dim=1) if draft else block

    def fork(self) -> "Row":
        """A row with the same text, which is not in the cache yet."""
        return Row(self.ids, self.max_length, self)


class Target:
    """
    The model and one cache for all rows. Rows end at the same place of the cache; in front of a shorter one is padding.

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
        input_ids: torch.LongTensor,
        config: SSRConfig,
        metrics: SSRMetrics,
        model_kwargs: dict[str, Any],
    ):
        self.model = model
        self.config = config
        self.metrics = metrics
        self.model_kwargs = model_kwargs
        self.rows = [Row(ids, config.max_length) for ids in input_ids.split(1)]
        self.batch_size, self._width = input_ids.shape
        self._fed = dict.fromkeys(self.rows, self._width)  # tokens of each row in the last forward, `_width` wide
        self._end = self._described = self._width  # places of the cache; of these, described by `model_kwargs`
        self._block_kwargs: dict[str, Any] | None = model_kwargs  # of all places, as long as nothing has changed
        self._next_logits: torch.Tensor | None = None
        self.last_shape = (0, 0)  # rows and tokens of the last forward

    @property
    def has_logits(self) -> bool:
        """Whether the next tokens can be picked without a forward: only after the prefill."""
        return self._next_logits is not None

    @property
    def holds_text_only(self) -> bool:
        """Whether the cache is a DynamicCache with nothing before the texts. One that the user has filled may have."""
        return type(self.cache) is DynamicCache and not self.rollback.holds_more

    @property
    def takes_uneven_blocks(self) -> bool:
        """Whether rows may be given differently many tokens in a forward: each can go back by a count of its own."""
        return (
            self.holds_text_only
            and self.rollback.states.settles_rows
            and self.model_kwargs.get("position_ids") is not None
            and not getattr(self.model.config.get_text_config(decoder=True), "attn_temperature_tuning", False)
        )

    def prefill(self) -> None:
        """The forward over the prompts."""
        ids = torch.cat([row.ids for row in self.rows])
        with self.metrics.timed_forward("prefill", len(self.rows), self._width, ids.device):
            outputs = self.model._prefill(ids, self.config, self.model_kwargs, is_first_iteration=True)
        self.cache = self.model_kwargs["cache"] = outputs.cache
        self._next_logits = outputs.logits[:, -1:]
        self.last_shape = tuple(ids.shape)
        if type(self.cache) is DynamicCache and self.config.setting("grow_in_place"):
            grow_in_place(self.cache)
        self.rollback = Rollback(self.model, self.cache, self._width)
        most = self._width + self.rollback.spare_places, _positions(self.model) - self.rollback.places_ahead
        for row in self.rows:
            row.cached = row.length
            row.max_length = min(row.max_length, min(most) + 1)

    def forward(
        self, phase: str, drafts: Mapping[Row, Sequence[int]], recording: bool = True
    ) -> dict[Row, torch.Tensor]:
        """
        One forward over what the cache does not hold of each row yet, and over a draft behind it. Shorter rows are
        filled up behind their tokens, where these do not see it, and which is rolled back.

        Args:
            phase (`str`): of the metrics.
            drafts (`Mapping[Row, Sequence[int]]`): proposed tokens of rows that have any.
            recording (`bool`): whether tokens of this forward may have to be rolled back.

        Returns:
            `dict[Row, torch.FloatTensor]`: of each row, shape `(1, draft_length + 1, vocab_size)`: what comes after the
            text, and after each draft token.
        """
        if self._next_logits is not None:  # left over from the prefill
            logits, self._next_logits = self._next_logits, None
            return dict(zip(self.rows, logits.split(1), strict=True))
        self.rollback.record(recording)
        drafts = {row: drafts.get(row, ()) for row in self.rows}
        texts = {row: row.length - row.cached for row in self.rows}
        fed = {row: texts[row] + len(draft) for row, draft in drafts.items()}
        width = max(fed.values())
        blocks = [_padded(row.block(draft), width) for row, draft in drafts.items()]
        block = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        begin = min(texts.values())
        self._describe(self._end + begin)
        logits = self._feed(phase, block, fed, keep=width - begin + 1)
        return {
            row: logits[place : place + 1, texts[row] - begin : fed[row] - begin + 1]
            for place, row in enumerate(self.rows)
        }

    def _feed(self, phase: str, block: torch.LongTensor, fed: dict[Row, int], keep: int) -> torch.Tensor:
        """A forward over a block of shape `(rows, width)`; the logits of its last `keep` places."""
        width = block.shape[1]
        kwargs = self._extended(self.model_kwargs, self._end + width - self._described)
        inputs = self.model.prepare_inputs_for_generation(block, next_sequence_length=width, **kwargs)
        if "logits_to_keep" in inputs:  # set last: some models overwrite it while preparing
            inputs["logits_to_keep"] = keep
        # a draft, or what fills up the shorter rows
        is_draft = any(row.cached + count > row.length or count < width for row, count in fed.items())
        with self.rollback.stepping(is_draft):
            outputs = self._run(phase, block, inputs)
        for row, count in fed.items():
            row.cached += count
        self._width, self._fed, self._block_kwargs = width, fed, kwargs
        self._end += width
        self._count_places(len(self.rows))
        return outputs.logits[:, -keep:]

    def _count_places(self, rows: int) -> None:
        """`rows` rows of the cache are as long as the longest: what is there beside the texts?"""
        extra = rows * self._end - sum(row.length for row in self.rows if row.origin is None)
        self.metrics.extra_places = max(self.metrics.extra_places, extra)

    def _run(self, phase: str, block: torch.LongTensor, inputs: dict[str, Any]):
        with self.metrics.timed_forward(phase, *block.shape, block.device):
            outputs = self.model(**inputs, return_dict=True)
        self.last_shape = tuple(block.shape)
        return outputs

    def shape_of(self, widths: Sequence[int]) -> tuple[int, int]:
        """Rows and tokens of a forward that gives each row so many tokens."""
        return len(widths), max(widths)

    def undo_forward(self) -> bool:
        """Puts the cache back to before a forward that failed on its way; `False` if some layer cannot go back."""
        return self.rollback.abandon(self._end)

    def keep(self, rows: Sequence[Row]) -> None:
        """The cache forgets every other row, rejected draft tokens, and what filled rows up."""
        excess = {row: self._width - self._fed[row] + max(0, row.cached - (row.length - 1)) for row in rows}
        longest = max(min(row.cached, row.length - 1) for row in rows)
        is_padded = self.batch_size == 1 and self._end - min(excess.values()) > longest  # a longer row has gone
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
                row.cached = min(row.cached, row.length - 1)
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
            self._select(places + [self.rows.index(row.origin) for row in rows])
        except torch.OutOfMemoryError:
            self._select(places)  # some layers may have all rows already
            raise
        self._add(rows)
        self._fed = dict.fromkeys(self.rows, 0)

    def _add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.cached = row.origin.cached
        self.rows += rows

    def settle(self) -> None:
        """Leaves the cache of one text as plain `generate` leaves it: one row, all of the text but its last token."""
        try:
            if self.batch_size == 1:
                self._settle_one()
        finally:
            self.rollback.record(False)
            as_dynamic(self.cache)

    def _settle_one(self) -> None:
        row = self.rows[0]
        is_whole = self.undo_forward()
        if is_whole and self.rollback.can_roll_back and not self.has_logits:
            self.keep([row])
        elif len(self.rows) > 1:
            self._select([0])
            self.rows = [row]
        if not is_whole:
            return
        is_kept = self.config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)
        if is_kept and row.cached < row.length - 1:
            missing = row.ids[:, row.cached : row.length - 1].clone()
            self._feed("speculate", missing, {row: missing.shape[1]}, keep=1)

    def _select(self, places: list[int]) -> None:
        self._describe(self._end)
        self.model_kwargs = select_rows(self.cache, self.model_kwargs, places, len(self.rows))

    def _described_to_end(self) -> dict[str, Any]:
        """`model_kwargs` of all places of the cache."""
        if self._block_kwargs is not None:
            return self._block_kwargs
        return self._extended(self.model_kwargs, self._end - self._described)

    def _describe(self, end: int) -> None:
        """Lets `model_kwargs` (positions, mask) describe the places before `end`."""
        if end > self._described:
            self.model_kwargs = self._extended(self.model_kwargs, end - self._described)
            self._described = end

    def _extended(self, model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
        """`model_kwargs` that describe `count` tokens more, or fewer if it is negative."""
        if count == 0:
            return model_kwargs
        if count < 0:
            cut = {name: model_kwargs[name][..., :count] for name in PLACE_WISE if model_kwargs.get(name) is not None}
            return {**model_kwargs, **cut}
        extended = self.model._update_model_kwargs_for_generation({}, dict(model_kwargs), num_new_tokens=count)
        types = model_kwargs.get("token_type_ids")
        if types is not None:  # each as the last, as in steps of one token; transformers would repeat the last `count`
            extended["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, count)], dim=-1)
        return extended


def _padded(block: torch.LongTensor, width: int) -> torch.LongTensor:
    return block if block.shape[1] == width else F.pad(block, (0, width - block.shape[1]))


def _positions(model) -> float:
    """Of a table of positions, that may not be passed; others go on."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "rope_parameters", None) is not None:
        return math.inf
    names = ("max_position_embeddings", "max_target_positions")
    return min((size for name in names if (size := getattr(config, name, None))), default=math.inf)
