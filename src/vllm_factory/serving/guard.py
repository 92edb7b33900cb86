"""Ending a server's processes, also when whoever started them is gone.

vLLM's engine processes outlive an API process that is killed hard, and a supervisor that is killed hard
cannot clean up. So a server gets a process group of its own, and beside it runs this file as a tiny process
that holds one end of a pipe: when the supervisor disappears, for whatever reason, the pipe closes and the
guard ends the group. Run by path, with the standard library only, so that it starts at once and is small.
"""

from __future__ import annotations

import os
import signal
import sys
import time

#: What the supervisor writes when the group has ended and its number may be used again.
DISMISSED = b"."
_POLL_SECONDS = 0.05


def end_group(group: int, grace: float) -> None:
    """Ask the process group to end, and kill what is left of it after ``grace`` seconds.

    With a ``grace``, whoever started the group's first process has waited for it already.
    """
    deadline = time.monotonic() + grace
    signalled = _signal(group, signal.SIGTERM)
    while signalled and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        _reap(group)
        signalled = _signal(group, 0)
    if signalled:
        _signal(group, signal.SIGKILL)


def _reap(group: int) -> None:
    # In a container the supervisor may be process 1, which inherits the orphans: unless it waits for them,
    # they stay in the group as zombies.
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _signal(group: int, signum: int) -> bool:
    """Whether the group had a process to send it to."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS, for a group of zombies
        return False
    return True


def main() -> None:
    """Wait for the supervisor's word or its end. Arguments: process group, grace in seconds."""
    group, grace = int(sys.argv[1]), float(sys.argv[2])
    # A terminal's Ctrl-C, or a service manager that signals everything, must not end the guard first.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if sys.stdin.buffer.read(1) != DISMISSED:
        end_group(group, grace)


if __name__ == "__main__":
    main()
