"""Self-Speculation for Reasoning Models (SSR, arXiv 2608.20359) in Hugging Face `generate`: the same tokens, sooner."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

from .version import __version__, check_transformers

TYPE_CHECKING = False  # editors take it for that of `typing`
if TYPE_CHECKING:
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

# The module of each public name: looked up when first asked for, so that `hf-ssr --help` need not wait for torch.
_MODULES = {
    "Draft": "drafting",
    "Drafter": "drafting",
    "SSRConfig": "config",
    "SSRGenerationMixin": "generate",
    "SSRMetrics": "metrics",
    "SSROutput": "output",
    "SplitThinking": "thinking",
    "Stage": "metrics",
    "StopThinking": "stopping",
    "SuffixAutomaton": "suffix_automaton",
    "SuffixDrafter": "drafter_suffix",
    "SuffixMatch": "suffix_automaton",
    "ThinkingBudgetLogitsProcessor": "thinking",
    "generate": "generate",
    "split_thinking": "thinking",
    "ssr_decoding": "decoding",
}


def __getattr__(name: str) -> Any:
    """A public name, the generation mode being added to transformers before; or a module."""
    if name in _MODULES:
        check_transformers()  # before the imports, which an old transformers would break
        importlib.import_module(".generate", __name__)
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value
    if name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`hf_ssr.generate` is the function, also when the module of that name is imported first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
