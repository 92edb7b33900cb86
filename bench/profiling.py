"""Where a server's processes spend their time, by sampling them with py-spy while they work."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any


def processes(root: int) -> dict[str, int]:
    """The API process and the engine process of the server ``root``."""
    found = {"api": root}
    for pid in _descendants(root):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if "EngineCore" in title:
            found["engine"] = pid
    return found


def _descendants(root: int) -> list[int]:
    result = []
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            result += [pid, *_descendants(pid)]
    return result


def start(pid: int, seconds: int, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Begin to sample a process (``--gil``: only threads that hold the interpreter)."""
    output = Path(tempfile.mkdtemp()) / "stacks"
    # In a virtual environment that is not activated, its scripts are not on PATH.
    sampler = shutil.which("py-spy") or str(Path(sys.executable).parent / "py-spy")
    command = [
        sampler,
        "record",
        "-p",
        str(pid),
        "-d",
        str(seconds),
        "-r",
        "100",
        "-f",
        "raw",
        *options,
        "-o",
        str(output),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    return process, output


def summary(stacks: Path, most: int = 15) -> dict[str, Any]:
    """Shares of the samples of the busiest thread: by function itself, and by function with what it calls."""
    threads: dict[str, Counter[str]] = {}
    for line in stacks.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread = next((f for f in stack.split(";") if f.startswith("thread")), stack.split(";")[0])
        threads.setdefault(thread, Counter())[stack] += int(count)
    busiest = max(threads.values(), key=lambda stacks: sum(stacks.values()))
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for stack, samples_here in busiest.items():
        frames = stack.split(";")
        own[frames[-1]] += samples_here
        for frame in set(frames):
            total[frame] += samples_here
    samples = sum(busiest.values())
    share = {name: [(f, round(n / samples, 3)) for f, n in c.most_common(most)] for name, c in (("self", own),)}
    share["inclusive"] = [(f, round(n / samples, 3)) for f, n in total.most_common(3 * most)]
    return {"samples": samples, **share}
