"""Are a real server's answers the reference library's?

For every plugin: the library builds and saves a small checkpoint with random weights (or did so, where it cannot
live beside vLLM: ``scripts/make_reference.py``), ``vllm-factory-serve`` prepares and serves it, and all answers
over HTTP, requested at once so that the engine batches them, are compared with the library's: the same results,
scores within 1e-4. Exit status 1 when one differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_factory.errors import FactoryError
from vllm_factory.registry import PLUGINS, plugin
from vllm_factory.serving.testing import Server, running_server

TOLERANCE = 1e-4
#: Requests in flight at once.
CONCURRENCY = 16

Data = dict[str, Any]
Entities = list[dict[str, Any]]
Scores = dict[tuple[Any, ...], float]


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint and what is asked of it.

    Attributes:
        name: For the table.
        checkpoint: Directory as the reference library saved it.
        requests: The ``data`` of each request.
        reference: The library's answer to one of them.
        scores: An answer as what was found, and its score.
    """

    name: str
    checkpoint: Path
    requests: list[Data]
    reference: Callable[[Data], Any]
    scores: Callable[[Any], Scores]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the comparison of a case found.

    Attributes:
        found: How many entities or values the library found in all requests.
        difference: The greatest difference of two scores of the same one.
        problems: One line for each request whose answer differs.
    """

    found: int
    difference: float
    problems: list[str]


def gliner(directory: Path, *recipes: dict[str, Any]) -> Iterator[Case]:
    """GLiNER checkpoints, asked in all modes."""
    # Beside the tests, which build the same ones; outside the package, so not a plain import here.
    made = import_module("checkpoints")
    modes = [
        {"threshold": 0.5},
        {"threshold": 0.2, "flat_ner": False},
        {"threshold": 0.3, "multi_label": True},
        {"threshold": 0.35, "flat_ner": False, "multi_label": True},
    ]
    requests = [
        {"text": text, "labels": made.LABELS[: 1 + index % len(made.LABELS)], **mode}
        for index, (text, mode) in enumerate(itertools.product(made.TEXTS, modes))
    ]
    for recipe in recipes:
        checkpoint = made.build(made.Recipe(**recipe), directory)
        model = made.load(checkpoint)

        def reference(data: Data, model: Any = model) -> Entities:
            entities: Entities = model.predict_entities(**data)
            return entities

        yield Case(recipe["name"], checkpoint, requests, reference, _entity_scores)


TOKEN_LEVEL = {"span_mode": "token_level"}


def deberta_gliner(directory: Path) -> Iterator[Case]:
    """A span and a token-level checkpoint."""
    return gliner(directory, {"name": "span-v3"}, {"name": "token-v3", "head": TOKEN_LEVEL, "seed": 40})


def mmbert_gliner(directory: Path) -> Iterator[Case]:
    """A span checkpoint."""
    modernbert = {"family": "modernbert", "hidden": 64}
    return gliner(directory, {"name": "mmbert-span", **modernbert, "tokenizer": "bpe", "seed": 60})


def linking(directory: Path, layer: int, recipe: dict[str, Any]) -> Iterator[Case]:
    """Entity recognition, and what glinker's layer of that number makes of the same checkpoint."""
    made, reference_of = import_module("checkpoints"), import_module("linking")
    yield from gliner(directory, recipe)
    candidates = reference_of.CANDIDATES[:-1]  # The last one holds a marker of some models.
    modes: list[Data] = [{"threshold": 0.3}, {"threshold": 0.2, "flat_ner": False}]
    common = {"candidate_labels": candidates, "template": reference_of.TEMPLATE}
    requests = [{"text": text, **common, **mode} for text, mode in itertools.product(made.TEXTS, modes)]

    def reference(data: Data) -> Any:
        mode = {key: data[key] for key in data if key in ("threshold", "flat_ner")}
        linker = reference_of.layer(directory / recipe["name"], layer, **mode)
        (found,) = linker(texts=[data["text"]], candidates=[reference_of.records(candidates)]).entities
        return reference_of.written(found)

    def scores(answer: Entities) -> Scores:
        linked = answer and "entity_id" in answer[0]
        return _entity_scores(reference_of.by_template(answer) if linked else answer)

    yield Case(f"{recipe['name']}, linking", directory / recipe["name"], requests, reference, scores)


def modernbert_gliner_rerank(directory: Path) -> Iterator[Case]:
    """A token-level checkpoint."""
    token = {"encoder": {"vocab_size": 700}, "tokenizer": "gemma", "head": TOKEN_LEVEL, "seed": 61}
    return linking(directory, 4, {"name": "mmbert-token", "family": "modernbert", "hidden": 64, **token})


def deberta_gliner_linker(directory: Path) -> Iterator[Case]:
    """A span and a token-level checkpoint."""
    yield from linking(directory, 3, {"name": "linker-span", "labels": {}, "seed": 70})
    token = {"head": TOKEN_LEVEL, "labels": {"hidden_size": 24}, "seed": 71}
    yield from linking(directory, 3, {"name": "linker-token", **token})


def mt5_gliner(directory: Path) -> Iterator[Case]:
    """A span and a token-level checkpoint."""
    mt5 = {"family": "mt5", "tokenizer": "t5"}
    span = {"name": "mt5-span", **mt5, "seed": 50}
    return gliner(directory, span, {"name": "mt5-token", **mt5, "head": TOKEN_LEVEL, "seed": 51})


def deberta_gliner2(directory: Path) -> Iterator[Case]:
    """All counting layers, asked for everything at once and in parts, in all views."""
    made, harness = import_module("gliner2_checkpoints"), import_module("gliner2_harness")
    texts = import_module("checkpoints").TEXTS
    details = {"include_confidence": True, "include_spans": True}
    options = [
        {"schema": made.SCHEMA, **details},
        {"schema": {"entities": ["person", "[E]"]}, "threshold": 0.3, "overlap_policy": "nested", **details},
        {"schema": {key: made.SCHEMA[key] for key in ("structures", "relations")}, "include_confidence": True},
        {"schema": {"classifications": made.SCHEMA["classifications"]}, "format_results": False},
    ]
    requests = [{"text": text, **each} for text, each in itertools.product(texts, options)]
    for index, layer in enumerate(("count_lstm", "count_lstm_v2", "count_lstm_moe")):
        recipe = made.Gliner2Recipe(layer, head={"counting_layer": layer}, seed=index)
        checkpoint = made.build_gliner2(recipe, directory)
        model = made.load_gliner2(checkpoint)

        def reference(data: Data, model: Any = model) -> Any:
            return harness.library_answer(model, data)

        yield Case(layer, checkpoint, requests, reference, _leaf_scores)


def golden(plugin: str, *names: str) -> Callable[[Path], Iterator[Case]]:
    """Stored checkpoints and the library's stored vectors and scores (scripts/make_reference.py)."""
    harness, vectors = import_module("retrieval_harness"), import_module("vllm_factory.io.vectors")

    def cases(_: Path) -> Iterator[Case]:
        for name in names:
            stored = harness.Golden(plugin, name)
            wanted: dict[str, Any] = {}
            requests = []
            for case in stored.meta()["cases"]:
                item = vectors.vector_item(stored.arrays()[case["key"]], "float", "float32")
                requests.append(harness.request(case))
                wanted[json.dumps(requests[-1])] = {"embeddings": item, "usage": {}}
            for query, scores in zip(
                stored.meta().get("queries", ()), stored.arrays().get("scores", ()), strict=False
            ):
                results = [{"index": index, "score": float(score)} for index, score in enumerate(scores)]
                documents = list(map(harness.document, stored.meta()["documents"]))
                requests.append({"query": query, "documents": documents})
                wanted[json.dumps(requests[-1])] = {"results": results, "query": {}, "usage": {}}

            def reference(data: Data, wanted: dict[str, Any] = wanted) -> Any:
                return wanted[json.dumps(data)]

            yield Case(name, stored.path, requests, reference, _vector_scores)

    return cases


def _vector_scores(answer: Any) -> Scores:
    """Every number of the vectors by its place, or every document's score."""
    if "results" in answer:
        return {("score", result["index"]): result["score"] for result in answer["results"]}
    array = import_module("retrieval_harness").decoded(answer["embeddings"])
    return {place: float(number) for place, number in np.ndenumerate(array)}


def _entity_scores(answer: Entities) -> Scores:
    return {(each["start"], each["end"], each["label"], each["text"]): each["score"] for each in answer}


def _leaf_scores(answer: Any, path: tuple[Any, ...] = ()) -> Scores:
    """Every number of an answer by its path, and every other value as part of one. Order is part of a path."""
    if isinstance(answer, dict):
        steps = [((place, key), each) for place, (key, each) in enumerate(answer.items())]
    elif isinstance(answer, list | tuple):
        steps = [((place, None), each) for place, each in enumerate(answer)]
    else:
        return {path: answer} if isinstance(answer, float) else {(*path, answer): 0.0}
    found: Scores = {}
    for step, each in steps:
        found |= _leaf_scores(each, (*path, step))
    return found


#: Cases by plugin. A plugin of the registry without any is an error: nothing goes untested in silence.
CASES: dict[str, Callable[[Path], Iterator[Case]]] = {
    "deberta_gliner": deberta_gliner,
    "mmbert_gliner": mmbert_gliner,
    "mt5_gliner": mt5_gliner,
    "modernbert_gliner_rerank": modernbert_gliner_rerank,
    "deberta_gliner_linker": deberta_gliner_linker,
    "deberta_gliner2": deberta_gliner2,
    "embeddinggemma": golden("embeddinggemma", "mean", "joined", "no-prompt"),
    "moderncolbert": golden("moderncolbert", "hidden", "attended", "unexpanded"),
    "colqwen3": golden("colqwen3", "narrow", "default"),
    "nemotron_colembed": golden("nemotron_colembed", "published", "short"),
    "collfm2": golden("collfm2", "tiles", "wide", "whole"),
    "lfm2_colbert": golden("lfm2_colbert", "hidden", "attended", "ended", "unexpanded"),
}


def ask(server: Server, data: Data) -> Any:
    """The answer to one request."""
    request = urllib.request.Request(
        f"{server.url}/pooling",
        json.dumps({"model": server.model, "data": data}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["data"]


def compare(case: Case, answers: Sequence[Any]) -> Outcome:
    """The server's answers against the library's."""
    found, difference, problems = 0, 0.0, []
    for data, answer in zip(case.requests, answers, strict=True):
        wanted = case.reference(data)
        expected, got = case.scores(wanted), case.scores(answer)
        found += len(expected)
        differences = [abs(got[key] - expected[key]) for key in expected.keys() & got.keys()]
        difference = max([difference, *differences])
        same = expected.keys() == got.keys() and len(wanted) == len(answer)
        if not same or not all(each <= TOLERANCE for each in differences):
            problems.append(f"{data}: server {got}, library {expected}")
    if not found:
        problems.append("the library found nothing at all, so nothing was compared")
    return Outcome(found, difference, problems)


def run(case: Case, scratch: Path, console: Console) -> Outcome:
    """Serve one case and compare."""
    with (
        console.status(f"{case.name}: starting a server") as status,
        running_server(case.checkpoint, "--cache-dir", str(scratch / "cache")) as server,
    ):
        status.update(f"{case.name}: {len(case.requests)} requests, {CONCURRENCY} at once")
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            answers = list(pool.map(lambda data: ask(server, data), case.requests))
        return compare(case, answers)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    result.add_argument("--plugin", metavar="P", help="only this plugin; all of them when absent")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when an answer differs or a server fails, 2 for a plugin that there is not."""
    arguments = parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        names = [plugin(arguments.plugin).name] if arguments.plugin else [spec.name for spec in PLUGINS]
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    table = Table("plugin", "checkpoint", "requests", "found", "largest difference", "")
    problems = [f"{name}: no case in {Path(__file__).name}" for name in names if name not in CASES]
    with tempfile.TemporaryDirectory(prefix="vllm-factory-") as directory:
        scratch = Path(directory)
        try:
            for name in [name for name in names if name in CASES]:
                for case in CASES[name](scratch):
                    outcome = run(case, scratch, console)
                    problems += outcome.problems
                    verdict = "[red]differs[/]" if outcome.problems else "[green]equal[/]"
                    counts = (str(len(case.requests)), str(outcome.found), f"{outcome.difference:.1e}")
                    table.add_row(name, case.name, *counts, verdict)
        except (FactoryError, OSError) as error:
            problems.append(str(error))
    console.print(table)
    for problem in problems:
        console.print(problem, markup=False, style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
