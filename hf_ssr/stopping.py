""" "Answer now": a handle that closes a thought while it is written."""

from collections.abc import Callable, Sequence
from threading import Event

import torch
from transformers import StoppingCriteria


class StopThinking(StoppingCriteria):
    """
    Closes the thought at the next token, from any thread. What was drafted until then is there for the answer.

    It ends no text: given to `generate` among `stopping_criteria`, it is asked before each token, and the forced close
    follows as if `thinking_budget` were what has been thought so far. Where the thought is over, or no answer would fit
    behind it, nothing happens. As long as it is set, a later thought closes as it opens. Where a tokenizer is known, a
    thought goes on for up to 3 tokens to end its last character. All prompts of a batch are told at once. A copy,
    pickled or not, is a handle of its own in the same state.

    Example:

        stop = hf_ssr.StopThinking()
        call = {**inputs, "generation_config": config, "stopping_criteria": [stop]}
        Thread(target=model.generate, kwargs=call).start()
        stop.set()  # the user does not want to wait
    """

    stops_thinking = True  # by which it is known: a repository of the Hub has a class of its own

    def __init__(self) -> None:
        self._event = Event()

    @property
    def is_set(self) -> bool:
        """Whether thoughts are to end."""
        return self._event.is_set()

    def set(self) -> None:
        """Thoughts end at the next token."""
        self._event.set()

    def clear(self) -> None:
        """For the next call: thoughts may go on."""
        self._event.clear()

    def __getstate__(self) -> dict[str, bool]:
        return {"is_set": self.is_set}  # a copy is a handle of its own, in the same state

    def __setstate__(self, state: dict[str, bool]) -> None:
        self._event = Event()
        if state["is_set"]:
            self.set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        """No row is done, of `(batch_size, sequence_length)`."""
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def thinking_stop(stopping_criteria: Sequence) -> Callable[[], bool] | None:
    """Whether a handle among the criteria is set; `None` if there is no handle."""
    handles = [each for each in stopping_criteria if getattr(each, "stops_thinking", False)]
    return (lambda: any(handle.is_set for handle in handles)) if handles else None
