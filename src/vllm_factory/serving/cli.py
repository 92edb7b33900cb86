"""``vllm-factory-serve``: one command from a checkpoint to a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vllm_factory import __version__
from vllm_factory.errors import FactoryError
from vllm_factory.io.limits import HOSTS_VARIABLE
from vllm_factory.registry import PLUGINS
from vllm_factory.serving.instance import supervise
from vllm_factory.serving.plan import Options, make_plan

console = Console(stderr=True, highlight=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="vllm-factory-serve",
        usage="%(prog)s MODEL [options] [vLLM's options]",
        description="Serve a checkpoint with vLLM. One that must be prepared first is, once, in a cache.",
        epilog="Every other option goes to vLLM as it is: --port, --host, --dtype, --api-server-count ... "
        "(vllm-factory-doctor checks the installation.)",
        allow_abbrev=False,
    )
    result.add_argument(
        "model", metavar="MODEL", help="prepared directory, checkpoint directory, or hub id; comes first"
    )
    result.add_argument(
        "--num-instances", type=int, default=1, metavar="N", help="servers behind one address (only 1 so far)"
    )
    result.add_argument(
        "--max-batch-size", type=int, metavar="B", help="most requests in one step (vLLM's --max-num-seqs)"
    )
    result.add_argument(
        "--io-processor-plugin",
        metavar="P",
        help=f"plugin, when the files do not tell: {', '.join(spec.name for spec in PLUGINS)}",
    )
    result.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    result.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="where prepared checkpoints are kept ($VLLM_FACTORY_CACHE)",
    )
    result.add_argument(
        "--image-hosts",
        metavar="HOSTS",
        help=f"hosts from which images may be fetched: host[:port],... (${HOSTS_VARIABLE}; none by default)",
    )
    result.add_argument("--force-prep", action="store_true", help="prepare anew although the cache has it")
    result.add_argument(
        "--dry-run", action="store_true", help="prepare if needed, print the server's command, and exit"
    )
    result.add_argument("--version", action="version", version=f"vllm-factory {__version__}")
    return result


def parse(argv: Sequence[str]) -> tuple[Options, bool, list[str]]:
    """Our options, whether it is a dry run, and the rest, for vLLM.

    Raises:
        ServeError: An option of ours has a value that is not accepted.
    """
    result = parser()
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        # Which of vLLM's options take a value is not known here, so MODEL could not be told from one.
        result.error(f"MODEL comes first, before {argv[0]}")
    values, rest = result.parse_known_args(argv)
    dry_run: bool = values.dry_run
    del values.dry_run
    return Options(**vars(values)), dry_run, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. The server's own exit status, or 2 when it cannot be started as asked."""
    try:
        options, dry_run, rest = parse(sys.argv[1:] if argv is None else argv)
        plan = make_plan(options, rest)
    except FactoryError as error:
        console.print(f"vllm-factory-serve: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    if plan.target.note:
        console.print(f"vllm-factory-serve: {plan.target.note}", markup=False)
    if dry_run:
        print(plan.shell())
        return 0
    return supervise(plan.command, plan.environment)


if __name__ == "__main__":
    sys.exit(main())
