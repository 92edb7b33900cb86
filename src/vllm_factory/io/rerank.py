"""The reranker's pipeline: candidates a few at a time in the prompt, as glinker's reranking layer reads them."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_factory.io.link_pipeline import LinkPipeline, Pass
from vllm_factory.io.linking import LinkRequest, RerankRequest


class RerankPipeline(LinkPipeline):
    """See :class:`~vllm_factory.io.pipeline.Pipeline`."""

    request_model = RerankRequest
    best_of_passes = True

    def passes(self, request: LinkRequest, candidates: Sequence[str]) -> list[Pass]:
        """See :class:`~vllm_factory.io.link_pipeline.LinkPipeline`."""
        assert isinstance(request, RerankRequest)
        types = request.label_prompts
        passes = [Pass(self._label_prompt(types), len(types))] if types else []
        for first in range(0, len(candidates), request.max_labels):
            part = candidates[first : first + request.max_labels]
            passes.append(Pass(self._label_prompt(part, "candidate_labels"), 0, first))
        return passes
