"""
Does a model read several tokens in one forward, and roll them back, as it does one by one, past its windows too? Do
the rows of a batch go back by counts of their own? Does it draw random numbers meanwhile? And does it do as a mask
says: does it tell a child from its parent in one row, rows of different lengths? Tried once, before SSR is trusted.
"""

import weakref
from collections.abc import Callable, Iterable
from threading import RLock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .host import attention_of, kernels_of
from .self_trials import autocast_dtypes, rounds_float32, try_blocks, try_forward, try_masks, try_rows

_results: "weakref.WeakKeyDictionary[torch.nn.Module, dict]" = weakref.WeakKeyDictionary()
_lock = RLock()  # what another thread draws would look as if the model drew it


def why_not_in_blocks(model, windows: Iterable[int] = ()) -> str | None:
    """
    Why a forward over several tokens does not yield what forwards over single tokens yield, also after tokens were
    rolled back; `None` if it does. The answer is kept for as long as the model computes in the same way, unless it is
    an error. The global random generators are left as they were.

    Args:
        model (`PreTrainedModel`): with a cache that can be rolled back.
        windows (`Iterable[int]`): lengths of those windows of the cache that the text may pass.
    """
    with _lock:
        if _is_training(model):
            reason, _ = _tried(model, try_forward)  # each time: a rate of dropout may have changed
            if reason is not None:
                return reason
        for window in (None, *sorted(windows)):
            reason = _known(model, try_blocks, window)
            if reason is not None:
                return reason
    return None


def why_not_in_rows(model) -> str | None:
    """
    Why rows of a batch cannot keep differently many tokens of a forward; `None` if they can. The answer is kept as that
    of [`why_not_in_blocks`].

    Args:
        model (`PreTrainedModel`): with layers that keep a state.
    """
    with _lock:
        return _known(model, try_rows)


def tells_texts_apart(model, windows: Iterable[int] = ()) -> bool:
    """
    Whether forwards over two rows of slots, which go on by differently many tokens and one of which has a child, with
    masks that say who sees whom, yield what forwards over each text alone yield. The answer is kept as that of
    [`why_not_in_blocks`].

    Args:
        model (`PreTrainedModel`): whose cache has attention layers only.
        windows (`Iterable[int]`): lengths of those windows of the cache that the text may pass.
    """
    with _lock:
        takes_masks = attention_of(model) in ("sdpa", "eager")
        return takes_masks and all(_known(model, try_masks, window) is None for window in (None, *sorted(windows)))


def _known(model, trial: Callable, *args) -> str | None:
    known = _results.setdefault(model, {})
    key = trial, args, _mode(model)
    if key not in known:
        reason, is_lasting = _tried(model, trial, *args)
        if not is_lasting:
            return reason
        known[key] = reason
    return known[key]


def _mode(model) -> tuple:
    """How the model computes: what was tried in one way need not hold in another."""
    config = model.config.get_text_config(decoder=True)
    return (
        *((each.training, getattr(each, "gradient_checkpointing", False)) for each in model.modules()),
        *(each._compiled_call_impl is None for each in model.modules()),
        frozenset((parameter.dtype, parameter.device) for parameter in model.parameters()),
        (*kernels_of(model.config), *kernels_of(config)),
        id(vars(model).get("forward")),  # wrapped, for instance in autocast; by its id, as it holds the model
        frozenset(autocast_dtypes()),
        rounds_float32(),
    )


def _tried(model, trial: Callable, *args) -> tuple[str | None, bool]:
    """What speaks against the model by a trial, or `None`; and whether that lasts."""
    name, generators = type(model).__name__, _generators()
    states = [get() for get, _ in generators]
    try:
        with torch.no_grad():
            reason = trial(model, *args)
            if all(torch.equal(get(), state) for (get, _), state in zip(generators, states, strict=True)):
                return reason, True
            with _Draws() as draws:  # or was it another thread?
                trial(model, *args)
            if not draws.seen:
                return reason, True
    except torch.OutOfMemoryError:
        return f"there is no memory to try whether {name} reads several tokens at once", False
    except Exception as error:  # of whatever kind: plain `generate` may know better how to call it
        message = (str(error).strip().splitlines() or [""])[0]
        return f"{name} raises {type(error).__name__} where it reads several tokens at once: {message}", False
    for (_, put_back), state in zip(generators, states, strict=True):
        put_back(state)
    cure = ", as dropout does in training mode: call `model.eval()`" if _is_training(model) else ""
    return f"{name} draws random numbers in its forward{cure}", False


class _Draws(TorchDispatchMode):
    """Sees whether what this thread computes draws from a global random generator."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = {each.name: each.default_value for each in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            is_off = given.get("dropout_p") == 0 or given.get("train") is False
            self.seen |= not is_off and given.get("generator") is None
        return func(*args, **kwargs)


def _is_training(model) -> bool:
    return any(module.training for module in model.modules())


def _generators() -> list[tuple[Callable, Callable]]:
    """Of the global random generators: what reads and what sets their states."""
    generators = [(torch.default_generator.get_state, torch.default_generator.set_state)]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if hasattr(module, "default_generators"):  # one of each device
            generators += [(each.get_state, each.set_state) for each in module.default_generators]
        else:
            generators.append((module.get_rng_state, module.set_rng_state))
    return generators
