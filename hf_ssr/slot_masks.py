"""Who sees whom in a cache of slots: masks, made from the index and the branch of places and of slots."""

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from .cache_slots import SlotLayer, StepSlots
from .places import Places

FIRST_REGION = 32  # slots of a child's region, at least


class SlotsOfAKind:
    """
    All layers with full attention, or all with one window: they have the same slots.

    Args:
        layers (`list[SlotLayer]`): after the prefill.
        prompt_mask (`torch.BoolTensor` of shape `(rows, prompt_length)`, *optional*): what is no padding; `None` = all.
        device (`torch.device`): of the masks.
    """

    def __init__(self, layers: list[SlotLayer], prompt_mask: torch.Tensor | None, device: torch.device):
        self.layers = layers
        self.window = layers[0].window
        self.device = device
        self._prompt_mask = prompt_mask
        first = layers[0]
        self.region, self.bases = first.region, list(first.bases)
        self.child_bases = [0] * len(self.bases)
        self._sees_text_before = [0] * len(self.bases)  # of each row's child
        self._room = 0  # slots behind the region, in every layer
        self._is_arranged = False  # whether every layer is as this says
        self._is_described = False

    def select(self, rows: Sequence[int], prompt_mask: torch.Tensor | None) -> None:
        """The layers have selected rows."""
        self._prompt_mask = prompt_mask
        names = ("bases", "child_bases", "_sees_text_before")
        for name in names:
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        self._is_described = False

    def fork(self, forks: dict[int, int]) -> None:
        """
        Rows get a child, which sees the text before an index. Under a window it gets a copy of what it sees: its parent
        may leave that behind.

        Raises:
            `torch.OutOfMemoryError`: no row has a child then.
        """
        before = self.region, self.child_bases, self._sees_text_before
        firsts = {row: self._first_seen(row, fork) for row, fork in forks.items()}
        self.child_bases = [firsts.get(row, base) for row, base in enumerate(self.child_bases)]
        self._sees_text_before = [
            (forks[row] if self.window is None else 0) if row in forks else fork
            for row, fork in enumerate(self._sees_text_before)
        ]
        seen, needed = (max(forks[row] - base[row] for row in forks) for base in (firsts, self.bases))
        self.region = max(self.region, FIRST_REGION if self.window is None else self.layers[0].roomy(seen))
        if needed >= self._room:  # all is copied once for both
            self._room = self.layers[0].roomy(needed + 1)
        try:
            self._set_child_bases()
            self._arrange()
        except torch.OutOfMemoryError:
            self.region, self.child_bases, self._sees_text_before = before
            self._set_child_bases()
            raise
        if self.window is not None:
            for layer in self.layers:
                for row, fork in forks.items():
                    source = self.region + firsts[row] - self.bases[row]
                    layer.copy_slots(row, source, 0, fork - firsts[row])

    def _set_child_bases(self) -> None:
        """Nothing moves: what was of a child there, or is not yet, is of no use."""
        if self.window is not None:
            for layer in self.layers:
                layer.child_bases = list(self.child_bases)

    def _first_seen(self, row: int, fork: int) -> int:
        """Index of the first token that a child gets a copy of: without a window, of none before the fork."""
        return fork if self.window is None else max(self.bases[row], fork - self.window + 1)

    def offset(self, row: int, is_child: bool) -> int:
        """Of a row's slots, from the indices that they stand for."""
        return -self.child_bases[row] if is_child else self.region - self.bases[row]

    def make_room(self, begins: list[int], ends: list[int], places: Places | None = None) -> None:
        """
        Before a step. `begins`, `ends` are those of its texts.

        Raises:
            `torch.OutOfMemoryError`: nothing is lost then.
        """
        before = self.region, self._room
        if max(end - base for end, base in zip(ends, self.bases, strict=True)) > self._room:
            layer = self.layers[0]
            self.bases = layer.bases_for(begins, self.bases)
            needed = max(end - base for end, base in zip(ends, self.bases, strict=True))
            self._room = max(self._room, layer.roomy(needed))
            self._is_arranged = False
        if places is not None and places.is_child is not None:
            self._make_room_for_children(places)
        if not self._is_arranged:
            try:
                self._arrange()
            except torch.OutOfMemoryError:
                self.region, self._room = before  # without the child, less will do
                raise

    def _make_room_for_children(self, places: Places) -> None:
        has_child = [end > begin for begin, end in zip(places.child_begins, places.child_ends, strict=True)]

        def needed(bases: list[int]) -> int:
            return max(end - base for end, base, has in zip(places.child_ends, bases, has_child, strict=True) if has)

        if needed(self.child_bases) <= self.region:
            return
        if self.window is not None:
            self.child_bases = [
                max(base, begin - self.window + 1) if has else base
                for base, begin, has in zip(self.child_bases, places.child_begins, has_child, strict=True)
            ]
        needed_now = needed(self.child_bases)
        if needed_now > self.region:
            doubled = 2 * self.region if self.window is None else self.layers[0].roomy(needed_now)
            self.region = max(needed_now, doubled)
        self._is_arranged = False

    def _arrange(self) -> None:
        self._is_arranged = self._is_described = False
        # under full attention the region begins at the fork, wherever that is: nothing moves
        child_bases = [0] * len(self.bases) if self.window is None else self.child_bases
        for layer in self.layers:
            layer.arrange(self.region, self.bases, child_bases, self._room)
        self._is_arranged = True

    def step(self, places: Places) -> StepSlots:
        """Where the places are written, and what attention is given: nothing behind the last place."""
        self._describe()
        slots = places.slots + self._text_offsets
        if places.is_child is not None:
            slots = torch.where(places.is_child, places.slots - self._child_bases, slots)
        end = self.region + max(end - base for end, base in zip(places.ends, self.bases, strict=True))
        return StepSlots(slots, self.region if places.is_child is None else 0, end)

    def mask(self, places: Places, end: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """
        Added to the attention scores: 0 at what a place sees.

        Args:
            places ([`Places`]): of the step.
            end (`int`): of the slots that attention is given.
            window (`int`, *optional*): of the attention. A cache may hold more than that.

        Returns:
            `torch.Tensor` of shape `(rows, 1, places, slots)`.
        """
        self._describe()
        begin = self.region if places.is_child is None else 0
        mask = torch.zeros((*places.slots.shape, end - begin), dtype=dtype, device=self.device)
        unseen = torch.finfo(dtype).min
        lowest = None if window is None else (places.indices - (window - 1))[..., None]
        highest = places.slots
        if places.is_child is not None:
            highest = torch.where(places.is_child, self._forks - 1, highest)
        # without a window, the texts that all go on from are compared with nothing
        first = self.region if window is not None else self.region + self._seen_by_all(places)
        text = self._held[:, None, first:end]
        hides = text > highest[..., None]
        if lowest is not None:
            hides |= text < lowest
        mask[..., first - begin :].masked_fill_(hides, unseen)
        if places.is_child is not None:
            child = self._held[:, None, : self.region]
            hides = (child > places.slots[..., None]) | ~places.is_child[..., None]
            if lowest is not None:
                hides |= child < lowest
            mask[..., : self.region].masked_fill_(hides, unseen)
        if self._padding is not None:
            padding = self._padding[:, None, begin:end]
            mask[..., : padding.shape[-1]].masked_fill_(padding, unseen)
        for row, place, slot, is_child, ancestors in places.trees:
            nodes = slice(place, place + len(ancestors))
            if window is not None:
                depths = places.indices[row, nodes]
                ancestors = ancestors & (depths[:, None] - depths[None] < window)
            column = slot + self.offset(row, is_child) - begin
            mask[row, nodes, column : column + len(ancestors)] = mask.new_zeros(()).where(ancestors, unseen)
        return mask[:, None]

    def _seen_by_all(self, places: Places) -> int:
        """Slots of the texts that every place of its row sees."""
        seen = [begin - base for begin, base in zip(places.begins, self.bases, strict=True)]
        if places.is_child is not None:
            pairs = zip(self._sees_text_before, self.bases, places.child_begins, places.child_ends, strict=True)
            seen += [max(0, fork - base) for fork, base, begin, end in pairs if end > begin]
        return min(seen)

    def _describe(self) -> None:
        """What index each slot has, if it is written; kept until something moves."""
        if self._is_described:
            return
        self._is_described = True
        self._text_offsets = self._column([self.region - base for base in self.bases])
        self._child_bases, self._forks = self._column(self.child_bases), self._column(self._sees_text_before)
        child = torch.arange(self.region, device=self.device) + self._child_bases
        text = torch.arange(self.region, self.region + self._room, device=self.device) - self._text_offsets
        self._held = torch.cat([child, text], dim=1)
        self._padding = None
        if self._prompt_mask is not None:
            width = self._prompt_mask.shape[1]
            seen = torch.nn.functional.pad(self._prompt_mask, (0, 1), value=True)
            padding = ~seen.gather(1, self._held.clamp(max=width))
            last = padding.any(dim=0).nonzero()
            self._padding = padding[:, : int(last[-1]) + 1] if len(last) else None

    def _column(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)[:, None]


class SlotsOfCache:
    """
    All slots of a cache: writes each step to where it belongs, and says who sees whom.

    Args:
        cache (`Cache`): after the prefill; its attention layers are [`SlotLayer`].
        config (`PreTrainedConfig`): of the text model.
        prompt_mask (`torch.BoolTensor` of shape `(rows, prompt_length)`, *optional*): what is no padding; `None` = all.
        device (`torch.device`): of the masks.
    """

    def __init__(self, cache: Cache, config, prompt_mask: torch.Tensor | None, device: torch.device):
        self.layers = [layer for layer in cache.layers if type(layer) is SlotLayer]
        kinds: dict[int | None, list[SlotLayer]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.window, []).append(layer)
        self.kinds = {window: SlotsOfAKind(layers, prompt_mask, device) for window, layers in kinds.items()}
        self._prompt_mask = prompt_mask
        self._masks = _masks_of(config, set(kinds))

    @property
    def takes_masks(self) -> bool:
        """Whether it is known which mask the layers of each kind are given."""
        return self._masks is not None

    @property
    def is_aligned(self) -> bool:
        """Whether an index has the same slot in all rows."""
        return all(len(set(kind.bases)) == 1 for kind in self.kinds.values())

    def begin_plain(self, begin: int, width: int) -> None:
        """A step begins in which all rows go on at the same index, and the model makes its own mask."""
        rows = len(self.layers[0].bases)
        for kind in self.kinds.values():
            kind.make_room([begin] * rows, [begin + width] * rows)
        for layer in self.layers:
            layer.step, layer.end = None, begin

    def begin(self, places: Places, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        A step begins.

        Returns:
            `torch.Tensor` of shape `(rows, 1, places, slots)`, or a `dict` of such, by the type of the layers: what is
            added to the attention scores.

        Raises:
            `torch.OutOfMemoryError`: nothing is lost then.
        """
        ends = {}
        for window, kind in self.kinds.items():
            kind.make_room(places.begins, places.ends, places)
            step = kind.step(places)
            ends[window] = step.end
            for layer in kind.layers:
                layer.step, layer.end = step, max(places.ends)
        assert self._masks is not None, "the model's masks are not known"
        found = {}
        for name, (held, window) in self._masks.items():
            found[name] = self.kinds[held].mask(places, ends[held], window, dtype)
        return found.get("", found)

    def end(self) -> None:
        """The step is over, or has failed."""
        for layer in self.layers:
            layer.step = None

    def fork(self, forks: dict[int, int]) -> None:
        """
        Rows get a child each, which sees the text before an index.

        Raises:
            `torch.OutOfMemoryError`: no row has a child then.
        """
        for kind in self.kinds.values():
            kind.fork(forks)

    def select(self, rows: Sequence[int]) -> None:
        """The layers have selected rows."""
        if self._prompt_mask is not None:
            self._prompt_mask = self._prompt_mask[list(rows)]
        for kind in self.kinds.values():
            kind.select(rows, self._prompt_mask)

    def move(self, row: int, is_child: bool, sources: Sequence[int], first: int) -> None:
        """What the slots of the indices `sources` of a text hold goes to those from `first` on."""
        for kind in self.kinds.values():
            offset = kind.offset(row, is_child)
            for layer in kind.layers:
                layer.gather_slots(row, [offset + source for source in sources], offset + first)


def _masks_of(config, held: set[int | None]) -> dict[str, tuple[int | None, int | None]] | None:
    """
    Which masks the model is given, by the type of the layers, `""` where there is one for all: the window that these
    layers of the cache hold, and the window of their attention. `None` if that is not known.
    """
    types, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if not types <= {"full_attention", "sliding_attention"} or not held <= {None, window}:
        return None
    if "sliding_attention" not in types:
        window = None if types else window
        return {"": (window if window in held else None, window)} if len(held) == 1 else None
    if "full_attention" in types and None not in held:
        return None
    masks = {"sliding_attention": (window if window in held else None, window), "full_attention": (None, None)}
    return {name: mask for name, mask in masks.items() if name in types}
