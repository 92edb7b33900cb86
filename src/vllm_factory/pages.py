"""A page of documentation for each plugin, made from its request model so that it cannot drift.

``python -m vllm_factory.tools pages`` writes ``docs/plugins``; a test compares.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from vllm_factory.registry import PluginSpec


def page(spec: PluginSpec) -> str:
    """The Markdown page of a plugin."""
    module, _, name = spec.request_model.partition(":")
    model: type[BaseModel] = getattr(import_module(module), name)
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
            "## Fields of `data`",
            "",
            *_fields(model),
            "",
            "A field that is not listed, or a value of another type, is HTTP 400 with the field's name.",
            "",
            "## For vLLM",
            "",
            f"- io processor `{spec.io_name}`, architecture `{spec.architecture}`",
            f"- pooling task `{spec.pooling_task}`",
            f"- {'checkpoints are prepared first' if spec.prep else 'checkpoints are served as published'}",
            "",
        ]
    )


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
