"""A layer of a cache that appends in place, where `DynamicLayer` copies all it holds at every step."""

import torch
from transformers.cache_utils import Cache, DynamicLayer

FIRST_SPARE_PLACES = 256  # at least; then a quarter of what the layer holds


class GrowableLayer(DynamicLayer):
    """
    A [`~transformers.DynamicLayer`] with spare places behind its tokens: O(1) to append to and to crop.

    `keys` and `values` are views of a longer buffer. Whoever replaces them (rows are selected, places dropped) need not
    know: the next update sees that they lie elsewhere, and makes a new buffer.
    """

    _key_buffer = _value_buffer = _keys_in_buffer = _values_in_buffer = None  # the latter two: as the last update left

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """
        Appends the keys and values of new tokens, and returns all.

        Args:
            key_states, value_states (`torch.Tensor` of shape `(rows, heads, tokens, head_dim)`): of the new tokens.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        keys, values = self._key_buffer, self._value_buffer
        is_as_left = self.keys is self._keys_in_buffer and self.values is self._values_in_buffer
        if not is_as_left or end > keys.shape[-2]:  # asked at every layer of every step: what is looked at adds up
            keys = self._key_buffer = _with_room(keys, self.keys, length, end, key_states)
            values = self._value_buffer = _with_room(values, self.values, length, end, value_states)
        keys[..., length:end, :] = key_states
        values[..., length:end, :] = value_states
        self.keys = self._keys_in_buffer = keys[..., :end, :]
        self.values = self._values_in_buffer = values[..., :end, :]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Selects rows; the buffers of the old ones are of no more use."""
        super().reorder_cache(beam_idx)
        self._key_buffer = self._value_buffer = self._keys_in_buffer = self._values_in_buffer = None


def _with_room(
    buffer: torch.Tensor | None, held: torch.Tensor, length: int, end: int, new: torch.Tensor
) -> torch.Tensor:
    """The buffer that `held` is the beginning of, or a copy of it with room for more."""
    is_view = (
        buffer is not None
        and length > 0
        and held.data_ptr() == buffer.data_ptr()
        and held.stride() == buffer.stride()
        and held.shape[:-2] == buffer.shape[:-2]
    )
    if is_view and end <= buffer.shape[-2]:
        return buffer
    places = end + max(FIRST_SPARE_PLACES, end // 4)
    buffer = new.new_empty((*new.shape[:-2], places, new.shape[-1]))
    if length:
        buffer[..., :length, :] = held
    return buffer


def grow_in_place(cache: Cache) -> None:
    """Every full-attention layer of the cache appends in place from now on."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = _turned_into(GrowableLayer, layer)


def as_dynamic(cache: Cache) -> None:
    """Undoes [`grow_in_place`]: the layers are what transformers would have made. Nothing is copied."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is GrowableLayer:
            cache.layers[index] = _turned_into(DynamicLayer, layer)


def _turned_into(kind: type[DynamicLayer], layer: DynamicLayer) -> DynamicLayer:
    new = kind()
    new.__dict__.update({name: value for name, value in vars(layer).items() if not name.endswith("_buffer")})
    return new
