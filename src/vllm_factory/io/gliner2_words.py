"""Words as gliner2 2.1.0 splits a text by default (``processing/word_splitter.py``)."""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

from vllm_factory.io.words import Splitter


@cache
def gliner2_splitter() -> Splitter:
    """Web addresses, e-mail addresses, handles, words with inner hyphens, and single symbols.

    Unlike gliner's, words keep their combining marks and zero-width joiners, and come in lower case; offsets are
    those of the text as it stands.
    """
    # Looking at every character of Unicode takes a while, so not at import.
    marks = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c)[0] == "M")
    letter = rf"[\w{marks}\u200c\u200d]"
    kinds = (
        r"https?://\S+",
        r"www\.\S+",
        r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}",
        r"@[a-z0-9_]+",
        rf"{letter}+(?:[-_]{letter}+)*",
        r"\S",
    )
    pattern = re.compile("|".join(kinds), re.IGNORECASE)
    return lambda text: [(match.group().lower(), *match.span()) for match in pattern.finditer(text)]
