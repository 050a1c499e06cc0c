"""
Measures the tiny reasoner on held-out tasks, greedy, and writes `evaluation.json` and `accuracy_by_budget.png`.

    python evaluate.py --tasks 300 --budget-tasks 100

*Accuracy*: an answer is right if the rule of its family says so. *By budget*: the model's own thought is cut after 0,
25, 50, 75 and 100 % of its tokens, closed, and answered. Beside that accuracy stands what such a draft is worth to SSR:
the share of the final answer's tokens that the draft has right, as a prefix (up to the first difference) and by
alignment (`difflib.SequenceMatcher` on token ids).
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_ssr.bench.runner import overlap
from hf_ssr.bench.tasks import HELD_OUT, TASKS, Sample, check, draw
from hf_ssr.cache_slots import into_slots

BUDGETS = (0, 25, 50, 75, 100)
MAX_NEW_TOKENS = 1600


class Reasoner:
    """
    The model and its tokenizer, answering in batches.

    Args:
        folder (`Path`): of the model.
        batch_size (`int`): rows a batch.
    """

    def __init__(self, folder: Path, batch_size: int):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.batch_size = batch_size
        self.close = self.tokenizer("\n</think>\n\n", add_special_tokens=False).input_ids

    def prompt(self, sample: Sample) -> list[int]:
        """The tokens of the chat, its thought open."""
        chat = [{"role": "user", "content": sample.prompt}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """What greedy generation appends to each prompt, without the token that ends the turn."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: dict[int, list[int]] = {}
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            inputs = self.tokenizer.pad(
                {"input_ids": [prompts[i] for i in rows]}, padding_side="left", return_tensors="pt"
            )
            cache = DynamicCache(config=self.model.config)
            into_slots(cache)  # a DynamicCache copies all of its rows at every step
            ids = self.model.generate(**inputs, cache=cache, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            for i, new in zip(rows, ids[:, inputs.input_ids.shape[1] :].tolist(), strict=True):
                end = self.tokenizer.eos_token_id
                outputs[i] = new[: new.index(end)] if end in new else new
        return [outputs[i] for i in range(len(prompts))]

    def split(self, new: list[int]) -> tuple[list[int], list[int]]:
        """Thought and answer, without the close; an unclosed thought has no answer."""
        for i in range(len(new) - len(self.close) + 1):
            if new[i : i + len(self.close)] == self.close:
                return new[:i], new[i + len(self.close) :]
        return new, []

    def is_right(self, sample: Sample, answer: list[int]) -> bool:
        """Whether the answer's text is right by rule."""
        return check(sample, self.tokenizer.decode(answer))


def evaluate(reasoner: Reasoner, task: str, count: int, budget_count: int, first_seed: int) -> dict:
    """The figures of one family, by budget on the first `budget_count` tasks."""
    samples = [draw(task, first_seed + i) for i in range(count)]
    prompts = [reasoner.prompt(sample) for sample in samples]
    pairs = [reasoner.split(new) for new in reasoner.generate(prompts)]
    right = [reasoner.is_right(sample, answer) for sample, (_, answer) in zip(samples, pairs, strict=True)]
    lengths = {
        name: {"min": min(values), "mean": round(sum(values) / count, 1), "max": max(values)}
        for name, values in (
            ("thought_tokens", [len(thought) for thought, _ in pairs]),
            ("answer_tokens", [len(answer) for _, answer in pairs]),
        )
    }
    by_budget = {}
    for budget in BUDGETS:
        kept = [thought[: len(thought) * budget // 100] for thought, _ in pairs[:budget_count]]
        drafts = reasoner.generate([[*p, *t, *reasoner.close] for p, t in zip(prompts, kept, strict=False)])
        shares = [overlap(draft, final) for draft, (_, final) in zip(drafts, pairs, strict=False) if final]
        by_budget[str(budget)] = {
            "right": sum(map(reasoner.is_right, samples, drafts)) / len(drafts),
            "prefix": sum(prefix for prefix, _ in shares) / len(shares),
            "aligned": sum(aligned for _, aligned in shares) / len(shares),
        }
    wrong = [first_seed + i for i, ok in enumerate(right) if not ok]
    figures = {"tasks": count, "right": sum(right), "accuracy": sum(right) / count, "wrong_seeds": wrong}
    return figures | lengths | {"budget_tasks": budget_count, "by_budget": by_budget}


def plot(families: dict, file: Path) -> None:
    """Draws the three figures by budget, a line a family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "right": "answers that are right",
        "prefix": "final answer's tokens right, as a prefix",
        "aligned": "final answer's tokens right, by alignment",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), sharey=True, layout="constrained")
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for (task, figures), marker in zip(families.items(), "os^", strict=True):
            axis.plot(BUDGETS, [100 * figures["by_budget"][str(b)][name] for b in BUDGETS], marker=marker, label=task)
        axis.set(title=title, xlabel="thinking budget (% of the own thought)", xticks=BUDGETS, ylim=(-3, 103))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("%")
    axes[0].legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Evaluates, prints, and writes the figures and the plot."""
    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=folder)
    parser.add_argument("--tasks", type=int, default=300, help="held-out tasks a family")
    parser.add_argument("--budget-tasks", type=int, default=100, help="of these, how many for the figures by budget")
    parser.add_argument("--first-seed", type=int, default=HELD_OUT)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder of the figures; default: the model's")
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reasoner = Reasoner(args.model, args.batch_size)
    begin, families = time.perf_counter(), {}
    for task in TASKS:
        families[task] = evaluate(reasoner, task, args.tasks, min(args.budget_tasks, args.tasks), args.first_seed)
        print(task, json.dumps(families[task]), flush=True)
    result = {
        "decoding": "greedy, float32, batched with padding on the left",
        "first_seed": args.first_seed,
        "seconds": round(time.perf_counter() - begin),
        "families": families,
    }
    output = args.output or args.model
    output.mkdir(parents=True, exist_ok=True)
    (output / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    if not args.no_plot:
        plot(families, output / "accuracy_by_budget.png")


if __name__ == "__main__":
    main()
