"""Measures what loopscope costs: ``python -m tests.benchmarks`` writes docs/benchmarks.md."""
