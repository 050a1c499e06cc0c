"""
Every private member of transformers that SSR uses, and why. No other file touches one: what a new transformers renames
is mended here, and named before the first token.
"""

import inspect
import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin


class Member(NamedTuple):
    """
    A private member of transformers.

    Args:
        holder (`str`): what has it.
        name (`str`): of the member.
        purpose (`str`): what SSR needs it for.
        where (`type` or `function`): the holder itself, or whose methods set it on one; of a function, whose variable
            it is.
    """

    holder: str
    name: str
    purpose: str
    where: Any = GenerationMixin

    @property
    def is_there(self) -> bool:
        """Whether the transformers that is installed has it."""
        if self.where.__name__ == self.holder:
            return hasattr(self.where, self.name)
        functions = vars(self.where).values() if inspect.isclass(self.where) else [self.where]
        functions = [each for each in map(inspect.unwrap, filter(callable, functions)) if inspect.isfunction(each)]
        if not any(each.__module__.startswith("transformers.") for each in functions):
            return True  # somebody has replaced the function
        return any(self.name in each.__code__.co_names + each.__code__.co_varnames for each in functions)


MEMBERS = (
    Member("GenerationMixin", "_prefill", "the forward over the prompt"),
    Member("GenerationMixin", "_sample", "plain decoding, where SSR does not apply"),
    Member("GenerationMixin", "_update_model_kwargs_for_generation", "masks and positions of the tokens to come"),
    Member("GenerationMixin", "_optimize_model_for_decode", "the experts' kernel for one-token steps"),
    Member("GenerationMixin", "_validate_generation_mode", "a call that asks for another mode"),
    Member("GenerationMixin", "_prepare_generation_config", "`SSRGenerationMixin`"),
    Member("GenerationMixin", "_get_candidate_generator", "`SSRGenerationMixin`"),
    Member("GenerationMixin.generate", "streamer", "what it keeps from `custom_generate`", GenerationMixin.generate),
    Member("GenerationMixin.generate", "kwargs", "what it keeps from `custom_generate`", GenerationMixin.generate),
    Member("GenerationMixin", "init_continuous_batching", "the warning that it runs without SSR"),
    Member("GenerationConfig", "_eos_token_tensor", "the tokens that end a text"),
    Member("GenerationConfig", "_pad_token_tensor", "the token that fills up shorter texts"),
    Member("Cache", "_is_user_defined", "a cache that the user gave, and gets back"),
    Member("PreTrainedModel", "_is_stateful", "models whose cache cannot go back", PreTrainedModel),
    Member("PreTrainedConfig", "_attn_implementation", "how attention is computed", PreTrainedConfig),
    Member("PreTrainedConfig", "_experts_implementation", "how experts are computed", PreTrainedConfig),
)


def require_members() -> None:
    """
    Looks for all of [`MEMBERS`].

    Raises:
        `ImportError`: naming those that the transformers that is installed lacks.
    """
    missing = [f"`{each.holder}.{each.name}` ({each.purpose})" for each in MEMBERS if not each.is_there]
    if missing:
        raise ImportError(
            f"hf_ssr needs what transformers {transformers.__version__} lacks: {', '.join(missing)}. Install an older "
            "transformers, or a newer hf_ssr."
        )


def prefill(model, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]):
    """The forward over the prompts. Private, as only it knows about chunks, a filled cache, and images."""
    return model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)


def decode_plainly(model, input_ids: torch.Tensor, **kwargs):
    """Plain decoding of a call that `generate` has prepared. Private, as `generate` would prepare it again."""
    return model._sample(input_ids, **kwargs)


def extended_kwargs(model, model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` that describe `count` tokens more. Private, as it is a step of `generate`'s own loop."""
    return model._update_model_kwargs_for_generation({}, dict(model_kwargs), num_new_tokens=count)


def extends_kwargs_itself(model) -> bool:
    """Whether the model's class overrides that step: what it does there may not go back."""
    own = type(model)._update_model_kwargs_for_generation
    return own is not GenerationMixin._update_model_kwargs_for_generation


def kernels_for_steps(model) -> AbstractContextManager[None]:
    """Within it, experts have the kernel of one-token steps. Private, and what plain decoding does."""
    return model._optimize_model_for_decode()


def is_stateful(model) -> bool:
    """Whether the cache holds a state that does not go back. Private: nothing public says it of a class."""
    return model._is_stateful


def is_of_user(cache) -> bool:
    """Whether the user gave the cache to `generate`. Private: `generate` marks it so, and tells nobody else."""
    return getattr(cache, "_is_user_defined", False)


def attention_of(model) -> str:
    """How attention is computed. Private: there is no public getter."""
    return model.config._attn_implementation


def kernels_of(config: PreTrainedConfig) -> tuple[str | None, str | None]:
    """How attention and experts are computed. Private: there is no public getter for a part of a model."""
    return getattr(config, "_attn_implementation", None), getattr(config, "_experts_implementation", None)


def is_prepared(config: GenerationConfig | None) -> bool:
    """Whether `generate` has prepared the config. Private: only its tensors tell it from one that a user made."""
    return hasattr(config, "_eos_token_tensor")


def eos_token_ids(config: GenerationConfig) -> set[int]:
    """Tokens that end a text. Private: `generate` completes them from the model's config, as tensors only."""
    eos = config._eos_token_tensor
    return set() if eos is None else set(eos.flatten().tolist())


def pad_token_id(config: GenerationConfig) -> int:
    """The token that fills up shorter texts. Private, as [`eos_token_ids`]."""
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad)


def validate_mode(model, mode, config: GenerationConfig, given: dict[str, Any]) -> None:
    """
    Whether a mode of transformers takes a call. Private: `generate` has checked it without what is added here.

    Raises:
        `ValueError`: if it does not.
    """
    model._validate_generation_mode(mode, config, given)


def local_of_generate(name: str) -> Any:
    """
    An argument of the `GenerationMixin.generate` call that we are in, or of the wrappers around it. From the stack:
    `custom_generate` is not given it.
    """
    method, codes = GenerationMixin.generate, []
    while method is not None:
        codes.append(method.__code__)
        method = getattr(method, "__wrapped__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not codes[-1]:
        frame = frame.f_back
    while frame is not None and frame.f_code in codes:
        found = frame.f_locals.get(name)
        if found is None:
            found = frame.f_locals.get("kwargs", {}).get(name)
        if found is not None:
            return found
        frame = frame.f_back
    return None


def is_read_by_continuous_batching() -> bool:
    """Whether it reads the property that asks this. From the stack: it asks a config for nothing else."""
    return sys._getframe(2).f_code.co_name == "init_continuous_batching"
