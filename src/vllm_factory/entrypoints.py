"""The functions that vLLM finds through this distribution's entry points.

They run in every vLLM process, so they import nothing heavy, and running them twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_factory.registry import PLUGINS, plugin


def register() -> None:
    """Entry point of ``vllm.general_plugins``: make our architectures and config class known."""
    from vllm import ModelRegistry

    from vllm_factory.compat.hf import register_config

    register_config()
    for spec in PLUGINS:
        if spec.architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(spec.architecture, spec.model_class)


def _io_entry_point(name: str) -> Callable[[], str]:
    def io_class() -> str:
        return plugin(name).io_class

    io_class.__doc__ = f"Entry point of ``vllm.io_processor_plugins`` for ``{name}``."
    return io_class


deberta_gliner_io = _io_entry_point("deberta_gliner")
mt5_gliner_io = _io_entry_point("mt5_gliner")
mmbert_gliner_io = _io_entry_point("mmbert_gliner")
modernbert_gliner_rerank_io = _io_entry_point("modernbert_gliner_rerank")
deberta_gliner_linker_io = _io_entry_point("deberta_gliner_linker")
deberta_gliner2_io = _io_entry_point("deberta_gliner2")
embeddinggemma_io = _io_entry_point("embeddinggemma")
moderncolbert_io = _io_entry_point("moderncolbert")
colqwen3_io = _io_entry_point("colqwen3")
collfm2_io = _io_entry_point("collfm2")
nemotron_colembed_io = _io_entry_point("nemotron_colembed")
lfm2_colbert_io = _io_entry_point("lfm2_colbert")
