"""Reading a checkpoint's tensors and giving them the names of our modules."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm_factory.errors import PrepError
from vllm_factory.prep.source import Source

SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"


def read_tensors(source: Source) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, on the CPU, under their own names.

    Raises:
        PrepError: There are no weights, or they are damaged.
    """
    try:
        if source.has(SAFETENSORS):
            return _read_safetensors(source.path / SAFETENSORS)
        if source.has(PICKLE):
            # weights_only: a checkpoint must not run code here.
            return dict(torch.load(source.path / PICKLE, map_location="cpu", weights_only=True, mmap=True))
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise PrepError(f"{source.name}: the weights cannot be read: {str(error).splitlines()[0]}") from error
    raise PrepError(f"{source.name}: no weights; looked for {SAFETENSORS} and {PICKLE}")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        # Shared tensors are saved once; the metadata says under which name the others find it.
        for name, saved in (file.metadata() or {}).items():
            if name not in tensors and saved in tensors:
                tensors[name] = tensors[saved]
    return tensors


def rename(
    tensors: Mapping[str, torch.Tensor], prefixes: Mapping[str, str], ignored: Sequence[str]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Tensors under new names, and the names that no prefix fits.

    Args:
        tensors: By old name.
        prefixes: Old prefix to new.
        ignored: Patterns (regular expressions, whole name) of tensors that inference does not use.
    """
    renamed, unknown = {}, []
    for name, tensor in tensors.items():
        name = name.replace("_orig_mod.", "")
        if any(re.fullmatch(pattern, name) for pattern in ignored):
            continue
        prefix = next((old for old in prefixes if name.startswith(old)), None)
        if prefix is None:
            unknown.append(name)
        else:
            renamed[prefixes[prefix] + name[len(prefix) :]] = tensor
    return renamed, unknown


def check_fit(source: Source, network: nn.Module, tensors: Mapping[str, torch.Tensor], unknown: list[str]) -> None:
    """Every parameter has its tensor, every tensor its parameter, and the shapes agree.

    Raises:
        PrepError: They do not; the message names them.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    problems = [f"no parameter takes {name}" for name in [*unknown, *sorted(set(tensors) - set(expected))]]
    problems += [f"no tensor fills {name}" for name in sorted(set(expected) - set(tensors))]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, its configuration says {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        rest = f" (and {len(problems) - 6} more)" if len(problems) > 6 else ""
        raise PrepError(f"{source.name}: weights and configuration disagree: {'; '.join(problems[:6])}{rest}")
