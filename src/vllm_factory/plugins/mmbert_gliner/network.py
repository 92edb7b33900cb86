"""What the prepared weights must look like. The network that runs is vLLM's; see ``model.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import ModernBertModel

from vllm_factory.plugins.mmbert_gliner.config import MmbertGlinerConfig
from vllm_factory.poolers.gliner import gliner_pooler


class MmbertGlinerLayout(nn.Module):
    """Names and shapes of the weights, as transformers has them. Built without memory, and never run."""

    def __init__(self, config: MmbertGlinerConfig) -> None:
        super().__init__()
        self.backbone = ModernBertModel(config.encoder)
        self.head = gliner_pooler(config.head, config.encoder.hidden_size)

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> MmbertGlinerLayout:
        """From what a prepared ``config.json`` holds under ``factory``."""
        return cls(MmbertGlinerConfig.from_factory(factory))
