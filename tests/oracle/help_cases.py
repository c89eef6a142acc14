"""Help texts of every command, of every experiment's options and of every hook, at 80 columns."""

import re

from tests.oracle import product


def commands() -> list[tuple[str, ...]]:
    """Return the words of every command with a help text; the help of ``loopscope`` lists the commands."""
    _, overview, _ = product.run_command("--help")
    names = dict.fromkeys(re.findall(r"^  loopscope (\w+)", overview, re.MULTILINE))
    plain = [("--help",), ("list",), ("hooks",), *((name, "--help") for name in names)]
    kinds = [("new", kind, "--help") for kind in ("hook", "experiment")]
    runs = [("run", experiment, "--help") for experiment in product.experiments()]
    return [*plain, *kinds, *runs, *(("hooks", hook) for hook in product.shipped_hooks())]


def texts() -> dict[str, list[str]]:
    """Return the lines of every help text by its command, each without the spaces at its end."""
    found: dict[str, list[str]] = {}
    for words in commands():
        status, output, errors = product.run_command(*words)
        if status or errors:
            raise RuntimeError(f"loopscope {' '.join(words)} ended with status {status}: {errors}")
        found[" ".join(("loopscope", *words))] = [line.rstrip() for line in output.splitlines()]
    return found
