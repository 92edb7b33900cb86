"""Which plugin serves a checkpoint, told from its files, never from its name."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_factory.errors import PrepError, shown
from vllm_factory.poolers.gliner_config import TOKEN_LEVEL
from vllm_factory.prep.source import Source
from vllm_factory.registry import MODEL_TYPE, PluginSpec, plugin, plugin_for_encoder

GLINER_CONFIG = "gliner_config.json"

#: gliner's architectures that no plugin serves, by the key that marks them, in the library's order of precedence.
_OTHER_GLINER = {"relations_layer": "relation extraction", "labels_decoder": "generative label decoder"}


class Encoder(NamedTuple):
    """Where a ``gliner_config.json`` describes an encoder, and where it names one."""

    config_key: str
    name_key: str


TEXT_ENCODER = Encoder("encoder_config", "model_name")
LABELS_ENCODER = Encoder("labels_encoder_config", "labels_encoder")


def detect(source: Source) -> PluginSpec:
    """The plugin for an unprepared checkpoint.

    Raises:
        PrepError: No plugin serves it; the message says what it is, where that can be told.
    """
    if source.has(GLINER_CONFIG):
        return _detect_gliner(source)
    if source.has("config.json"):
        config = source.json("config.json")
        if config.get("model_type") == MODEL_TYPE:
            raise PrepError(f"{source.name} is already prepared; serve it as it is")
        if _is_gliner2(config):
            return _detect_gliner2(source, config)
        raise PrepError(
            f"{source.name}: config.json says model_type {shown(config.get('model_type'))}; prepared are "
            "checkpoints of the gliner and gliner2 libraries"
        )
    if source.has("adapter_config.json"):
        raise PrepError(
            f"{source.name} is a LoRA adapter alone; merge it into its base model, save, and prepare that"
        )
    raise PrepError(f"{source.name} is no checkpoint: it has neither {GLINER_CONFIG} nor config.json")


def needs_preparation(source: Source) -> bool:
    """Whether a library of ours saved the checkpoint, so that vLLM cannot make anything of it as it is."""
    return source.has(GLINER_CONFIG) or (source.has("config.json") and _is_gliner2(source.json("config.json")))


def is_prepared(source: Source) -> bool:
    """Whether the directory is an output of ``vllm-factory-prep``."""
    return source.has("config.json") and source.json("config.json").get("model_type") == MODEL_TYPE


def _is_gliner2(config: dict[str, Any]) -> bool:
    return "counting_layer" in config or config.get("model_type") == "extractor"


def _detect_gliner2(source: Source, config: dict[str, Any]) -> PluginSpec:
    architecture = str(config.get("architecture") or "span").strip().lower()
    if architecture != "span":
        name = "the boundary architecture (GLiNER2.5)" if architecture == "boundary" else shown(architecture)
        raise PrepError(f"{source.name}: a gliner2 checkpoint of {name}, which no plugin serves yet")
    backbone = gliner2_encoder_config(source).get("model_type")
    if backbone != "deberta-v2":
        raise PrepError(f"{source.name}: a GLiNER2 on {shown(backbone)}, which no plugin serves yet")
    return plugin("deberta_gliner2")


def gliner2_encoder_config(source: Source) -> dict[str, Any]:
    """Configuration of a GLiNER2 model's encoder, which the library saves in a folder of its own."""
    return source.json("encoder_config/config.json")


def _detect_gliner(source: Source) -> PluginSpec:
    config = source.json(GLINER_CONFIG)
    for key, kind in _OTHER_GLINER.items():
        if config.get(key) is not None:
            raise PrepError(f"{source.name}: a GLiNER {kind} model ({key} is set), which no plugin serves yet")
    if config.get("model_type") == "gliner_streaming_span":
        raise PrepError(f"{source.name}: a GLiNER streaming model (causal decoder), which no plugin serves yet")
    backbone = encoder_type(source, config)
    if config.get(LABELS_ENCODER.name_key) is not None:
        labels = encoder_type(source, config, LABELS_ENCODER)
        if (backbone, labels) != ("deberta-v2", "deberta-v2"):
            raise PrepError(
                f"{source.name}: a GLiNER bi-encoder, {shown(backbone)} for texts and {shown(labels)} for labels; "
                "served are bi-encoders with deberta-v2 for both"
            )
        return plugin("deberta_gliner_linker")
    spec = plugin_for_encoder(backbone, token_level=config.get("span_mode") == TOKEN_LEVEL)
    if spec is None:
        raise PrepError(f"{source.name}: a GLiNER on {shown(backbone)}, which no plugin serves yet")
    return spec


def encoder_type(source: Source, config: dict[str, Any], encoder: Encoder = TEXT_ENCODER) -> str:
    """``model_type`` of an encoder, as the library would choose it."""
    saved = config.get(encoder.config_key)
    if isinstance(saved, dict):
        return str(saved.get("model_type", "deberta-v2"))
    return str(hub_encoder_config(source, config, encoder).get("model_type"))


def hub_encoder_config(source: Source, config: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Configuration of the encoder that an old checkpoint only names.

    Raises:
        PrepError: It is not within reach.
    """
    from transformers import AutoConfig

    name = config.get(encoder.name_key)
    if not isinstance(name, str) or not name:
        raise PrepError(f"{source.name}: {GLINER_CONFIG} has neither {encoder.config_key} nor {encoder.name_key}")
    try:
        values: dict[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise PrepError(
            f"{source.name}: {GLINER_CONFIG} only names its encoder, {shown(name)}, and that configuration is "
            "not within reach. Save the model once more with a current gliner, or make the hub reachable."
        ) from error
    return values
