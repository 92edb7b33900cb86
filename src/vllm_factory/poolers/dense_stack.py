"""The dense modules of a sentence-transformers or PyLate checkpoint, of any number. Plain torch, no vLLM import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_factory.errors import CheckpointError, shown
from vllm_factory.published import Module, Published

_IDENTITY = "torch.nn.modules.linear.Identity"
_KEYS = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
#: Files of a module's weights, by preference.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """One dense module.

    Attributes:
        in_features, out_features: Widths.
        bias: Whether the projection has a bias.
        activation: Class of ``torch.nn``, made without arguments.
        use_residual: Whether the input is added to the output, through a projection where the widths differ.
    """

    in_features: int
    out_features: int
    bias: bool = True
    activation: type[nn.Module] = nn.Identity
    use_residual: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any], name: str) -> DenseConfig:
        """From a module's ``config.json``.

        Raises:
            CheckpointError: A setting that this package does not know, or of another type; ``name`` stands before.
        """
        unknown = sorted(key for key in values.keys() - _KEYS if values[key] is not None)
        # Newer versions of the library write which features the module reads; others than the usual are refused.
        usual = {"module_input_name", "module_output_name"}
        unknown = [
            k for k in unknown if k not in usual or not str(values[k]).endswith(("_embedding", "_embeddings"))
        ]
        if unknown:
            raise CheckpointError(f"{name}: unknown settings {', '.join(unknown)}")
        sizes = [values.get("in_features"), values.get("out_features")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise CheckpointError(f"{name}: in_features and out_features are {sizes}")
        return cls(
            in_features=values["in_features"],
            out_features=values["out_features"],
            bias=bool(values.get("bias", True)),
            activation=_activation(values.get("activation_function") or _IDENTITY, name),
            use_residual=bool(values.get("use_residual", False)),
        )


def _activation(path: str, name: str) -> type[nn.Module]:
    package, _, last = path.rpartition(".")
    found = getattr(nn, last, None)
    if not package.startswith("torch.nn") or not isinstance(found, type) or not issubclass(found, nn.Module):
        raise CheckpointError(f"{name}: activation_function {shown(path)}; expected a class of torch.nn")
    return found


class Dense(nn.Module):
    """Projection, activation, and maybe the input added. Names of the weights are PyLate's."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        # The vectors are the result: they are computed in float32 whatever type the backbone runs in.
        sizes = (config.in_features, config.out_features)
        self.use_residual = config.use_residual
        self.linear = nn.Linear(*sizes, bias=config.bias, dtype=torch.float32)
        self.activation = config.activation()
        self.residual = (
            nn.Linear(*sizes, bias=False, dtype=torch.float32)
            if config.use_residual and config.in_features != config.out_features
            else None
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, float32."""
        projected = self.activation(self.linear(states))
        if not self.use_residual:
            return projected
        return projected + (states if self.residual is None else self.residual(states))


class DenseStack(nn.Module):
    """Dense modules one after the other; none at all is the identity.

    Args:
        configs: The modules.
        in_features: Width of what comes in.
        name: The checkpoint, for messages.

    Raises:
        CheckpointError: The widths do not fit each other.
    """

    def __init__(self, configs: Sequence[DenseConfig], in_features: int, name: str = "checkpoint") -> None:
        super().__init__()
        self.in_features = self.out_features = in_features
        for index, config in enumerate(configs):
            if config.in_features != self.out_features:
                raise CheckpointError(
                    f"{name}: dense module {index} takes {config.in_features} features, gets {self.out_features}"
                )
            self.out_features = config.out_features
        self.layers = nn.ModuleList(map(Dense, configs))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` of any type, to ``[..., out_features]`` float32."""
        states = states.float()
        for layer in self.layers:
            states = layer(states)
        return states


def dense_stack(checkpoint: Published, in_features: int) -> DenseStack:
    """The dense modules that a checkpoint lists, without their weights."""
    configs = [
        DenseConfig.from_dict(checkpoint.table(f"{m.folder}/config.json"), f"{checkpoint.name}: {m.folder}")
        for m in _dense_modules(checkpoint)
    ]
    return DenseStack(configs, in_features, checkpoint.name)


def load_dense_stack(stack: DenseStack, checkpoint: Published) -> set[str]:
    """Fill the stack from the modules' own files.

    Returns:
        Names of the parameters: all of the stack's.

    Raises:
        CheckpointError: A tensor that nobody takes, a parameter that nobody fills, or another shape.
    """
    for layer, module in zip(stack.layers, _dense_modules(checkpoint), strict=True):
        try:
            layer.load_state_dict(_weights(checkpoint, module), strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.name}: {module.folder}: {error}") from error
    return {name for name, _ in stack.named_parameters()}


def _dense_modules(checkpoint: Published) -> list[Module]:
    return [module for module in checkpoint.modules() if module.kind == "Dense"]


def _weights(checkpoint: Published, module: Module) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    file = next((f for f in _WEIGHTS if checkpoint.has(f"{module.folder}/{f}")), None)
    if file is None:
        raise CheckpointError(f"{checkpoint.name}: {module.folder} has no weights ({' or '.join(_WEIGHTS)})")
    path = checkpoint.path / module.folder / file
    if file.endswith(".safetensors"):
        return load_file(path)
    weights: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights
