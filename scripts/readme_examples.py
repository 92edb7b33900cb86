"""The README's examples: each plugin's demonstration request to a real server, and what it answered.

The checkpoints are the tests' own: the reference library builds them tiny and with random weights, so the answers
show the form of a response and mean nothing. ``python scripts/readme_examples.py`` writes the part of README.md
between its two markers; with names of plugins, it asks these again and leaves the others' examples.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from vllm_factory.registry import PLUGINS, PluginSpec
from vllm_factory.serving.testing import running_server

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- examples -->", "<!-- /examples -->"
#: Entries of a list that are shown.
SHOWN = 2
#: Columns, and characters of a string.
WIDTH = 110
LONGEST = 60

MODERNBERT: dict[str, Any] = {"family": "modernbert", "hidden": 64}
TOKEN_LEVEL = {"span_mode": "token_level"}
#: Tests' recipes with tokenizers that are the same in every process, by plugin.
RECIPES: dict[str, dict[str, Any]] = {
    "mt5_gliner": {"family": "mt5", "tokenizer": "t5", "seed": 50},
    "mmbert_gliner": {**MODERNBERT, "seed": 60},
    "modernbert_gliner_rerank": {**MODERNBERT, "head": TOKEN_LEVEL, "seed": 61},
    "deberta_gliner_linker": {"labels": {}, "labels_tokenizer": "unigram", "seed": 70},
}
#: Random weights find little; so much of it is shown.
THRESHOLDS = {"deberta_gliner_linker": 0.4, "modernbert_gliner_rerank": 0.01}


GOLDEN = ROOT / "tests" / "golden"
#: The stored checkpoint of a plugin whose checkpoints are served as published.
STORED = {
    "embeddinggemma": "mean",
    "moderncolbert": "hidden",
    "lfm2_colbert": "hidden",
    "colqwen3": "narrow",
    "nemotron_colembed": "published",
    "collfm2": "tiles",
}


def _image(name: str) -> str:
    return "data:image/png;base64," + base64.b64encode((GOLDEN / "images" / name).read_bytes()).decode()


#: Requests that show more than the registry's.
REQUESTS: dict[str, dict[str, Any]] = {
    "lfm2_colbert": {"text": "Who runs Apple?", "is_query": True, "output": "base64", "dtype": "float16"},
    "colqwen3": {
        "query": "Who runs Apple?",
        "documents": ["Tim Cook is the chief executive of Apple.", {"image": _image("page.png")}],
    },
    "nemotron_colembed": {"image": _image("square.png"), "text": "An organisation chart.", "output": "base64"},
    "collfm2": {
        "query": "Apple",
        "documents": [{"image": _image("square.png")}],
        "similarity": True,
    },
}


def _gliner(spec: PluginSpec) -> Callable[[Path], Path]:
    made = import_module("checkpoints")
    recipe = made.Recipe(spec.name, **RECIPES[spec.name])
    return lambda directory: made.build(recipe, directory)


def _gliner2(directory: Path) -> Path:
    made = import_module("gliner2_checkpoints")
    path: Path = made.build_gliner2(made.Gliner2Recipe("gliner2"), directory)
    return path


def _stored(spec: PluginSpec) -> Callable[[Path], Path]:
    return lambda _: GOLDEN / spec.name / STORED[spec.name] / "checkpoint"


def builder(spec: PluginSpec) -> Callable[[Path], Path] | None:
    """What makes a plugin's checkpoint; ``None`` for the plugin that the README shows anyway."""
    if spec.name in RECIPES:
        return _gliner(spec)
    if spec.name in STORED:
        return _stored(spec)
    return _gliner2 if spec.name == "deberta_gliner2" else None


def example(spec: PluginSpec, build: Callable[[Path], Path]) -> str:
    """One request and its answer, as Markdown."""
    data = dict(REQUESTS.get(spec.name, spec.demo_request))
    if spec.name in THRESHOLDS:
        data["threshold"] = THRESHOLDS[spec.name]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = build(Path(scratch))
        with running_server(checkpoint, "--cache-dir", f"{scratch}/cache") as server:
            request = urllib.request.Request(
                f"{server.url}/pooling",
                json.dumps({"data": data}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                answer = json.load(response)["data"]
    return "\n".join(
        [
            f"**`{spec.name}`** ({spec.summary}):",
            "",
            "```text",
            f"request   {_shown(_abridged(data))}",
            f"answer    {_shown(_shortened(answer))}",
            "```",
        ]
    )


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        rest = [f"... {len(value) - SHOWN} more"] if len(value) > SHOWN else []
        return [*map(_shortened, value[:SHOWN]), *rest]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else _abridged(value)


def _abridged(value: Any) -> Any:
    """Long base64 cut short, wherever it is."""
    if isinstance(value, list):
        return [*map(_abridged, value)]
    if isinstance(value, dict):
        return {key: _abridged(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > LONGEST and " " not in value:
        return f"{value[: LONGEST // 2]}... ({len(value)} characters)"
    return value


def _shown(value: Any, indent: int = 10) -> str:
    """JSON; an object or list that is too long for a line gets one for each of its entries."""
    text = json.dumps(value, ensure_ascii=False)
    if indent + len(text) <= WIDTH or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        names = [f"{json.dumps(key)}: " for key in value]
        rows = [name + _shown(item, indent + 2) for name, item in zip(names, value.values(), strict=True)]
    else:
        rows = [_shown(item, indent + 2) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inner = ",".join(f"\n{' ' * (indent + 2)}{row}" for row in rows)
    return f"{opening}{inner}\n{' ' * indent}{closing}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the README's part."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [spec.name for spec in PLUGINS if builder(spec) is not None]
    parser.add_argument("plugin", nargs="*", help=f"{', '.join(names)}; all when absent")
    wanted = parser.parse_args(argv).plugin or names
    if unknown := set(wanted) - set(names):
        parser.error(f"no such plugin, or none of these examples: {', '.join(sorted(unknown))}")
    readme = ROOT / "README.md"
    head, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    old, tail = rest.split(END)
    shown = dict(re.findall(r"(?ms)^\*\*`(\w+)`\*\* (.*?^```)$", old))
    parts = []
    for spec in PLUGINS:
        build = builder(spec)
        if build is not None and spec.name in wanted:
            print(spec.name, file=sys.stderr)
            parts.append(example(spec, build))
        elif spec.name in shown:
            parts.append(f"**`{spec.name}`** {shown[spec.name]}")
    readme.write_text(head + BEGIN + "\n" + "\n\n".join(parts) + "\n" + END + tail, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
