"""Where a checkpoint comes from: a local directory or a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_factory.errors import PrepError, shown

#: What is worth downloading of a hub repository. Weights in other formats (ONNX, OpenVINO) stay there.
HUB_FILES = ("*.json", "*.model", "*.txt", "*.safetensors", "pytorch_model.bin", "*/*.json", "*/*.model")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on this machine.

    Attributes:
        path: Its directory.
        name: What the user called it.
    """

    path: Path
    name: str

    def has(self, file: str) -> bool:
        """Whether the checkpoint holds ``file``."""
        return (self.path / file).is_file()

    def json(self, file: str) -> dict[str, Any]:
        """A JSON object of the checkpoint.

        Raises:
            PrepError: The file is missing, damaged, or no object.
        """
        try:
            content = json.loads((self.path / file).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise PrepError(f"{self.name}: {file} is missing") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PrepError(f"{self.name}: {file} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise PrepError(f"{self.name}: {file} holds {type(content).__name__}, expected an object")
        return content


def resolve(model: str, revision: str | None = None) -> Source:
    """The checkpoint called ``model``: a directory if there is one of that name, else a hub id.

    Downloads show their progress and are cached by huggingface_hub.

    Raises:
        PrepError: There is no such directory and no such repository within reach.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(path.resolve(), model)
    if path.exists():
        raise PrepError(f"{model} is a file; give the directory of the checkpoint")
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or not model.strip():
        raise PrepError(f"{shown(model)}: there is no such directory")
    return Source(_download(model, revision), model)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(HUB_FILES)))
    except HFValidationError as error:
        raise PrepError(f"{shown(model)} is neither a directory nor a hub id: {error}") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PrepError(
            f"{shown(model)} is no directory here, and the hub did not give it: {_first_line(error)} "
            "Check the spelling, or the network, or download it elsewhere and give the directory."
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
