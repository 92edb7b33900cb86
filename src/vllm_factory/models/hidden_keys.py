"""Attention in which some tokens are seen by nobody. Plain torch, no vLLM import.

ColBERT fills queries up with mask tokens that get vectors, and to which, as most checkpoints are saved, no token
attends. Kernels for flat batches know boundaries of sequences and windows, and no such mask; this does.

Shape legend: T tokens, H heads, D head size, B sequences of a group, L its longest, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from vllm_factory.varlen import PaddedGroup, Varlen


class HiddenKeys:
    """Some sequences of a flat batch, and which of their tokens are hidden.

    Args:
        rows: Rows of the flat batch, ``[T]`` int64, one sequence after the other; ``None`` when it is all of them.
        varlen: The sequences, in that order.
        hidden: ``[T]`` bool, in that order.
    """

    def __init__(self, rows: torch.Tensor | None, varlen: Varlen, hidden: torch.Tensor) -> None:
        self.rows = rows
        self.varlen = varlen
        self.hidden = hidden

    def visible(self, num_tokens: int) -> torch.Tensor:
        """``[rows of the whole batch]`` bool: all but the hidden ones."""
        if self.rows is None:
            return ~self.hidden
        everything = torch.ones(num_tokens, dtype=torch.bool, device=self.hidden.device)
        return everything.index_put((self.rows,), ~self.hidden)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Attention of the chosen sequences, each over its own tokens that are not hidden.

        Args:
            query: ``[rows of the whole batch, H, D]``.
            key, value: The same, or of fewer heads, each of which serves as many neighbours among the query's.
            scale: Factor of the products.
            window: Greatest distance at which tokens see each other; ``None`` for any.
            causal: Whether tokens see none behind them.

        Returns:
            ``[T, H * D]``, in the order of ``rows``. A token that sees nobody gets zeros.
        """

        def within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: PaddedGroup) -> torch.Tensor:
            sees = self._sees(group, window, causal)
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
            # What a softmax over nothing is, differs between kernels.
            return torch.where(sees.any(-1, keepdim=True), context, 0.0)

        chosen = [x if self.rows is None else x[self.rows] for x in (query, key, value)]
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            chosen[1:] = [x.repeat_interleave(shared, dim=1) for x in chosen[1:]]
        return self.varlen.attend(chosen[0], chosen[1], chosen[2], within)

    def _sees(self, group: PaddedGroup, window: int | None, causal: bool) -> torch.Tensor:
        """``[B, 1, L, L]`` bool. Padding sees what there is: its rows are dropped."""
        seen = ~self.hidden[group.index]
        if group.mask is not None:
            seen = seen & group.mask
        sees = seen[:, None, None, :]
        position = torch.arange(group.index.shape[1], device=sees.device)
        if window is None and not causal:
            return sees.expand(-1, -1, position.shape[0], -1)
        ahead = position - position[:, None]
        if window is not None:
            sees = sees & (ahead.abs() <= window)
        return sees & (ahead <= 0) if causal else sees


def hidden_keys(
    ids: torch.Tensor, varlen: Varlen, *, token: int, spared: int = 0, length: int, everything: bool
) -> HiddenKeys | None:
    """The sequences that need an attention of their own.

    A query that was filled up has exactly ``length`` tokens, so only such sequences can hold hidden ones: the run
    of ``token`` at their end, but for those that end every text. (The io processor refuses a text that itself
    ends in that token, where it could not be told from them.)

    Args:
        ids: ``[T]`` token ids of the flat batch.
        varlen: All its sequences.
        token: What queries are filled up with.
        spared: How many of the run are not hidden, from its beginning: those that end every text.
        length: How far.
        everything: Take all sequences, whatever their length.

    Returns:
        ``None`` when no sequence needs it.
    """
    full = [index for index, n in enumerate(varlen.lengths) if n == length]
    if not full and not everything:
        return None
    rows = _rows(varlen, full)
    index = torch.from_numpy(rows).to(ids.device, non_blocking=True)
    run = (ids[index] == token).view(len(full), length).flip(1).long().cumprod(1).flip(1)
    run = (run.cumsum(1) > spared).logical_and(run.bool()).flatten()
    if not everything:
        return HiddenKeys(index, Varlen([length] * len(full), ids.device), run)
    hidden = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    hidden[index] = run
    return HiddenKeys(None, varlen, hidden)


def _rows(varlen: Varlen, sequences: Sequence[int]) -> np.ndarray:
    """Flat rows of some sequences, one after the other."""
    pieces = [np.arange(varlen.starts[i], varlen.starts[i] + varlen.lengths[i]) for i in sequences]
    return np.concatenate([np.empty(0, np.int64), *pieces])
