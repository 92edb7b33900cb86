"""Building, saving and running ColBERTs with PyLate: what the recipes of its plugins share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from references.common import DOCUMENTS, QUERIES, draw, fresh, store, versions

ENVIRONMENT = "pylate-1.6.0"
REQUIREMENTS = (
    "torch==2.13.0",
    "sentence-transformers==5.3.0",
    "transformers==5.3.0",
    "numpy==2.3.5",
    "scipy==1.16.3",
    "ujson==5.12.0",
    "accelerate==1.15.0",
    "datasets>=2.20",
    "pandas>=2.2",
    "sentencepiece",
)
#: Its indexes need other builds of torch; nothing of them is used here.
WITHOUT_DEPENDENCIES = ("pylate==1.6.0",)


@dataclass(frozen=True)
class Variant:
    """One checkpoint.

    Attributes:
        name: Its folder.
        settings: Of PyLate's ``ColBERT``.
        dense: Arguments of its dense modules but the first width.
        prompts: By name.
        lower: ``do_lower_case``.
        seed: Of the weights.
        copies: How often a text stands in the batch that encodes it. LFM2 in transformers 5.3 applies the attention
            mask to its convolutions in batches of two and more only; newer versions always do.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    dense: list[dict[str, Any]] = field(default_factory=lambda: [{"out_features": 16, "bias": False}])
    prompts: dict[str, str] = field(default_factory=dict)
    lower: bool = False
    copies: int = 1


def run(backbone: Path, variant: Variant, output: Path) -> None:
    """Build the variant on a saved backbone, save it as PyLate does, and store its results."""
    from pylate import models
    from sentence_transformers.models import Transformer

    directory = fresh(output / variant.name)
    transformer = Transformer(str(backbone), do_lower_case=variant.lower)
    modules: list[Any] = [transformer]
    width = transformer.get_word_embedding_dimension()
    for arguments in variant.dense:
        modules.append(models.Dense(in_features=width, **arguments))
        width = arguments["out_features"]
    model = models.ColBERT(modules=modules, device="cpu", prompts=variant.prompts or None, **variant.settings)
    draw(model, variant.seed)
    model.encode("what is tokenized last leaves its length in the checkpoint", is_query=True)
    model.save_pretrained(str(directory / "checkpoint"), create_model_card=False)
    # As a user would load it, not as it was built.
    model = models.ColBERT(str(directory / "checkpoint"), device="cpu")
    meta, arrays = results(model, variant)
    store(directory, meta, arrays)


def results(model: Any, variant: Variant) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Vectors of every text alone, pooled documents, and scores of every pair."""
    import torch
    from pylate.scores import colbert_scores

    arrays: dict[str, np.ndarray] = {}
    cases = []
    names = [None, *variant.prompts]
    for is_query, texts in ((True, QUERIES), (False, DOCUMENTS)):
        for index, text in enumerate(texts):
            for prompt_name in names:
                key = f"{'query' if is_query else 'document'}_{index}_{prompt_name or 'none'}"
                ids = model.tokenize([(model.prompts.get(prompt_name) or "") + text], is_query=is_query)[
                    "input_ids"
                ]
                arrays[f"{key}_ids"] = ids[0].numpy().astype(np.int32)
                batch = [text] * variant.copies
                arrays[key] = model.encode(batch, is_query=is_query, prompt_name=prompt_name)[0]
                cases.append({"key": key, "text": text, "is_query": is_query, "prompt_name": prompt_name})
    for factor in (2, 3):
        for index, text in enumerate(DOCUMENTS):
            key = f"pooled_{index}_{factor}"
            arrays[key] = model.encode(text, is_query=False, pool_factor=factor)
            cases.append({"key": key, "text": text, "is_query": False, "prompt_name": None, "pool_factor": factor})
    scores = [
        [
            float(colbert_scores(arrays[f"query_{q}_none"][None], arrays[f"document_{d}_none"][None])[0, 0])
            for d in range(len(DOCUMENTS))
        ]
        for q in range(len(QUERIES))
    ]
    arrays["scores"] = np.array(scores, np.float32)
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert torch.tensor(scores).std() > 0.1, "the scores do not differ"
    meta = {
        "cases": cases,
        "queries": QUERIES,
        "documents": DOCUMENTS,
        "seed": variant.seed,
        "versions": versions("pylate", "sentence-transformers", "transformers", "torch", "numpy", "scipy"),
    }
    return meta, arrays
