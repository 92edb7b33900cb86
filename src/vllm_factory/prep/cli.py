"""``vllm-factory-prep``: make a checkpoint servable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_factory import __version__
from vllm_factory.errors import FactoryError, PrepError
from vllm_factory.prep.detect import detect
from vllm_factory.prep.output import check_output, staged
from vllm_factory.prep.source import resolve

console = Console(stderr=True, highlight=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="vllm-factory-prep",
        description="Turn a GLiNER-family checkpoint into a self-contained directory that vLLM serves.",
        epilog="Then: vllm-factory-serve DIR",
    )
    result.add_argument("--model", required=True, metavar="M", help="hub id, or directory of a checkpoint")
    result.add_argument("--output", required=True, metavar="DIR", type=Path, help="directory to write")
    result.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    result.add_argument("--force", action="store_true", help="replace an earlier output in DIR")
    result.add_argument("--version", action="version", version=f"vllm-factory {__version__}")
    return result


def prepare(model: str, output: Path, *, revision: str | None = None, force: bool = False) -> dict[str, str]:
    """Prepare ``model`` into ``output``.

    Returns:
        What was found, in words.

    Raises:
        PrepError: Nothing was written; the message says why.
    """
    check_output(output, force)
    source = resolve(model, revision)
    spec = detect(source)
    if spec.prep is None:
        raise PrepError(f"{model}: {spec.name} serves this checkpoint as it is")
    module, _, function = spec.prep.partition(":")
    with console.status(f"preparing {model} for {spec.name}"), staged(output) as scratch:
        summary: dict[str, str] = getattr(import_module(module), function)(source, scratch)
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0, or 2 when the input is not what it claims to be."""
    arguments = parser().parse_args(argv)
    try:
        summary = prepare(arguments.model, arguments.output, revision=arguments.revision, force=arguments.force)
    except FactoryError as error:
        console.print(f"vllm-factory-prep: {error}", markup=False)
        return 2
    table = Table(show_header=False, box=None)
    for key, value in summary.items():
        table.add_row(key, value)
    console.print(table)
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
