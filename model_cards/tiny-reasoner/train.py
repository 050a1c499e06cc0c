"""
Trains the tiny reasoner from scratch: tokenizer, weights, and the folder that goes to the Hub.

    python train.py --minutes 60            # on 2 CPU cores; --resume goes on where a run stopped

The tasks are in `hf_ssr.bench.tasks`. First half a minute of plain lookups (segments shown once, then in another
order), because copying is what small models learn last; then short tasks, from which they learn it; then all. From all
at once they had not learnt it after 50 minutes. A third of the thoughts is cut at a random token; with `--cut-share 0`
none is, which gives the twin that shows what these cuts are worth.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AttentionInterface, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_ssr.bench.tasks import TASKS, VALIDATION, Sample, cut_thought, draw

FOLDER = Path(__file__).parent
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, _, TURN_END = MARKERS
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that keeps the names and phrases of the tasks whole; digits stay apart."""
    pieces = {"user", "assistant", "system", *(piece for task in TASKS.values() for piece in task.PIECES)}
    escaped = [_escape(piece) for piece in sorted(pieces, key=lambda piece: (-len(piece), piece))]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = (spell.pre_tokenize_str(piece)[0][0] for piece in sorted(pieces))
    vocabulary += [piece for piece in spelt if piece not in vocabulary]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex("|".join([*escaped, r"[\s\S]"])), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def _escape(text: str) -> str:
    """The text as a pattern; one that ends in a letter matches whole words only (" h" of "3 h", not of "3 height")."""
    escaped = "".join(c if c.isalnum() or c in '_"' else "\\n" if c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return escaped + ("(?![A-Za-z])" if text[-1].isalpha() else "")


def make_model(tokenizer: PreTrainedTokenizerFast, qk_scale: float) -> Qwen3ForCausalLM:
    """A Qwen3 of 1.4 million parameters; `qk_scale` above 1 makes attention sharp from the start, as a lookup is."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        initializer_range=0.04,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, qk_scale)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, qk_scale)
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    start_with_lookups(model)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def blockwise_attention(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
    """
    Causal attention over blocks of 128 queries: the same as PyTorch's, whose backward pass takes twice the time on a
    CPU in bfloat16. Queries, keys and values are (rows, heads, tokens, size).
    """
    rows, heads, tokens, size = query.shape
    query, key, value = (x.to(value.dtype).reshape(rows * heads, tokens, size) for x in (query, key, value))
    outputs = []
    for start in range(0, tokens, 128):
        end = min(start + 128, tokens)
        mask = torch.full((end - start, end), -math.inf, dtype=value.dtype).triu(start + 1)
        mask = mask.expand(rows * heads, -1, -1)
        scores = torch.baddbmm(mask, query[:, start:end], key[:, :end].transpose(1, 2), alpha=scaling)
        outputs.append(scores.softmax(-1).to(value.dtype) @ value[:, :end])
    return torch.cat(outputs, dim=1).view(rows, heads, tokens, size).transpose(1, 2), None


AttentionInterface.register("blockwise", blockwise_attention)


@torch.no_grad()
def start_with_lookups(model: Qwen3ForCausalLM, offsets: int = 4, positional: int = 5, scale: float = 2.2) -> None:
    """
    Lets heads of the first two layers start as an induction circuit, the rest of the model as noise. Found by training
    alone, the circuit takes longer than everything else: one head must look back, another must use what it found.

    *First layer.* Head n looks at the token n + 1 places back and writes a part of its embedding into directions of its
    own. The embedding's first dimension is the same for all tokens and is all that query and key see; RoPE turns both
    with their position, and a key turned ahead by n + 1 places meets the query that is n + 1 places later.

    *Second layer.* Head 0 finds tokens whose predecessor is the current token, head 1 those whose predecessor's
    predecessor is the current token's predecessor, and so on; the last heads find earlier occurrences of the current
    token and of its predecessor. They compare in the dimensions that RoPE hardly turns, and copy the token they find.
    """
    config, size = model.config, model.config.head_dim
    half, width = size // 2, config.hidden_size
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = 4 * config.initializer_range
    basis = torch.linalg.qr(torch.randn(width - 1, width - 1)).Q
    basis = torch.cat([torch.zeros(width - 1, 1), basis], dim=1)  # rows: directions that the first dimension is not in
    seen, *written = (F.pad(part, (0, 0, 0, 1)) for part in basis.split(size - 1)[: offsets + 1])
    slow = torch.ones(size, 1)
    slow[:positional] = slow[half : half + positional] = 0
    turns = config.rope_parameters["rope_theta"] ** (-torch.arange(positional) / half)

    def rows(projection: torch.nn.Linear, head: int) -> torch.Tensor:
        return projection.weight[head * size : (head + 1) * size]

    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for attention in (first, second):
        attention.q_norm.weight.fill_(scale)
        attention.k_norm.weight.fill_(scale)
    for head in range(offsets):
        query, key = rows(first.q_proj, head).zero_(), rows(first.k_proj, head).zero_()
        query[:positional, 0] = 0.5
        key[:positional, 0] = 0.5 * torch.cos((head + 1) * turns)
        key[half : half + positional, 0] = 0.5 * torch.sin((head + 1) * turns)
        rows(first.v_proj, head).copy_(seen)
        first.o_proj.weight[:, head * size : (head + 1) * size] = 0.09 * written[head].T
    now = [seen, *written]  # where the second layer finds a part of the token 0, 1, 2, ... places back
    compared = [(now[n], now[n + 1]) for n in range(offsets)] + [(now[n], now[n]) for n in range(2)]
    for head, (ours, theirs) in enumerate(compared[: config.num_attention_heads]):
        rows(second.q_proj, head).copy_(0.5 * slow * ours)
        rows(second.k_proj, head).copy_(0.5 * slow * theirs)
        if head < offsets:
            rows(second.v_proj, head).copy_(seen)
            second.o_proj.weight[:, head * size : (head + 1) * size] = 0.05 * seen.T


class Encoder:
    """
    Turns samples into (tokens, first learnt position).

    Args:
        tokenizer (`PreTrainedTokenizerFast`): of `make_tokenizer`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.close = self.ids("\n</think>\n\n")
        self.no_thought = self.ids("\n\n</think>\n\n")

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def prompt(self, sample: Sample) -> list[int]:
        """The tokens of the chat up to where the model goes on: the thought is open."""
        return self.ids(f"<|im_start|>user\n{sample.prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n")

    def __call__(self, sample: Sample, cut: random.Random | None = None) -> tuple[list[int], int]:
        prompt, thought = self.prompt(sample), self.ids(sample.thought)
        if cut is not None and cut.random() < 0.1:  # `enable_thinking=False` of the chat template, as it is tokenized
            prompt, thought = prompt[:-1], []
            return [*prompt, *self.no_thought, *self.ids(sample.answer + TURN_END)], len(prompt) + len(self.no_thought)
        if cut is not None:
            thought = cut_thought(thought, cut)
        answer = self.ids(sample.answer + TURN_END)
        return [*prompt, *thought, *self.close, *answer], len(prompt)


def is_short(sample: Sample) -> bool:
    """Whether nothing is wished for beside the plain answer, and a class has at most 8 fields."""
    return not sample.data[-1] and (sample.task != "class" or len(sample.data[1]) <= 8)


def lookups(rng: random.Random, tokens: list[int], most: int) -> tuple[list[int], int]:
    """Segments of 2 to 5 random tokens, then the same segments in another order; the second half is learnt."""
    segments = [rng.sample(tokens, rng.randint(2, 5)) for _ in range(rng.randint(min(most, 3), most))]
    first = [token for segment in segments for token in segment]
    rng.shuffle(segments)
    return [*first, *(token for segment in segments for token in segment)], len(first)


def batches(rng: random.Random, draw_one, tokens_per_batch: int, pool: int = 512):
    """Endless batches of (tokens, first learnt position) pairs of like length."""
    while True:
        rows = sorted((draw_one() for _ in range(pool)), key=lambda row: len(row[0]))
        ready, batch = [], []
        for row in rows:
            if batch and len(row[0]) * (len(batch) + 1) > tokens_per_batch:
                ready.append(batch)
                batch = []
            batch.append(row)
        rng.shuffle(ready)  # the last, unfinished batch of the longest rows is made anew with the next pool
        yield from [*ready, batch]


def loss_of(model: Qwen3ForCausalLM, batch, pad: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The loss and whether the model is right at each learnt token of a batch, and how many of these a row has."""
    longest = max(len(tokens) for tokens, _ in batch)
    ids = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens, _ in batch])
    learnt = torch.zeros_like(ids, dtype=torch.bool)
    for row, (tokens, first) in enumerate(batch):
        learnt[row, first - 1 : len(tokens) - 1] = True  # the position before a token predicts it
    # Padding is on the right and attention looks back only, so that no mask is needed.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[learnt]
    targets = ids.roll(-1, dims=1)[learnt]
    logits = model.lm_head(hidden).float()
    right = logits.argmax(-1) == targets
    return F.cross_entropy(logits, targets, reduction="none"), right, learnt.sum(1).tolist()


@torch.no_grad()
def validate(model, encode: Encoder, count: int) -> dict[str, dict[str, float]]:
    """
    Teacher-forced figures on validation tasks with their full thought. `exact` is the share of tasks with every token
    right, which is what greedy generation gets right word for word.
    """
    figures = {}
    for task in TASKS:
        rows = sorted((encode(draw(task, VALIDATION + i)) for i in range(count)), key=lambda row: len(row[0]))
        losses, rights, exact = [], [], 0
        for i in range(0, count, 8):
            loss, right, lengths = loss_of(model, rows[i : i + 8], 0)
            exact += sum(bool(row.all()) for row in right.split(lengths))
            losses.append(loss)
            rights.append(right)
        figures[task] = {
            "loss": torch.cat(losses).mean().item(),
            "tokens": torch.cat(rights).float().mean().item(),
            "exact": exact / count,
        }
    return figures


def make_optimizers(model, args) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices and AdamW for the rest."""
    matrices = [p for name, p in model.model.layers.named_parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    groups = [{"params": others, "weight_decay": 0.0}]
    optimizers = []
    if args.optimizer == "muon":
        optimizers.append(torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.05, adjust_lr_fn="original"))
    else:
        groups.append({"params": matrices, "weight_decay": 0.05})
    optimizers.append(torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def rate(step: int, progress: float, flat: float) -> float:
    """The learning rate as a share of its peak: up in 100 steps, flat, then down along a line."""
    return min(1.0, (step + 1) / 100) * min(1.0, max(0.01, (1 - progress) / (1 - flat)))


def main() -> None:
    """Trains for `--minutes`, validating and saving at intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--warmup-minutes", type=float, default=0.4, help="of lookups, within --minutes")
    parser.add_argument("--short-share", type=float, default=0.7, help="of --minutes: short tasks only")
    parser.add_argument("--cut-share", type=float, default=1 / 3, help="of the thoughts: cut short, or empty (a tenth)")
    parser.add_argument("--twice", choices=[*TASKS], default="path", help="the family of which there are twice as many")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--flat", type=float, default=0.4, help="share of the time before the rate falls")
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--qk-scale", type=float, default=1.5)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate-every", type=float, default=2, help="minutes")
    parser.add_argument("--validation-tasks", type=int, default=48, help="a family")
    parser.add_argument("--run", type=Path, default=FOLDER / "run", help="folder of checkpoint and log")
    parser.add_argument("--model", type=Path, default=FOLDER, help="folder of the best model so far")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    encode = Encoder(tokenizer)
    model = make_model(tokenizer, args.qk_scale)
    if args.precision == "bfloat16":
        model.set_attn_implementation("blockwise")
    optimizers = make_optimizers(model, args)
    args.run.mkdir(parents=True, exist_ok=True)
    checkpoint = args.run / "checkpoint.pt"
    state = {"step": 0, "seconds": 0.0, "tokens": 0, "best": -1.0, "samples": 0, "optimizer": args.optimizer}
    if args.resume:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        if saved["state"]["optimizer"] == args.optimizer:  # changing the optimizer starts its moments anew
            for optimizer, old in zip(optimizers, saved["optimizers"], strict=True):
                peaks = [group["peak"] for group in optimizer.param_groups]
                optimizer.load_state_dict(old)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["peak"] = peak
        state = saved["state"] | {"optimizer": args.optimizer}

    # Data depends on the seed and on how many samples came before, so that a resumed run does not see them again.
    rng = random.Random(f"{args.seed} {state['samples']}")
    pieces = {piece for task in TASKS.values() for piece in task.PIECES if piece.isalnum()}
    words = sorted({token for piece in pieces for token in encode.ids(piece)})
    families = [*TASKS, args.twice]
    short_until = 60 * args.short_share * args.minutes

    def draw_task():
        state["samples"] += 1
        task = families[state["samples"] % len(families)]
        while not is_short(sample := draw(task, rng.randrange(VALIDATION))) and state["seconds"] < short_until:
            pass
        return encode(sample, rng if rng.random() < args.cut_share else None)

    task_batches = batches(rng, draw_task, args.batch_tokens)

    def draw_lookups():  # few at first: a lookup among few tokens is found sooner
        share = state["seconds"] / 60 / args.warmup_minutes
        return lookups(rng, words, 3 + int(37 * share**2))

    lookup_batches = batches(rng, draw_lookups, args.batch_tokens // 4, pool=128)

    def save():
        optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
        torch.save({"model": model.state_dict(), "optimizers": optimizer_states, "state": state}, checkpoint)

    def validation():
        model.eval()
        figures = validate(model, encode, args.validation_tasks)
        model.train()
        record = {"minutes": round(state["seconds"] / 60, 1), "loss": running, **state, "families": figures}
        with open(args.run / "log.jsonl", "a") as log:
            log.write(json.dumps(record) + "\n")
        text = "  ".join(
            f"{task} {f['loss']:.4f} {f['tokens']:.2%} exact {f['exact']:.0%}" for task, f in figures.items()
        )
        bar.console.print(
            f"{record['minutes']:6.1f} min  step {state['step']}  {state['tokens'] / 1e6:.1f} M tokens  {text}",
            soft_wrap=True,
        )
        # The mean of losses breaks ties while nothing is exact yet.
        score = sum(f["exact"] + 1e-3 * f["tokens"] for f in figures.values()) / len(figures)
        if score >= state["best"]:
            state["best"] = score
            model.save_pretrained(args.model)
            tokenizer.save_pretrained(args.model)
        save()

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    running, next_validation = float("nan"), state["seconds"] + 60 * args.validate_every
    model.train()
    with Progress(*columns) as bar:
        shown = bar.add_task("", total=args.minutes * 60, completed=state["seconds"])
        while state["seconds"] < args.minutes * 60:
            begin = time.perf_counter()
            warming = state["seconds"] < args.warmup_minutes * 60
            batch = next(lookup_batches if warming else task_batches)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bfloat16"):
                losses, right, _ = loss_of(model, batch, tokenizer.pad_token_id)
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            share = rate(state["step"], state["seconds"] / 60 / args.minutes, args.flat)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * share
                optimizer.step()
                optimizer.zero_grad()
            loss = losses.mean().item()
            running = loss if math.isnan(running) else 0.97 * running + 0.03 * loss
            state["step"] += 1
            state["tokens"] += sum(len(tokens) for tokens, _ in batch)
            state["seconds"] += time.perf_counter() - begin
            speed = state["tokens"] / state["seconds"]
            kind = "lookups" if warming else "tasks"
            bar.update(
                shown,
                completed=state["seconds"],
                description=f"{kind} step {state['step']} loss {running:.4f} {speed:.0f} tokens/s",
            )
            if state["step"] % 50 == 0 and not bar.console.is_terminal:
                bar.console.print(
                    f"{kind} {state['seconds']:.0f} s step {state['step']} loss {running:.4f} "
                    f"right {right.float().mean():.3f} {speed:.0f} tokens/s",
                    soft_wrap=True,
                )
            if state["seconds"] >= next_validation or state["seconds"] >= args.minutes * 60:
                validation()
                next_validation = state["seconds"] + 60 * args.validate_every


if __name__ == "__main__":
    main()
