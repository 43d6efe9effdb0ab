"""What every test gets: one thread, no network, no W&B settings of the machine, and tokens that are made once."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

# Before anything imports torch, tokenizers, huggingface_hub or wandb: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_SILENT"] = "true"
for _name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"):
    os.environ.pop(_name, None)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `cache` folder with the tokens of debug scale: made by one worker, read by all of them."""
    from experiments.language_model.tokens import load_tokens

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    cache = shared / "shared-cache"
    with open(shared / "shared-cache.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load_tokens(
            "wikipedia_mini", limit_documents=400, vocabulary=512, cache_dir=cache / "tokens", progress=False
        )  # fmt: skip
    return cache


@pytest.fixture
def outputs(tmp_path: Path, warm_cache: Path) -> Path:
    """A live store of the test's own, with warm tokens."""
    return outputs_in(tmp_path / "outputs", warm_cache)


@pytest.fixture
def reference_outputs(tmp_path: Path, warm_cache: Path) -> Path:
    """A second live store, for the run that nothing happens to."""
    return outputs_in(tmp_path / "reference", warm_cache)


def outputs_in(folder: Path, cache: Path) -> Path:
    """`folder` as a live store whose cache is `cache`."""
    folder.mkdir(parents=True)
    (folder / "cache").symlink_to(cache, target_is_directory=True)
    return folder
