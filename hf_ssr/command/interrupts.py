"""Ctrl-C while a model writes: "answer now", then "stop"."""

import os
from collections.abc import Callable

import torch
from transformers import StoppingCriteria

from ..stopping import StopThinking


class _Halt(StoppingCriteria):
    """Ends the text at the next token."""

    is_set = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.is_set, dtype=torch.bool, device=input_ids.device)


class Interrupts:
    """
    Ctrl-C while the model writes: first the thought closes, then the text ends at the next token, and for who cannot
    wait for that it ends where it is. When the text is over, nothing is left to end.

    Args:
        is_thinking (`Callable[[], bool]`): whether a thought is open.
    """

    def __init__(self, is_thinking: Callable[[], bool]):
        self.stop, self.halt, self._is_thinking = StopThinking(), _Halt(), is_thinking
        self.is_over = False

    @property
    def criteria(self) -> list[StoppingCriteria]:
        """For `generate`."""
        return [self.stop, self.halt]

    def interrupt(self, *_) -> None:
        """The handler of the signal. It must not print: it may have interrupted a print."""
        if self.is_over:
            return
        if self.halt.is_set:
            self.is_over = True
            raise KeyboardInterrupt
        if self._is_thinking() and not self.stop.is_set:
            self.stop.set()
            os.write(2, b"\n[answer now]\n")
        else:
            self.halt.is_set = True
