"""``make demo``: serve a small entity recognition model on this machine, ask it, and show the answers.

Does what a user of the package does: ``vllm-factory-serve MODEL`` for the server, one POST a text for the
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from vllm_factory.errors import FactoryError
from vllm_factory.serving.testing import Server, log_tail, running_server

HERE = Path(__file__).parent
#: Backgrounds of entities, by the order in which labels appear.
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
#: What somebody with the network and a GPU would serve.
PUBLISHED_MODEL = "urchade/gliner_small-v2.1"

console = Console(highlight=False)

Entity = dict[str, Any]


def ask(server: Server, data: dict[str, Any]) -> tuple[list[Entity], float]:
    """The entities of one text, and how many milliseconds the answer took."""
    request = urllib.request.Request(
        f"{server.url}/pooling",
        json.dumps({"model": server.model, "data": data}).encode(),
        {"Content-Type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        entities: list[Entity] = json.load(response)["data"]
    return entities, 1000 * (time.perf_counter() - start)


def curl(server: Server, data: dict[str, Any]) -> str:
    """The same request for a shell."""
    body = json.dumps({"model": server.model, "data": data}, ensure_ascii=False)
    # JSON's own escape: a quote would end the shell's string.
    body = body.replace("'", r"\u0027")
    return f"curl {server.url}/pooling -H 'Content-Type: application/json' \\\n  -d '{body}'"


def show(data: dict[str, Any], entities: list[Entity], milliseconds: float) -> Group:
    """One text with its entities marked, and a table of them."""
    colours = {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(data["labels"])}
    text = Text(data["text"])
    for entity in entities:
        text.stylize(f"bold black on {colours[entity['label']]}", entity["start"], entity["end"])
    asked = Text("labels: ", style="dim")
    for label, colour in colours.items():
        asked.append(f"{label} ", style=colour)
    asked.append(f"  ({milliseconds:.0f} ms)", style="dim")
    if not entities:
        return Group(Rule(style="dim"), text, asked, Text("no entities", style="dim"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, justify in (("entity", "left"), ("label", "left"), ("score", "right"), ("offsets", "right")):
        table.add_column(column, justify="right" if justify == "right" else "left")
    for entity in entities:
        label = Text(entity["label"], style=colours[entity["label"]])
        offsets = f"{entity['start']}-{entity['end']}"
        table.add_row(Text(entity["text"]), label, f"{entity['score']:.3f}", offsets)
    return Group(Rule(style="dim"), text, asked, table)


def start_and_ask(model: Path, sentences: list[dict[str, Any]], log: Path | None, keep: bool) -> None:
    """The demonstration.

    Raises:
        FactoryError: The server did not start, or a request failed; the message has the end of its log.
    """
    with console.status("") as status:

        def waiting(seconds: float) -> None:
            status.update(f"starting the server, mostly imports: {seconds:.0f} s so far (often 30-60)")

        waiting(0)
        with running_server(model, "--served-model-name", "demo", log=log, waiting=waiting) as server:
            status.stop()
            console.print(f"[green]ready[/] after {server.started_in:.0f} s at {server.url}")
            try:
                for data in sentences:
                    console.print(show(data, *ask(server, data)))
            except (urllib.error.URLError, OSError) as error:
                body = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                raise FactoryError(f"a request failed: {error} {body}\n{log_tail(server.log)}") from error
            explain(server, sentences[0], model)
            if keep:
                wait_for_interrupt(server)


def explain(server: Server, data: dict[str, Any], model: Path) -> None:
    """How to do the same without this script, and what this model is not."""
    console.print(Rule(style="dim"))
    console.print("[bold]The first of these requests for a shell[/] (the server must run: make demo ARGS=--keep)")
    console.print(curl(server, data), markup=False, soft_wrap=True)
    console.print("[bold]The server alone[/]")
    console.print(f"vllm-factory-serve {model} --port 8000", markup=False, soft_wrap=True)
    console.print(
        "\n[bold]This is a small demonstration model[/], trained in minutes on generated sentences so that "
        "it can be shipped here: it shows how serving works, not how well GLiNER does. With the hub within "
        "reach, and better with a GPU:"
    )
    console.print(f"vllm-factory-serve {PUBLISHED_MODEL}", markup=False, soft_wrap=True)


def wait_for_interrupt(server: Server) -> None:
    """Keep serving until Ctrl-C.

    Raises:
        FactoryError: The server ended by itself.
    """
    console.print("\nserving; Ctrl-C ends it")
    try:
        while server.healthy():
            time.sleep(1)
    except KeyboardInterrupt:
        return
    raise FactoryError(f"the server does not answer any more\n{log_tail(server.log)}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="make demo", description="Serve the demonstration model and ask it.")
    result.add_argument("--model", type=Path, default=HERE / "demo_gliner", help="directory of the checkpoint")
    result.add_argument(
        "--sentences", type=Path, default=HERE / "sentences.json", help="a JSON list of {text, labels}"
    )
    result.add_argument("--log", type=Path, help="keep the server's log in this file")
    result.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 when something failed."""
    arguments = parser().parse_args(argv)
    model = Path(os.path.relpath(arguments.model))
    try:
        sentences = json.loads(arguments.sentences.read_text(encoding="utf-8"))
        start_and_ask(model, sentences, arguments.log, arguments.keep)
    except (FactoryError, OSError, json.JSONDecodeError) as error:
        console.print(f"make demo: {error}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
