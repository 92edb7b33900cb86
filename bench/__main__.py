"""GLiNER served by vLLM Factory beside the reference library, on the same machine in the same run.

    python -m bench --size tiny                      # the CPU, a minute or two
    python -m bench --size large --dtype bfloat16    # a GPU

First parity: entities and scores against the library, alone and concurrently. Then requests a second over
HTTP, and of the library at batch 1 and 32. With ``--profile``, where the API process and the engine process
spend their time. Numbers are printed only if parity holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench import profiling
from bench.accuracy import score_accuracy
from bench.checkpoint import LABELS, SIZES, build, load_reference, texts
from bench.environment import environment
from bench.load import answers, measure
from vllm_factory.serving.testing import Server, running_server

console = Console(soft_wrap=True)
#: Largest difference of a score from the library's on the same device.
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
#: Words of the benchmark's texts: with the labels they make prompts of 512 to 768 tokens.
WORDS = (350, 480)
#: Spans of a text above the threshold: when answers are compared, and when speed is measured.
COMPARED, FOUND = 400, 20


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    result.add_argument("--size", choices=SIZES, default="tiny", help="encoder size (default: %(default)s)")
    result.add_argument(
        "--dtype", choices=TOLERANCE, default="float32", help="of both sides (default: %(default)s)"
    )
    result.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="keep the checkpoint in DIR, or take the one there"
    )
    result.add_argument("--requests", type=int, default=64, help="requests a measurement (default: %(default)s)")
    result.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128], help="(default: %(default)s)")
    result.add_argument("--library-batch", type=int, nargs="+", default=[1, 32], help="(default: %(default)s)")
    result.add_argument("--profile", type=int, metavar="SECONDS", help="sample both processes this long")
    result.add_argument("--output", type=Path, help="file for the results (JSON)")
    result.add_argument(
        "--flag", action="append", default=[], help="one more flag for the server, e.g. --flag=--foo"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 1 when parity fails."""
    arguments = parser().parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="vllm-factory-bench-") as scratch:
        checkpoint = arguments.checkpoint or Path(scratch) / "checkpoint"
        if not checkpoint.exists():
            build(SIZES[arguments.size], checkpoint, device)
        results = run(arguments, checkpoint, device, Path(scratch))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    report(results)
    return 0 if results["parity"]["holds"] else 1


def run(arguments: argparse.Namespace, checkpoint: Path, device: str, scratch: Path) -> dict[str, Any]:
    """Everything that is measured, as one dictionary."""
    dtype = getattr(torch, arguments.dtype)
    # By default the library's LSTM would run in TF32: equal scores are asked for in float32.
    torch.backends.cudnn.allow_tf32 = False
    sample = texts(arguments.requests, WORDS)
    reference = load_reference(checkpoint, device, dtype)
    many, few = (threshold_for(reference, sample[:4], count) for count in (COMPARED, FOUND))
    requests = [{"text": text, "labels": LABELS, "threshold": few} for text in sample]
    results: dict[str, Any] = {
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "environment": environment(),
        "size": arguments.size,
        "dtype": arguments.dtype,
        "labels": len(LABELS),
    }
    options = {"threshold": many, "flat_ner": False, "multi_label": True}
    wanted = [reference.inference([text], LABELS, **options)[0] for text in sample[:24]]
    results["library"] = [library_load(reference, sample, batch, few, device) for batch in arguments.library_batch]
    del reference
    results["scores"] = score_accuracy(checkpoint, scratch, sample[:8], device, dtype)
    torch.cuda.empty_cache()
    flags = ["--dtype", arguments.dtype, "--cache-dir", str(scratch / "cache"), *arguments.flag]
    with running_server(checkpoint, *flags, log=scratch / "server.log", waiting=_waiting) as server:
        results["server_started_in_s"] = round(server.started_in, 1)
        results["command_of_server"] = list(server.plan.command)
        results["parity"] = parity(server, sample[:24], options, wanted)
        worst, tolerance = results["scores"]["ours_to_library"]["largest"], TOLERANCE[arguments.dtype]
        results["parity"] |= {"tolerance": tolerance, "holds": worst <= tolerance}
        results["tokens"] = token_counts(server, requests[:16])
        results["http"] = [server_load(server, requests, c) for c in arguments.concurrency]
        if arguments.profile:
            results["profile"] = profile(server, requests, max(arguments.concurrency), arguments.profile)
    return results


def _waiting(seconds: float) -> None:
    if int(seconds * 4) % 40 == 0:
        print(f"waiting for the server: {seconds:.0f} s", flush=True)


def threshold_for(reference: Any, sample: list[str], count: int) -> float:
    """A threshold that about ``count`` spans of a text pass: random weights have no natural one."""
    prepared = reference.prepare_batch(sample, LABELS)
    batch = reference.collate_batch(prepared["input_x"], prepared["entity_types"], reference.create_collator())
    logits = reference.run_batch(batch, move_to_device=True).logits.float().flatten()
    return round(float(torch.sigmoid(logits.topk(count * len(sample)).values[-1])), 6)


def library_load(reference: Any, sample: list[str], batch: int, threshold: float, device: str) -> dict[str, Any]:
    """Requests a second of the library's own ``inference``."""
    few = sample if batch > 1 else sample[: max(8, len(sample) // 4)]
    reference.inference(few[: 2 * batch], LABELS, batch_size=batch, threshold=threshold)
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    reference.inference(few, LABELS, batch_size=batch, threshold=threshold)
    wall = time.perf_counter() - start
    return {"batch": batch, "requests": len(few), "per_second": round(len(few) / wall, 2)}


def parity(
    server: Server,
    sample: list[str],
    options: dict[str, Any],
    wanted: list[list[dict[str, Any]]],
) -> dict[str, Any]:
    """Entities and scores against the library, and each request's answer alone against its answer in a crowd.

    Spans may nest and have several labels, so that many scores of every request are compared. A span close to
    the threshold, or to one it overlaps with, may be on one side only; those are counted.
    """
    requests = [{"text": text, "labels": LABELS, **options} for text in sample]
    alone, _ = asyncio.run(answers(server.url, requests, 1))
    crowd, _ = asyncio.run(answers(server.url, requests, len(requests)))
    to_library = [difference(a, w) for a, w in zip(alone, wanted, strict=True)]
    to_crowd = [difference(a, c) for a, c in zip(alone, crowd, strict=True)]
    return {
        "requests": len(sample),
        "threshold": options["threshold"],
        "entities_compared": sum(d["common"] for d in to_library),
        "largest_score_difference": max(d["score"] for d in to_library),
        "entities_on_one_side": sum(d["one_sided"] for d in to_library),
        "batch_invariance": {
            "largest_score_difference": max(d["score"] for d in to_crowd),
            "entities_on_one_side": sum(d["one_sided"] for d in to_crowd),
        },
    }


def difference(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> dict[str, Any]:
    """How two answers to one request differ."""
    sides = [{(e["start"], e["end"], e["label"]): e["score"] for e in side} for side in (got, want)]
    common = sides[0].keys() & sides[1].keys()
    scores = [abs(sides[0][key] - sides[1][key]) for key in common]
    return {
        "common": len(common),
        "score": float(max(scores, default=0.0)),
        "one_sided": len(sides[0].keys() ^ sides[1].keys()),
    }


def token_counts(server: Server, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompt tokens of the benchmark's requests."""
    data, _ = asyncio.run(answers(server.url, [{**r, "include_usage": True} for r in requests], 8))
    counts = [item["usage"]["prompt_tokens"] for item in data]
    return {"min": min(counts), "mean": round(float(np.mean(counts)), 1), "max": max(counts)}


def server_load(server: Server, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Requests a second over HTTP."""
    measure(server.url, requests[: max(8, concurrency)], concurrency)
    many = requests if concurrency > 1 else requests[: max(16, len(requests) // 4)]
    return measure(server.url, many * (4 if concurrency > 32 else 1), concurrency).as_dict()


def profile(server: Server, requests: list[dict[str, Any]], concurrency: int, seconds: int) -> dict[str, Any]:
    """Samples of both processes under load."""
    found = profiling.processes(server.pid)
    # The API process waits in many threads; only the one that holds the interpreter works.
    options = {"api": ("--gil",), "engine": ()}
    started = {name: profiling.start(pid, seconds, *options[name]) for name, pid in found.items()}
    end = time.monotonic() + seconds + 2
    while time.monotonic() < end:
        measure(server.url, requests, concurrency)
    for process, _ in started.values():
        process.wait(60)
    return {name: profiling.summary(stacks) for name, (_, stacks) in started.items() if stacks.exists()}


def report(results: dict[str, Any]) -> None:
    """The results as a table: ratios, since machines differ."""
    found = results["parity"]
    console.print(
        f"{results['environment']['device']}, {results['size']}, {results['dtype']}, tokens {results['tokens']}; "
        f"{found['entities_compared']} entities compared, largest score difference "
        f"{found['largest_score_difference']:.2e}, one-sided {found['entities_on_one_side']}, "
        f"batch invariance {found['batch_invariance']}; scores of all spans {results['scores']}"
    )
    if not found["holds"]:
        console.print(f"parity does not hold (tolerance {found['tolerance']}): no numbers")
        return
    baseline = {row["batch"]: row["per_second"] for row in results["library"]}
    table = Table("what", "requests/s", "p50 ms", "p95 ms", *(f"x library, batch {b}" for b in baseline))
    for batch, rate in baseline.items():
        table.add_row(f"gliner, batch {batch}", f"{rate}", "", "", *(f"{rate / b:.2f}" for b in baseline.values()))
    for row in results["http"]:
        ratios = [f"{row['per_second'] / b:.2f}" for b in baseline.values()]
        table.add_row(
            f"HTTP, {row['concurrency']} clients",
            f"{row['per_second']}",
            f"{row['p50_ms']}",
            f"{row['p95_ms']}",
            *ratios,
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
