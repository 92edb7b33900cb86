"""What the distribution declares, against the registry and the changelog; and which way imports run."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import vllm_factory
from vllm_factory import entrypoints
from vllm_factory.pages import page
from vllm_factory.registry import PLUGINS, PluginSpec
from vllm_factory.tools import table

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "vllm_factory").rglob("*.py"))
#: Packages that must work without vLLM; files of them that are the bridge.
NO_VLLM = ("poolers", "io", "models", "kernels", "pooling", "prep")
BRIDGES = {
    "io/processor.py",
    "io/gliner_processor.py",
    "io/colbert_processor.py",
    "io/visual_processor.py",
    "pooling/vllm_adapter.py",
    "pooling/vllm_model.py",
}


def imported_modules(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_entry_points_are_the_registry_s() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    io_points = {spec.io_name: f"vllm_factory.entrypoints:{spec.io_name}" for spec in PLUGINS}
    assert declared["vllm.io_processor_plugins"] == io_points
    assert declared["vllm.general_plugins"] == {"vllm_factory": "vllm_factory.entrypoints:register"}
    for spec in PLUGINS:
        assert getattr(entrypoints, spec.io_name)() == spec.io_class


def test_the_readme_s_table_is_the_registry_s() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = readme.partition("<!-- plugins -->\n")[2].partition("\n<!-- /plugins -->")[0]
    assert shown == table(), "python -m vllm_factory.tools table"


@pytest.mark.parametrize("spec", PLUGINS, ids=lambda spec: spec.name)
def test_every_plugin_has_its_page(spec: PluginSpec) -> None:
    written = (ROOT / "docs" / "plugins" / f"{spec.name}.md").read_text(encoding="utf-8")
    assert written == page(spec), "python -m vllm_factory.tools pages"


def test_the_version_is_the_changelog_s() -> None:
    latest = re.search(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None
    assert latest[1] == vllm_factory.__version__


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT / "src" / "vllm_factory")))
def test_imports_run_one_way(file: Path) -> None:
    name = file.relative_to(ROOT / "src" / "vllm_factory").as_posix()
    modules = imported_modules(file)
    if name.split("/")[0] in NO_VLLM and name not in BRIDGES:
        assert not [m for m in modules if m == "vllm" or m.startswith("vllm.")]
    if not name.startswith("plugins/"):
        assert not [m for m in modules if m.startswith("vllm_factory.plugins")], "shared code names no plugin"


def test_only_compat_knows_vllm_versions() -> None:
    offenders = [
        str(file)
        for file in SOURCES
        if "compat" not in file.parts
        and re.search(r"\bvllm\.__version__|VersionInfo|version\.parse", file.read_text())
    ]
    assert not offenders


def test_no_registry_host_is_named() -> None:
    hosts = re.compile("py" + r"pi\.org|hugging" + r"face\.co|files\.python" + "hosted")
    files = [f for f in ROOT.rglob("*") if f.suffix in {".py", ".md", ".toml", ".yaml", ".json"} and f.is_file()]
    tracked = [f for f in files if not {".git", ".venv", ".kit", ".references"} & set(f.parts)]
    assert not [str(f) for f in tracked if hosts.search(f.read_text(errors="ignore"))]
