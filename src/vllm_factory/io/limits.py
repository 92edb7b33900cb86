"""How much one request may ask for. Operators change the numbers by environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from vllm_factory.errors import UnsupportedError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request.

    Attributes:
        max_chars: Characters of all texts together (``VLLM_FACTORY_MAX_CHARS``).
        max_texts: Texts (``VLLM_FACTORY_MAX_TEXTS``).
        max_labels: Labels (``VLLM_FACTORY_MAX_LABELS``).
        max_candidates: Candidate labels to link to (``VLLM_FACTORY_MAX_CANDIDATES``).
        max_mentions: Mentions in all texts together (``VLLM_FACTORY_MAX_MENTIONS``).
        max_similarities: Numbers in the similarity matrices of one response (``VLLM_FACTORY_MAX_SIMILARITIES``).
    """

    max_chars: int = 1_000_000
    max_texts: int = 1_024
    max_labels: int = 4_096
    max_candidates: int = 16_384
    max_mentions: int = 16_384
    max_similarities: int = 1_000_000

    @classmethod
    def from_environment(cls) -> Limits:
        """The defaults, where no environment variable says otherwise.

        Raises:
            UnsupportedError: A variable is no positive integer.
        """
        given = {}
        for name in (field.name for field in fields(cls)):
            variable = f"VLLM_FACTORY_{name.upper()}"
            value = os.environ.get(variable)
            if value is None:
                continue
            if not value.isdecimal() or int(value) < 1:
                raise UnsupportedError(f"{variable}={shown(value)}: expected a positive whole number")
            given[name] = int(value)
        return cls(**given)
