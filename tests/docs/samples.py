"""Comparison of the outputs on the pages with those of their programs."""

import re


def masked(text: str) -> str:
    """Return a text without the values of its numbers, and with single spaces."""
    return " ".join(re.sub(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", "0", text).split())


def assert_printed(sample: str, output: str) -> None:
    """Assert that an output contains the parts of a sample, which lines with `...` separate."""
    for part in sample.split("\n...\n"):
        assert masked(part) in masked(output), output
