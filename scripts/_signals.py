"""Ends a script in order when it is told to stop; knows no script."""

import signal
from types import FrameType
from typing import NoReturn


class Stopped(SystemExit):
    """A signal ended the script; what is caught as a failure of somebody's code must let it pass."""


def end_in_order() -> None:
    """Let SIGTERM and SIGHUP unwind the stack, so that temporary directories and servers go; exits 143 and 129."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _stop)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
    raise Stopped(128 + number)
