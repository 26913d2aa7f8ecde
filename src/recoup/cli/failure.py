"""How a command fails: one paragraph on stderr and an exit code, without a traceback."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, ParamSpec

import click

from recoup.errors import RecoupError

P = ParamSpec("P")

# As shells count it: 128 and the number of the signal.
TERMINATED = 128 + signal.SIGTERM
# Seconds after which a signal that was lost is sent again: by then the destructor has ended.
AGAIN = 0.01
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _TerminatedError(BaseException):
    """Somebody asked the process to end. No `except Exception` on the way holds it up."""


def reports_failures(command: Callable[P, None]) -> Callable[P, None]:
    """The command with a message in place of any error a user can act on; others are bugs and stay tracebacks."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _terminable():
                command(*args, **kwargs)
                sys.stdout.flush()  # here and not at the end of the process, where nobody would say that it failed
        except RecoupError as error:
            _fail(f"error: {' '.join(str(error).split())}", error.exit_code, error)
        except KeyboardInterrupt as error:
            _fail("interrupted", 1, error)
        except _TerminatedError as error:
            _fail("terminated", TERMINATED, error)
        except OSError as error:
            if error.errno not in FULL:
                raise
            _forget_output()
            _fail(f"error: {error.strerror}: {error.filename or 'the output'}. Make room and run it again.", 1, error)

    return guarded


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the command, so that every `with` and `finally` on the way removes what it has made.

    Not where somebody else has decided what SIGTERM does, nor in a thread that cannot.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with _sent_again_where_ignored():
            yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _sent_again_where_ignored() -> Iterator[None]:
    """A signal that comes while Python runs a destructor or a weak reference's callback is sent once more.

    What is raised in there is printed and forgotten: the command would go on as if nobody had asked it to end.
    """
    usual, timers = sys.unraisablehook, list[threading.Timer]()

    def hook(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, _TerminatedError):
            usual(ignored)
            return
        timers.append(threading.Timer(AGAIN, os.kill, (os.getpid(), signal.SIGTERM)))
        timers[-1].daemon = True
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in timers:
            timer.cancel()


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise _TerminatedError


def _forget_output() -> None:
    """What could not be written would be tried again at the end of the process, and fail again."""
    with suppress(OSError):
        sys.stdout.close()
    sys.stdout = None  # as in a process that was started without one


def _fail(message: str, exit_code: int, error: BaseException) -> NoReturn:
    click.echo(message, err=True)
    raise click.exceptions.Exit(exit_code) from error
