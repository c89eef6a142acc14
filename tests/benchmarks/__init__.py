"""Benchmarks of loopscope: ``python -m tests.benchmarks`` writes docs/benchmarks.md."""
