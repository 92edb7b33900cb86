"""What a plugin must equal: tiny checkpoints and the reference library's own results on them.

``python scripts/make_reference.py --plugin P`` builds the reference library's environment with pinned versions, has
the library build, save and run tiny seeded checkpoints in it, and stores them with the results under
``tests/golden/P``. Tests compare with these files, so the main environment needs no reference library. A plugin's
recipe is the module of its name in ``scripts/references``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "scripts" / "references"
#: Environments of the reference libraries; ignored by git, and built once.
ENVIRONMENTS = Path(os.environ.get("VLLM_FACTORY_REFERENCES", ROOT / ".references"))
sys.path.insert(0, str(ROOT / "scripts"))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    names = sorted(
        file.stem
        for file in RECIPES.glob("*.py")
        if file.stem != "__init__" and not file.stem.endswith(("common", "_cases"))
    )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", choices=names, action="append", help="all when absent; may be repeated")
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "golden")
    arguments = parser.parse_args(argv)
    for name in arguments.plugin or names:
        recipe = importlib.import_module(f"references.{name}")
        make(name, recipe, arguments.output / name)
    return 0


def make(name: str, recipe: Any, output: Path) -> None:
    """Run one recipe in its environment."""
    python = environment(recipe.ENVIRONMENT, recipe.REQUIREMENTS, recipe.WITHOUT_DEPENDENCIES)
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    subprocess.run([python, "-m", f"references.{name}", output], env=variables, check=True)


def environment(name: str, requirements: Sequence[str], without_dependencies: Sequence[str]) -> Path:
    """Python of a virtual environment with exactly these requirements, built unless it is there."""
    directory = ENVIRONMENTS / name
    python = directory / "bin" / "python"
    stamp = directory / "requirements.txt"
    wanted = "\n".join([*requirements, *without_dependencies])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run([*pip, *requirements], check=True)
    if without_dependencies:
        subprocess.run([*pip, "--no-deps", *without_dependencies], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return python


if __name__ == "__main__":
    sys.exit(main())
