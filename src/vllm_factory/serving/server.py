"""The process that is the server: ``python -m vllm_factory.serving.server MODEL [FLAGS]``.

Takes what ``vllm serve`` takes, and nothing else; works with every build of vLLM. vLLM's own child processes
import this module again, so nothing stands outside the guard.
"""

from __future__ import annotations

import sys

from vllm_factory.compat.server import serve

if __name__ == "__main__":
    serve(sys.argv[1:])
