"""One server and its processes: start, wait, end, without leaving any behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from vllm_factory.serving import guard

#: Seconds that a server's processes get to end once asked.
GRACE_SECONDS = 15.0


class Instance:
    """A server as a process group of its own, with a guard.

    Args:
        command: What to run.
        environment: Variables to set in addition to this process's.
        log: File for its output; this process's output when absent.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            # A group of its own: one signal reaches all of it, and Ctrl-C goes through the supervisor only.
            start_new_session=True,
        )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(self.pid), str(GRACE_SECONDS)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Number of the server process, and of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status when the server has ended, as a shell reports it; ``None`` while it runs."""
        code = self._process.poll()
        return None if code is None else _shell_status(code)

    def signal(self, signum: int) -> None:
        """Pass a signal on to the server process."""
        self._process.send_signal(signum)

    def wait(self) -> int:
        """Wait for the server to end, clean up, and return its exit status."""
        self._process.wait()
        return self.end()

    def end(self, grace: float = GRACE_SECONDS) -> int:
        """End the server and all its processes; no harm when it has ended already."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        guard.end_group(self.pid, grace)
        self._dismiss_guard()
        return _shell_status(self._process.returncode)

    def kill(self) -> None:
        """End all processes at once."""
        guard.end_group(self.pid, 0)

    def _dismiss_guard(self) -> None:
        pipe = self._guard.stdin
        if pipe is None or pipe.closed:
            return
        try:
            pipe.write(guard.DISMISSED)
            pipe.close()
        except BrokenPipeError:  # somebody killed the guard; there is nothing left to guard
            pass
        self._guard.wait()


def _shell_status(code: int) -> int:
    return code if code >= 0 else 128 - code


def supervise(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a server in the foreground and return its exit status.

    SIGINT and SIGTERM are passed on, and the server ends in its own way. A second one ends it at once.
    """
    instance: Instance | None = None
    received = 0

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if instance is None:
            raise SystemExit(128 + signum)
        if received == 1:
            instance.signal(signum)
        else:
            instance.kill()

    previous = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        instance = Instance(command, environment)
        status = instance.wait()
        # vLLM's server exits with 0 when its engine died. Nobody asked it to end, so it has failed.
        return status or int(not received)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
