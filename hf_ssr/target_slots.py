"""Rows of a cache of slots: each goes on by as many tokens as it keeps, and a child is a branch in its parent's row."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer

from .cache_slots import SlotLayer
from .drafting import Draft, Evidence
from .forking import PLACE_WISE, select_rows
from .forwards import Forwards
from .places import Fed, Places
from .rows import Row
from .self_check import tells_texts_apart
from .slot_masks import SlotsOfCache
from .target_rows import padded

# what places are described by: positions go on, the mask is ours, types are repeated or zero
_DESCRIBED = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


class RowsInSlots:
    """
    Each text is a row of the cache, whose slots are written where the text goes on. A mask says who sees whom, so what
    is rejected needs no rollback, rows need not agree in length, and a draft may be a tree. A child is a branch in its
    parent's row. Where nothing of this is so, the model makes its own mask, as in plain `generate`.

    Args:
        forwards ([`Forwards`]): run the model.
        cache (`DynamicCache`): after the prefill; its layers are [`SlotLayer`].
        rows (`list[Row]`): of the cache, in order; it holds the prompts and nothing else.
        model_kwargs (`dict`): describe the places of the prompts.
    """

    takes_branches = True  # else a child is a row of its own, as beside layers that keep a state

    def __init__(self, forwards: Forwards, cache: DynamicCache, rows: list[Row], model_kwargs: dict[str, Any]):
        self.forwards = forwards
        self.cache = cache
        self.rows = list(rows)
        self.model_kwargs = model_kwargs
        self._lines = {row: line for line, row in enumerate(rows)}  # which row of the cache each lies in
        self._branches: dict[Row, int] = {}  # children that share a row: how much of its text they see
        self._fed: dict[Row, Fed] = {}  # in the last forward
        self._width = rows[0].prompt_length
        mask = model_kwargs.get("attention_mask")
        padded_mask = None if mask is None or bool(mask.all()) else mask.bool()
        self._slots = SlotsOfCache(cache, self._config, padded_mask, rows[0].ids.device)

    @staticmethod
    def fits(forwards: Forwards, cache, rows: list[Row], model_kwargs: dict[str, Any]) -> bool:
        """Whether the cache is one of slots and the model is told positions, so that all of this can be tried."""
        mask = model_kwargs.get("attention_mask")
        others = [name for name in PLACE_WISE if name not in _DESCRIBED]
        config = forwards.model.config.get_text_config(decoder=True)
        return (
            type(cache) is DynamicCache
            and all(type(layer) in (SlotLayer, DummyLayer) for layer in cache.layers)
            and all(layer.is_initialized for layer in cache.layers if type(layer) is SlotLayer)
            and any(type(layer) is SlotLayer for layer in cache.layers)
            and {layer.end for layer in cache.layers if type(layer) is SlotLayer} == {rows[0].cached}
            and model_kwargs.get("position_ids") is not None
            and all(model_kwargs.get(name) is None for name in others)
            and (mask is None or (mask.ndim == 2 and mask.shape[1] == rows[0].prompt_length))
            and not getattr(config, "attn_temperature_tuning", False)
        )

    @property
    def _config(self):
        return self.forwards.model.config.get_text_config(decoder=True)

    @cached_property
    def takes_masks(self) -> bool:
        """Whether the model does as our masks say: it is tried once. Without them there is one row, and no branch."""
        most = max(row.max_length for row in self.rows)
        windows = [window for window in self._slots.kinds if window is not None and window < most]
        return self._slots.takes_masks and tells_texts_apart(self.forwards.model, windows)

    @property
    def takes_uneven_blocks(self) -> bool:
        """Whether rows may be given differently many tokens in a forward."""
        return self.takes_masks

    @property
    def takes_trees(self) -> bool:
        """Whether a draft may be a tree."""
        return self.takes_masks

    def line_of(self, row: Row) -> Hashable:
        """Which row of the cache a text or a child lies in."""
        return self._lines[row]

    def forward(self, phase: str, drafts: Mapping[Row, Draft]) -> dict[Row, Evidence]:
        """In slots of their own, where no other place sees them, shorter rows are filled up."""
        fed = {row: Fed(row.cached, row.length - row.cached, drafts.get(row, _NOTHING)) for row in self.rows}
        width = max(sum(fed[row].count for row in line) for line in self._by_line())
        return (self._plain if self._is_plain(fed, width) else self._masked)(phase, fed, width)

    def _by_line(self) -> list[list[Row]]:
        """The text in each row of the cache, and the child that shares it."""
        lines: list[list[Row]] = [[] for _ in range(len(self.rows) - len(self._branches))]
        for row in self.rows:  # parents come first
            lines[self._lines[row]].append(row)
        return lines

    def _is_plain(self, fed: Mapping[Row, Fed], width: int) -> bool:
        """Whether the places lie as those of a step of plain `generate`, and the mask that the model makes is right."""
        if self._branches or any(each.draft.parents is not None for each in fed.values()):
            return False
        is_alone = len(fed) == 1
        return is_alone or (
            len({each.begin for each in fed.values()}) == 1
            and all(each.begin + width <= row.max_length for row, each in fed.items())
            and self._slots.is_aligned
        )

    def _plain(self, phase: str, fed: dict[Row, Fed], width: int) -> dict[Row, Evidence]:
        first = min(each.pending for each in fed.values())
        block = padded([row.block(each.draft.ids) for row, each in fed.items()], width)
        evidence = self._feed(phase, block, width - first + 1)
        self._fed = fed
        return {
            row: evidence.of(line, each.pending - first, each.count - first + 1)
            for line, (row, each) in enumerate(fed.items())
        }

    def _feed(self, phase: str, block: torch.Tensor, keep: int) -> Evidence:
        """A step of plain `generate`, of more than one token perhaps."""
        begin, width = self.rows[0].cached, block.shape[1]
        kwargs = self.forwards.extended(self.model_kwargs, begin + width - self._width)
        return self.forwards.run(phase, block, kwargs, keep, partial(self._slots.begin_plain, begin, width))

    def _masked(self, phase: str, fed: dict[Row, Fed], width: int) -> dict[Row, Evidence]:
        lines = self._by_line()
        places = Places.of([[fed[row] for row in line] for line in lines], width, self.rows[0].ids.device)
        block = padded([torch.cat([row.block(fed[row].draft.ids) for row in line], dim=1) for line in lines], width)
        prepare = partial(self._slots.begin, places, self.forwards.model.dtype)
        try:
            evidence = self.forwards.run(phase, block, self._kwargs_of(places), width, prepare)
        finally:
            self._slots.end()
        self._fed = fed
        found = {}
        for place, line in enumerate(lines):
            begin = 0
            for row in line:
                end = begin + fed[row].count
                found[row] = evidence.of(place, begin + fed[row].pending - 1, end)
                begin = end
        return found

    def _kwargs_of(self, places: Places) -> dict[str, Any]:
        """`model_kwargs` of the places: filler stands where the last that counts does, past no table of positions."""
        rows, width = places.indices.shape
        kwargs = dict(self.model_kwargs)
        positions = kwargs["position_ids"]
        kwargs["position_ids"] = positions[..., -1:] + (places.indices - (self._width - 1))
        kwargs["attention_mask"] = places.indices.new_ones((1, 1)).expand(rows, max(places.ends))
        if (types := kwargs.get("token_type_ids")) is not None:
            kwargs["token_type_ids"] = types[:, -1:].expand(rows, width)
        if (types := kwargs.get("mm_token_type_ids")) is not None:
            kwargs["mm_token_type_ids"] = types.new_zeros((rows, width))
        return kwargs

    @property
    def extra_places(self) -> int:
        """Slots in use beside the texts: each row has as many as the longest text, and as the longest child."""
        used = {
            row: self._fed[row].begin + self._fed[row].count if row in self._fed else row.cached for row in self.rows
        }
        lines = self._by_line()
        texts = max(used[text] for text, *_ in lines)
        children = max((used[row] - fork for row, fork in self._branches.items()), default=0)
        return len(lines) * (texts + children) - sum(row.length for row in self.rows if row.origin is None)

    def undo_forward(self) -> bool:
        """A forward that failed has written to slots that will be written again."""
        self._slots.end()
        self._fed = {}
        return True

    def keep(self, rows: Sequence[Row]) -> None:
        """Every other row goes; of these, what agrees with what was written meanwhile is right from now on."""
        for row in rows:
            fed = self._fed.get(row)
            if fed is None:
                row.cached = min(row.cached, row.length - 1)
            elif fed.draft.parents is None:
                row.cached = min(fed.begin + fed.count, row.length - 1)
            else:
                row.cached = self._keep_of_tree(row, fed)
        self._fed = {}
        lines = [self._lines[row] for row in rows if row not in self._branches]
        if lines != list(range(len(self._by_line()))):
            self._select(lines)
        self.rows, left = list(rows), set(rows)
        self._branches = {row: fork for row, fork in self._branches.items() if row in left}
        self._number_lines()

    def _number_lines(self) -> None:
        texts = [row for row in self.rows if row not in self._branches]
        self._lines = {row: line for line, row in enumerate(texts)}
        self._lines |= {row: self._lines[row.parent] for row in self._branches}

    def _keep_of_tree(self, row: Row, fed: Fed) -> int:
        """Follows what was written along the tree, and moves the nodes on that path to where the text has its slots."""
        begin = fed.begin + fed.pending  # of the nodes, in the text as in the slots
        path: list[int] = []
        for token in row.ids[0, begin : row.length - 1].tolist():
            node = fed.draft.after(path[-1] if path else -1, token)
            if node is None:
                break
            path.append(node)
        if path != list(range(len(path))):
            self._slots.move(self._lines[row], row in self._branches, [begin + node for node in path], begin)
        return begin + len(path)

    def fork(self, rows: Sequence[Row]) -> None:
        """
        New rows, forked from rows of the cache.

        Raises:
            `torch.OutOfMemoryError`: if they do not fit; none of them is there then.
        """
        if self.takes_branches:
            self._slots.fork({self._lines[row.parent]: row.parent.cached for row in rows})
            self._branches |= {row: row.parent.cached for row in rows}
        else:
            lines = list(range(len(self.rows)))
            try:
                self._select(lines + [self._lines[row.parent] for row in rows])
            except torch.OutOfMemoryError:
                self._select(lines)  # some layers may have all rows already
                raise
        for row in rows:
            row.cached = row.parent.cached
        self.rows += rows
        self._number_lines()

    def _select(self, lines: list[int]) -> None:
        self.model_kwargs = select_rows(self.cache, self.model_kwargs, lines, len(self._by_line()))
        self._slots.select(lines)

    def settle(self, row: Row, can_keep: bool, is_whole_wanted: bool) -> None:
        """Leaves one row, and in it all of the text but its last token if that is wanted."""
        self._slots.end()
        if can_keep or len(self.rows) > 1:
            self.keep([row])
        if is_whole_wanted and row.cached < row.length - 1:
            self._feed("speculate", row.ids[:, row.cached : row.length - 1].clone(), keep=1)
            row.cached = row.length - 1
        self.align()

    def align(self) -> None:
        """Lets the layers go on from where the text does, which is the only one."""
        for layer in self._slots.layers:
            layer.step, layer.end = None, self.rows[0].cached


_NOTHING = Draft()
