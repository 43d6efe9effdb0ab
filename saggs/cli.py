"""`saggs inspect`, `explain`, `algebra`, `certify`, `rebalance`: a checkpoint on disk, from the command line; and
`saggs probe`: an optimizer.

Exit codes: 0 done; 1 a pair failed certification (certify); 2 refused or impossible, with one line on stderr that says
why; 130 and 143 interrupted. Nothing heavy is imported before the arguments are understood.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As in `saggs.pairs`, whose import would take a second.
KINDS = ("query_key", "value_output", "up_down", "norm_gain", "query_key_gain")
BALANCED_KINDS = KINDS[:3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = parser().parse_args(arguments)
    restored = signal.signal(signal.SIGTERM, _terminated)  # so that what was begun is removed
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except (ValueError, OSError) as error:
        print(f"saggs: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("saggs: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, restored)


def _terminated(*_: object) -> None:
    raise SystemExit(143)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(
        prog="saggs",
        description="Find, certify, balance the exact scaling symmetries of a checkpoint's weights. Probe optimizers.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="how far from balance every exact pair is, the worst first")
    _common(inspect)
    inspect.add_argument("--norm", choices=("l2", "l1"), default="l2", help="default: l2 (Frobenius)")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of a table")
    inspect.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios against the layers")
    inspect.add_argument("--top", type=int, default=40, metavar="N", help="rows of the table; 0: all (default: 40)")
    inspect.set_defaults(command=_inspect)

    certify = commands.add_parser("certify", help="prove every pair on these very weights; exit code 1 if one fails")
    _common(certify)
    certify.set_defaults(command=_certify)

    explain = commands.add_parser("explain", help="for every matrix and gain: in which pair it is, or why in none")
    _path(explain)
    explain.add_argument("--json", action="store_true", help="print JSON instead of a table")
    explain.set_defaults(command=_explain)

    algebra = commands.add_parser("algebra", help="count the exact rescalings, and check that none was missed")
    _path(algebra)
    algebra.add_argument("--json", action="store_true", help="print JSON instead of a table")
    algebra.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the counts and the singular values")
    algebra.set_defaults(command=_algebra)

    rebalance = commands.add_parser("rebalance", help="write a balanced copy, optimizer state carried along")
    _common(rebalance)
    rebalance.add_argument("out", type=Path, metavar="OUT", help="a directory that does not exist yet")
    rebalance.add_argument("--damping", type=float, default=1.0, help="in (0, 1]; 1 equalises the norms (default)")
    rebalance.add_argument("--norm", choices=("l2", "l1"), default="l2", help="default: l2 (Frobenius)")
    rebalance.add_argument(
        "--factors",
        choices=("auto", "exact", "power_of_two"),
        default="auto",
        help="auto (default): powers of two, bit-exact, where weights are bfloat16; exact ones elsewhere",
    )
    rebalance.add_argument("--optimizer", type=Path, metavar="FILE", help="its state, if not optimizer.pt in PATH")
    rebalance.add_argument("--without-optimizer", action="store_true", help="leave the optimizer's state out")
    rebalance.set_defaults(command=_rebalance)

    probe = commands.add_parser("probe", help="how an optimizer answers rescaling, rotation and signed permutation")
    probe.add_argument("optimizer", metavar="CLASS", help="as torch.optim.AdamW, or my_module:MyClass")
    probe.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, as betas=0.9,0.95; may be repeated"
    )
    probe.add_argument("--steps", type=int, metavar="N", help="of every run (default: more than any refresh period)")
    probe.add_argument("--json", action="store_true", help="print JSON instead of a table")
    probe.set_defaults(command=_probe)
    return top


def _path(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=Path, metavar="PATH", help="the checkpoint's directory")


def _common(command: argparse.ArgumentParser) -> None:
    _path(command)
    command.add_argument(
        "--kinds",
        type=_kinds,
        default=BALANCED_KINDS,
        metavar="KIND,…",
        help=f"of {', '.join(KINDS)}, or all (default: the first three)",
    )
    command.add_argument(
        "--granularity",
        choices=("matrix", "head", "channel"),
        default="matrix",
        help="one factor a matrix (default), a head, or a channel",
    )


def _kinds(text: str) -> tuple[str, ...]:
    chosen = KINDS if text == "all" else tuple(part.strip() for part in text.split(","))
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}, all")
    return chosen


def _inspect(options: argparse.Namespace) -> int:
    from saggs import report
    from saggs.checkpoints import inspect_checkpoint

    if options.top < 0:
        raise ValueError(f"--top {options.top} must be 0 or more")
    found = _with_progress(inspect_checkpoint, options.path, options.kinds, options.granularity, options.norm)
    print(json.dumps(report.as_json(found), indent=1) if options.json else report.table(found, options.top))
    if options.plot:
        report.plot(found, options.plot, f"Norm ratios of {options.path.resolve().name}, {options.granularity} pairs")
        _note(f"{options.plot} written")
    return 0


def _certify(options: argparse.Namespace) -> int:
    from saggs import report
    from saggs.checkpoints import certify_checkpoint

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        examined = certify_checkpoint(options.path, options.kinds, options.granularity)
    left_out = [str(w.message) for w in caught if str(w.message).startswith("left out")]
    print(report.certificates(examined))
    for line in left_out:
        print(f"FAILED  {line}")
    failed = len(left_out) + sum(error is not None for _, error in examined)
    if not examined and not left_out:
        raise ValueError(f"{options.path}: the model has no exact pair of the kinds {', '.join(options.kinds)}")
    _note(f"{len(examined) + len(left_out) - failed} pairs exact, {failed} failed")
    return 1 if failed else 0


def _explain(options: argparse.Namespace) -> int:
    from saggs.checkpoints.model import explain_checkpoint

    found = explain_checkpoint(options.path)
    print(json.dumps(found.to_json(), indent=1) if options.json else found)
    return 0


def _algebra(options: argparse.Namespace) -> int:
    from saggs import report
    from saggs.checkpoints.model import algebra_of_checkpoint

    found = algebra_of_checkpoint(options.path)
    print(json.dumps(found.to_json(), indent=1) if options.json else found)
    if options.plot:
        report.plot_algebra(found, options.plot, f"Exact rescalings of {options.path.resolve().name}")
        _note(f"{options.plot} written")
    return 0


def _rebalance(options: argparse.Namespace) -> int:
    from saggs.checkpoints import rebalance_checkpoint

    done = _with_progress(
        rebalance_checkpoint,
        options.path,
        options.out,
        kinds=options.kinds,
        granularity=options.granularity,
        damping=options.damping,
        norm=options.norm,
        factors=options.factors,
        optimizer=options.optimizer,
        without_optimizer=options.without_optimizer,
    )
    for note in done.notes:
        _note(note)
    before = max((abs(p.log2_ratio) for p in done.pairs if p.log2_ratio is not None), default=0.0)
    after = max((abs(p.log2_ratio_after) for p in done.pairs if p.log2_ratio_after is not None), default=0.0)
    moved = [p.factor for p in done.pairs if p.factor != 1.0]
    span = f", factors {min(moved):.4g} to {max(moved):.4g}" if moved else ""
    print(f"{options.out}: {len(moved)} of {len(done.pairs)} pairs rescaled{span}")
    print(f"largest |log2 ratio| {before:.3f} before, {after:.3f} after; optimizer state: {done.optimizer}")
    return 0


def _probe(options: argparse.Namespace) -> int:
    from saggs.named import builder, optimizer_class, settings_of
    from saggs.probes import probe

    build = builder(optimizer_class(options.optimizer), settings_of(options.set))
    found = probe(build, name=options.optimizer, steps=options.steps)
    print(json.dumps(found.to_json(), indent=1) if options.json else found)
    return 0


def _with_progress(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from saggs.report import ProgressLine

    line = ProgressLine()
    try:
        return function(*args, **kwargs, progress=line)
    finally:
        line.clear()


def _note(text: str) -> None:
    print(f"saggs: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
