"""Nemotron ColEmbed: one vector a token of texts and page images, on vLLM's Qwen3-VL with attention both ways."""
