"""
Run by `test_installation.py` where only torch and transformers are installed: the Hub's two ways into SSR give the
tokens of plain `generate`, and stream them as they are written, in fewer forwards.

Arguments: what `custom_generate` names, what `from_pretrained` names, a prompt.
"""

import sys
from importlib.util import find_spec

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer


class Pieces(TextStreamer):
    """Pieces of text, each with the forwards until then."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True)
        self.forwards, self.pieces, self.ends = [], [], 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append((len(self.forwards), text))
        self.ends += stream_end


def write(model, streamer: Pieces, inputs, **settings):
    """Text of the stream, output, and forwards of one call."""
    forwards = streamer.forwards
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    torch.manual_seed(3)
    output = model.generate(**inputs, max_new_tokens=1024, return_dict_in_generate=True, streamer=streamer, **settings)
    hook.remove()
    times = [time for time, _ in streamer.pieces]
    assert streamer.ends == 1 and times == sorted(times) and len(set(times)) > 20 and times[0] < len(forwards) / 4
    return "".join(text for _, text in streamer.pieces), output, len(forwards)


def main(code: str, folder: str, prompt: str) -> None:
    for name in ("hf_ssr", "accelerate", "peft", "matplotlib", "pytest"):
        assert find_spec(name) is None, name
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    plain = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    ours = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    # at any cost: forwards are timed, and this machine may be busy
    settings = {"tokenizer": tokenizer, "draft_budgets": [32, 64], "max_overhead": "off"}
    for sampling in ({}, {"do_sample": True, "temperature": 0.5}):
        text, expected, most = write(plain, Pieces(tokenizer), inputs, **sampling)
        routes = {
            "custom_generate": (plain, {"custom_generate": code, "trust_remote_code": True}),
            "from_pretrained": (ours, {}),
        }
        for route, (model, call) in routes.items():
            streamed, output, forwards = write(model, Pieces(tokenizer), inputs, **sampling, **settings, **call)
            assert torch.equal(output.sequences, expected.sequences), route
            assert streamed == text == tokenizer.decode(expected.sequences[0, inputs["input_ids"].shape[1] :])
            assert forwards == sum(output.metrics.forwards.values()) < 0.9 * most, (route, forwards, most)
            budgets = [stage.draft_budget for stage in output.metrics.stages]
            assert budgets == [32, 64], (route, budgets)
            print(f"{route}: {forwards} forwards instead of {most}")


if __name__ == "__main__":
    main(*sys.argv[1:])
