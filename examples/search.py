"""Index a few texts in memory and search them by MaxSim: ``python examples/search.py "who runs Apple?"``.

Starts ``vllm-factory-serve MODEL``, asks it once for the vectors of all texts, and from then on searches with
numpy: only the query goes to the server. The best hits are ranked a second time on the server, which also says
which words matched. Without ``--model`` it serves a tiny checkpoint of the tests whose weights are random: that
shows the way, not what a trained model finds.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_factory.errors import FactoryError
from vllm_factory.serving.testing import running_server

ROOT = Path(__file__).parents[1]
RANDOM_MODEL = ROOT / "tests" / "golden" / "moderncolbert" / "hidden" / "checkpoint"
TEXTS = (
    "Tim Cook has been the chief executive of Apple since 2011.",
    "Apple's headquarters are in Cupertino, California.",
    "The apple is a fruit of the rose family.",
    "Angela Merkel was chancellor of Germany for sixteen years.",
    "Tokyo Tower stands in Minato and is 333 metres high.",
    "A retrieval model gives every word of a text its own vector.",
)

console = Console(highlight=False)


@dataclass
class Client:
    """Asks one server.

    Attributes:
        url: Its address.
        model: The name it serves the model under.
    """

    url: str
    model: str

    def ask(self, data: dict[str, Any]) -> dict[str, Any]:
        """The response's ``data``."""
        request = urllib.request.Request(
            f"{self.url}/pooling",
            json.dumps({"model": self.model, "data": data}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)["data"]
        return answer

    def vectors(self, texts: list[str], *, is_query: bool) -> list[np.ndarray]:
        """``[n, d]`` float32 of each text."""
        data = {"text": texts, "is_query": is_query, "output": "base64", "dtype": "float16"}
        return [decoded(item) for item in self.ask(data)["embeddings"]]


def decoded(item: dict[str, Any]) -> np.ndarray:
    """An item of float16 rows; see ``docs/retrieval.md``."""
    array = np.frombuffer(base64.b64decode(item["data"]), "<f2").reshape(item["shape"])
    return array.astype(np.float32)


@dataclass
class Index:
    """Texts and their vectors, in memory."""

    texts: list[str] = field(default_factory=list)
    vectors: list[np.ndarray] = field(default_factory=list)

    def add(self, client: Client, texts: Sequence[str]) -> None:
        """Put texts in; one request for all of them."""
        self.texts += texts
        self.vectors += client.vectors(list(texts), is_query=False)

    def search(self, query: np.ndarray, most: int) -> list[tuple[float, str]]:
        """The best texts for a query's ``[M, d]``, with their scores."""
        scores = [float((query @ document.T).max(axis=1).sum()) for document in self.vectors]
        order = np.argsort(scores)[::-1][:most]
        return [(scores[place], self.texts[place]) for place in order]


def show(client: Client, index: Index, query: str, most: int) -> None:
    """Search, rank the hits once more on the server, and print both."""
    hits = index.search(client.vectors([query], is_query=True)[0], most)
    ranked = client.ask(
        {"query": query, "documents": [text for _, text in hits], "similarity": True, "output": "base64"}
    )
    table = Table("here", "on the server", "text", "closest to", title=query)
    for result in ranked["results"]:
        score, text = hits[result["index"]]
        table.add_row(f"{score:.3f}", f"{result['score']:.3f}", text, strongest(ranked["query"], result))
    console.print(table)


def strongest(query: dict[str, Any], result: dict[str, Any]) -> str:
    """The pair of a query's word and a text's word that are most alike."""
    item = result["similarity"]
    matrix = np.frombuffer(base64.b64decode(item["data"]), "<f4").reshape(item["shape"]).copy()
    for axis, tokens in enumerate((query["tokens"], result["tokens"])):
        special = [place for place, token in enumerate(tokens) if token["start"] is None]
        matrix[(slice(None), special) if axis else special] = -np.inf
    if not np.isfinite(matrix).any():
        return ""
    row, column = np.unravel_index(matrix.argmax(), matrix.shape)
    return f"{query['tokens'][row]['text'].strip()} ~ {result['tokens'][column]['text'].strip()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when the server cannot be started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query", nargs="*", default=["Who runs Apple?", "Where is the tower?"])
    parser.add_argument("--model", default=str(RANDOM_MODEL), help="directory or hub id of a multi-vector model")
    parser.add_argument("--most", type=int, default=3, help="hits to show")
    arguments = parser.parse_args(argv)
    if arguments.model == str(RANDOM_MODEL):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        console.print(
            "a tiny checkpoint with random weights is served; --model takes a trained one", style="yellow"
        )
    try:
        with running_server(arguments.model) as server:
            client, index = Client(server.url, server.model), Index()
            index.add(client, TEXTS)
            for query in arguments.query:
                show(client, index, query, arguments.most)
    except FactoryError as error:
        console.print(f"search: {error}", style="red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
