"""Where a user's own optimizer, balancing rule, model or corpus enters by name.

A plugin is an importable module that calls these decorators; name it in the configuration and use its names:

    # my_plugin.py
    from experiments.registry import optimizer

    @optimizer("my_rule")
    def my_rule(groups, learning_rate, weight_decay, gamma=0.5):
        return MyRule(groups, lr=learning_rate, gamma=gamma)

    python train.py plugins=[my_plugin] optimizer=custom optimizer.name=my_rule optimizer.learning_rate=1e-3 \\
        +optimizer.options.gamma=0.7
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from experiments.checks import ConfigError, nearest

Builder = Callable[..., Any]
_BUILDERS: dict[str, dict[str, Builder]] = {"optimizer": {}, "rebalance": {}, "model": {}, "corpus": {}}


def _register(kind: str, name: str) -> Callable[[Builder], Builder]:
    def decorate(builder: Builder) -> Builder:
        known = _BUILDERS[kind].get(name)
        if known is not None and (known.__module__, known.__qualname__) != (builder.__module__, builder.__qualname__):
            raise ValueError(f"{kind} {name!r} is registered already by {known.__module__}; choose another name")
        _BUILDERS[kind][name] = builder
        return builder

    return decorate


def optimizer(name: str) -> Callable[[Builder], Builder]:
    """Register `build(param_groups, learning_rate, weight_decay, **options) -> torch.optim.Optimizer`."""
    return _register("optimizer", name)


def rebalance(name: str) -> Callable[[Builder], Builder]:
    """Register `build(model, optimizer, pairs, every, transport, **options)` returning an object with `step()`,
    `state_dict()` and `load_state_dict()`."""
    return _register("rebalance", name)


def model(name: str) -> Callable[[Builder], Builder]:
    """Register `build(vocabulary, context, layers, width, heads, tied, **options)`, a causal language model."""
    return _register("model", name)


def corpus(name: str) -> Callable[[Builder], Builder]:
    """Register `load(path) -> experiments.language_model.corpus.Corpus`."""
    return _register("corpus", name)


def builders(kind: str) -> dict[str, Builder]:
    """Registered builders of one kind, by name."""
    return dict(_BUILDERS[kind])


def load_plugins(modules: Sequence[str]) -> None:
    """Import the modules that register things. Raises a ConfigError naming one that cannot be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"plugins: cannot import {module!r} ({error}); is it on PYTHONPATH?") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(f"plugins: importing {module!r} raised {type(error).__name__}: {error}") from error


def require(kind: str, name: str) -> None:
    """Raise a ConfigError where nothing of this kind and name is registered."""
    if name not in _BUILDERS[kind]:
        raise ConfigError(
            f"{kind} {name!r} is not registered{nearest(name, _BUILDERS[kind])}; list its plugin in plugins=[…]"
        )


def build(kind: str, name: str, options: dict[str, Any], **arguments: Any) -> Any:
    """Call the builder of `name`.

    Raises a ConfigError for an unknown name, an option it does not take, or one it needs and was not given.
    """
    require(kind, name)
    builder = _BUILDERS[kind][name]
    parameters = inspect.signature(builder).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        own = [p for p in parameters if p not in arguments]
        for option in options:
            if option not in own:
                raise ConfigError(f"{kind}.options.{option}: {name!r} takes no such option{nearest(option, own)}")
    try:
        inspect.signature(builder).bind(**arguments, **options)
    except TypeError as error:
        raise ConfigError(
            f"{kind} {name!r}: {error}; its builder is called with {', '.join([*arguments, *options])}"
        ) from None
    return builder(**arguments, **options)
