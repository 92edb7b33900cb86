"""What can only be learnt by importing vLLM, in a process of its own.

Run as ``python -m vllm_factory.compat.probe``. A broken installation may fail with any exception, or end the
process; the doctor survives both. The last line of the output is one JSON object, see :class:`Probe`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import TypedDict, TypeVar

from vllm_factory.registry import PLUGINS, PluginSpec

T = TypeVar("T")


class Probe(TypedDict):
    """What was found. ``None`` where asking failed.

    Attributes:
        platform: vLLM's word for the kind of device, e.g. ``cuda``.
        device: The device's name.
        model_runner_v2: Whether an engine with default settings uses Model Runner V2.
        params_per_prompt: Whether a request may need several prompts.
        imports: By ``<plugin> <what>``, the error of an import, or ``""``.
    """

    platform: str | None
    device: str | None
    model_runner_v2: bool | None
    params_per_prompt: bool | None
    imports: dict[str, str]


def probe() -> Probe:
    """Ask vLLM, and import everything that the registry names."""
    return Probe(
        platform=_attempt(_platform),
        device=_attempt(_device),
        model_runner_v2=_attempt(_model_runner_v2),
        params_per_prompt=_attempt(_params_per_prompt),
        imports={
            f"{spec.name} {what}": _import_error(target)
            for spec in PLUGINS
            for what, target in import_targets(spec).items()
        },
    )


def import_targets(spec: PluginSpec) -> dict[str, str]:
    """What a plugin consists of, as ``module:name``."""
    module, _, name = spec.io_class.rpartition(".")
    targets = {"model": spec.model_class, "io processor": f"{module}:{name}"}
    return targets if spec.prep is None else {**targets, "prep": spec.prep}


def _attempt(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:  # whatever a broken installation raises: the doctor shows the imports' errors
        return None


def _platform() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _device() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def _model_runner_v2() -> bool:
    from vllm.config import VllmConfig

    # Versions before V2 have no such property.
    return bool(getattr(VllmConfig(), "use_v2_model_runner", False))


def _params_per_prompt() -> bool:
    from vllm_factory.compat.vllm_api import capabilities

    return capabilities().params_per_prompt


def _import_error(target: str) -> str:
    module, _, name = target.partition(":")
    try:
        getattr(import_module(module), name)
    except Exception as error:  # any library may be the broken one
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    # vLLM's own words may stand on the lines before.
    print(f"\n{json.dumps(probe())}", flush=True)
