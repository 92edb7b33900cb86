"""Closed-loop load: a fixed number of clients, each sending its next request when it has its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One measurement.

    Attributes:
        concurrency: Clients.
        requests: Answered requests.
        per_second: Requests a second.
        p50_ms, p95_ms: Latency percentiles.
    """

    concurrency: int
    requests: int
    per_second: float
    p50_ms: float
    p95_ms: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def answers(url: str, requests: Sequence[dict[str, Any]], concurrency: int) -> tuple[list[Any], list[float]]:
    """Responses' ``data`` in order, and the seconds that each took.

    Raises:
        RuntimeError: A response was not 200.
    """
    results: list[Any] = [None] * len(requests)
    seconds = [0.0] * len(requests)
    queue = iter(enumerate(requests))
    connector = aiohttp.TCPConnector(limit=concurrency)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            for index, data in queue:
                start = time.perf_counter()
                async with session.post(f"{url}/pooling", json={"data": data}) as response:
                    body = await response.json()
                seconds[index] = time.perf_counter() - start
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {body}")
                results[index] = body["data"]

        await asyncio.gather(*(client() for _ in range(concurrency)))
    return results, seconds


def measure(url: str, requests: Sequence[dict[str, Any]], concurrency: int) -> Load:
    """Send all ``requests`` and time them."""
    start = time.perf_counter()
    _, seconds = asyncio.run(answers(url, requests, concurrency))
    wall = time.perf_counter() - start
    p50, p95 = np.percentile(seconds, [50, 95]) * 1000
    return Load(
        concurrency=concurrency,
        requests=len(requests),
        per_second=round(len(requests) / wall, 2),
        p50_ms=round(float(p50), 2),
        p95_ms=round(float(p95), 2),
    )
