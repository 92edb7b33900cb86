"""The configuration class of prepared checkpoints, known to transformers under our own ``model_type``."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from vllm_factory.registry import MODEL_TYPE


class FactoryConfig(PretrainedConfig):  # type: ignore[misc]
    """``config.json`` of a prepared checkpoint.

    What vLLM reads stands at the top level (``hidden_size``, ``max_position_embeddings`` ...). What only we
    read is under ``factory``, where nothing else trips over it: ``plugin``, the ``backbone``'s own
    configuration, the ``head``'s, and what prepared the directory.
    """

    model_type = MODEL_TYPE

    def __init__(self, factory: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.factory = factory or {}
        # vLLM reads this as "attends to both sides", whatever the model class says.
        kwargs.setdefault("is_causal", False)
        super().__init__(**kwargs)


def register_config() -> None:
    """Teach ``AutoConfig`` our ``model_type``. Running it again changes nothing."""
    AutoConfig.register(MODEL_TYPE, FactoryConfig, exist_ok=True)
