"""The token data that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from experiments import registry
from experiments.config import Config
from experiments.language_model.tokens import TokenData, load_tokens


def load_data(config: Config) -> TokenData:
    """The tokens of the configuration's corpus, from the cache or made now.

    Raises:
        DataMissing: the corpus is not on this machine; the message says how to get it.
    """
    registry.load_plugins(config.plugins)
    data = config.data
    return load_tokens(
        data.name,
        path=data.path,
        limit_documents=data.limit_documents,
        tokenizer=data.tokenizer,
        vocabulary=data.vocabulary,
        cache_dir=Path(config.paths.outputs) / "cache" / "tokens",
        progress=config.progress,
        loaders=registry.builders("corpus"),
    )
