"""vLLM's names and habits that differ between versions, probed by feature, never by version number."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def refuse_other_images(vllm_config: VllmConfig) -> None:
    """Stop at start when images would be processed otherwise than the io processor counts on.

    Raises:
        UnsupportedError: The message names the setting and the remedy.
    """
    changed = getattr(vllm_config.model_config.multimodal_config, "mm_processor_kwargs", None)
    if changed:
        raise UnsupportedError(
            f"--mm-processor-kwargs {changed}: how images are processed stands in the checkpoint's "
            "preprocessor_config.json, which both sides read; change it there"
        )


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


def load_model_of_vllm_strictly(
    model: Any, weights: Sequence[tuple[str, torch.Tensor]], load: Callable[..., set[str]] | None = None
) -> set[str]:
    """Give published ``weights`` to a model class of vLLM's, which would skip the names it does not know.

    Args:
        model: The model.
        weights: All of the checkpoint's.
        load: The class's own way of loading; ``model.load_weights`` when absent.

    Returns:
        The names of the model's parameters loaded: all of them.

    Raises:
        CheckpointError: A tensor that nobody takes, or a parameter that nobody fills.
    """
    packed = _packed(model)
    given: dict[str, set[str]] = {}
    for name, _ in weights:
        for destination in _destinations(model, name, packed):
            given.setdefault(destination, set()).add(name)
    parameters = {name for name, _ in model.named_parameters()}
    unknown = given.keys() - parameters
    missing = {part for name in parameters for part in _missing(name, given.get(name, set()), packed)}
    if unknown or missing:
        raise CheckpointError(
            f"tensors that nobody takes: {_listed(unknown)}; parameters that nobody fills: {_listed(missing)}"
        )
    loaded: set[str] = (load or model.load_weights)(iter(weights))
    unfilled = {name for name, _ in model.named_parameters()} - loaded
    if unfilled:
        raise CheckpointError(f"parameters that nobody fills: {_listed(unfilled)}")
    return loaded


def _destinations(model: Any, name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """The parameters that a published name belongs to; vLLM's modules rename, from the outermost to the inner."""
    whole = {part: together for together, parts in packed.items() for part in parts}
    names = [name]
    applied: list[tuple[str, Any]] = []
    for prefix, mapper in _mappers(model):
        # A model and its backbone often share a mapper, of which only one is applied.
        if not any(prefix.startswith(outer) and mapper == used for outer, used in applied):
            applied.append((prefix, mapper))
            names = [new for each in names for new in _renamed(mapper, f"{prefix}.".lstrip("."), each)]
    return [_replaced(each, whole) for each in names]


def _mappers(model: Any) -> list[tuple[str, Any]]:
    found = ((prefix, getattr(module, "hf_to_vllm_mapper", None)) for prefix, module in model.named_modules())
    return [(prefix, mapper) for prefix, mapper in found if mapper is not None]


def _renamed(mapper: Any, prefix: str, name: str) -> list[str]:
    if not name.startswith(prefix):
        return [name]
    # Names are what counts; a mapper may leave notes on the tensors.
    return [prefix + new for new, _ in mapper.apply([(name[len(prefix) :], torch.empty(0))])]


def _replaced(name: str, modules: Mapping[str, str]) -> str:
    """``name`` with another last module."""
    *outer, module, kind = ["", *name.split(".")]
    return ".".join([*outer, modules.get(module, module), kind]).lstrip(".")


def _missing(parameter: str, given: set[str], packed: Mapping[str, Sequence[str]]) -> set[str]:
    """Published names of what is missing of a parameter; its own where nothing of it is there."""
    parts = packed.get(parameter.split(".")[-2] if "." in parameter else "", ())
    if not given or len(given) >= len(parts):
        return set() if given else {parameter}
    one = next(iter(given))
    present = next((part for part in parts if f".{part}." in f".{one}."), None)
    if present is None:
        return {parameter}
    return {f".{one}".replace(f".{present}.", f".{part}.").lstrip(".") for part in parts} - given


def _packed(model: Any) -> dict[str, Sequence[str]]:
    """Published modules by the module in which vLLM keeps them together. What an outer model says comes first."""
    found: dict[str, Sequence[str]] = {}
    for _, module in model.named_modules():
        for whole, parts in getattr(module, "packed_modules_mapping", {}).items():
            found.setdefault(whole, parts)
    for _, mapper in _mappers(model):
        groups: dict[str, list[str]] = {}
        for part, (whole, _shard) in getattr(mapper, "orig_to_new_stacked", {}).items():
            groups.setdefault(whole.strip("."), []).append(part.strip("."))
        for whole, parts in groups.items():
            found.setdefault(whole, parts)
    return found


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


def whole_prompts(model_class: type) -> type:
    """Class decorator of causal models: a pooler of ours wants a prompt in one step, so vLLM may not cut it.

    vLLM neither chunks nor reuses prefixes where the first token's state is pooled, so that is what we claim.
    """
    model_class.default_seq_pooling_type = "CLS"  # type: ignore[attr-defined]
    model_class.default_tok_pooling_type = "ALL"  # type: ignore[attr-defined]
    return model_class
