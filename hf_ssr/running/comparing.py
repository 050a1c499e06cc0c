"""Runs of `generate` on one prompt, timed from outside, and where two of them part."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ..config import SSRConfig
from ..output import SSROutput
from ..thinking import ThinkingBudgetLogitsProcessor


@dataclass
class Run:
    """
    New tokens of a run, its forwards and seconds, and the metrics of SSR.

    Args:
        shapes (`list[tuple[int, int, float]]`): rows, tokens and seconds of each forward.
        peak_memory (`int`, *optional*): bytes of a GPU, where someone has looked.
    """

    tokens: list[int]
    forwards: int
    seconds: float
    metrics: Any = None
    shapes: list[tuple[int, int, float]] = field(default_factory=list, repr=False)
    peak_memory: int | None = None


def prompt_ids(tokenizer, prompt: str, prefill: str = "") -> torch.Tensor:
    """A user's message in the chat template, if there is one, and how the model's turn begins; `(1, prompt_length)`."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt + prefill, return_tensors="pt").input_ids
    return chat_ids(tokenizer, [{"role": "user", "content": prompt}], prefill, enable_thinking=True)


def chat_ids(tokenizer, messages, prefill: str, add_generation_prompt: bool = True, **settings) -> torch.Tensor:
    """Messages in the chat template, which is told `settings`, and how the model's turn begins; `(1, length)`."""
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False, **settings
    )
    return tokenizer(text + prefill, return_tensors="pt", add_special_tokens=False).input_ids


def timed_generate(model, ids, seed: int, attention_mask: torch.Tensor | None = None, **kwargs) -> Run:
    """
    `model.generate` from a seed, its forwards counted and timed from outside. Streaming counts as time. Of a batch, the
    tokens of all rows, one after the other.
    """
    attention_mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    begins: list[float] = []
    shapes: list[tuple[int, int, float]] = []

    def now() -> float:
        if ids.device.type != "cpu":
            torch.accelerator.synchronize(ids.device)
        return time.perf_counter()

    def after(module, args, kwargs, output) -> None:
        rows, tokens = kwargs["input_ids"].shape if "input_ids" in kwargs else args[0].shape
        shapes.append((rows, tokens, now() - begins[-1]))

    hooks = [
        model.register_forward_pre_hook(lambda *_: begins.append(now())),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    torch.manual_seed(seed)
    begin = time.perf_counter()
    try:
        output = model.generate(ids, attention_mask=attention_mask, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    seconds = time.perf_counter() - begin
    metrics = output.metrics if isinstance(output, SSROutput) else None
    return Run(output.sequences[:, ids.shape[1] :].flatten().tolist(), len(shapes), seconds, metrics, shapes)


def run_plain(model, ids, seed: int, config: SSRConfig, tokenizer) -> Run:
    """Without SSR, under the same thinking budget."""
    names = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "return_dict_in_generate")
    plain = GenerationConfig(**{name: getattr(config, name) for name in names})
    processors = []
    if config.thinking_budget is not None:
        processors.append(
            ThinkingBudgetLogitsProcessor(
                config, prompt_length=ids.shape[1], tokenizer=tokenizer, max_new_tokens=config.max_new_tokens
            )
        )
    return timed_generate(model, ids, seed, generation_config=plain, logits_processor=processors)


def agreeing(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(tokens, others, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


def difference_between(model, tokenizer, ids, run: Run, plain: Run) -> dict[str, Any] | None:
    """Where two runs first part, and how far the model's scores of the two tokens lie apart there."""
    position = agreeing(run.tokens, plain.tokens)
    if position == len(run.tokens) == len(plain.tokens):
        return None
    difference: dict[str, Any] = {"position": position}
    if position < min(len(run.tokens), len(plain.tokens)):
        text = torch.cat([ids, ids.new_tensor([plain.tokens[:position]])], dim=1)
        with torch.no_grad():
            logits = model(text).logits[0, -1].float()
        ours, theirs = run.tokens[position], plain.tokens[position]
        difference |= {"ssr": tokenizer.decode([ours]), "plain": tokenizer.decode([theirs])}
        difference["margin"] = float(logits[theirs] - logits[ours])
    return difference
