"""Writing a directory all at once or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_factory.errors import PrepError
from vllm_factory.prep.detect import is_prepared
from vllm_factory.prep.source import Source


def check_output(output: Path, force: bool) -> None:
    """Refuse to write over anything but an empty directory or, with ``force``, an earlier output.

    Raises:
        PrepError: The message says what is there.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise PrepError(f"{output} exists and is no directory")
    if not any(output.iterdir()):
        return
    if not is_prepared(Source(output, str(output))):
        raise PrepError(f"{output} holds something that vllm-factory-prep did not write; choose another directory")
    if not force:
        raise PrepError(f"{output} is already prepared; --force writes it anew")


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A scratch directory beside ``output`` that takes its place when the block ends well.

    When it ends badly, ``output`` is as it was before.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        scratch.rename(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_json(path: Path, content: object) -> None:
    """Readable JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
