"""The command line: every command parses, calls one function and prints.

Results go to stdout, everything else to stderr; 0 is done, 1 failed, 2 a request that makes no sense,
143 ended by SIGTERM with nothing left behind.
"""

from __future__ import annotations

import click

from recoup.cli.demo import demo_command
from recoup.cli.evaluate import evaluate_command
from recoup.cli.finetune import finetune_command
from recoup.cli.inspect import inspect_command
from recoup.cli.prune import prune_command
from recoup.version import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="recoup", message="%(prog)s %(version)s")
def main() -> None:
    """Make a trained PyTorch network smaller and faster without retraining."""


main.add_command(demo_command)
main.add_command(inspect_command)
main.add_command(prune_command)
main.add_command(finetune_command)
main.add_command(evaluate_command)
