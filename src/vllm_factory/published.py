"""Checkpoints that are served as they were published: what their files say.

Retrieval models come in the layout of sentence-transformers, which PyLate shares: ``modules.json`` lists the
modules in order, each with a folder of its own, and ``config_sentence_transformers.json`` holds prompts and, for
PyLate, how queries and documents are written. The io processor and the model read the same files through this
module; nothing that stands in them is known anywhere else. Imports nothing of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_factory.errors import CheckpointError, shown

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
#: All but the weights of the backbone, which vLLM loads.
_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "[0-9]*_*/*")


@dataclass(frozen=True, slots=True)
class Module:
    """One line of ``modules.json``.

    Attributes:
        kind: Last part of its type: ``Transformer``, ``Pooling``, ``Dense``, ``Normalize``.
        folder: Its folder in the checkpoint; ``""`` is the checkpoint itself.
    """

    kind: str
    folder: str


@dataclass(frozen=True, slots=True)
class Published:
    """A published checkpoint on this machine.

    Attributes:
        path: Its directory.
        name: What the user called it.
    """

    path: Path
    name: str

    @classmethod
    def open(cls, model: str, revision: str | None = None) -> Published:
        """The checkpoint called ``model``: a directory, or a hub id whose small files are downloaded.

        Raises:
            CheckpointError: It is not within reach.
        """
        if Path(model).is_dir():
            return cls(Path(model), model)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return cls(Path(snapshot_download(model, revision=revision, allow_patterns=list(_FILES))), model)
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{shown(model)} is no directory, and the hub did not give it: {error}"
            ) from error

    def has(self, file: str) -> bool:
        """Whether the checkpoint holds ``file``."""
        return (self.path / file).is_file()

    def json(self, file: str) -> Any:
        """Content of a JSON file.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        try:
            return json.loads((self.path / file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{self.name}: {file} cannot be read: {error}") from error

    def table(self, file: str, *, missing_ok: bool = False) -> dict[str, Any]:
        """A JSON object; an empty one for a file that is missing, where that is allowed.

        Raises:
            CheckpointError: The file is missing, damaged, or no object.
        """
        if missing_ok and not self.has(file):
            return {}
        content = self.json(file)
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.name}: {file} holds {type(content).__name__}, expected an object")
        return content

    def modules(self) -> list[Module]:
        """The modules, in order.

        Raises:
            CheckpointError: There is no ``modules.json``, or it has another form.
        """
        try:
            found = [Module(line["type"].rpartition(".")[2], line["path"]) for line in self.json(MODULES_FILE)]
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.name}: {MODULES_FILE} has an unknown form: {error!r}") from error
        if not found or found[0].kind != "Transformer":
            raise CheckpointError(f"{self.name}: {MODULES_FILE} does not begin with a Transformer")
        return found

    def within_positions(self, tokens: int) -> int:
        """``tokens``, or the positions of the text model if they are fewer."""
        config = self.table("config.json")
        positions = (config.get("text_config") or config).get("max_position_embeddings")
        return min(tokens, positions) if isinstance(positions, int) else tokens

    def settings(self) -> dict[str, Any]:
        """``config_sentence_transformers.json``."""
        return self.table(SETTINGS_FILE, missing_ok=True)

    def prompts(self) -> dict[str, str]:
        """Prompts by name, as sentence-transformers has them: ``query`` and ``document`` are always there."""
        prompts = self.settings().get("prompts") or {}
        if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
            raise CheckpointError(f"{self.name}: {SETTINGS_FILE}: prompts are {shown(prompts)}")
        return {"query": "", "document": "", **prompts}

    def default_prompt(self) -> str:
        """The prompt of a request that names none; mostly there is none."""
        name = self.settings().get("default_prompt_name")
        if name is None:
            return ""
        prompts = self.prompts()
        if name not in prompts:
            raise CheckpointError(f"{self.name}: {SETTINGS_FILE}: default_prompt_name {shown(name)} is no prompt")
        return prompts[name]

    def transformer_settings(self) -> dict[str, Any]:
        """``max_seq_length`` and ``do_lower_case`` of the Transformer module."""
        folder = self.modules()[0].folder
        return self.table(str(Path(folder) / "sentence_bert_config.json"), missing_ok=True)


def layout(path: Path) -> str | None:
    """How a checkpoint is laid out.

    Returns:
        In the layout of sentence-transformers, what it holds: ``colbert``, ``dense`` or ``None``. Else the
        architecture that ``config.json`` names, or ``None``.
    """
    checkpoint = Published(path, str(path))
    if not checkpoint.has(MODULES_FILE):
        architectures = checkpoint.table("config.json", missing_ok=True).get("architectures")
        return str(architectures[0]) if isinstance(architectures, list) and architectures else None
    kinds = [module.kind for module in checkpoint.modules()]
    settings = checkpoint.settings()
    if settings.get("model_type") == "ColBERT" or settings.get("similarity_fn_name") == "MaxSim":
        return "colbert"
    if "Pooling" in kinds:
        return "dense"
    return "colbert" if "Dense" in kinds else None
