"""Benchmarks of gpuimg against peers and against this machine's limits: `python -m bench --help`."""
