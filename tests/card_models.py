"""Tiny models and tokenizers in the place of those that the cards of `model_cards` load."""

from typing import NamedTuple

import torch
import transformers
from test_thinking import tokenizer_with
from tiny_models import build
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ssr.config import SETTINGS

VOCAB_SIZE = 272  # every byte, and the markers
LIMIT = 300  # tokens, of the tiny Phi's first rotary positions
SMALLER = {"32768": "400", "4096]": "32]", "[1024,": "[8,", "4096": str(LIMIT)}
THINK = ("<think>", "</think>")
CHATML = "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n"


class Case(NamedTuple):
    """
    What stands for the model of a card: an architecture of `tiny_models`, the special tokens of a tokenizer, what the
    model's chat template has of its family, and whether that opens the thought.
    """

    architecture: str
    tokens: tuple[str, ...]
    template: str
    is_open: bool = False


CASES = {
    "ssr": Case("qwen3", THINK, CHATML),
    "ssr-qwen3-8b": Case("qwen3", THINK, CHATML),
    "ssr-qwen3.5-4b": Case("qwen3_5", THINK, CHATML + "{{ '<think>\\n' }}", True),
    "ssr-smollm3-3b": Case("smollm3", THINK, CHATML + "{# /no_think #}"),
    "ssr-olmo-3-7b-think": Case("olmo3", (), CHATML + "<think>", True),
    "ssr-deepseek-r1-distill-qwen-1.5b": Case(
        "qwen2", THINK, "<｜User｜>{{ messages[0].content }}{{'<｜Assistant｜><think>\\n'}}", True
    ),
    "ssr-phi-4-mini-reasoning": Case(
        "phi3", ("<|user|>", "<|end|>", "<|assistant|>"), "<|user|>{{ messages[0].content }}<|end|><|assistant|>"
    ),
    "ssr-gpt-oss-20b": Case(
        "gpt_oss",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|start|>user<|message|>{{ messages[0].content }}<|end|><|start|>assistant",
    ),
    "ssr-gemma-4-e4b-it": Case(
        "gemma4_shared",
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"),
        "{% if enable_thinking %}<|turn>system\n<|think|>\n<turn|>\n{% endif %}"
        "<|turn>user\n{{ messages[0].content }}<turn|>\n<|turn>model{{ '\n' }}",
    ),
}


def tokenizer_of(name: str):
    tokenizer = tokenizer_with(*CASES[name].tokens, template=CASES[name].template)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def model_of(name: str):
    """A tiny random model of the class that `AutoModelForCausalLM` makes for the card's model."""
    architecture = CASES[name].architecture
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": VOCAB_SIZE - 1}
    if architecture == "phi3":
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        sizes |= {"rope_parameters": rope, "original_max_position_embeddings": LIMIT, "sliding_window": 262144}
        sizes |= {"max_position_embeddings": 4 * LIMIT}
    if architecture != "gemma4_shared":
        return build(architecture, **sizes)
    text = build(architecture, vocab_size_per_layer_input=VOCAB_SIZE, **sizes)
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config = transformers.Gemma4Config(text_config=text.config.to_dict(), vision_config=vision, audio_config=None)
    model = transformers.Gemma4ForConditionalGeneration(config).to(text.dtype).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    return model


class Script:
    """A forward hook that makes the model write given tokens from a position on, whatever else it is asked."""

    def __init__(self, first: int, tokens: list[int]):
        self.first, self.tokens = first, tokens

    def __call__(self, module, args, kwargs, output):
        positions = kwargs["position_ids"]
        positions = (positions[0] if positions.ndim == 3 else positions)[:, -output.logits.shape[1] :]
        for row, column in torch.ones_like(output.logits[..., 0]).nonzero().tolist():
            place = int(positions[min(row, len(positions) - 1), column]) + 1 - self.first
            if 0 <= place < len(self.tokens):
                output.logits[row, column, self.tokens[place]] += 1e4


class Stand:
    """
    A tiny model and a tokenizer in the place of those that a card loads. The model writes a thought with the card's
    markers, then what it likes. What `generate` was given and gave is kept.
    """

    def __init__(self, name: str, markers: dict[str, str], monkeypatch):
        self.loaded, self.calls = [], []
        self.model, self.tokenizer = model_of(name), tokenizer_of(name)
        self.model.generate = self.generate
        self.thought = self._thought("" if CASES[name].is_open else markers["thinking_start"], markers["forced_close"])
        self.hook = None
        for auto, made in ((AutoModelForCausalLM, self.model), (AutoTokenizer, self.tokenizer)):
            monkeypatch.setattr(auto, "from_pretrained", lambda name, made=made, **_: self.loaded.append(name) or made)

    def generate(self, **kwargs):
        length = kwargs["input_ids"].shape[1]
        if self.hook is None:
            self.hook = self.model.register_forward_hook(Script(length, self.thought), with_kwargs=True)
        torch.manual_seed(5)
        output = type(self.model).generate(self.model, **kwargs)
        self.calls.append((kwargs, output))
        return output

    def _thought(self, start: str, close: str) -> list[int]:
        """A hundred random tokens of thought, with the markers around them."""
        thought = torch.randint(0, 250, (100,), generator=torch.Generator().manual_seed(1)).tolist()
        return [*self.tokenizer.encode(start), *thought, *self.tokenizer.encode(close)]

    def run(self, names: dict, block: str) -> None:
        """Runs a block of a card's code, with lengths for a tiny model."""
        for old, new in SMALLER.items():
            block = block.replace(old, new)
        exec(block, names)

    def plain(self, call: int) -> torch.Tensor:
        """What plain `generate` gives for one of the calls."""
        ours = {*SETTINGS, "custom_generate", "trust_remote_code", "tokenizer", "return_dict_in_generate"}
        kwargs = {name: value for name, value in self.calls[call][0].items() if name not in ours}
        torch.manual_seed(5)
        return type(self.model).generate(self.model, **kwargs)
