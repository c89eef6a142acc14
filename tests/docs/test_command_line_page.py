"""The site's page of options, and the examples of docs/command-line.md, have exactly the existing options."""

import re
from functools import partial
from pathlib import Path

import pytest
from loopscope.cli import main

from docs import options
from tests.docs.markdown import ROOT, blocks
from tests.docs.running import SMALL, status_of

PAGE = ROOT / "docs/command-line.md"
RUN = f"run mod_arithmetic --strategy random --no-console-output {SMALL['mod_arithmetic']}".split()
HOOKS = ["--hooks", "norms", "grad_clip", "--hook-csv", "--hook-jsonl", "--hook-tensorboard", "--profile-hooks"]


def documented_options() -> set[str]:
    return set(re.findall(r"^\| `(--[a-z0-9-]+)", options.page(), re.M))


def test_every_option_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The generated lists contain every option of the help."""
    assert documented_options() == set(re.findall(r"`(--[a-z0-9-]+)", "\n".join(options.names())))
    for experiment in ("mod_arithmetic", "lowbit_lm", "tied_lm"):
        assert status_of(partial(main, ["run", experiment, "--help"])) == 0
        assert documented_options() >= set(re.findall(r"^ +(--[a-z0-9-]+)", capsys.readouterr().out, re.M))


@pytest.mark.longer
def test_printed_config_can_be_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """The output of --print-config is accepted by --config."""
    monkeypatch.chdir(tmp_path)
    assert status_of(lambda: main([*RUN, "--hooks", "norms", "--print-config"])) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert main(["run", "mod_arithmetic", "--config", "printed.yaml"]) == 0
    assert (tmp_path / "output/mod_arithmetic/random/summary.json").exists()


def test_yaml_example_uses_documented_options() -> None:
    """Every key of the YAML example is the name of an option on the page."""
    (example,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    keys = re.findall(r"^(\w+):", example, re.M)
    assert {f"--{key.replace('_', '-')}" for key in keys} <= documented_options()
