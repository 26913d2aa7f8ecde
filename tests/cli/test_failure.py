import os
import signal
import sys
import threading
import time

import click
import pytest

from recoup.cli.failure import reports_failures
from recoup.errors import RecoupError, UsageError


def outcome(command) -> int:
    with pytest.raises(click.exceptions.Exit) as caught:
        reports_failures(command)()
    return caught.value.exit_code


def test_sigterm_unwinds_the_command_and_is_as_it_was_afterwards(capsys):
    cleaned = []

    def command():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("not reached")
        except Exception:
            cleaned.append("swallowed")
        finally:
            cleaned.append("cleaned")

    assert outcome(command) == 143
    assert cleaned == ["cleaned"]
    assert capsys.readouterr().err == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_not_lost_in_a_destructor(capsys):
    class Ends:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001)  # the signal is handled here, at the latest

    def command():
        Ends()
        time.sleep(5)
        raise AssertionError("not reached")

    hook = sys.unraisablehook
    assert outcome(command) == 143
    assert capsys.readouterr().err == "terminated\n"
    assert sys.unraisablehook is hook


def test_what_else_a_destructor_raises_is_told_as_usual(monkeypatch):
    class Fails:
        def __del__(self):
            raise ValueError("theirs")

    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(str(ignored.exc_value)))
    reports_failures(lambda: (Fails(), None)[1])()
    assert told == ["theirs"]


def test_somebody_elses_handler_stays(monkeypatch):
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("theirs"))
    try:
        reports_failures(lambda: os.kill(os.getpid(), signal.SIGTERM))()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == ["theirs"]


def test_a_thread_sets_no_handler():
    handlers = []
    thread = threading.Thread(target=reports_failures(lambda: handlers.append(signal.getsignal(signal.SIGTERM))))
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def raising(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RecoupError("one\n two"), 1, "error: one two\n"),
        (UsageError("what"), 2, "error: what\n"),
        (KeyboardInterrupt(), 1, "interrupted\n"),
    ],
)
def test_what_a_user_can_act_on_is_said_in_a_line(capsys, error, code, said):
    assert outcome(raising(error)) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [OSError(5, "broken"), ValueError("a bug")])
def test_a_bug_stays_a_traceback(error):
    with pytest.raises(type(error)):
        reports_failures(raising(error))()
