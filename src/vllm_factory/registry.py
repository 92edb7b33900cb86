"""The one list of plugins.

Entry points, doctor, make targets, docs tables, prep, serve and bench read it; nothing else lists plugins.
A plugin stands here once it works.
"""

from __future__ import annotations

from dataclasses import dataclass

#: ``model_type`` of every prepared checkpoint's ``config.json``.
MODEL_TYPE = "vllm_factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """What the rest of the package needs to know about one plugin.

    Attributes:
        name: Public name. The io processor is called ``<name>_io``.
        summary: One line for tables.
        architecture: Name under which the model class is registered with vLLM. Ours alone: names that vLLM
            or another package owns are never registered again.
        model_class: ``module:class`` of the vLLM model.
        network_class: ``module:class`` of the plain torch network that the model runs, or ``None`` when its
            backbone is a model of vLLM's.
        io_class: ``module.class`` of the io processor, in vLLM's notation.
        request_model: ``module:class`` of the pydantic model of a request's ``data``.
        prep: ``module:function`` that prepares a checkpoint, or ``None`` when it is served as published.
        encoders: ``model_type`` of the encoders with which a uni-encoder GLiNER belongs to this plugin.
        heads: Which of GLiNER's heads belong to it, of ``"span"`` and ``"token"``.
        published: For a plugin that serves checkpoints as published, which they are: ``layout:model_type``, with
            the layout as :func:`vllm_factory.published.layout` tells it and the ``model_type`` of ``config.json``.
        longest_prompt: ``module:function`` from a :class:`~vllm_factory.published.Published` to the tokens of the
            longest prompt that its files ask for, where vLLM would read another number out of them.
        guide: A page of the documentation about what requests and answers of the plugin's family mean, or ``""``.
        other_requests: Further request models, ``module:class``, that ``data`` may follow.
        pooling_task: The native pooling task that the model's pooler advertises.
        example_model: A published checkpoint that the plugin serves.
        reference: The library whose results the plugin must equal.
        extra: The extra of this distribution that the plugin's tests need, or ``""``.
        serve_flags: Flags for vLLM's server that ``vllm-factory-serve`` adds unless the user gives them.
        demo_request: A request's ``data`` for smoke tests, benchmarks and documentation.
    """

    name: str
    summary: str
    architecture: str
    model_class: str
    network_class: str | None
    io_class: str
    request_model: str
    prep: str | None
    encoders: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("span", "token")
    published: tuple[str, ...] = ()
    longest_prompt: str | None = None
    guide: str = ""
    other_requests: tuple[str, ...] = ()
    pooling_task: str
    example_model: str
    reference: str
    extra: str = ""
    serve_flags: tuple[str, ...] = ()
    demo_request: dict[str, object]

    @property
    def io_name(self) -> str:
        """Name of the plugin's entry point in ``vllm.io_processor_plugins``."""
        return f"{self.name}_io"


# Models of ours are not compiled yet: capturing graphs would only cost start-up time.
_EAGER = ("--enforce-eager",)

# One image a prompt; without a word, vLLM would set memory aside for the longest videos as well.
# It would also keep images that no request refers to again: each has a name of its own (io/processor.py).
_VISUAL = (*_EAGER, "--limit-mm-per-prompt", '{"image": 1, "video": 0}', "--mm-processor-cache-gb", "0")

#: 64 pixels by 32, black on white: "Tim Cook".
_TINY_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAAAgAQAAAACK5kMpAAAASUlEQVR42mP8zwABTAy0Z/w0YDjB8ICBgYntAsMX"
    "iNTbgAOSfxgYmBgYM5jP18AU/4Aw/sC0O7BwMDCwMDAwnI07zMDASEc3AwCymw/Rp8+ItgAAAABJRU5ErkJggg=="
)
_VISUAL_REQUEST: dict[str, object] = {
    "query": "Who runs Apple?",
    "documents": ["Tim Cook is the chief executive of Apple.", {"image": _TINY_IMAGE}],
}

PLUGINS: tuple[PluginSpec, ...] = (
    PluginSpec(
        name="deberta_gliner",
        summary="GLiNER entity recognition on DeBERTa v2/v3 and mDeBERTa (span and token-level heads)",
        architecture="VllmFactoryDebertaGliner",
        model_class="vllm_factory.plugins.deberta_gliner.model:DebertaGlinerModel",
        network_class="vllm_factory.plugins.deberta_gliner.network:DebertaGlinerNetwork",
        io_class="vllm_factory.plugins.deberta_gliner.io_processor.DebertaGlinerIOProcessor",
        request_model="vllm_factory.io.ner:NerRequest",
        prep="vllm_factory.plugins.deberta_gliner.prep:prepare",
        encoders=("deberta-v2",),
        pooling_task="token_classify",
        example_model="urchade/gliner_small-v2.1",
        reference="gliner 0.2.29",
        extra="gliner",
        serve_flags=_EAGER,
        demo_request={
            "text": "Angela Merkel met Tim Cook in Cupertino on 12 March 2019.",
            "labels": ["person", "place", "date"],
        },
    ),
    PluginSpec(
        name="mt5_gliner",
        summary="GLiNER entity recognition on T5 and mT5 encoders (span and token-level heads)",
        architecture="VllmFactoryMt5Gliner",
        model_class="vllm_factory.plugins.mt5_gliner.model:Mt5GlinerModel",
        network_class="vllm_factory.plugins.mt5_gliner.network:Mt5GlinerNetwork",
        io_class="vllm_factory.plugins.mt5_gliner.io_processor.Mt5GlinerIOProcessor",
        request_model="vllm_factory.io.ner:NerRequest",
        prep="vllm_factory.plugins.mt5_gliner.prep:prepare",
        encoders=("mt5", "t5"),
        pooling_task="token_classify",
        example_model="knowledgator/gliner-x-large",
        reference="gliner 0.2.29",
        extra="gliner",
        serve_flags=_EAGER,
        demo_request={
            "text": "Angela Merkel traf Tim Cook am 12. März 2019 in Cupertino.",
            "labels": ["person", "place", "date"],
        },
    ),
    PluginSpec(
        name="mmbert_gliner",
        summary="GLiNER entity recognition on vLLM's ModernBERT, also mmBERT (span heads)",
        architecture="VllmFactoryMmbertGliner",
        model_class="vllm_factory.plugins.mmbert_gliner.model:MmbertGlinerModel",
        network_class=None,
        io_class="vllm_factory.plugins.mmbert_gliner.io_processor.MmbertGlinerIOProcessor",
        request_model="vllm_factory.io.ner:NerRequest",
        prep="vllm_factory.plugins.mmbert_gliner.prep:prepare",
        encoders=("modernbert",),
        heads=("span",),
        pooling_task="token_classify",
        example_model="VAGOsolutions/SauerkrautLM-GLiNER",
        reference="gliner 0.2.29",
        extra="gliner",
        # vLLM can compile its ModernBERT, and on a CPU the scores stay; what graphs gain on a GPU is not measured.
        serve_flags=_EAGER,
        demo_request={
            "text": "Angela Merkel traf Tim Cook am 12. März 2019 in Cupertino.",
            "labels": ["Person", "Ort", "Datum"],
        },
    ),
    PluginSpec(
        name="modernbert_gliner_rerank",
        summary="GLiNER's token-level head on vLLM's ModernBERT: entity recognition, and reranking of candidates",
        architecture="VllmFactoryModernBertGlinerRerank",
        model_class="vllm_factory.plugins.modernbert_gliner_rerank.model:ModernBertGlinerRerankModel",
        network_class=None,
        io_class="vllm_factory.plugins.modernbert_gliner_rerank.io_processor.ModernBertGlinerRerankIOProcessor",
        request_model="vllm_factory.io.linking:RerankRequest",
        prep="vllm_factory.plugins.modernbert_gliner_rerank.prep:prepare",
        encoders=("modernbert",),
        heads=("token",),
        pooling_task="token_classify",
        example_model="knowledgator/gliner-linker-rerank-v1.0",
        reference="gliner 0.2.29, glinker 0.1.1",
        extra="gliner",
        serve_flags=_EAGER,
        demo_request={
            "text": "Jordan scored 38 points although he had the flu.",
            "mentions": [{"start": 0, "end": 6}],
            "candidate_labels": [
                {"label": "Michael Jordan", "description": "basketball player", "entity_id": "Q41421"},
                {"label": "Jordan", "description": "country in the Middle East", "entity_id": "Q810"},
            ],
        },
    ),
    PluginSpec(
        name="deberta_gliner_linker",
        summary="GLiNER bi-encoder on two DeBERTa encoders: entity linking, and entity recognition",
        architecture="VllmFactoryDebertaGlinerLinker",
        model_class="vllm_factory.plugins.deberta_gliner_linker.model:DebertaGlinerLinkerModel",
        network_class="vllm_factory.plugins.deberta_gliner_linker.network:DebertaGlinerLinkerNetwork",
        io_class="vllm_factory.plugins.deberta_gliner_linker.io_processor.DebertaGlinerLinkerIOProcessor",
        request_model="vllm_factory.io.linking:LinkRequest",
        prep="vllm_factory.plugins.deberta_gliner_linker.prep:prepare",
        pooling_task="token_classify",
        example_model="knowledgator/gliner-linker-large-v1.0",
        reference="gliner 0.2.29, glinker 0.1.1",
        extra="gliner",
        serve_flags=_EAGER,
        demo_request={
            "text": "Apple introduced the first iPhone in San Francisco.",
            "candidate_labels": [
                {"label": "Apple Inc.", "description": "American technology company", "entity_id": "Q312"},
                {"label": "apple", "description": "fruit of the apple tree", "entity_id": "Q89"},
                {"label": "San Francisco", "description": "city in California", "entity_id": "Q62"},
            ],
        },
    ),
    PluginSpec(
        name="deberta_gliner2",
        summary="GLiNER2 extraction on DeBERTa v2/v3: entities, relations, structures and classifications",
        architecture="VllmFactoryDebertaGliner2",
        model_class="vllm_factory.plugins.deberta_gliner2.model:DebertaGliner2Model",
        network_class="vllm_factory.plugins.deberta_gliner2.network:DebertaGliner2Network",
        io_class="vllm_factory.plugins.deberta_gliner2.io_processor.DebertaGliner2IOProcessor",
        request_model="vllm_factory.io.gliner2_request:Gliner2Request",
        prep="vllm_factory.plugins.deberta_gliner2.prep:prepare",
        pooling_task="token_classify",
        example_model="fastino/gliner2-base-v1",
        reference="gliner2 2.1.0",
        extra="gliner2",
        serve_flags=_EAGER,
        demo_request={
            "text": "Tim Cook, chief executive of Apple, presented the iPhone 15 in Cupertino.",
            "schema": {
                "entities": {"person": "a human being, by name", "company": {"threshold": 0.4}},
                "relations": ["works_for"],
                "classifications": [{"task": "topic", "labels": ["technology", "sports"]}],
                "structures": {"product": {"fields": [{"name": "name", "dtype": "str"}, {"name": "maker"}]}},
            },
        },
    ),
    PluginSpec(
        name="embeddinggemma",
        summary="EmbeddingGemma on vLLM's Gemma 3, attending to both sides: one vector a text",
        architecture="VllmFactoryEmbeddingGemma",
        model_class="vllm_factory.plugins.embeddinggemma.model:EmbeddingGemmaModel",
        network_class=None,
        io_class="vllm_factory.plugins.embeddinggemma.io_processor.EmbeddingGemmaIOProcessor",
        request_model="vllm_factory.io.retrieval:DenseTextRequest",
        prep=None,
        published=("dense:gemma3_text",),
        guide="docs/retrieval.md",
        pooling_task="embed",
        example_model="unsloth/embeddinggemma-300m",
        reference="sentence-transformers 5.3.0",
        extra="retrieval",
        serve_flags=_EAGER,
        demo_request={"text": "Tim Cook is the chief executive of Apple.", "is_query": False, "dimensions": 4},
    ),
    PluginSpec(
        name="moderncolbert",
        summary="ColBERT on vLLM's ModernBERT: one vector a token, and ranking by MaxSim on the server",
        architecture="VllmFactoryModernColbert",
        model_class="vllm_factory.plugins.moderncolbert.model:ModernColbertModel",
        network_class=None,
        io_class="vllm_factory.plugins.moderncolbert.io_processor.ModernColbertIOProcessor",
        request_model="vllm_factory.io.retrieval:MultiVectorTextRequest",
        prep=None,
        published=("colbert:modernbert",),
        longest_prompt="vllm_factory.io.colbert:longest_prompt",
        guide="docs/retrieval.md",
        other_requests=("vllm_factory.io.retrieval:RankRequest",),
        pooling_task="token_embed",
        example_model="VAGOsolutions/SauerkrautLM-Multi-Reason-ModernColBERT",
        reference="pylate 1.6.0",
        extra="retrieval",
        serve_flags=_EAGER,
        demo_request={
            "query": "Who runs Apple?",
            "documents": ["Tim Cook is the chief executive of Apple.", "Cupertino lies in California."],
            "top_n": 1,
        },
    ),
    PluginSpec(
        name="lfm2_colbert",
        summary="ColBERT on vLLM's LFM2 (convolutions and attention): one vector a token, and ranking by MaxSim",
        architecture="VllmFactoryLfm2Colbert",
        model_class="vllm_factory.plugins.lfm2_colbert.model:Lfm2ColbertModel",
        network_class=None,
        io_class="vllm_factory.plugins.lfm2_colbert.io_processor.Lfm2ColbertIOProcessor",
        request_model="vllm_factory.io.retrieval:MultiVectorTextRequest",
        prep=None,
        published=("colbert:lfm2",),
        longest_prompt="vllm_factory.io.colbert:longest_prompt",
        guide="docs/retrieval.md",
        other_requests=("vllm_factory.io.retrieval:RankRequest",),
        pooling_task="token_embed",
        example_model="LiquidAI/LFM2-ColBERT-350M",
        reference="pylate 1.6.0",
        extra="retrieval",
        serve_flags=_EAGER,
        demo_request={
            "query": "Who runs Apple?",
            "documents": ["Tim Cook is the chief executive of Apple.", "Cupertino lies in California."],
            "top_n": 1,
        },
    ),
    PluginSpec(
        name="colqwen3",
        summary="ColQwen3 on vLLM's Qwen3-VL: one vector a token of texts and page images, and ranking by MaxSim",
        architecture="VllmFactoryColQwen3",
        model_class="vllm_factory.plugins.colqwen3.model:ColQwen3Model",
        network_class=None,
        io_class="vllm_factory.plugins.colqwen3.io_processor.ColQwen3IOProcessor",
        request_model="vllm_factory.io.retrieval:VisualRequest",
        prep=None,
        published=("ColQwen3:colqwen3", "ColQwen3:qwen3_vl"),
        longest_prompt="vllm_factory.io.qwen_vl:longest_prompt",
        guide="docs/retrieval.md",
        other_requests=("vllm_factory.io.retrieval:VisualRankRequest",),
        pooling_task="token_embed",
        example_model="VAGOsolutions/SauerkrautLM-ColQwen3-1.7b-Turbo-v0.1",
        reference="sauerkrautlm-colpali 0.1.0",
        extra="images",
        serve_flags=_VISUAL,
        demo_request=_VISUAL_REQUEST,
    ),
    PluginSpec(
        name="nemotron_colembed",
        summary="Nemotron ColEmbed on vLLM's Qwen3-VL: one vector a token of texts and page images, and MaxSim",
        architecture="VllmFactoryNemotronColEmbed",
        model_class="vllm_factory.plugins.nemotron_colembed.model:NemotronColEmbedModel",
        network_class=None,
        io_class="vllm_factory.plugins.nemotron_colembed.io_processor.NemotronColEmbedIOProcessor",
        request_model="vllm_factory.io.retrieval:VisualRequest",
        prep=None,
        published=("Qwen3VLNemotronEmbedModel:qwen3_vl_nemotron_embed",),
        longest_prompt="vllm_factory.plugins.nemotron_colembed.writer:longest_prompt",
        guide="docs/retrieval.md",
        other_requests=("vllm_factory.io.retrieval:VisualRankRequest",),
        pooling_task="token_embed",
        example_model="nvidia/nemotron-colembed-vl-4b-v2",
        reference="transformers 4.57.6",
        extra="images",
        serve_flags=_VISUAL,
        demo_request=_VISUAL_REQUEST,
    ),
    PluginSpec(
        name="collfm2",
        summary="ColLFM2 on vLLM's LFM2-VL: one vector a token of texts and page images, and ranking by MaxSim",
        architecture="VllmFactoryColLfm2",
        model_class="vllm_factory.plugins.collfm2.model:ColLfm2Model",
        network_class=None,
        io_class="vllm_factory.plugins.collfm2.io_processor.ColLfm2IOProcessor",
        request_model="vllm_factory.io.retrieval:VisualRequest",
        prep=None,
        published=("ColLFM2:collfm2", "ColLFM2:lfm2_vl", "ColLFM2:lfm2-vl"),
        longest_prompt="vllm_factory.io.lfm2_vl:longest_prompt",
        guide="docs/retrieval.md",
        other_requests=("vllm_factory.io.retrieval:VisualRankRequest",),
        pooling_task="token_embed",
        example_model="VAGOsolutions/SauerkrautLM-ColLFM2-450M-v0.1",
        reference="sauerkrautlm-colpali 0.1.0",
        extra="images",
        serve_flags=_VISUAL,
        demo_request=_VISUAL_REQUEST,
    ),
)


def plugin(name: str) -> PluginSpec:
    """The plugin called ``name`` (the io processor's name is accepted too).

    Raises:
        KeyError: There is none; the message lists those there are.
    """
    for spec in PLUGINS:
        if name in (spec.name, spec.io_name):
            return spec
    raise KeyError(f"unknown plugin {name!r}; there are: {', '.join(spec.name for spec in PLUGINS)}")


def plugin_for_encoder(model_type: str, *, token_level: bool) -> PluginSpec | None:
    """The plugin of a uni-encoder GLiNER with this head on an encoder of ``model_type``, if any."""
    head = "token" if token_level else "span"
    return next((spec for spec in PLUGINS if model_type in spec.encoders and head in spec.heads), None)


def plugin_for_published(layout: str | None, model_type: str) -> PluginSpec | None:
    """The plugin that serves a checkpoint of this layout and ``model_type`` as published, if any."""
    return next((spec for spec in PLUGINS if f"{layout}:{model_type}" in spec.published), None)


def plugin_for_architecture(architecture: str) -> PluginSpec | None:
    """The plugin whose model is registered as ``architecture``, if any."""
    return next((spec for spec in PLUGINS if spec.architecture == architecture), None)
