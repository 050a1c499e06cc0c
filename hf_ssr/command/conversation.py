"""A chat of several turns: its messages, and what the model says next."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from ..config import SSRConfig
from ..markers import resolve_markers
from ..metrics import SSRMetrics
from ..running.comparing import agreeing, chat_ids
from ..thinking import split_thinking
from .turn_cache import TurnCache


@dataclass
class Reply:
    """
    What the model said in one turn.

    Args:
        thought, answer (`str`): the thought is empty if there was none.
        prompt_tokens, cached_tokens (`int`): of the whole chat up to here, and how many of these were not read again.
        metrics ([`SSRMetrics`], *optional*): of the turn; `None` if it was broken off.
    """

    thought: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    metrics: SSRMetrics | None


class _Written(BaseStreamer):
    """Passes a stream on, and keeps its tokens: all there is of a text that is broken off."""

    def __init__(self, streamer: BaseStreamer):
        self._streamer, self._is_prompt = streamer, True
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.tokens += value.flatten().tolist()
        self._is_prompt = False
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


class Conversation:
    """
    A chat with one model. Each turn is one `generate` over the whole chat, of which only what is new is read.

    Args:
        model (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): with a chat template, which also decides what becomes of earlier
            thoughts: it is given them as `reasoning_content`.
        config ([`SSRConfig`]): of each turn; `max_new_tokens` is cut to what the model's positions leave room for.
        prefill (`str`): how each of the model's turns begins.

    Raises:
        `ValueError`: if the tokenizer has no chat template.
    """

    def __init__(self, model, tokenizer, config: SSRConfig, prefill: str = ""):
        if tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template, which a chat needs: ask one prompt at a time.")
        self.model, self.tokenizer, self.config, self.prefill = model, tokenizer, config, prefill
        self.messages: list[dict[str, str]] = []
        self.template_settings: dict[str, Any] = {"enable_thinking": True}
        self._cache = TurnCache()

    def ask(
        self,
        text: str,
        streamer_of: Callable[[list[int]], BaseStreamer] | None = None,
        stopping_criteria: Sequence = (),
    ) -> Reply:
        """
        The model's answer to the user's next message. Both join the chat, unless there is no answer: then neither does.

        Args:
            text (`str`): the message.
            streamer_of (`Callable[[list[int]], BaseStreamer]`, *optional*): makes a streamer, from the prompt's tokens.
            stopping_criteria (`Sequence[StoppingCriteria]`): a text that they end is kept as far as it goes; so is one
                that Ctrl-C breaks off, if there is a streamer.

        Raises:
            `ValueError`: if the chat is as long as the model can read.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(messages)
        config = self._config_for(len(ids))
        cache, cached = self._cache.take(ids)
        if self._cache.needs_copies:
            cache, cached = self._read_ahead(ids, messages, cache, cached)
        prompt = torch.tensor([ids], device=self.model.device)
        streamer = None if streamer_of is None else _Written(streamer_of(ids))
        try:
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                tokenizer=self.tokenizer,
                streamer=streamer,
                stopping_criteria=list(stopping_criteria),
                **({} if cache is None else {"cache": cache}),
            )
            sequence, metrics = output.sequences[0].tolist(), output.metrics
            # where SSR does not apply, it is not known whether the model can go on from a cache with several tokens
            self._cache.keep(output.cache if metrics.plain_reason is None else None, sequence[:-1])
        except KeyboardInterrupt:
            if streamer is None:
                raise
            self._cache.clear()
            sequence, metrics = ids + streamer.tokens, None
        thought, answer = self._texts(sequence, len(ids))
        if answer:
            reply = {"role": "assistant", "content": answer}
            self.messages = [*messages, reply | ({"reasoning_content": thought} if thought else {})]
        return Reply(thought, answer, len(ids), cached, metrics)

    def undo(self) -> str | None:
        """Takes back the last message of the user and its answer. Returns the message, `None` if there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            return None
        text = self.messages[last]["content"]
        self.messages = self.messages[:last]
        return text

    def restart(self, system: str | None = None) -> None:
        """Forgets all messages; `system` is the first of the new chat."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def _ids(self, messages: list[dict[str, str]], is_turn: bool = True) -> list[int]:
        prefill = self.prefill if is_turn else ""
        return chat_ids(self.tokenizer, messages, prefill, add_generation_prompt=is_turn, **self.template_settings)[
            0
        ].tolist()

    def _config_for(self, prompt_tokens: int) -> SSRConfig:
        config = copy.deepcopy(self.config)
        config.return_dict_in_generate = True
        positions = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions is not None:
            room = positions - prompt_tokens
            if room < 1:
                raise ValueError(f"the chat has {prompt_tokens} tokens, and the model reads at most {positions}.")
            config.max_new_tokens = min(room, config.max_new_tokens or room)
        return config

    @torch.no_grad()
    def _read_ahead(self, ids: list[int], messages: list[dict[str, str]], cache: DynamicCache | None, cached: int):
        """Reads the messages alone, without the beginning of the model's turn, to have a place to go back to."""
        shared = min(agreeing(self._ids(messages, is_turn=False), ids), len(ids) - 1)
        if shared <= cached:
            return cache, cached
        if cache is None:
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        block = torch.tensor([ids[cached:shared]], device=self.model.device)
        self.model.base_model(input_ids=block, cache=cache, use_cache=True)
        self._cache.remember(cache, shared)
        return cache, cached

    def _texts(self, sequence: list[int], prompt_length: int) -> tuple[str, str]:
        """Thought and answer as text."""
        thought: list[int] = []
        answer = sequence[prompt_length:]
        if resolve_markers(self.config, self.tokenizer) is not None:
            thought, answer = split_thinking(sequence, self.config, prompt_length, self.tokenizer)
        return tuple(self.tokenizer.decode(part, skip_special_tokens=True).strip() for part in (thought, answer))
