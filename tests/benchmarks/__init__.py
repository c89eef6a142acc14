"""Benchmarks of loopscope: ``python -m tests.benchmarks`` writes docs/data/benchmarks.txt."""
