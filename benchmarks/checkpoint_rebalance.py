"""How fast a sharded checkpoint is rebalanced, against copying its files, and what memory its two passes take.

    python benchmarks/checkpoint_rebalance.py [--megabytes 800] [--times 5]

A Llama-like model of random weights is written in shards. Its pairs are found on a narrow twin (they are whole
matrices, whatever the width) and given to a fresh process, so that what is measured are the two passes alone: reading
the weights of the pairs (sums), and writing the result. A plain copy is `shutil.copyfile` of every file with the same
syncs. Copy and write alternate; figures are medians. The write pass runs from the last byte measured to the directory
under its final name. Memory is by how much what the fresh process holds grows at most during both passes (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from experiments.files import write_json  # noqa: E402
from saggs import ScalePair, find_pairs  # noqa: E402
from saggs.checkpoints import operations as checkpoints  # noqa: E402
from saggs.checkpoints.output_directory import sync_directory  # noqa: E402
from saggs.pairs import BALANCED_KINDS  # noqa: E402

CASES: tuple[tuple[torch.dtype, checkpoints.Factors], ...] = (
    (torch.float32, "exact"),
    (torch.float32, "power_of_two"),
    (torch.bfloat16, "auto"),
)


def llama(layers: int, width: int, mlp: int, vocabulary: int) -> Any:
    """A Llama-like model of random weights, its pairs out of balance."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=mlp, vocab_size=vocabulary, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "v_proj" in name or "up_proj" in name:
                parameter.mul_(11)
    return model


def build(folder: Path, pairs: Path, megabytes: int, dtype: torch.dtype) -> int:
    """A checkpoint of about so many megabytes in eight shards, and its pairs; returns how many there are."""
    width, mlp, vocabulary = 1024, 2816, 8192
    weights = megabytes * 10**6 // dtype.itemsize
    layers = max(1, (weights - 2 * width * vocabulary) // (4 * width**2 + 3 * width * mlp))
    llama(layers, width, mlp, vocabulary).to(dtype).save_pretrained(folder, max_shard_size=f"{megabytes // 8}MB")
    found = [pair.to_json() for pair in find_pairs(llama(layers, 32, 48, 64), BALANCED_KINDS)]
    for pair in found:
        for part in (*pair["left"], *pair["right"]):
            assert all(bounds is None for bounds in part["ranges"])
            part["shape"] = None
    pairs.write_text(json.dumps(found))
    return len(found)


def copied(source: Path, target: Path) -> float:
    """Seconds for a plain copy that is as safe: every file and the directory synced."""
    started = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as stream:
            os.fsync(stream.fileno())
    sync_directory(target)
    return time.perf_counter() - started


def passes(source: Path, target: Path, pairs: Path, factors: checkpoints.Factors) -> dict[str, float]:
    """Both passes in this process: seconds, and the growth of its peak memory in megabytes."""
    known = [ScalePair.from_json(pair) for pair in json.loads(pairs.read_text())]
    checkpoints.pairs_of_checkpoint = lambda *_: known
    times: list[float] = []
    held = [0, 0]  # at the beginning, and at most

    def watch(what: str, done: int, total: int) -> None:
        if what not in ("measuring", "writing"):
            return  # transformers is still to be imported
        kilobytes = int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])
        held[:] = held[0] or kilobytes, max(held[1], kilobytes)
        if what == "measuring":
            times.append(time.perf_counter())

    done = checkpoints.rebalance_checkpoint(source, target, factors=factors, progress=watch)
    assert all(report.factor != 1 for report in done.pairs)
    now = time.perf_counter()
    growth = (held[1] - held[0]) * 1024 / 1e6
    return {"sums": times[-1] - times[0], "write": now - times[-1], "memory_megabytes": growth}


def measured(folder: Path, megabytes: int, times: int, dtype: torch.dtype, factors: str) -> dict[str, Any]:
    """The figures of one case."""
    source, pairs = folder / "source", folder / "pairs.json"
    count = build(source, pairs, megabytes, dtype)
    copies, children = [], []
    for _ in range(times):
        copies.append(copied(source, folder / "copy"))
        shutil.rmtree(folder / "copy")
        command = [sys.executable, __file__, "--child", str(source), str(folder / "out"), str(pairs), factors]
        children.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        shutil.rmtree(folder / "out")
    sizes = [path.stat().st_size / 1e6 for path in source.iterdir()]
    shutil.rmtree(source)
    copy = statistics.median(copies)
    medians = {key: statistics.median(child[key] for child in children) for key in children[0]}
    return {
        "dtype": str(dtype),
        "factors": factors,
        "pairs": count,
        "megabytes": round(sum(sizes)),
        "largest_shard_megabytes": round(max(sizes)),
        "write_throughput_over_copy": round(copy / medians["write"], 2),
        "copy_seconds": round(copy, 2),
        "write_seconds": round(medians["write"], 2),
        "sums_seconds": round(medians["sums"], 2),
        "memory_growth_megabytes": round(medians["memory_megabytes"], 1),
    }


def main() -> None:
    """Measure every case and write results/benchmarks/checkpoint_rebalance.json."""
    parser = argparse.ArgumentParser(description="How fast a sharded checkpoint is rebalanced.")
    parser.add_argument("--megabytes", type=int, default=800, help="size of the checkpoint (default: 800)")
    parser.add_argument("--times", type=int, default=5, help="repetitions (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints (default: a temporary directory)")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        source, target, pairs, factors = options.child
        print(json.dumps(passes(Path(source), Path(target), Path(pairs), factors)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = [measured(Path(folder), options.megabytes, options.times, *case) for case in CASES]
    for result in results:
        print(json.dumps(result))
    environment = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    target = ROOT / "results" / "benchmarks" / "checkpoint_rebalance.json"
    write_json(target, {"environment": environment, "threads": 1, "cases": results})
    print(f"written to {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
