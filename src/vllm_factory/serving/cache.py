"""Prepared checkpoints, kept so that a checkpoint is prepared once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_factory import __version__
from vllm_factory.errors import ServeError
from vllm_factory.prep.cli import prepare
from vllm_factory.prep.detect import is_prepared
from vllm_factory.prep.source import Source


def cache_root(given: Path | None = None) -> Path:
    """Directory of the cache: ``given``, or as the environment says, or ``~/.cache/vllm-factory``."""
    if given is not None:
        return given.expanduser()
    if own := os.environ.get("VLLM_FACTORY_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-factory"


def cache_key(source: Source) -> str:
    """What identifies a checkpoint's content without reading its weights.

    The path holds the commit for a hub snapshot; names, sizes and times of the files tell a directory that
    was written over; the version of this package tells an output of older code.
    """
    digest = hashlib.sha256(f"{__version__}\n{source.path.resolve()}\n".encode())
    for file in sorted(path for path in source.path.rglob("*") if path.is_file()):
        status = file.stat()
        digest.update(f"{file.relative_to(source.path)}\t{status.st_size}\t{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def prepared_directory(
    source: Source, *, root: Path, revision: str | None = None, force: bool = False
) -> tuple[Path, bool]:
    """The prepared form of ``source``, made now unless the cache has it.

    Processes that ask at the same time wait for the one that prepares.

    Returns:
        The directory, and whether it was made now.

    Raises:
        PrepError: The checkpoint cannot be prepared.
        ServeError: The cache cannot be written.
    """
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(source.name).name).strip("-.") or "checkpoint"
    output = root / f"{name}-{cache_key(source)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{output.name}.lock"):
            if not force and output.is_dir() and is_prepared(Source(output, str(output))):
                return output, False
            _sweep(output)
            prepare(source.name, output, revision=revision, force=True)
    except OSError as error:
        raise ServeError(f"the cache {root} cannot be written: {error}; choose another with --cache-dir") from error
    return output, True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # Given back by the system when the process ends, however it ends.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(output: Path) -> None:
    """Remove what a killed process left half done. The caller holds the lock, so nobody is writing."""
    for scratch in output.parent.glob(f".{output.name}.*"):
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
