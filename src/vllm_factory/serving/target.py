"""What MODEL is: prepared, to be prepared, or served as published. Told from its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vllm_factory.errors import ServeError, shown
from vllm_factory.prep.detect import detect, is_prepared, needs_preparation
from vllm_factory.prep.source import Source, resolve
from vllm_factory.published import MODULES_FILE, SETTINGS_FILE, Published, layout
from vllm_factory.registry import PluginSpec, plugin, plugin_for_published
from vllm_factory.serving.cache import prepared_directory

_PEEKED = ("*config.json", MODULES_FILE, SETTINGS_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model that can be handed to vLLM.

    Attributes:
        model: What vLLM gets: a directory or a hub id.
        name: What the user called it.
        plugin: Which plugin serves it; ``None`` leaves all to vLLM.
        configured: Whether the model's own ``config.json`` names the io processor.
        dtype: As what the weights are stored, where ``config.json`` says so.
        overrides: What must stand in ``config.json`` for vLLM and does not, as published.
        max_tokens: Tokens of the longest prompt, where vLLM would not find out; ``None`` leaves it to vLLM.
        note: What happened on the way and is worth a line, or ``""``.
    """

    model: str
    name: str
    plugin: PluginSpec | None
    configured: bool = False
    dtype: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    note: str = ""


def wanted_plugin(name: str | None) -> PluginSpec | None:
    """The plugin that the user asked for, by its name or its io processor's.

    Raises:
        ServeError: There is no such plugin.
    """
    if name is None:
        return None
    try:
        return plugin(name)
    except KeyError as error:
        raise ServeError(f"--io-processor-plugin: {error.args[0]}") from error


def find(
    model: str,
    *,
    cache: Path,
    wanted: PluginSpec | None = None,
    revision: str | None = None,
    force_prep: bool = False,
) -> Target:
    """Look at ``model``'s files and, where it must be prepared, prepare it.

    Raises:
        PrepError: It is no checkpoint, or one that no plugin serves.
        ServeError: Another plugin was asked for than the files call for.
    """
    source = _peek(model, revision)
    if is_prepared(source):
        return _prepared(source, model, wanted, "")
    if needs_preparation(source):
        _check_wanted(model, detect(source), wanted)
        directory, new = prepared_directory(
            resolve(model, revision), root=cache, revision=revision, force=force_prep
        )
        note = f"{'prepared into' if new else 'already prepared in'} {directory}"
        return _prepared(Source(directory, str(directory)), model, wanted, note)
    return _published(source, model, wanted)


def _peek(model: str, revision: str | None) -> Source:
    """``model``'s configuration files; of a hub id only these: vLLM downloads the weights that it serves."""
    if Path(model).expanduser().exists() or model.count("/") > 1:
        return resolve(model, revision)
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(model, revision=revision, allow_patterns=list(_PEEKED))
    except (OSError, ValueError):
        # Fails in the same way, in better words.
        return resolve(model, revision)
    return Source(Path(path), model)


def _prepared(source: Source, name: str, wanted: PluginSpec | None, note: str) -> Target:
    config = source.json("config.json")
    written = (config.get("factory") or {}).get("plugin")
    try:
        spec = plugin(str(written))
    except KeyError as error:
        raise ServeError(f"{name} was prepared for another version of vllm-factory: {error.args[0]}") from error
    _check_wanted(name, spec, wanted)
    return Target(
        model=str(source.path) if Path(name).expanduser().is_dir() or note else name,
        name=name,
        plugin=spec,
        configured=config.get("io_processor_plugin") == spec.io_name,
        dtype=_dtype(config),
        note=note,
    )


def _published(source: Source, name: str, wanted: PluginSpec | None) -> Target:
    config = source.json("config.json") if source.has("config.json") else {}
    spec = plugin_for_published(layout(source.path), str(config.get("model_type")))
    if spec is not None:
        _check_wanted(name, spec, wanted)
    elif not config.get("architectures") or (wanted is not None and wanted.prep is not None):
        # Neither vLLM nor the plugin knows it: this raises, and says what it is.
        detect(source)
    spec = spec or wanted
    note = "" if spec else f"no plugin of vllm-factory serves {shown(name)}: vLLM gets it as it is"
    max_tokens = _longest_prompt(spec, source) if spec else None
    return Target(
        model=str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name,
        name=name,
        plugin=spec,
        configured=spec is not None and config.get("io_processor_plugin") == spec.io_name,
        dtype=_dtype(config),
        overrides=_overrides(spec, config, max_tokens) if spec else {},
        max_tokens=max_tokens,
        note=note,
    )


def _longest_prompt(spec: PluginSpec, source: Source) -> int | None:
    if spec.longest_prompt is None:
        return None
    return int(resolve_name(spec.longest_prompt)(Published(source.path, source.name)))


def _overrides(spec: PluginSpec, config: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if config.get("architectures") != [spec.architecture]:
        overrides["architectures"] = [spec.architecture]
    if max_tokens is not None:
        # vLLM takes a longer --max-model-len than it reads out of the files only up to this number.
        overrides["model_max_length"] = max_tokens
    return overrides


def _check_wanted(name: str, found: PluginSpec, wanted: PluginSpec | None) -> None:
    if wanted is not None and wanted is not found:
        raise ServeError(
            f"--io-processor-plugin {wanted.name}: {name} is a checkpoint for {found.name}; leave the flag out"
        )


def _dtype(config: dict[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    return value if isinstance(value, str) else None
