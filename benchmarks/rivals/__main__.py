"""Run the recipe of a rival on a network trained on CIFAR-10, or all of them on small digits.

    python -m benchmarks.rivals dcp --cifar DIR --checkpoints DIR --network vgg16 --share 0.5 --device cuda --out FILE
    python -m benchmarks.rivals --smoke

Rows are kept in the file, so that a later call goes on where one stopped. `--epochs` is for the training after the cut,
`--search-epochs` for what comes before it, `--set` for other settings of the recipe, e.g. `--set criterion=sampled`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from benchmarks import networks
from benchmarks.baselines import count_macs
from benchmarks.rivals import amc, cac, dcp, gal, metapruning, sfp, torch_pruning
from benchmarks.rivals.training import Schedule
from benchmarks.rows import Case, Outcome, Row, Store
from recoup.cli.data import open_data
from recoup.cli.models import open_model
from recoup.cli.models.digits import digits_resnet, train_digits
from recoup.errors import RecoupError, UsageError

RECIPES: dict[str, Any] = {
    "dcp": dcp,
    "gal": gal,
    "metapruning": metapruning,
    "cac": cac,
    "sfp": sfp,
    "amc": amc,
    "torch_pruning": torch_pruning,
}
# All training images of the split: rivals learn from them.
IMAGES = 40_000
# For digits: enough to see that a recipe works, little enough for two cores.
SHORT = Schedule(epochs=3, rate=0.02, batch=64, augment=False)
SMOKE: dict[str, dict[str, Any]] = {
    "dcp": {"images": 64},
    "gal": {"sparsity": 0.3, "mask_every": 5},
    "metapruning": {"hidden": 8, "generations": 4, "population": 8, "parents": 3, "judges": 0.2},
    "cac": {},
    "sfp": {},
    "amc": {"walks": 20, "random_walks": 10, "hidden": 32},
}
SMOKE_WIDTH, SMOKE_EPOCHS = 8, 8


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if options.smoke:
        print(json.dumps(smoke(options.share), indent=1))
        return
    store, case = Store(options.out, common(options)), case_of(options)
    if not store.waiting([case]):
        print(f"{options.out} has this row already", file=sys.stderr)
        return
    bench = networks.open_bench(options.network, options)
    images, labels = (torch.cat(part) for part in zip(*bench.calibration(options.seed), strict=True))
    smaller, seconds = RECIPES[options.name].prune(bench.model, images, labels, settings_of(options))
    removed = 1 - count_macs(smaller, bench.example) / count_macs(bench.model, bench.example)
    outcome: Outcome = bench.outcome(smaller, removed, seconds)
    store.add(Row(case, outcome))


def case_of(options: argparse.Namespace) -> Case:
    """What was asked for; a case counts what is removed."""
    return Case(options.network, options.name, options.seed, round(1 - options.share, 6))


def common(options: argparse.Namespace) -> dict[str, Any]:
    """What all rows of a file have in common: the recipe's settings but for share and seed, and the images."""
    plain = json.loads(json.dumps(dataclasses.asdict(settings_of(options))))
    del plain["share"]
    for value in plain.values():
        if isinstance(value, dict):
            del value["seed"]
    return {"recipe": options.name, "settings": plain, "images": options.images}


def settings_of(options: argparse.Namespace) -> Any:
    """The settings of the recipe with all that was said; the seed goes to every schedule."""
    usual = RECIPES[options.name].Settings(share=options.share)
    said = said_of(options)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(usual):
        value = getattr(usual, field.name)
        if isinstance(value, Schedule):
            epochs = options.epochs if field.name == "tuning" else options.search_epochs
            changes[field.name] = dataclasses.replace(
                value, seed=options.seed, epochs=value.epochs if epochs is None else epochs
            )
        elif field.name in said:
            changes[field.name] = understood(field.name, said.pop(field.name), type(value))
    if said:
        raise UsageError(f"{options.name} has no settings {', '.join(said)}: see benchmarks/rivals/{options.name}.py")
    return dataclasses.replace(usual, **changes)


def said_of(options: argparse.Namespace) -> dict[str, str]:
    """The words after `--set` by name.

    Raises:
        UsageError: a word has no value, or says what an option of its own does.
    """
    pairs = [pair.partition("=") for pair in options.set]
    for name, equals, _ in pairs:
        if not equals:
            raise UsageError(f"--set {name} says no value. Give --set {name}=VALUE.")
        if name == "share":
            raise UsageError("--set share=... would be filed under another share. Give --share.")
    return {name: word for name, _, word in pairs}


def understood(name: str, word: str, kind: type[Any]) -> Any:
    """The value of a setting, of that kind, that a word says.

    Raises:
        UsageError: the word says none.
    """
    flags = {"true": True, "false": False}
    try:
        return flags[word.lower()] if kind is bool else kind(word)
    except (KeyError, ValueError):
        expected = "true or false" if kind is bool else {int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"--set {name}={word}: {name} must be {expected}.") from None


def smoke(share: float) -> dict[str, dict[str, float]]:
    """For every recipe the accuracy on digits before and after, and the share of the MACs that is left."""
    model, images, labels, test = digits()
    before, example = recoup.accuracy(model, test), images[:1]
    found = {}
    for name, changes in SMOKE.items():
        usual = RECIPES[name].Settings(share=share, **changes)
        schedules = {f.name: SHORT for f in dataclasses.fields(usual) if isinstance(getattr(usual, f.name), Schedule)}
        smaller, seconds = RECIPES[name].prune(model, images, labels, dataclasses.replace(usual, **schedules))
        found[name] = {
            "before": before,
            "after": recoup.accuracy(smaller, test),
            "macs": count_macs(smaller, example) / count_macs(model, example),
            "seconds": sum(seconds.values()),
        }
    return found


def digits() -> tuple[nn.Module, Tensor, Tensor, list[Any]]:
    """A small network trained on digits, its training images and labels, and test batches."""
    spec = open_model("recoup:digits", None).input
    train, test = (list(open_data(f"digits@{part}", spec, batch_size=200)) for part in ("train", "test"))
    images, labels = (torch.cat(part) for part in zip(*train, strict=True))
    fresh = digits_resnet(width=SMOKE_WIDTH)
    return train_digits(fresh, images, labels, epochs=SMOKE_EPOCHS, seed=0), images, labels, test


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=list(RECIPES))
    networks.add_arguments(parser)
    parser.add_argument("--network", default="vgg16", choices=list(networks.CIFAR))
    parser.add_argument("--share", type=float, default=0.5, help="of the MACs, kept")
    parser.add_argument("--epochs", type=int, help="of the training after the cut")
    parser.add_argument("--search-epochs", type=int, help="of every training before it")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the recipe")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="all recipes on digits, in two minutes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    options.networks = [options.network]
    if not options.smoke:
        if options.name is None:
            parser.error(f"which recipe? One of {', '.join(RECIPES)}, or --smoke")
        networks.check_places(parser, options)
        try:
            settings_of(options)
        except RecoupError as error:
            parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
