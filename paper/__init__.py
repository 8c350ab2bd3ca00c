"""Reproduces the paper and our own studies: `python -m paper NAME`. It imports spot, never the reverse."""
