"""ColLFM2: one vector a token of texts and page images, on vLLM's LFM2-VL."""
