"""Span representations: from word vectors to one vector for every start and width.

All layers share one signature: words ``[B, W, D]`` (zeros behind each text's last word) and the number of
words ``[B]``, to ``[B, W, K, D]`` where entry ``(s, k)`` is the span of words ``s .. s + k``. Entries of spans
that end behind the text hold anything; the caller masks them. Parameter names and formulas are those of
gliner 0.2.29, ``modeling/span_rep.py``, for one text at a time: what lies behind a text's last word counts as
zero there, whatever the batch.

Shape legend: B texts, W longest text in words, K largest width, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def projection(in_size: int, out_size: int) -> nn.Sequential:
    """Two layers with ReLU between, four times ``out_size`` wide inside (dropout keeps its index)."""
    return nn.Sequential(
        nn.Linear(in_size, 4 * out_size), nn.ReLU(), nn.Identity(), nn.Linear(4 * out_size, out_size)
    )


def _narrow_projection(size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Identity(), nn.Linear(2 * size, size))


def _ends(num_words: int, max_width: int, device: torch.device) -> torch.Tensor:
    """``[W, K]`` index of each span's last word, clamped to the padded text."""
    start = torch.arange(num_words, device=device)
    return (start[:, None] + torch.arange(max_width, device=device)).clamp(max=num_words - 1)


def _start_and_end(start: torch.Tensor, end: torch.Tensor, max_width: int) -> list[torch.Tensor]:
    """``[B, W, D]`` each, to two ``[B, W, K, D]``: the vector of each span's first and last word."""
    ends = _ends(start.shape[1], max_width, start.device)
    return [start.unsqueeze(2).expand(-1, -1, max_width, -1), end[:, ends]]


class SpanMarker(nn.Module):
    """``marker``: projections of the first and the last word."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__()
        self.max_width = max_width
        self.project_start = _narrow_projection(hidden_size)
        self.project_end = _narrow_projection(hidden_size)
        self.out_project: nn.Module = nn.Linear(2 * hidden_size, hidden_size)

    def context(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor | None:
        """``[B, D]`` that every span of a text sees besides its ends, or ``None``."""
        return None

    def forward(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        parts = _start_and_end(self.project_start(words), self.project_end(words), self.max_width)
        context = self.context(words, num_words)
        if context is not None:
            parts.append(context[:, None, None, :].expand_as(parts[0]))
        return self.out_project(torch.cat(parts, dim=-1).relu())


class SpanMarkerV0(SpanMarker):
    """``markerV0``: wider projections than ``marker``."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__(hidden_size, max_width)
        self.project_start = projection(hidden_size, hidden_size)
        self.project_end = projection(hidden_size, hidden_size)
        self.out_project = projection(2 * hidden_size, hidden_size)


class SpanMarkerV1(SpanMarkerV0):
    """``markerV1``: with the mean of the text's words (unprojected: ``project_first`` is saved, not used)."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__(hidden_size, max_width)
        self.project_first = projection(hidden_size, hidden_size)
        self.out_project = projection(3 * hidden_size, hidden_size)

    def context(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        return words.sum(dim=1) / num_words[:, None].to(words.dtype)


class SpanMarkerV2(SpanMarkerV0):
    """``markerV2``: with a projection of the text's last word."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__(hidden_size, max_width)
        self.project_context = projection(hidden_size, hidden_size)
        self.out_project = projection(3 * hidden_size, hidden_size)

    def context(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(words.shape[0], device=words.device)
        return self.project_context(words[rows, num_words - 1])


class SpanQuery(nn.Module):
    """``query``: the first word scaled by a learned vector for each width."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__()
        self.query_seg = nn.Parameter(torch.empty(hidden_size, max_width))
        self.project = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU())

    def forward(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        return self.project(words.unsqueeze(2) * self.query_seg.T)


class SpanMLP(nn.Module):
    """``mlp``: all widths from the first word by one layer."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__()
        self.max_width = max_width
        self.mlp = nn.Linear(hidden_size, hidden_size * max_width)

    def forward(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        return self.mlp(words).unflatten(-1, (self.max_width, words.shape[-1])).relu()


class SpanCAT(nn.Module):
    """``cat``: the first word beside a learned vector of 128 values for each width."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__()
        self.query_seg = nn.Parameter(torch.empty(128, max_width))
        self.project = nn.Sequential(nn.Linear(hidden_size + 128, hidden_size), nn.ReLU())

    def forward(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        # The library lays the [128, K] parameter out as [K, 128] by reshaping it, not by transposing.
        width = self.query_seg.reshape(-1, 128)
        batch, length, _ = words.shape
        words = words.unsqueeze(2).expand(-1, -1, width.shape[0], -1)
        return self.project(torch.cat([words, width.expand(batch, length, -1, -1)], dim=-1))


class SpanConvBlock(nn.Module):
    """A convolution or pooling over windows of ``kernel_size`` words, starting at each word."""

    def __init__(self, hidden_size: int, kernel_size: int, mode: str) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.mode = mode
        if mode == "conv_conv":
            self.conv = nn.Conv1d(hidden_size, hidden_size, kernel_size)

    def forward(self, channels: torch.Tensor) -> torch.Tensor:
        """``[B, D, W]`` to ``[B, D, W]``."""
        padded = F.pad(channels, (0, self.kernel_size - 1))
        if self.mode == "conv_conv":
            return self.conv(padded)
        if self.mode == "conv_max":
            return F.max_pool1d(padded, self.kernel_size, stride=1)
        mean = F.avg_pool1d(padded, self.kernel_size, stride=1)
        return mean * self.kernel_size if self.mode == "conv_sum" else mean


class SpanConv(nn.Module):
    """``conv_conv``, ``conv_max``, ``conv_mean``, ``conv_sum``: one window size for each width."""

    def __init__(self, hidden_size: int, max_width: int, mode: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SpanConvBlock(hidden_size, k, mode) for k in range(2, max_width + 1))
        self.project = nn.Sequential(nn.ReLU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        channels = words.transpose(1, 2)
        widths = [words, *(conv(channels).transpose(1, 2) for conv in self.convs)]
        return self.project(torch.stack(widths, dim=2))


class ConvShare(nn.Module):
    """``conv_share``: one convolution whose first k taps serve width k."""

    def __init__(self, hidden_size: int, max_width: int) -> None:
        super().__init__()
        self.max_width = max_width
        # Spelled as in the library: it is the name in the checkpoint.
        self.conv_weigth = nn.Parameter(torch.empty(hidden_size, hidden_size, max_width))
        self.project = nn.Sequential(nn.ReLU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, words: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        channels = words.transpose(1, 2)
        widths = [
            F.conv1d(F.pad(channels, (0, width)), self.conv_weigth[:, :, : width + 1]).transpose(1, 2)
            for width in range(self.max_width)
        ]
        return self.project(torch.stack(widths, dim=2))


class TokenMarker(nn.Module):
    """``token_level`` with ``represent_spans``: vectors of chosen spans only."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.project_start = projection(hidden_size, hidden_size)
        self.project_end = projection(hidden_size, hidden_size)
        self.out_project = projection(2 * hidden_size, hidden_size)

    def forward(
        self, words: torch.Tensor, text: torch.Tensor, start: torch.Tensor, end: torch.Tensor
    ) -> torch.Tensor:
        """``[B, W, D]`` words and three ``[N]`` indices, to ``[N, D]``."""
        ends = [self.project_start(words)[text, start], self.project_end(words)[text, end]]
        return self.out_project(torch.cat(ends, dim=-1).relu())


_MARKERS: dict[str, type[SpanMarker]] = {
    "marker": SpanMarker,
    "markerV0": SpanMarkerV0,
    "markerV1": SpanMarkerV1,
    "markerV2": SpanMarkerV2,
}
_OTHERS: dict[str, type[nn.Module]] = {
    "query": SpanQuery,
    "mlp": SpanMLP,
    "cat": SpanCAT,
    "conv_share": ConvShare,
}


def span_layer(mode: str, hidden_size: int, max_width: int) -> nn.Module:
    """The layer for a checkpoint's ``span_mode`` (one of ``gliner_config.SPAN_MODES``)."""
    if mode.startswith("conv_") and mode != "conv_share":
        return SpanConv(hidden_size, max_width, mode)
    return {**_MARKERS, **_OTHERS}[mode](hidden_size, max_width)
