"""Turns what the argument parser says into one sentence that names the option, the value and the choices."""

import re

from jsonargparse import ArgumentParser

from framework.errors import unknown


def sentence(message: str, parser: ArgumentParser) -> str:
    """Rewrite a message of jsonargparse."""
    flags = sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
    keys = [flag[2:].replace("-", "_") for flag in flags]
    if match := re.search(r"[Uu]nrecognized arguments: (\S+)", message):
        word = match[1].split("=")[0].replace("_", "-")
        return str(unknown("option", word, [flag.replace("_", "-") for flag in flags]))
    if match := re.search(r"Option '([^']+)' is not accepted", message):
        return str(unknown("key in the config file", match[1], keys))
    if match := re.search(r"Parser key \"([^\"]+)\":\s*(.*)", message, re.S):
        expected = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.", lambda found: found[1] or "", match[2])
        return f"--{match[1].replace('_', '-')}: {' '.join(expected.split())}."
    return " ".join(message.split()).rstrip(".") + "."
