"""Scores of every span, this package's and the library's, without vLLM and without overlap rules.

An answer's entities depend on which of two close scores is the higher, so in 16-bit types two correct
implementations may well answer differently. The scores themselves can be compared one by one, and each side's
with the library's in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from bench.checkpoint import LABELS, load_reference
from vllm_factory.io.gliner import GlinerPipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.tokens import WordTokenizer
from vllm_factory.plugins.deberta_gliner.network import DebertaGlinerNetwork
from vllm_factory.poolers.gliner_config import GlinerConfig
from vllm_factory.prep.cli import prepare
from vllm_factory.varlen import Varlen


def score_accuracy(
    checkpoint: Path, scratch: Path, sample: list[str], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Differences of the scores of all spans of ``sample``: largest and mean."""
    prepared = scratch / "prepared"
    prepare(str(checkpoint), prepared)
    ours = _our_scores(prepared, sample, device, dtype)
    library = _library_scores(checkpoint, sample, device, dtype)
    exact = library if dtype == torch.float32 else _library_scores(checkpoint, sample, device, torch.float32)
    return {
        "spans": int(sum(scores.size for scores in ours)),
        "ours_to_library": _difference(ours, library),
        "ours_to_library_float32": _difference(ours, exact),
        "library_to_library_float32": _difference(library, exact),
    }


def _difference(got: list[np.ndarray], want: list[np.ndarray]) -> dict[str, float]:
    differences = np.concatenate([np.abs(a - b) for a, b in zip(got, want, strict=True)])
    return {"largest": float(differences.max()), "mean": float(differences.mean())}


@torch.inference_mode()
def _our_scores(prepared: Path, sample: list[str], device: str, dtype: torch.dtype) -> list[np.ndarray]:
    """One array a text: the scores of its spans by start, width and label, all texts in one batch."""
    values = json.loads((prepared / "config.json").read_text())
    max_tokens = values["max_position_embeddings"]
    network = DebertaGlinerNetwork.from_factory(values["factory"]).eval().to(device, dtype)
    network.load_state_dict(load_file(prepared / "model.safetensors"))
    network.prepare(max_tokens)
    head = GlinerConfig.from_dict(values["factory"]["head"])
    tokenizer = WordTokenizer(prepared / "tokenizer.json")
    pipeline = GlinerPipeline(head, tokenizer, max_tokens, 10**9, Limits())
    request = pipeline.parse({"text": sample, "labels": LABELS, "threshold": 0.0})
    prompts = pipeline.encode(request).prompts
    lengths = [len(prompt.token_ids) for prompt in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt.token_ids], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    hidden = network.encode(ids, positions, Varlen(lengths, ids.device))
    parsed = [network.head.parse(prompt.arrays, n) for prompt, n in zip(prompts, lengths, strict=True)]
    results = network.head.pool(hidden, (np.cumsum(lengths) - lengths).tolist(), parsed)
    return [result.arrays[3] for result in results]


@torch.inference_mode()
def _library_scores(checkpoint: Path, sample: list[str], device: str, dtype: torch.dtype) -> list[np.ndarray]:
    reference = load_reference(checkpoint, device, dtype)
    scores = []
    for text in sample:
        prepared = reference.prepare_batch([text], LABELS)
        batch = reference.collate_batch(prepared["input_x"], prepared["entity_types"], reference.create_collator())
        cube = torch.sigmoid(reference.run_batch(batch, move_to_device=True).logits[0].float())
        words, widths, _ = cube.shape
        start = torch.arange(words, device=cube.device)
        inside = start[:, None] + torch.arange(widths, device=cube.device) < words
        scores.append(cube[inside].flatten().cpu().numpy())
    return scores
