"""A real server for the length of a block: for tests, benchmarks and the demo."""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_factory.errors import ServeError
from vllm_factory.serving.cli import parse
from vllm_factory.serving.instance import Instance
from vllm_factory.serving.plan import Plan, make_plan

#: Seconds that a server may take to start; two busy cores need half of it at worst.
START_SECONDS = 300.0
_POLL_SECONDS = 0.25
_TAIL_LINES = 40
_EARLIER_ERRORS = 8
_ERROR = re.compile(r"\b(\w+\.)*\w*(Error|Exception): .*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that answers.

    Attributes:
        url: Its base address, without a slash at the end.
        plan: What was started.
        log: File with its output.
        pid: Its process.
        started_in: Seconds from start to health.
    """

    url: str
    plan: Plan
    log: Path
    pid: int
    started_in: float

    @property
    def model(self) -> str:
        """The name that requests give."""
        return self.plan.served_name

    def healthy(self) -> bool:
        """Whether it says so at the moment."""
        return _healthy(self.url)


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """The end of a server's log, and before it the errors that the end no longer shows.

    vLLM reports an engine's failure first, and then at length that there was one.
    """
    everything = log.read_text(encoding="utf-8", errors="replace").splitlines()
    head, tail = everything[:-lines], everything[-lines:]
    errors = list(dict.fromkeys(found[0] for line in head if (found := _ERROR.search(line))))[-_EARLIER_ERRORS:]
    return "\n".join([*errors, *["..."] * bool(errors), *tail])


@contextmanager
def running_server(
    model: str | Path,
    *flags: str,
    log: Path | None = None,
    deadline: float = START_SECONDS,
    waiting: Callable[[float], None] | None = None,
) -> Iterator[Server]:
    """Serve ``model`` as ``vllm-factory-serve MODEL FLAGS`` does, on a free port of this machine.

    Args:
        model: As on the command line.
        flags: As on the command line, without ``--host`` and ``--port``.
        log: File for the output; a temporary one when absent, gone after the block.
        deadline: Seconds to become healthy.
        waiting: Called with the seconds so far while the server starts.

    Raises:
        ServeError: It ended or was not healthy in time; the message has the end of its log.
    """
    port = free_port()
    options, _, rest = parse([str(model), *flags, "--host", "127.0.0.1", "--port", str(port)])
    plan = make_plan(options, rest)
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        if log is None:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-factory-"))
            log = Path(scratch) / "server.log"
        instance = Instance(plan.command, plan.environment, stack.enter_context(log.open("wb")))
        stack.callback(instance.end)
        started_in = _wait(instance, url, log, deadline, waiting)
        yield Server(url=url, plan=plan, log=log, pid=instance.pid, started_in=started_in)


def _wait(
    instance: Instance, url: str, log: Path, deadline: float, waiting: Callable[[float], None] | None
) -> float:
    start = time.monotonic()
    while (seconds := time.monotonic() - start) < deadline:
        status = instance.poll()
        if status is not None:
            raise ServeError(f"the server ended with status {status} before it was ready:\n{log_tail(log)}")
        if _healthy(url):
            return seconds
        if waiting is not None:
            waiting(seconds)
        time.sleep(_POLL_SECONDS)
    raise ServeError(f"the server was not ready after {deadline:.0f} s:\n{log_tail(log)}")


def _healthy(url: str) -> bool:
    # No proxy: the environment may name one, and this is our own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
