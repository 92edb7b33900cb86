"""The flags that a user gives for vLLM's server, read only as far as we must know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from vllm_factory.errors import ServeError, UnsupportedError, shown

#: Flags whose presence matters here. vLLM's parser also takes unambiguous beginnings of them.
KNOWN = (
    "dtype",
    "enable-chunked-prefill",
    "enable-lora",
    "enable-prefix-caching",
    "enforce-eager",
    "hf-overrides",
    "io-processor-plugin",
    "max-model-len",
    "max-num-seqs",
    "model",
    "pipeline-parallel-size",
    "quantization",
    "runner",
    "served-model-name",
    "tensor-parallel-size",
)
_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-q": "quantization"}
#: Flags that the plugins' models cannot follow, the value that is harmless, and the remedy.
_REFUSED = {
    "tensor-parallel-size": ("1", "an encoder is not sharded; run one server per GPU instead"),
    "pipeline-parallel-size": ("1", "an encoder is not split; run one server per GPU instead"),
    "quantization": ("none", "the plugins' models have no quantized form; leave the flag out"),
    "enable-lora": ("false", "the plugins' models have no LoRA support; leave the flag out"),
    "enable-chunked-prefill": ("false", "an encoder needs the whole prompt in one step; leave the flag out"),
    "enable-prefix-caching": ("false", "every token depends on the whole prompt; leave the flag out"),
}


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """What the user wrote for vLLM.

    Attributes:
        tokens: As written, to be passed on untouched.
        values: By the flag's full name without dashes, from the command line and from ``--config``'s file.
            A flag without a value has ``"true"``, its ``--no-`` form ``"false"``.
    """

    tokens: tuple[str, ...]
    values: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, tokens: Sequence[str]) -> VllmFlags:
        """Read a command line.

        Raises:
            ServeError: The file of ``--config`` cannot be read.
        """
        values = dict(_pairs(tokens))
        if "config" in values:
            values = {**_config_file(values["config"]), **values}
        return cls(tuple(tokens), values)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def refuse_unsupported(self, plugin: str) -> None:
        """Stop before a start of half a minute ends in the same words, or in wrong results.

        Raises:
            UnsupportedError: The message names each flag and the remedy.
        """
        problems = [
            f"--{name} {self.values[name]}: {remedy}"
            for name, (harmless, remedy) in _REFUSED.items()
            if self.values.get(name, harmless).lower() != harmless
        ]
        if problems:
            raise UnsupportedError(f"{plugin} does not run with {'; '.join(problems)}")


def flag_name(token: str) -> tuple[str, bool] | None:
    """Full name of a flag, and whether it is the ``--no-`` form; ``None`` when the token is no flag."""
    if token in _SHORT:
        return _SHORT[token], False
    if not token.startswith("--") or token == "--":
        return None
    name = token[2:].replace("_", "-")
    negated = name.startswith("no-")
    name = name.removeprefix("no-")
    return next((known for known in KNOWN if known.startswith(name)), name), negated


def without(tokens: Sequence[str], present: VllmFlags) -> list[str]:
    """Our default ``tokens``, less those flags (and their values) that the user has given in some form."""
    kept: list[str] = []
    keep = True
    for token in tokens:
        found = flag_name(token.partition("=")[0])
        if found is not None:
            keep = found[0] not in present
        if keep:
            kept.append(token)
    return kept


def _pairs(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    for token, following in zip(tokens, [*tokens[1:], "--"], strict=False):
        written, equals, value = token.partition("=")
        found = flag_name(written)
        if found is None:
            continue
        name, negated = found
        if negated:
            yield name, "false"
        elif equals:
            yield name, value
        else:
            yield name, "true" if following.startswith("-") else following


def _config_file(path: str) -> dict[str, str]:
    # A dependency of vLLM's own, which reads the same file with it.
    yaml = import_module("yaml")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ServeError(f"--config {shown(path)} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ServeError(f"--config {shown(path)}: expected a mapping of flags to values")
    values = {}
    for key, value in content.items():
        found = flag_name(f"--{key}")
        if found is not None:
            values[found[0]] = str(value).lower() if isinstance(value, bool) else str(value)
    return values
