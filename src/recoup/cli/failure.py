"""How a command fails: one paragraph on stderr and an exit code, without a traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import click

from recoup.errors import RecoupError

P = ParamSpec("P")


def reports_failures(command: Callable[P, None]) -> Callable[P, None]:
    """The command with a message in place of any error a user can act on; others are bugs and stay tracebacks."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except RecoupError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise click.exceptions.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(1) from error

    return guarded
