"""The reference for linking: glinker's layers around a checkpoint of the tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from glinker.l1.models import L1Entity
from glinker.l2.models import DatabaseRecord
from glinker.l3.component import L3Component
from glinker.l3.models import L3Config
from glinker.l3.processor import L3Processor
from glinker.l4.component import L4Component
from glinker.l4.models import L4Config
from glinker.l4.processor import L4Processor

CANDIDATES: list[dict[str, Any]] = [
    {"label": "Angela Merkel", "description": "politician", "entity_id": "Q567"},
    {"label": "Apple Inc.", "description": "company in Cupertino", "entity_id": "Q312"},
    {"label": "apple", "description": "fruit", "entity_id": "Q89"},
    {"label": "İstanbul", "description": "şehir", "entity_id": "Q406"},
    {"label": "東京", "entity_id": "Q1490"},
    {"label": "New York 💛", "description": "city — state", "entity_id": "Q60"},
    {"label": "date of birth", "entity_id": "P569"},
    {"label": "APPLE", "description": "FRUIT", "entity_id": "Q89-again"},
    {"label": "Müller & Söhne", "description": "a: b", "entity_id": "X1"},
    {"label": "[SEP] <mask>", "entity_id": "X2"},
]
TEMPLATE = "{label}: {description}"


def records(candidates: list[dict[str, Any]]) -> list[DatabaseRecord]:
    """Candidates as glinker keeps them."""
    return [DatabaseRecord(**candidate) for candidate in candidates]


def mentions(text: str, spans: list[tuple[int, int]]) -> list[L1Entity]:
    """Spans of characters as glinker's first layer finds them."""
    return [
        L1Entity(text=text[start:end], start=start, end=end, left_context="", right_context="")
        for start, end in spans
    ]


@cache
def _component(path: Path, kind: type) -> Any:
    config = L3Config if kind is L3Component else L4Config
    return kind(config(model_name=str(path)))


def layer(path: Path, number: int, **options: Any) -> Any:
    """glinker's layer 3 (linking) or 4 (reranking) with a checkpoint; ``options`` of its configuration."""
    kind, config, processor = {
        3: (L3Component, L3Config, L3Processor),
        4: (L4Component, L4Config, L4Processor),
    }[number]
    component = _component(path, kind)
    component.config = config(model_name=str(path), **options)
    result = processor(component.config, component)
    result.schema = {"template": TEMPLATE}
    return result


def written(found: Any) -> list[dict[str, Any]]:
    """glinker's entities as ours; a label is a candidate as it was written for the model."""
    return [{"text": e.text, "label": e.label, "score": e.score, "start": e.start, "end": e.end} for e in found]


def by_template(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our entities, each with its candidate as it was written for the model."""
    texts = {c["entity_id"]: f"{c['label']}: {c.get('description', '')}" for c in CANDIDATES}
    return [{**e, "label": texts[e["entity_id"]]} for e in entities]
