"""Prune to a share of the time that a batch takes on this machine.

python examples/latency.py --keep 0.6 --batch-size 100

Let nothing else run on the machine: times are measured, and differ from run to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import digits

import recoup


def main(arguments: Sequence[str] | None = None) -> None:
    """The first calibration batch is the one that is timed: its size is the batch size you serve."""
    options = parse(arguments)
    data = digits.load(options.batch_size)
    network = digits.trained_network(data.train, options.epochs, width=32).to(options.device)

    result = recoup.prune(
        network,
        data.train,
        validation=data.validation,
        budget=recoup.Budget(latency=options.keep),
        method=recoup.Fast(multiple_of=8),
    )
    print(result.report)

    latency = result.report.latency
    print(f"{1e3 * latency.before:.2f} ms -> {1e3 * latency.after:.2f} ms for {options.batch_size} images")
    print(f"share {latency.share:.2f}, asked for {latency.asked:.2f}, met: {latency.is_met}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune to a share of the time that a batch takes.")
    parser.add_argument("--keep", type=float, default=0.6, help="share of the time to keep")
    parser.add_argument("--batch-size", type=int, default=100, help="images in the batch that is timed")
    parser.add_argument("--device", default="cpu", help="where the network will run")
    parser.add_argument("--epochs", type=int, default=4, help="of training")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
