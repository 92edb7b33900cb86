"""The registry for shell and make: ``python -m vllm_factory.tools plugins`` and so on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_factory.pages import page
from vllm_factory.registry import PLUGINS, plugin


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 2 for a plugin that there is not."""
    parser = argparse.ArgumentParser(prog="python -m vllm_factory.tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plugins", help="names of all plugins, one a line")
    commands.add_parser("table", help="the README's table of plugins")
    pages = commands.add_parser("pages", help="write a page for each plugin")
    pages.add_argument("directory", type=Path, nargs="?", default=Path("docs/plugins"))
    example = commands.add_parser("example", help="a published checkpoint that the plugin serves")
    check = commands.add_parser("check", help="print the plugin's name, or fail and list those there are")
    for command in (example, check):
        command.add_argument("plugin", help="name of the plugin or of its io processor")
    arguments = parser.parse_args(argv)
    if arguments.command == "plugins":
        print("\n".join(spec.name for spec in PLUGINS))
        return 0
    if arguments.command == "pages":
        _write_pages(arguments.directory)
        return 0
    if arguments.command == "table":
        print(table())
        return 0
    try:
        spec = plugin(arguments.plugin)
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    print(spec.example_model if arguments.command == "example" else spec.name)
    return 0


def _write_pages(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for spec in PLUGINS:
        (directory / f"{spec.name}.md").write_text(page(spec), encoding="utf-8")


def table() -> str:
    """The plugins as a Markdown table; the README holds it between its two markers."""
    head = ("plugin", "what it serves", "a published checkpoint", "equals", "prepared first")
    rows = [
        (f"`{s.name}`", s.summary, f"`{s.example_model}`", s.reference, "yes" if s.prep else "no") for s in PLUGINS
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    sys.exit(main())
