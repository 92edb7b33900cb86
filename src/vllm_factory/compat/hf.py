"""Configuration classes that transformers does not have: of prepared checkpoints, and of published ones."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, Lfm2VlConfig, PretrainedConfig

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


class ColLfm2Config(Lfm2VlConfig):  # type: ignore[misc]
    """``config.json`` of ColLFM2: LFM2-VL's, or no more than the name of the base model that holds the rest."""

    model_type = "collfm2"

    def __init__(self, base_model: str | None = None, **kwargs: Any) -> None:
        if base_model is not None and "text_config" not in kwargs:
            base = AutoConfig.from_pretrained(base_model).to_dict()
            kwargs = {key: value for key, value in base.items() if key != "model_type"} | kwargs
        self.base_model = base_model
        super().__init__(**kwargs)


def register_config() -> None:
    """Teach ``AutoConfig`` our ``model_type`` and those of plugins. Running it again changes nothing."""
    AutoConfig.register(MODEL_TYPE, FactoryConfig, exist_ok=True)
    AutoConfig.register(ColLfm2Config.model_type, ColLfm2Config, exist_ok=True)
