"""One forward of the model: what it is given, counted and timed."""

import math
from collections.abc import Callable
from typing import Any

import torch

from .drafting import Evidence
from .forking import PLACE_WISE
from .host import extended_kwargs
from .metrics import SSRMetrics


class Forwards:
    """
    Runs the model.

    Args:
        model (`PreTrainedModel`): the target.
        metrics ([`SSRMetrics`]): counts forwards and seconds.
    """

    def __init__(self, model, metrics: SSRMetrics):
        self.model = model
        self.metrics = metrics
        self.layers: tuple[int, ...] = ()  # whose hidden states are wanted too
        self.last_shape = (0, 0)  # rows and tokens of the last forward
        self.last_seconds = 0.0  # that it took

    def run(
        self,
        phase: str,
        block: torch.Tensor,
        model_kwargs: dict[str, Any],
        keep: int,
        prepare: Callable[[], torch.Tensor | dict[str, torch.Tensor] | None] | None = None,
    ) -> Evidence:
        """
        Args:
            phase (`str`): of the metrics.
            block (`torch.LongTensor` of shape `(rows, width)`): tokens.
            model_kwargs (`dict`): describe the places of the cache and of the block; a longer description is cut.
            keep (`int`): of how many of the last places logits are wanted.
            prepare (`Callable`, *optional*): makes room in the cache, and returns a mask instead of that which the
                model would make, or `None`. It is part of the forward and of its time, as both are in plain `generate`.

        Returns:
            [`Evidence`]: of the last `keep` places of each row.
        """
        inputs = self.model.prepare_inputs_for_generation(block, next_sequence_length=block.shape[1], **model_kwargs)
        if "logits_to_keep" in inputs:  # set last: some models overwrite it while preparing
            inputs["logits_to_keep"] = keep
        if self.layers:
            inputs["output_hidden_states"] = True
        rows, width = block.shape
        with self.metrics.timed_forward(phase, rows, width, block.device) as timer:
            mask = None if prepare is None else prepare()
            if mask is not None:
                inputs["attention_mask"] = mask
            outputs = self.model(**inputs, return_dict=True)
        self.last_shape, self.last_seconds = (rows, width), timer.seconds
        hidden = {layer: outputs.hidden_states[layer][:, -keep:] for layer in self.layers}
        return Evidence(outputs.logits[:, -keep:], hidden)

    def extended(self, model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
        """`model_kwargs` that describe `count` tokens more, or fewer if it is negative."""
        if count == 0:
            return model_kwargs
        if count < 0:
            cut = {name: model_kwargs[name][..., :count] for name in PLACE_WISE if model_kwargs.get(name) is not None}
            return {**model_kwargs, **cut}
        extended = extended_kwargs(self.model, model_kwargs, count)
        types = model_kwargs.get("token_type_ids")
        if types is not None:  # each as the last, as in steps of one token; transformers would repeat the last `count`
            extended["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, count)], dim=-1)
        return extended


def most_positions(model) -> float:
    """Of a table of positions, that may not be passed; others go on."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "rope_parameters", None) is not None:
        return math.inf
    names = ("max_position_embeddings", "max_target_positions")
    return min((size for name in names if (size := getattr(config, name, None))), default=math.inf)
