"""A page of documentation for each plugin, made from its request model so that it cannot drift.

``python -m vllm_factory.tools pages`` writes ``docs/plugins``; a test compares.
"""

from __future__ import annotations

import json
import shlex
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel

from vllm_factory.registry import PluginSpec


def page(spec: PluginSpec) -> str:
    """The Markdown page of a plugin."""
    request = json.dumps({"data": spec.demo_request}, indent=2, ensure_ascii=False)
    return "\n".join(
        [
            f"# `{spec.name}`",
            "",
            f"{spec.summary}. Equal to {spec.reference}; a published checkpoint: `{spec.example_model}`.",
            "",
            "```shell",
            f"vllm-factory-serve {spec.example_model} --port 8000",
            f"curl localhost:8000/pooling -H 'Content-Type: application/json' -d '{request}'",
            "```",
            "",
            *_sections(spec),
            "A field that is not listed, or a value of another type, is HTTP 400 with the field's name.",
            *([f"What requests and answers mean: `{spec.guide}`."] if spec.guide else []),
            "",
            "## For vLLM",
            "",
            f"- io processor `{spec.io_name}`, architecture `{spec.architecture}`",
            f"- pooling task `{spec.pooling_task}`",
            *_published(spec),
            "",
        ]
    )


def _published(spec: PluginSpec) -> list[str]:
    if spec.prep:
        return ["- checkpoints are prepared first"]
    overrides: dict[str, Any] = {"architectures": [spec.architecture]}
    length = ""
    if spec.longest_prompt:
        tokens = 8192 if spec.extra == "images" else 512
        overrides["model_max_length"] = tokens
        length = f" --max-model-len {tokens}"
    return [
        "- checkpoints are served as published; with vLLM's own command:",
        "",
        "```shell",
        f"vllm serve {spec.example_model} --runner pooling --io-processor-plugin {spec.io_name} \\",
        f"  --hf-overrides '{json.dumps(overrides)}'{length} {shlex.join(spec.serve_flags)}",
        "```",
        *(
            [
                "",
                "The number is the tokens of the longest prompt that the checkpoint's files ask for;",
                "`vllm-factory-serve --dry-run` shows it.",
            ]
            if spec.longest_prompt
            else []
        ),
    ]


def _sections(spec: PluginSpec) -> list[str]:
    """The fields of each request that the plugin takes; a second one has its own heading."""
    lines = []
    for path in (spec.request_model, *spec.other_requests):
        model: type[BaseModel] = resolve_name(path)
        heading = "## Fields of `data`"
        if spec.other_requests:
            required = [f"`{name}`" for name, field in model.model_fields.items() if field.is_required()]
            either = [f"`{name}`" for name in getattr(model, "alternatives", ())]
            heading += f" with {' and '.join(required) or ' or '.join(either)}"
        lines += [heading, "", *_fields(model), ""]
    return lines


def _fields(model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    rows = _table(schema)
    for name, inner in schema.get("$defs", {}).items():
        rows += ["", f"### `{name}`", "", str(inner.get("description", "")), "", *_table(inner)]
    return rows


def _table(schema: dict[str, Any]) -> list[str]:
    """An object's fields, those that are required first."""
    required = set(schema.get("required", ()))
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        default = "required" if name in required else f"`{json.dumps(field.get('default'))}`"
        rows.append(f"| `{name}` | {_type(field)} | {default} | {field.get('description', '')} |")
    return rows


def _type(field: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "anyOf" in field:
        return ", or ".join(_type(branch) for branch in field["anyOf"] if branch.get("type") != "null")
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}` object"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    kind = str(field.get("type", "anything"))
    if kind == "array":
        items = field.get("items", {})
        return f"list of {_plural(items)}"
    if kind == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"object of {_plural(field['additionalProperties'])}"
    return kind


def _plural(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(map(_plural, field["anyOf"]))
    if field.get("type") == "array":
        return f"lists of {_plural(field.get('items', {}))}"
    return f"{_type(field)}s" if field else "values"
