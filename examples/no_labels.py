"""Prune without any label: allow some answers to change, or ask for a share of the parameters.

python examples/no_labels.py --tolerance 2

Labels are used once, at the end, to see what it has cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import digits

import recoup


def main(arguments: Sequence[str] | None = None) -> None:
    """Two goals that need no labels."""
    options = parse(arguments)
    data = digits.load()
    network = digits.trained_network(data.train, options.epochs)
    images = [batch for batch, _ in data.train]
    others = [batch for batch, _ in data.validation]

    by_agreement = recoup.prune(network, images, validation=others, tolerance=options.tolerance, method=options.method)
    print(f"at most {options.tolerance:g} % of the answers may change:")
    print(by_agreement.report)

    by_size = recoup.prune(network, images, budget=recoup.Budget(parameters=options.keep), method=options.method)
    print(f"the share {options.keep:g} of the parameters:")
    print(by_size.report)

    print(f"accuracy on test images: original {recoup.accuracy(network, data.test):.1f}", end="")
    for name, result in (("agreement", by_agreement), ("size", by_size)):
        moved = recoup.divergence(result.model, network, data.test)
        print(f", by {name} {recoup.accuracy(result.model, data.test):.1f} (divergence {moved:.4f})", end="")
    print()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune without any label.")
    parser.add_argument("--tolerance", type=float, default=3.0, help="answers in a hundred that may change")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the parameters to keep")
    parser.add_argument("--epochs", type=int, default=4, help="of training")
    parser.add_argument("--method", default="best", help="best, fast, paper or released")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
