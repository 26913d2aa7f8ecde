"""The paper's tables and figures, one experiment each.

    python -m benchmarks.paper table2 --cifar DIR --checkpoints DIR --device cuda
    python -m benchmarks.paper all --smoke          # small networks, two cores, minutes; fails where a meaning is lost
    python -m benchmarks.paper all --table          # tables and figures again, from the stored rows

Rows go to benchmarks/results/paper/NAME.json as they come, and a second call goes on where the first stopped. Then the
figure docs/paper/NAME.svg and the block NAME of docs/paper.md are written. With --smoke all of it goes to a folder of
its own. To make a row anew, take it out of the file.

`--minutes 8` begins no case after eight minutes, `--only seed=0 selector=l1,l2` takes a part of the cases: GPU time
often comes in pieces.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.networks import CIFAR_IMAGES
from benchmarks.paper.cases import BEST, PAPER, RELEASED, Case
from benchmarks.paper.checks import require_rows
from benchmarks.paper.experiment import PAGE, Experiment, chosen_cases, is_out_of_time, run
from benchmarks.paper.opening import NETWORKS
from benchmarks.paper.recoveries import IN_ONE_PASS, SEQUENTIAL
from benchmarks.paper.registry import EXPERIMENTS
from benchmarks.paper.smoke import STAND_INS
from benchmarks.paper.workbench import PRECISIONS
from recoup.algebra.selection.registry import SELECTORS
from recoup.errors import UsageError

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results" / "paper", ROOT / "docs"
ALL = "all"
# Options whose values are places on somebody's machine, and what stands for them in a recorded command.
PLACES = {
    "--cifar": "DIR", "--checkpoints": "DIR", "--imagenet": "DIR", "--other-source": "DIR", "--out": "DIR",
    "--docs": "DIR",
}  # fmt: skip
# Options that decide how a run is shared out; of its rows they decide the seconds, which say so.
UNSAID = ("--jobs", "--beside", "--minutes")


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    options = parse(words)
    names = list(EXPERIMENTS) if options.name == ALL else [options.name]
    if options.smoke:
        torch.set_num_threads(1)  # the networks are too small to share
    failed = [name for name in names if not succeeds(EXPERIMENTS[name], options, words)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def succeeds(experiment: Experiment, options: argparse.Namespace, words: Sequence[str]) -> bool:
    """Run an experiment and print its table; whether its rows mean what they should."""
    options.command = command_of(experiment.name, words)
    start = time.perf_counter()
    try:
        rows = run(experiment, options)
        if rows:
            print(experiment.table(rows))
            experiment.check(rows)
        else:
            print(f"{experiment.name}: no rows; nothing at hand to measure", file=sys.stderr)
        if options.smoke and not is_out_of_time(options):
            require_rows(rows, chosen_cases(experiment, options))
    except UsageError as error:
        print(f"{experiment.name}: {error}", file=sys.stderr)
        return False
    except AssertionError as error:
        print(f"{experiment.name} does not mean what it should: {error}", file=sys.stderr)
        return False
    print(f"{experiment.name}: {len(rows)} rows, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return True


def command_of(name: str, words: Sequence[str]) -> str:
    """The command that makes the rows of an experiment again, without anybody's places."""
    shown: list[str] = []
    given = iter([name if word == ALL else word for word in words])
    for word in given:
        option, _, value = word.partition("=")
        if option in UNSAID:
            value or next(given, None)
        elif option in PLACES:
            value or next(given, None)
            shown += [option, PLACES[option]]
        else:
            shown.append(word)
    return f"python -m benchmarks.paper {' '.join(_without_files(shown))}"


def _without_files(words: Sequence[str]) -> list[str]:
    """NETWORK=/some/where/FILE becomes NETWORK=FILE."""
    return [f"{word.partition('=')[0]}=FILE" if word.partition("=")[0] in NETWORKS and "=" in word else word
            for word in words]  # fmt: skip


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*EXPERIMENTS, ALL], help="the experiment")
    parser.add_argument("--smoke", action="store_true", help="small networks that are trained in the run, few cases")
    parser.add_argument("--table", action="store_true", help="measure nothing; show the rows that are stored")
    _add_places(parser)
    _add_cases(parser)
    _add_way(parser)
    options = parser.parse_args(words)
    _check(parser, options)
    return options


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cifar", default=os.environ.get("RECOUP_CIFAR10"), help="folder with cifar-10-batches-py")
    parser.add_argument("--checkpoints", help="folder with the weights of the networks for CIFAR-10")
    parser.add_argument("--weights", nargs="+", default=[], metavar="NETWORK=FILE", help="weights of single networks")
    parser.add_argument("--imagenet", help="folder with calibration and validation, or the genuine data set")
    parser.add_argument("--other-source", help="table3: a folder of images, or data by name, such as voc:DIR")
    parser.add_argument("--out", type=Path, help=f"folder for the rows, {RESULTS.relative_to(ROOT)} if not said")
    parser.add_argument("--docs", type=Path, help=f"folder with {PAGE}, docs if not said")


def _add_cases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--networks", nargs="+", help="all that are at hand if not said")
    parser.add_argument("--methods", nargs="+", choices=(PAPER, RELEASED, BEST))
    parser.add_argument("--only", nargs="+", default=[], metavar="FIELD=VALUE[,VALUE]", help="a part of the cases")
    parser.add_argument("--tolerances", type=float, nargs="+", help="in points")
    parser.add_argument("--seeds", type=int, help="calibration samples")
    parser.add_argument("--selectors", nargs="+", choices=list(SELECTORS), metavar="SELECTOR")
    parser.add_argument("--recoveries", nargs="+", choices=(*IN_ONE_PASS, *SEQUENTIAL), metavar="RECOVERY")
    parser.add_argument("--epochs", type=int, nargs="+", help="of retraining")
    parser.add_argument("--kept", type=float, help="retraining: the share of the MACs")


def _add_way(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=CIFAR_IMAGES, help="for calibration")
    parser.add_argument("--validation-images", type=int, help="all if not said")
    parser.add_argument("--test-images", type=int, help="all if not said")
    parser.add_argument("--batch", type=int, help="images per batch")
    parser.add_argument("--keep-class", action="store_true", help="prune only what the network's class can hold")
    parser.add_argument("--unit", default="block", choices=("block", "layer"), help="what the paper's search visits")
    parser.add_argument("--ridge", type=float)
    parser.add_argument("--weighting")
    parser.add_argument("--positions", type=int, help="0 for all")
    parser.add_argument(
        "--fast-evaluate", choices=list(PRECISIONS),
        help="precision in which the paper's search measures candidates; what is reported is in float32",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help="begin no case after so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    parser.add_argument("--beside", type=int, default=0, help="processes of others on it meanwhile; rows say so")


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what cannot be run, and fill in where things go."""
    known = [*STAND_INS.values()] if options.smoke else [*NETWORKS]
    unknown = [name for name in options.networks or () if name not in known]
    if unknown:
        parser.error(f"--networks: there is no {', '.join(unknown)}; known are {', '.join(known)}")
    wrong = [text for text in options.weights if text.partition("=")[0] not in NETWORKS or "=" not in text]
    if wrong:
        parser.error(f"--weights: {', '.join(wrong)} is not NETWORK=FILE with one of {', '.join(NETWORKS)}")
    known = [part.name for part in fields(Case)]
    wrong = [text for text in options.only if text.partition("=")[0] not in known or "=" not in text]
    if wrong:
        parser.error(f"--only: {', '.join(wrong)} is not FIELD=VALUE with one of {', '.join(known)}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if options.beside < 0:
        parser.error(f"--beside must be at least 0, got {options.beside}")
    if not (options.smoke or options.table) and (options.cifar is None and options.imagenet is None):
        parser.error("--cifar or --imagenet must be said; --smoke needs neither")
    options.weights = dict(text.split("=", 1) for text in options.weights)
    if options.smoke:
        options.out = options.out or Path(tempfile.mkdtemp(prefix="recoup-paper-"))
        options.docs = options.docs or options.out
    options.out, options.docs = options.out or RESULTS, options.docs or DOCS
    options.only = {name: value.split(",") for name, _, value in (text.partition("=") for text in options.only)}
    options.until = None if options.minutes is None else time.time() + 60 * options.minutes
    options.command = ""
