"""vLLM's names and habits that differ between versions, probed by feature, never by version number."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm import PoolingParams
from vllm.config import VllmConfig

from vllm_factory.compat.server import Build, installed_build
from vllm_factory.errors import CheckpointError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the installed vLLM can do.

    Attributes:
        version: Version of the distribution that provides ``vllm``.
        distribution: Its name.
        params_per_prompt: The server accepts one ``PoolingParams`` for each prompt of a plugin request. Without
            it, a request may need one prompt only: one text, no windows.
    """

    version: str
    distribution: str
    params_per_prompt: bool


@cache
def capabilities() -> Capabilities:
    """Probe the installed vLLM once."""
    build = installed_build() or Build("unknown", "unknown")
    return Capabilities(build.version, build.distribution, _params_per_prompt())


def _params_per_prompt() -> bool:
    # 0.19 had no such module: its server hands one PoolingParams to every prompt of a plugin request.
    try:
        from vllm.entrypoints.pooling.base import serving
    except ImportError:
        return False
    source = inspect.getsource(serving)
    return "isinstance(pooling_params, list)" in source or 'engine_input["params"]' in source


class ParamsPerPrompt(list[PoolingParams]):
    """One ``PoolingParams`` for each prompt, where vLLM's server expects a single one.

    The server asks the object that it gets from ``merge_pooling_params`` for its task and to verify itself, then
    takes element i for prompt i. The object lives exactly as long as the request that it belongs to, so it also
    carries the request's state: when a request ends, is aborted or fails, the state goes with it.
    """

    def __init__(self, params: Iterable[PoolingParams], state: object) -> None:
        super().__init__(params)
        self.state = state

    @property
    def task(self) -> Any:
        """The task that all elements share."""
        return self[0].task

    @task.setter
    def task(self, task: Any) -> None:
        for params in self:
            params.task = task

    def verify(self, model_config: Any) -> None:
        """Verify every element."""
        for params in self:
            params.verify(model_config)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Stop at start when a setting would give wrong results or none.

    Raises:
        UnsupportedError: The message names the setting and the remedy.
    """
    parallel = vllm_config.parallel_config
    checks = {
        f"--tensor-parallel-size {parallel.tensor_parallel_size}: this encoder is not sharded; "
        "run one instance per GPU instead": parallel.tensor_parallel_size > 1,
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: this encoder is not split; "
        "run one instance per GPU instead": parallel.pipeline_parallel_size > 1,
        f"--quantization {vllm_config.model_config.quantization}: not supported by this model; "
        "leave the flag out": vllm_config.model_config.quantization is not None,
        "--enable-lora: this model has no LoRA support; leave the flag out": vllm_config.lora_config is not None,
        "--enable-chunked-prefill: an encoder needs the whole prompt in one step; leave the flag out": bool(
            vllm_config.scheduler_config.enable_chunked_prefill
        ),
        "--enable-prefix-caching: every token of an encoder depends on the whole prompt; leave the flag out": bool(
            vllm_config.cache_config.enable_prefix_caching
        ),
    }
    problems = [message for message, refused in checks.items() if refused]
    if problems:
        raise UnsupportedError("; ".join(problems))


def load_weights_strictly(
    parameters: Iterator[tuple[str, torch.Tensor]], weights: Iterable[tuple[str, torch.Tensor]]
) -> set[str]:
    """Copy ``weights`` into ``parameters`` by name.

    Returns:
        The names loaded: all of them.

    Raises:
        CheckpointError: A tensor that nobody takes, a parameter that nobody fills, or another shape.
    """
    missing = dict(parameters)
    loaded: set[str] = set()
    unknown = []
    for name, tensor in weights:
        parameter = missing.pop(name, None)
        if parameter is None:
            unknown.append(name)
            continue
        if parameter.shape != tensor.shape:
            raise CheckpointError(f"{name}: shape {tuple(tensor.shape)}, the model has {tuple(parameter.shape)}")
        parameter.data.copy_(tensor)
        loaded.add(name)
    if unknown or missing:
        raise CheckpointError(
            f"tensors that nobody takes: {_listed(unknown)}; parameters that nobody fills: {_listed(missing)}"
        )
    return loaded


def load_model_of_vllm_strictly(model: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
    """Give published ``weights`` to a model class of vLLM's, which would skip the names it does not know.

    Returns:
        The names of the model's parameters loaded: all of them.

    Raises:
        CheckpointError: A tensor that nobody takes, or a parameter that nobody fills.
    """
    parameters = {name for name, _ in model.named_parameters()}
    mapped = {name for name, _ in model.hf_to_vllm_mapper.apply(weights)}
    loaded: set[str] = model.load_weights(iter(weights))
    unknown, missing = mapped - parameters, parameters - loaded | _missing_parts(model.hf_to_vllm_mapper, weights)
    if unknown or missing:
        raise CheckpointError(
            f"tensors that nobody takes: {_listed(unknown)}; parameters that nobody fills: {_listed(missing)}"
        )
    return loaded


def _missing_parts(mapper: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
    """Tensors that are not among ``weights`` although others are that make one parameter with them.

    vLLM counts a parameter as loaded as soon as one of its parts is.
    """
    stacked = {old: (new, _set(shard)) for old, (new, shard) in getattr(mapper, "orig_to_new_stacked", {}).items()}
    given: dict[str, set[Any]] = {}
    for name, tensor in mapper.apply(weights):
        if any(new in name for new, _ in stacked.values()):
            given.setdefault(name, set()).add(getattr(tensor, "shard_id", None))
    return {
        name.replace(new, old)
        for name, shards in given.items()
        for old, (new, wanted) in stacked.items()
        if new in name and None not in shards and wanted - shards
    }


def _set(shard: Any) -> set[Any]:
    return set(shard) if isinstance(shard, list | tuple) else {shard}


def with_backbone(vllm_config: VllmConfig, hf_config: Any) -> VllmConfig:
    """The configuration for a model class of vLLM's inside one of ours, whose backbone ``hf_config`` describes."""
    return vllm_config.with_hf_config(hf_config)


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = sorted(names)
    shown = ", ".join(itertools.islice(names, most)) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def encoder_only(model_class: type) -> type:
    """Class decorator: attention runs in both directions, so no chunked prefill and no prefix caching."""
    from vllm.model_executor.models.interfaces_base import attn_type

    decorate: Callable[[type], type] = attn_type("encoder_only")
    return decorate(model_class)
