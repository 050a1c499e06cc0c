"""Self-Speculation for Reasoning Models (SSR, arXiv 2608.20359) in Hugging Face `generate`: the same tokens, sooner."""
# ruff: noqa: E402

from .version import __version__, check_transformers

check_transformers()  # before the imports below, which an old transformers would break

from .config import SSRConfig
from .decoding import ssr_decoding
from .drafter_suffix import SuffixDrafter
from .drafting import Draft, Drafter
from .generate import SSRGenerationMixin, generate
from .metrics import SSRMetrics, Stage
from .output import SSROutput
from .stopping import StopThinking
from .suffix_automaton import SuffixAutomaton, SuffixMatch
from .thinking import SplitThinking, ThinkingBudgetLogitsProcessor, split_thinking

__all__ = [
    "Draft",
    "Drafter",
    "SSRConfig",
    "SSRGenerationMixin",
    "SSRMetrics",
    "SSROutput",
    "SplitThinking",
    "Stage",
    "StopThinking",
    "SuffixAutomaton",
    "SuffixDrafter",
    "SuffixMatch",
    "ThinkingBudgetLogitsProcessor",
    "__version__",
    "generate",
    "split_thinking",
    "ssr_decoding",
]
