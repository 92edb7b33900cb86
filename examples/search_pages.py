"""Search texts and page images, and show what matched: ``python examples/search_pages.py "who runs Apple?"``.

Makes a small folder of texts and page images (rendered with Pillow), or takes yours (``--folder``: ``.txt``,
``.png``, ``.jpg``). Starts ``vllm-factory-serve MODEL``, keeps the vectors of all files in memory and searches them
with numpy. The best hits are ranked a second time on the server, which also says how alike each word of the query
and each patch of a page are; that becomes a picture of the best page, in which the patches that matched best are
marked. Without ``--model`` it serves a tiny checkpoint of the tests whose weights are random: that shows the way,
not what a trained model finds.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps
from rich.console import Console
from rich.progress import track
from rich.table import Table

from search import TEXTS, Client, decoded
from vllm_factory.errors import FactoryError
from vllm_factory.serving.testing import running_server

ROOT = Path(__file__).parents[1]
RANDOM_MODEL = ROOT / "tests" / "golden" / "colqwen3" / "narrow" / "checkpoint"
PAGES = {
    "apple": "Apple Inc.\n\nChief executive\nTim Cook, since 2011\n\nHeadquarters\nCupertino, California",
    "tower": "Tokyo Tower\n\nHeight: 333 m\nOpened: 1958\nShiba Park, Minato\n\nNearest station\nAkabanebashi",
    "menu": "Lunch\n\nTomato soup    4.50\nApple cake     3.80\nTea            2.20",
}
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
TOGETHER = 16

console = Console(highlight=False)


def make_folder(folder: Path) -> None:
    """Write the texts, and draw the pages."""
    for index, text in enumerate(TEXTS):
        (folder / f"text{index}.txt").write_text(text, encoding="utf-8")
    for name, text in PAGES.items():
        page = Image.new("RGB", (420, 594), "white")
        draw = ImageDraw.Draw(page)
        draw.rectangle((0, 0, 420, 12), fill="steelblue")
        draw.multiline_text((36, 48), text, fill="black", font_size=24, spacing=12)
        page.save(folder / f"{name}.png")


def kind_of(file: Path) -> str:
    """``"image"`` or ``"text"``, which is also the field of a request that takes it."""
    return "image" if file.suffix.lower() in MEDIA_TYPES else "text"


def document(file: Path) -> dict[str, str]:
    """A file as a document of a request."""
    if kind_of(file) == "text":
        return {"text": file.read_text(encoding="utf-8")}
    media_type = MEDIA_TYPES[file.suffix.lower()]
    return {"image": f"data:{media_type};base64,{base64.b64encode(file.read_bytes()).decode()}"}


@dataclass
class Index:
    """Files and their vectors, in memory."""

    files: list[Path] = field(default_factory=list)
    vectors: list[np.ndarray] = field(default_factory=list)

    def add(self, client: Client, files: Sequence[Path]) -> None:
        """Put files in, ``TOGETHER`` texts or images a request."""
        for kind in ("text", "image"):
            of_kind = [file for file in files if kind_of(file) == kind]
            for start in track(range(0, len(of_kind), TOGETHER), f"vectors of {kind}s", console=console):
                some = of_kind[start : start + TOGETHER]
                data = {kind: [document(file)[kind] for file in some], "output": "base64", "dtype": "float16"}
                self.vectors += [decoded(item) for item in client.ask(data)["embeddings"]]
                self.files += some

    def search(self, query: np.ndarray, most: int) -> list[tuple[float, Path]]:
        """The best files for a query's ``[M, d]``, with their scores."""
        scores = [float((query @ vectors.T).max(axis=1).sum()) for vectors in self.vectors]
        order = np.argsort(scores)[::-1][:most]
        return [(scores[place], self.files[place]) for place in order]


def search(client: Client, index: Index, query: str, most: int, picture: Path) -> None:
    """Search, rank the hits once more on the server, print both, and draw on the best page."""
    hits = index.search(client.vectors([query], is_query=True)[0], most)
    documents = [document(file) for _, file in hits]
    ranked = client.ask({"query": query, "documents": documents, "similarity": True, "output": "base64"})
    table = Table("here", "on the server", "file", title=query)
    for result in ranked["results"]:
        score, file = hits[result["index"]]
        table.add_row(f"{score:.3f}", f"{result['score']:.3f}", file.name)
    console.print(table)
    page = next((each for each in ranked["results"] if "image" in documents[each["index"]]), None)
    if page is None:
        console.print("no page among the hits; --most shows more")
        return
    mark(hits[page["index"]][1], ranked["query"], page).save(picture)
    console.print(f"the patches of {hits[page['index']][1].name} that matched best: {picture}")


def mark(file: Path, query: dict[str, Any], result: dict[str, Any]) -> Image.Image:
    """The page; the better a patch matches a word of the query, the deeper its colour. The best are framed."""
    item = result["similarity"]
    matrix = np.frombuffer(base64.b64decode(item["data"]), "<f4").reshape(item["shape"])
    words = [place for place, token in enumerate(query["tokens"]) if token["start"] is not None]
    patches = [place for place, token in enumerate(result["tokens"]) if token.get("box")]
    alike = matrix[np.ix_(words, patches)]
    best = alike.max(axis=0)
    strength = (best - best.min()) / max(float(np.ptp(best)), 1e-9)
    # Boxes are of the upright image.
    page = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")
    layer = Image.new("RGBA", page.size)
    draw = ImageDraw.Draw(layer)
    for place, value in zip(patches, strength, strict=True):
        draw.rectangle(result["tokens"][place]["box"], fill=(220, 60, 20, int(150 * value**2)))
    for place in set(alike.argmax(axis=1).tolist()):
        draw.rectangle(result["tokens"][patches[place]]["box"], outline=(160, 0, 0, 255), width=3)
    return Image.alpha_composite(page, layer).convert("RGB")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when the server cannot be started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query", nargs="*", default=["Who runs Apple?", "Where is the tower?"])
    parser.add_argument("--model", default=str(RANDOM_MODEL), help="directory or hub id of a model for pages")
    parser.add_argument("--folder", type=Path, help="of texts and images; a small one is made when absent")
    parser.add_argument("--most", type=int, default=5, help="hits to show")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the pictures")
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.model == str(RANDOM_MODEL):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        console.print(
            "a tiny checkpoint with random weights is served; --model takes a trained one", style="yellow"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        if arguments.folder is None:
            make_folder(folder)
        files = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in (".txt", *MEDIA_TYPES)]
        try:
            with running_server(arguments.model) as server:
                client, index = Client(server.url, server.model), Index()
                index.add(client, files)
                for number, query in enumerate(arguments.query):
                    search(client, index, query, arguments.most, arguments.output / f"matched{number}.png")
        except FactoryError as error:
            console.print(f"search_pages: {error}", style="red", markup=False)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
