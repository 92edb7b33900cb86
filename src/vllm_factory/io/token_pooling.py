"""Fewer vectors for a document: neighbours in meaning become their mean, as PyLate and colpali-engine do it.

Source: hierarchical clustering with Ward's criterion over cosine distances, ``n // pool_factor`` clusters, the
first vectors left as they are (PyLate 1.6.0's ``pool_embeddings_hierarchical``). Means are not normalised again
there, and are not here.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

#: Vectors at the beginning that are never merged.
PROTECTED_TOKENS = 1


def available() -> bool:
    """Whether scipy, which clusters, is installed (the extra ``retrieval``)."""
    return find_spec("scipy") is not None


def pool_tokens(vectors: np.ndarray, factor: int, protected: int = PROTECTED_TOKENS) -> np.ndarray:
    """About one ``factor``-th of the vectors.

    Args:
        vectors: ``[n, d]`` float32 of length one.
        factor: 1 changes nothing.
        protected: Vectors at the beginning that stay.

    Returns:
        ``[m, d]`` float32, ``m <= protected + max(1, (n - protected) // factor)`` where that is fewer than ``n``.
        The order of merged vectors is the clusters'.
    """
    rest = vectors[protected:]
    clusters = max(len(rest) // factor, 1)
    if clusters >= len(rest):
        return vectors
    from scipy.cluster import hierarchy

    distances = (1 - rest @ rest.T)[np.triu_indices(len(rest), k=1)]
    tree = hierarchy.linkage(distances, method="ward")
    labels = hierarchy.fcluster(tree, t=clusters, criterion="maxclust")
    # There may be fewer clusters than asked for.
    _, members, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), vectors.shape[1]), np.float32)
    np.add.at(sums, members, rest)
    means: np.ndarray = sums / counts[:, None].astype(np.float32)
    return np.concatenate([vectors[:protected], means])
