"""How metrics print: a name and a value a line."""

import math
from collections.abc import Iterator, Sequence


def rows_of(metrics, rates: Sequence[str]) -> Iterator[tuple[str, str]]:
    """
    Names and values.

    Args:
        metrics ([`SSRMetrics`]): what was counted.
        rates (`Sequence[str]`): names of its properties.
    """
    if metrics.plain_reason is not None:
        yield "plain decoding", metrics.plain_reason
        return
    if metrics.per_row:
        yield "rows", f"{len(metrics.per_row)}, each in `per_row`"
    yield "tokens", f"{metrics.prompt_tokens} prompt, {metrics.thinking_tokens} thought, {metrics.answer_tokens} answer"
    if metrics.thinking_budget is not None:
        yield "thinking budget", f"{metrics.thinking_budget}{' (cut to fit)' if metrics.thinking_budget_capped else ''}"
    stages = [
        f"{s.draft_tokens} from {s.draft_budget} ({s.ended_by}), used for {s.accepted_tokens}" for s in metrics.stages
    ]
    yield "stages (draft from budget)", ", ".join(stages) or "none"
    yield "forwards", _listed(metrics.forwards, "d")
    seconds = {name.replace("_", " "): value for name, value in metrics.seconds.items()}
    if not math.isnan(metrics.total_seconds):
        yield "seconds", _listed(seconds, ".3f")
        yield "seconds in all", f"{metrics.total_seconds:.3f}, outside forwards {metrics.overhead_seconds:.3f}"
    if metrics.thinking_drafted_tokens:
        yield (
            "in the thought",
            f"{metrics.thinking_accepted_tokens} of {metrics.thinking_drafted_tokens} draft tokens kept",
        )
    yield "rounds", f"{metrics.rounds}, {metrics.mean_draft_length:.2f} draft tokens each"
    yield "accepted from the prefix", f"{metrics.prefix_accepted}"
    yield "accepted from suffixes", _listed(metrics.suffix_accepted, "d")
    yield (
        "tokens of the model",
        f"{metrics.recovered_tokens} recovered, {metrics.bonus_tokens} bonus, {metrics.plain_tokens} plain",
    )
    yield "wasted draft tokens", f"{metrics.wasted_draft_tokens}"
    yield "extra places of the cache", f"{metrics.extra_places}"
    for name in rates:
        value = getattr(metrics, name)
        is_shown = not name.endswith("seconds") and name not in ("answer_speedup", "cost")  # one run's noise
        if isinstance(value, float) and is_shown and not math.isnan(value):
            yield name.replace("_", " "), f"{value:.3f}"


def _listed(values: dict[str, float], form: str) -> str:
    return ", ".join(f"{value:{form}} {name}" for name, value in values.items() if value) or "none"
