"""What preparing any checkpoint of the GLiNER family has in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_factory import __version__
from vllm_factory.errors import PrepError
from vllm_factory.prep.source import Source
from vllm_factory.registry import PluginSpec

#: Tokens of one prompt when positions are relative, so that nothing else bounds them. Larger inputs are read in
#: parts. ``--max-model-len`` changes it.
MAX_TOKENS = 4096
#: A limit that no tokenizer reaches.
NO_LIMIT = 10**9

Tensors = dict[str, torch.Tensor]


def load_tokenizer(source: Source, name: str | Path, what: str) -> Any:
    """transformers' fast tokenizer called ``name``.

    Args:
        source: The checkpoint, for the message.
        name: A directory, or a hub id.
        what: The tokenizer in words, for the message.

    Raises:
        PrepError: It cannot be loaded, or has no fast version.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # transformers lets errors of many libraries through
        raise PrepError(f"{source.name}: {what} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not tokenizer.is_fast:
        raise PrepError(f"{source.name}: {type(tokenizer).__name__} has no fast version, which prompts need")
    return tokenizer


def save_tokenizer(tokenizer: Any, output: Path) -> None:
    """Write a tokenizer that cuts nothing: we cut ourselves, at word boundaries."""
    tokenizer.model_max_length, limit = NO_LIMIT, tokenizer.model_max_length
    tokenizer.save_pretrained(output)
    tokenizer.model_max_length = limit


def max_length(tokenizer: Any) -> int:
    """Tokens at which the library's own tokenizer call cuts."""
    return min(tokenizer.model_max_length, NO_LIMIT)


def save_weights(tensors: Tensors, output: Path) -> None:
    """Write ``model.safetensors``, each tensor by itself."""
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, output / "model.safetensors")


def parameters(tensors: Mapping[str, torch.Tensor], dtype: str) -> str:
    """How many there are, for the summary."""
    return f"{sum(t.numel() for t in tensors.values()) / 1e6:.1f} million, {dtype}"


def dtype_name(tensor: torch.Tensor) -> str:
    """A tensor's dtype as ``config.json`` has it."""
    return str(tensor.dtype).removeprefix("torch.")


def origin(spec: PluginSpec, source: Source) -> dict[str, str]:
    """By what, from what and for which plugin a checkpoint was prepared."""
    return {
        "plugin": spec.name,
        "prepared_by": f"vllm-factory {__version__}",
        "prepared_from": Path(source.name).name if Path(source.name).is_dir() else source.name,
    }


def drop_unused_positions(tensors: Tensors, prefix: str, position_biased_input: bool) -> None:
    """Take out the position table that some DeBERTa checkpoints hold and none of them uses."""
    if not position_biased_input:
        tensors.pop(f"{prefix}embeddings.position_embeddings.weight", None)
