"""Benchmarks. ``python -m bench --help``; results as JSON in ``bench/results``, the story in ``bench/NOTES.md``."""
