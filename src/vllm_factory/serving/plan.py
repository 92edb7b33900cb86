"""From the user's command line to the command that is run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_factory.compat.server import GENERAL_PLUGIN, PLUGIN_FILTER, Build, filtered_plugins, usable_build
from vllm_factory.errors import ServeError, shown
from vllm_factory.io.limits import HOSTS_VARIABLE, parse_hosts
from vllm_factory.registry import PluginSpec
from vllm_factory.serving import target as targets
from vllm_factory.serving.cache import cache_root
from vllm_factory.serving.flags import VllmFlags, without
from vllm_factory.serving.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``vllm-factory-serve``'s own options. Everything else on its command line is vLLM's.

    Attributes:
        model: Directory or hub id.
        num_instances: Servers behind one address. Only 1 so far.
        max_batch_size: Most requests in one engine step; ``None`` leaves it to vLLM.
        io_processor_plugin: Plugin, when the files do not tell. Its name or its io processor's.
        revision: Branch, tag or commit of a hub id.
        cache_dir: Where prepared checkpoints are kept; ``None`` for the default.
        force_prep: Prepare anew although the cache has it.
        image_hosts: Hosts from which images may be fetched; ``None`` leaves it to the environment.
    """

    model: str
    num_instances: int = 1
    max_batch_size: int | None = None
    io_processor_plugin: str | None = None
    revision: str | None = None
    cache_dir: Path | None = None
    force_prep: bool = False
    image_hosts: str | None = None

    def __post_init__(self) -> None:
        if self.num_instances != 1:
            raise ServeError(
                f"--num-instances {self.num_instances}: one so far; for more, start several on ports of "
                "their own behind a load balancer"
            )
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ServeError(f"--max-batch-size {self.max_batch_size}: expected a number from 1")
        if self.image_hosts is not None:
            parse_hosts(self.image_hosts)  # a slip stops here, not half a minute later


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is about to be run.

    Attributes:
        target: The model.
        served_name: What clients call it.
        command: Program and arguments.
        environment: Variables set for it, beside those of this process.
    """

    target: Target
    served_name: str
    command: tuple[str, ...]
    environment: dict[str, str]

    def shell(self) -> str:
        """The command for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def make_plan(options: Options, tokens: Sequence[str]) -> Plan:
    """Find the model, prepare it if it must be, and work out the server's command.

    Args:
        options: Ours.
        tokens: The rest of the command line, for vLLM.

    Raises:
        FactoryError: It cannot be served as asked.
    """
    build = usable_build()
    flags = VllmFlags.parse(tokens)
    _refuse_contradictions(options, flags)
    wanted = targets.wanted_plugin(options.io_processor_plugin)
    # Before a checkpoint is prepared in vain; which plugin it is does not matter for these.
    if wanted is not None:
        flags.refuse_unsupported(wanted.name)
    target = targets.find(
        options.model,
        cache=cache_root(options.cache_dir),
        wanted=wanted,
        revision=options.revision,
        force_prep=options.force_prep,
    )
    if target.plugin is not None:
        flags.refuse_unsupported(target.plugin.name)
        _refuse_filter(target.plugin)
        _refuse_overrides(target, flags)
    ours = without([*_defaults(options, target, build)], flags)
    # The user's come last: vLLM's parser takes the last of two, should a spelling escape us.
    command = (sys.executable, "-m", "vllm_factory.serving.server", target.model, *ours, *flags.tokens)
    return Plan(
        target=target,
        served_name=flags.values.get("served-model-name", target.name),
        command=command,
        environment=_environment(options, target, build),
    )


def _defaults(options: Options, target: Target, build: Build) -> Iterator[str]:
    if options.max_batch_size is not None:
        yield from ("--max-num-seqs", str(options.max_batch_size))
    if target.model != target.name:
        # Clients name the model as the operator did, not by a directory in a cache.
        yield from ("--served-model-name", target.name)
    elif options.revision is not None:
        yield from ("--revision", options.revision)
    if target.plugin is None:
        return
    yield from ("--runner", "pooling")
    if not target.configured:
        yield from ("--io-processor-plugin", target.plugin.io_name)
    if dtype := _dtype(target, build):
        yield from ("--dtype", dtype)
    if target.overrides:
        yield from ("--hf-overrides", json.dumps(target.overrides))
    if target.max_tokens is not None:
        yield from ("--max-model-len", str(target.max_tokens))
    yield from target.plugin.serve_flags


def _dtype(target: Target, build: Build) -> str | None:
    if build.cpu:
        # Scores equal the reference library's only in float32, and 16-bit types are slow on CPUs.
        return "float32"
    # vLLM would make float16 of float32, and DeBERTa's activations can overflow in it.
    return "bfloat16" if target.dtype in ("float32", "bfloat16") else None


def _environment(options: Options, target: Target, build: Build) -> dict[str, str]:
    variables = {}
    # Encoders have no KV cache, yet vLLM's CPU build sets memory aside for one: gigabytes, unless told.
    if build.cpu and target.plugin is not None and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if options.image_hosts is not None:
        variables[HOSTS_VARIABLE] = options.image_hosts
    return variables


def _refuse_contradictions(options: Options, flags: VllmFlags) -> None:
    if "model" in flags:
        raise ServeError(f"--model {flags.values['model']}: the model is given once, as the first argument")
    if options.max_batch_size is not None and "max-num-seqs" in flags:
        raise ServeError("--max-batch-size and --max-num-seqs mean the same; give one of them")


def _refuse_overrides(target: Target, flags: VllmFlags) -> None:
    """The user's overrides replace ours, so they must hold ours."""
    if "hf-overrides" not in flags or not target.overrides:
        return
    try:
        given = json.loads(flags.values["hf-overrides"])
    except json.JSONDecodeError as error:
        raise ServeError(f"--hf-overrides {shown(flags.values['hf-overrides'])}: no JSON object") from error
    missing = {key: value for key, value in target.overrides.items() if key not in given}
    if missing:
        raise ServeError(f"--hf-overrides: this checkpoint also needs {json.dumps(missing)} in it")


def _refuse_filter(spec: PluginSpec) -> None:
    hidden = filtered_plugins((GENERAL_PLUGIN, spec.io_name))
    if hidden:
        raise ServeError(
            f"{PLUGIN_FILTER} in the environment keeps vLLM from loading {' and '.join(hidden)}; "
            "unset it, or add these names to it"
        )
