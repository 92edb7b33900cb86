"""What the linker's and the reranker's pipelines share. No vLLM import.

A request is read in one or several *passes* over its texts, each with labels of its own. The linker has one,
whose labels are the entity types and all candidates; the reranker has one for the entity types and one for
every few candidates. A pass is decoded by itself, as the library decodes one call, and then they are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vllm_factory.io.decoding import resolve_overlaps
from vllm_factory.io.gliner import GlinerPipeline, LabelPrompt, TextState, merge_windows
from vllm_factory.io.linking import Candidate, LinkRequest, Mention, parse_link_request, ranked_candidate
from vllm_factory.io.ner import entity, ner_response
from vllm_factory.io.pipeline import Encoded, Prompt
from vllm_factory.io.windows import Window
from vllm_factory.io.words import Word
from vllm_factory.poolers.selection import Selection

#: First and last word of a span.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One reading of the texts.

    Attributes:
        labels: The labels as the model and the pooler get them.
        num_types: Entity types among the labels; they come first.
        first_candidate: The request's candidate that comes next; the others follow.
    """

    labels: LabelPrompt
    num_types: int
    first_candidate: int = 0


@dataclass(slots=True)
class LinkState:
    """What decoding needs of a request."""

    request: LinkRequest
    candidates: list[Candidate]
    passes: list[Pass]
    #: For each text, how each pass read it.
    texts: list[list[TextState]]
    #: For each text, which of its mentions do not begin and end with words.
    unaligned: list[list[int]]


class Link(NamedTuple):
    """A span and the number of what it was found to be: an entity type, or a candidate."""

    start: int
    end: int
    label: int
    score: float

    @property
    def span(self) -> Span:
        return self.start, self.end


class LinkPipeline(GlinerPipeline):
    """See :class:`~vllm_factory.io.pipeline.Pipeline`. Subclasses say how labels are passed."""

    request_model: ClassVar[type[LinkRequest]] = LinkRequest
    #: Whether a span keeps only the best of what the passes found (glinker's reranking layer does that).
    best_of_passes: ClassVar[bool] = False

    def passes(self, request: LinkRequest, candidates: Sequence[str]) -> list[Pass]:
        """How the request's labels are read.

        Raises:
            RequestError: They do not fit.
        """
        raise NotImplementedError

    def check_prompts(self, passes: Sequence[Pass], prompts: Sequence[Prompt]) -> None:
        """Refuse what would be too much to send.

        Raises:
            RequestError: It is.
        """

    def parse(self, data: Any) -> LinkRequest:  # type: ignore[override]
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        return parse_link_request(self.request_model, data, self.limits)

    def encode(self, request: LinkRequest) -> Encoded[LinkState]:  # type: ignore[override]
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        written = request.candidates
        passes = self.passes(request, list(written))
        state = LinkState(request, list(written.values()), passes, [], [])
        prompts: list[Prompt] = []
        for index, text in enumerate(request.texts):
            self._read_text(index, text, state, prompts)
        # Texts without words need no engine, but vLLM wants a prompt for every request.
        if not prompts:
            selection = (Selection().pack(),)
            prompts.append(self._prompt(passes[0].labels, [], request.threshold, selection))
        self.check_prompts(passes, prompts)
        return Encoded(prompts, state)

    def decode(self, state: LinkState, results: Sequence[Sequence[np.ndarray]], prompt_tokens: int) -> Any:  # type: ignore[override]
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        entities = [self._found(state, texts, results) for texts in state.texts]
        notes = []
        for texts, unaligned in zip(state.texts, state.unaligned, strict=True):
            note: dict[str, Any] = {
                "windows": max(len(text.windows) for text in texts),
                "truncated": any(text.truncated for text in texts),
            }
            if state.request.mentions is not None:
                note["unaligned_mentions"] = unaligned
            notes.append(note)
        return ner_response(state.request, entities, prompt_tokens, notes)

    def _read_text(self, index: int, text: str, state: LinkState, prompts: list[Prompt]) -> None:
        request = state.request
        field = "text" if isinstance(request.text, str) else f"text[{index}]"
        mentions = request.mentions_of(index)
        spans, unaligned = _aligned(mentions or (), self.split(text) if mentions else [])
        state.unaligned.append(unaligned)
        texts = []
        for each in state.passes:

            def select(window: Window, each: Pass = each) -> Selection:
                ranked = request.candidate_labels is not None and each.labels.num_labels > each.num_types
                return Selection(
                    best_only=not request.multi_label,
                    top=request.top_k if ranked else 0,
                    first=each.num_types,
                    mentions=None if mentions is None else _within(spans, window),
                )

            texts.append(self._read(text, field, request, each.labels, prompts, select))
        state.texts.append(texts)

    def _found(
        self, state: LinkState, texts: list[TextState], results: Sequence[Sequence[np.ndarray]]
    ) -> list[dict[str, Any]]:
        request = state.request
        arrays = [_merged(text, results, self.config.token_level) for text in texts]
        types = [
            link
            for each, (rows, _) in zip(state.passes, arrays, strict=True)
            if each.num_types
            for link in _resolved(_part(rows, 0, each.num_types), request)
        ]
        if not state.candidates:
            return [self._entity(texts[0], link, request.label_names[link.label]) for link in types]
        only = {link.span for link in types} if request.labels is not None else None
        links: list[Link] = []
        ranks: dict[Span, dict[int, float]] = {}
        for each, (rows, ranked) in zip(state.passes, arrays, strict=True):
            offset = each.first_candidate - each.num_types
            found = _resolved(_part(rows, each.num_types, None, only), request)
            links += [link._replace(label=link.label + offset) for link in found]
            for link in ranked:
                best = ranks.setdefault(link.span, {})
                label = link.label + offset
                best[label] = max(link.score, best.get(label, 0.0))
        if self.best_of_passes:
            links = _best_of_each_span(links)
        # Stable: entities of one pass that start together keep its order.
        links.sort(key=lambda link: link.start)
        ordered = {
            span: sorted(best.items(), key=lambda item: (-item[1], item[0]))[: request.top_k]
            for span, best in ranks.items()
        }
        if request.labels is None:
            return [self._linked(state, texts[0], link, ordered) for link in links]
        return [self._typed(state, texts[0], link, links, ordered) for link in types]

    def _linked(
        self, state: LinkState, text: TextState, link: Link, ranks: dict[Span, list[tuple[int, float]]]
    ) -> dict[str, Any]:
        """An entity that is one of the candidates."""
        candidate = state.candidates[link.label]
        found = self._entity(text, link, candidate.label)
        if candidate.entity_id is not None:
            found["entity_id"] = candidate.entity_id
        found["candidates"] = _ranking(state, link.span, ranks)
        return found

    def _typed(
        self,
        state: LinkState,
        text: TextState,
        link: Link,
        links: list[Link],
        ranks: dict[Span, list[tuple[int, float]]],
    ) -> dict[str, Any]:
        """An entity of a type, and the candidate that it links to, if any."""
        found = self._entity(text, link, state.request.label_names[link.label])
        own = max((each for each in links if each.span == link.span), key=lambda each: each.score, default=None)
        found["link"] = None if own is None else ranked_candidate(state.candidates[own.label], own.score)
        found["candidates"] = [] if own is None else _ranking(state, link.span, ranks)
        return found

    @staticmethod
    def _entity(text: TextState, link: Link, label: str) -> dict[str, Any]:
        return entity(text.text, label, link.score, text.words[link.start][1], text.words[link.end][2])


def _aligned(mentions: Sequence[Mention], words: list[Word]) -> tuple[list[Span], list[int]]:
    """Mentions in words, and the places of those that do not begin and end with words."""
    first = {start: index for index, (_, start, _) in enumerate(words)}
    last = {end: index for index, (_, _, end) in enumerate(words)}
    spans, unaligned = [], []
    for place, mention in enumerate(mentions):
        start, end = first.get(mention.start, -1), last.get(mention.end, -1)
        if 0 <= start <= end:
            spans.append((start, end))
        else:
            unaligned.append(place)
    return spans, unaligned


def _within(spans: list[Span], window: Window) -> np.ndarray:
    """``[M, 2]`` spans that lie in a window, counted from its first word."""
    inside = [
        (start - window.start, end - window.start)
        for start, end in spans
        if window.start <= start and end < window.end
    ]
    return np.array(inside, np.int32).reshape(-1, 2)


def _merged(
    text: TextState, results: Sequence[Sequence[np.ndarray]], token_level: bool
) -> tuple[Sequence[np.ndarray], list[Link]]:
    """Rows (start, end, label, score) of all windows of a text, and its ranked candidates."""
    found = [results[text.first_prompt + i] for i in range(len(text.windows))]
    if not found:
        return [np.empty(0, np.int32)] * 3 + [np.empty(0, np.float32)], []
    rows = [window[:4] for window in found]
    merged = rows[0] if len(rows) == 1 else merge_windows(rows, text.windows, token_level)
    ranked = [
        Link(start + place.start, end + place.start, label, score)
        for window, place in zip(found, text.windows, strict=True)
        for start, end, label, score in zip(*(column.tolist() for column in window[4:]), strict=True)
    ]
    return merged, ranked


def _part(
    rows: Sequence[np.ndarray], first: int, last: int | None, only: set[Span] | None = None
) -> list[np.ndarray]:
    """Rows of labels ``first:last``, of certain spans only."""
    start, end, label = rows[:3]
    keep = label >= first
    if last is not None:
        keep &= label < last
    if only is not None:
        keep &= np.array([span in only for span in zip(start.tolist(), end.tolist(), strict=True)], bool)
    return [column[keep] for column in rows]


def _resolved(rows: Sequence[np.ndarray], request: LinkRequest) -> list[Link]:
    start, end, label, score = rows
    keep = resolve_overlaps(start, end, score, flat=request.flat_ner, multi_label=request.multi_label)
    return [Link(int(start[i]), int(end[i]), int(label[i]), float(score[i])) for i in keep]


def _best_of_each_span(links: Sequence[Link]) -> list[Link]:
    best: dict[Span, Link] = {}
    for link in links:
        if link.span not in best or link.score > best[link.span].score:
            best[link.span] = link
    return list(best.values())


def _ranking(state: LinkState, span: Span, ranks: dict[Span, list[tuple[int, float]]]) -> list[dict[str, Any]]:
    return [ranked_candidate(state.candidates[label], score) for label, score in ranks.get(span, ())]
