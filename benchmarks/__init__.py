"""Speed and memory, always as ratios measured in one run: `python -m benchmarks [NAME …]` or `make bench`."""
