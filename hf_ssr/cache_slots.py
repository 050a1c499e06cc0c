"""The cache of an attention layer: an array of slots in each row, which is written where a step says."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

FIRST_SPARE_SLOTS = 256  # at least; then a quarter of what the layer holds
SPARE_SLOTS_OF_A_WINDOW = 64


@dataclass
class StepSlots:
    """
    Where the places of a step are written, and what attention is given.

    Args:
        index (`torch.LongTensor` of shape `(rows, places)`): the slot of each place; no two of a row are equal.
        begin, end (`int`): attention is given the slots from `begin` on, before `end`.
    """

    index: torch.Tensor
    begin: int
    end: int

    def __post_init__(self):
        self._on: dict[torch.device, torch.Tensor] = {}

    def index_on(self, device: torch.device) -> torch.Tensor:
        """Of shape `(rows, 1, places, 1)`, on the device of a layer."""
        if device not in self._on:
            self._on[device] = self.index[:, None, :, None].to(device)
        return self._on[device]


class SlotLayer(DynamicLayer):
    """
    A [`~transformers.DynamicLayer`] or [`~transformers.DynamicSlidingWindowLayer`] whose keys and values lie in slots:

        | child's region | text                    | spare |

    The region of a child is in front, so that a text that grows moves nothing. The token with index i of a text lies in
    slot `region + i - base`. `base` is 0, but under a window it follows the text: what has left the window is dropped
    when there is no room, so that most steps move nothing, and what a step returns lies in order and in one piece.

    As long as all rows go on at the same index and nobody has set `step`, it does what the layer of transformers would
    do, but in place: it appends, returns all that the new tokens may see, and can be cropped, past its window too.

    Args:
        window (`int`, *optional*): of the layer; `None` = full attention.
        spares (`bool`): whether to keep room to grow. Without it, all is copied whenever there is more to hold.
    """

    def __init__(self, window: int | None = None, spares: bool = True):
        self.window = window
        self.spares = spares
        self.region = 0  # slots of a child, in front
        self.bases, self.child_bases = [0], [0]  # of each row: index of what lies in the first slot of each
        self.end = 0  # tokens of the texts, where all rows go on at the same index
        self.step: StepSlots | None = None
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        super().__init__()
        self.is_sliding = window is not None

    @classmethod
    def of(cls, held: DynamicLayer, spares: bool = True) -> "SlotLayer":
        """With what a layer of transformers holds. Nothing is copied before there is more to hold."""
        layer = cls(getattr(held, "sliding_window", None), spares)
        if held.is_initialized:
            assert held.keys is not None and held.values is not None
            layer.device, layer.is_initialized = held.keys.device, True
            layer.hold(held.keys, held.values, held.get_seq_length())
        return layer

    def as_plain(self) -> DynamicLayer:
        """The layer of transformers, as if it had held all this itself. Nothing is copied."""
        plain = DynamicLayer() if self.window is None else DynamicSlidingWindowLayer(self.window)
        if self.is_initialized:
            plain.lazy_initialization(*self._arrays)
            plain.keys, plain.values = self.keys, self.values
            if self.window is not None:
                plain.cumulative_length = self.end
        return plain

    def hold(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Instead of what it held: the last keys and values of texts with `end` tokens."""
        self._keys, self._values = keys, values
        self._hold_last(keys, end)

    def _hold_last(self, states: torch.Tensor, end: int) -> None:
        self.region, self.end = 0, end
        self.bases = [end - states.shape[-2]] * len(states)
        self.child_bases = [0] * len(states)

    @property
    def _arrays(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in their slots, once there are any."""
        assert self._keys is not None and self._values is not None, "the layer holds nothing yet"
        return self._keys, self._values

    @property
    def keys(self) -> torch.Tensor | None:
        """What the layer of transformers would hold, a view."""
        return self._held(self._keys)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys = keys
        self._replaced(keys)

    @property
    def values(self) -> torch.Tensor | None:
        """What the layer of transformers would hold, a view."""
        return self._held(self._values)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._values = values
        self._replaced(values)

    def _replaced(self, states: torch.Tensor | None) -> None:
        if states is not None:
            self._hold_last(states, states.shape[-2] if self.window is None else self.end)

    def all_held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens that are not dropped yet, some may be past the window; views."""
        slots = slice(self.region, self._slot(self.end))
        keys, values = self._arrays
        return keys[:, :, slots], values[:, :, slots]

    def _held(self, states: torch.Tensor | None) -> torch.Tensor | None:
        if states is None:
            return None
        return states[:, :, self._slot(self._first_seen(self.end)) : self._slot(self.end)]

    def _slot(self, index: int) -> int:
        return self.region + index - self.bases[0]

    def _first_seen(self, index: int) -> int:
        """Index of the first token that the one at `index` may see."""
        return self.bases[0] if self.window is None else max(self.bases[0], index - self.window + 1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """For a layer that holds nothing yet."""
        self.device, self.is_initialized = key_states.device, True
        self.hold(key_states[:, :, :0], value_states[:, :, :0], 0)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """
        Writes the keys and values of new tokens to their slots.

        Args:
            key_states, value_states (`torch.Tensor` of shape `(rows, heads, tokens, head_dim)`): of the new tokens.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: views of the slots that attention is given, of shape
            `(rows, heads, slots, head_dim)`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._arrays
        step = self.step
        if step is not None:
            index = step.index_on(key_states.device)
            for slots, new in ((keys, key_states), (values, value_states)):
                slots.scatter_(2, index.expand(-1, new.shape[1], -1, new.shape[-1]), new)
            return keys[:, :, step.begin : step.end], values[:, :, step.begin : step.end]
        begin, count = self.end, key_states.shape[-2]
        if self._slot(begin + count) > keys.shape[-2]:
            rows = len(self.bases)
            bases = self.bases_for([begin] * rows)
            self.arrange(self.region, bases, self.child_bases, self.roomy(begin + count - bases[0]))
            keys, values = self._arrays
        slot = self._slot(begin)
        keys[:, :, slot : slot + count] = key_states
        values[:, :, slot : slot + count] = value_states
        self.end = begin + count
        first = self._slot(self._first_seen(begin))
        return keys[:, :, first : slot + count], values[:, :, first : slot + count]

    def get_seq_length(self) -> int:
        """Tokens of the texts, where all rows go on at the same index."""
        return self.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots the next step returns if it is given no slots of its own, and the index of the first."""
        first = 0 if self.window is None else max(self.end - self.window + 1, 0)
        return self.end - first + query_length, first

    def get_max_length(self) -> int:
        """As the layer of transformers."""
        return -1 if self.window is None else self.window

    def crop(self, tokens_to_remove: int) -> None:
        """The last tokens are forgotten, as many as the last step had at most: their slots are written again."""
        self.end -= abs(tokens_to_remove) if self.is_initialized else 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Selects rows."""
        if not self.is_initialized:
            return
        keys, values = self._arrays
        index, rows = beam_idx.to(keys.device), beam_idx.tolist()
        self._keys, self._values = keys.index_select(0, index), values.index_select(0, index)
        self.bases, self.child_bases = ([bases[row] for row in rows] for bases in (self.bases, self.child_bases))

    @property
    def room(self) -> int:
        """Slots behind the child's region."""
        return self._arrays[0].shape[-2] - self.region

    def roomy(self, slots: int) -> int:
        """So many slots, and some to spare."""
        if not self.spares:
            return slots
        if self.window is not None:
            return slots + max(SPARE_SLOTS_OF_A_WINDOW, min(slots, self.window) // 4)
        return slots + max(FIRST_SPARE_SLOTS, slots // 4)

    def bases_for(self, begins: Sequence[int], bases: Sequence[int] | None = None) -> list[int]:
        """`bases` after what no token from `begins` on sees is dropped."""
        bases = list(self.bases if bases is None else bases)
        if self.window is None:
            return bases
        return [max(base, begin - self.window + 1) for base, begin in zip(bases, begins, strict=True)]

    def arrange(self, region: int, bases: Sequence[int], child_bases: Sequence[int], room: int) -> None:
        """
        Moves what is held to where it has to be; new slots are zeros, since attention multiplies also what it hides.

        Args:
            region (`int`): slots of a child, in front.
            bases, child_bases (`Sequence[int]`): of each row, not below what they were.
            room (`int`): slots behind the region, at least.

        Raises:
            `torch.OutOfMemoryError`: the layer is as it was then.
        """
        if region < self.region:  # a fork that found no memory in another layer
            cut = self.region - region
            keys, values = self._arrays
            self._keys, self._values, self.region = keys[:, :, cut:], values[:, :, cut:], region
        bases, child_bases = list(bases), list(child_bases)
        is_there = (region, bases, child_bases) == (self.region, self.bases, self.child_bases)
        if is_there and self.room >= room:
            return
        size = region + max(room, self.room)
        shifts = [new - old for new, old in zip(bases, self.bases, strict=True)]
        child_shifts = [new - old for new, old in zip(child_bases, self.child_bases, strict=True)]
        keys, values = (self._moved(old, size, region, shifts, child_shifts) for old in self._arrays)
        self._keys, self._values, self.region = keys, values, region
        self.bases, self.child_bases = bases, child_bases

    def _moved(self, old, size: int, region: int, shifts: list[int], child_shifts: list[int]) -> torch.Tensor:
        new = old.new_zeros((*old.shape[:2], size, old.shape[-1]))
        for row, (shift, child_shift) in enumerate(zip(shifts, child_shifts, strict=True)):
            text = old[row, :, self.region + shift :]
            new[row, :, region : region + text.shape[1]] = text
            child = old[row, :, min(child_shift, self.region) : self.region]
            new[row, :, : child.shape[1]] = child
        return new

    def copy_slots(self, row: int, source: int, target: int, count: int) -> None:
        """Of a row: `count` slots from `source` on are written to those from `target` on."""
        for slots in self._arrays:
            slots[row, :, target : target + count] = slots[row, :, source : source + count].clone()

    def gather_slots(self, row: int, sources: Sequence[int], target: int) -> None:
        """Of a row: the slots `sources` are written to those from `target` on."""
        for slots in self._arrays:
            index = torch.tensor(sources, device=slots.device)
            slots[row, :, target : target + len(sources)] = slots[row].index_select(1, index)


def into_slots(cache: Cache, spares: bool = True) -> None:
    """Every attention layer of the cache becomes a [`SlotLayer`], one after the other; the cache stays the object."""
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            cache.layers[place] = SlotLayer.of(layer, spares)


def as_plain(cache: Cache) -> None:
    """Undoes [`into_slots`]: the layers are what transformers would have made. Nothing is copied."""
    for place, layer in enumerate(cache.layers):
        if type(layer) is SlotLayer:
            cache.layers[place] = layer.as_plain()
