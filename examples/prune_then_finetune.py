"""Prune hard, then train what is left for a few epochs.

Recoup needs no training. Where there are labels and time, its result is a good place to start from.

    python examples/prune_then_finetune.py --keep 0.1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import digits

import recoup


def main(arguments: Sequence[str] | None = None) -> None:
    """`recoup.finetune` trains a copy of the result, here on labels and on the original's answers."""
    options = parse(arguments)
    data = digits.load()
    network = digits.trained_network(data.train, options.epochs)

    result = recoup.prune(network, data.train, budget=recoup.Budget(macs=options.keep), method=options.method)
    print(result.report)

    training = recoup.Training(epochs=options.finetune, optimiser="adamw", rate=0.003, loss="both")
    trained = recoup.finetune(result.model, data.train, training, teacher=network, validation=data.validation)
    for number, epoch in enumerate(trained.history, start=1):
        print(f"epoch {number}: loss {epoch.loss:.3f}, accuracy on validation images {epoch.accuracy:.1f}")

    before, pruned, tuned = (recoup.accuracy(each, data.test) for each in (network, result.model, trained.model))
    print(f"accuracy on test images: original {before:.1f}, pruned {pruned:.1f}, fine-tuned {tuned:.1f}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune hard, then train what is left for a few epochs.")
    parser.add_argument("--keep", type=float, default=0.1, help="share of the MACs to keep")
    parser.add_argument("--epochs", type=int, default=4, help="of training before")
    parser.add_argument("--finetune", type=int, default=4, help="epochs of training after")
    parser.add_argument("--method", default="best", help="best, fast, paper or released")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
