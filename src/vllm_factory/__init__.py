"""vLLM Factory: production inference for encoders, poolers and structured prediction, as vLLM plugins."""

__version__ = "0.1.0"
