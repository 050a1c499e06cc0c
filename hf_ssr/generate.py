"""
The door: the `ssr` generation mode, `generate` for transformers' `custom_generate`, and a mixin for model classes.

On the Hub this file is `custom_generate/generate.py`, with the modules it imports beside it.
"""

import copy
import functools
import inspect
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin

from .config import GENERATION_MODE, SETTINGS, SSRConfig, overruled
from .decoding import ssr_decoding
from .drafter_suffix import SuffixDrafter
from .host import is_prepared, local_of_generate, require_members, validate_mode
from .output import Stream
from .preparing import predictions_of
from .validating import refuse_lookalikes

require_members()
_DECODING_METHOD = f"_{GENERATION_MODE}_decoding"
GENERATION_MODES_MAPPING[GENERATION_MODE] = _DECODING_METHOD
setattr(GenerationMixin, _DECODING_METHOD, ssr_decoding)


def generate(*args: Any, **kwargs: Any) -> Any:
    """
    SSR as a `custom_generate` function: `model.generate(..., custom_generate=hf_ssr.generate)`, or loaded by
    transformers from a Hub repository or a folder.

    Args:
        model (`PreTrainedModel`): the target.
        args, kwargs: as for [`~transformers.GenerationMixin.generate`]; settings of [`SSRConfig`] work as keywords too.

    Returns:
        What `model.generate` returns; [`SSROutput`] under `return_dict_in_generate`.

    Raises:
        `ValueError`: as [`SSRConfig`] and [`ssr_decoding`].
    """
    if _is_decoding_call(kwargs):
        return _decode(*args, **kwargs)
    if "model" in kwargs:  # by keyword from transformers, so that the inputs may be positional
        return _generate_with(kwargs.pop("model"), *args, **kwargs)
    return _generate_with(*args, **kwargs)


def _is_decoding_call(kwargs: dict[str, Any]) -> bool:
    """Whether `generate` of transformers calls a decoding method, its preparations done."""
    config = kwargs.get("generation_config")
    return isinstance(kwargs.get("stopping_criteria"), StoppingCriteriaList) and is_prepared(config)


def _decode(model, input_ids, generation_config: GenerationConfig, **kwargs):
    # transformers keeps these from a callable; without its streamer, the reader of a stream would wait for ever
    for name in ("streamer", "tokenizer"):
        if kwargs.get(name) is None:
            kwargs[name] = local_of_generate(name)
    with Stream.around(kwargs["streamer"]) as stream:
        config = SSRConfig.from_config(generation_config)
        config.update(**{name: value for name in SETTINGS if (value := kwargs.pop(name, None)) is not None})
        asked = getattr(generation_config, "is_ssr_config", False)  # transformers has asked it, so that it has warned
        mode = config.other_mode() if asked else config.get_generation_mode()
        if mode in (None, GENERATION_MODE):
            return ssr_decoding(model, input_ids, generation_config=config, **{**kwargs, "streamer": stream})
        if "/" in (method := GENERATION_MODES_MAPPING[mode]):
            raise ValueError(f"`custom_generate` is SSR, but other settings ask for {mode.value}: drop one of them.")
        found = {"streamer": stream if stream.streamer is not None else None, "tokenizer": kwargs["tokenizer"]}
        found = {name: value for name, value in found.items() if value is not None}
        validate_mode(model, mode, config, found)  # transformers has checked a call without a streamer
        rest = {name: value for name, value in kwargs.items() if name not in ("streamer", "tokenizer")}
        return getattr(type(model), method)(model, input_ids, generation_config=config, **found, **rest)


def _generate_with(model, inputs=None, generation_config: GenerationConfig | None = None, *args, **kwargs):
    """`model.generate` in the `ssr` mode, from a call that has not been prepared."""
    kwargs.pop("custom_generate", None)
    kwargs.pop("trust_remote_code", None)
    with Stream.around(kwargs.get("streamer")) as stream:
        config = SSRConfig() if generation_config is None else SSRConfig.from_config(copy.deepcopy(generation_config))
        refuse_lookalikes(kwargs, known=(*vars(config), *inspect.signature(model.forward).parameters))
        # what the call sets moves into the config, but not `None`: as a keyword it means "none", in a config "inherit"
        settings = {k: v for k, v in kwargs.items() if v is not None and k in vars(config) and not k.startswith("_")}
        config.update(**settings)
        rest = {k: v for k, v in kwargs.items() if k not in settings and not (k in SETTINGS and v is None)}
        if stream.streamer is not None:
            rest["streamer"] = stream
        # a model folder puts this function on the instance as `generate`; a compiled model's class has none
        method = getattr(type(model), "generate", None)
        call = model.generate if method is None else functools.partial(method, model)
        return call(inputs, config, *args, **rest)


def _signature() -> inspect.Signature:
    """Names the settings of SSR: transformers gives a callable only the keywords that its signature has."""
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in SETTINGS]
    own = inspect.signature(generate).parameters
    return inspect.Signature([own["args"], *named, own["kwargs"]])


generate.__signature__ = _signature()  # type: ignore[attr-defined]  # `inspect` and transformers look for it


class SSRGenerationMixin:
    """
    For a model class: `class MyModel(SSRGenerationMixin, Qwen3ForCausalLM)`.

    Uses SSR whenever `model.generation_config` is an [`SSRConfig`] and a call passes no config, and gives transformers'
    assisted decoding our drafter.
    """

    generation_config: GenerationConfig  # of the model class beside it, as is what `super` finds

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs):
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if generation_config is not None or not getattr(self.generation_config, "is_ssr_config", False):
            return config, model_kwargs
        for name in overruled(kwargs):
            setattr(config, name, None)
        return SSRConfig.from_config(config), model_kwargs

    def _get_candidate_generator(self, generation_config: GenerationConfig, input_ids, *args, **kwargs):
        if not getattr(generation_config, "is_ssr_config", False):
            found = super()._get_candidate_generator(generation_config, input_ids, *args, **kwargs)  # type: ignore[misc]
            return found
        config = SSRConfig.from_config(generation_config)
        drafter = SuffixDrafter.from_config(config)
        drafter.add("prompt", input_ids[0].tolist())
        drafter.length = input_ids.shape[1]
        drafter.add_draft(predictions_of(config, len(input_ids))[0])
        return drafter
