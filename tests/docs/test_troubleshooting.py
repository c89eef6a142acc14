"""The outputs on the page of symptoms are those of its planted faults."""

import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.docs.samples import assert_printed
from tests.support.processes import own_process

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "docs/examples/faults.py"
PRINTED = re.compile(r"^<!-- printed by docs/examples/faults.py: (\w+) -->\n```text\n(.*?)^```$", re.M | re.S)
SAMPLES = dict(PRINTED.findall(PAGE))
IN_ONE_PROCESS = [name for name in SAMPLES if name != "hang"]


@pytest.mark.slow_rows("hook_left_out", "spike", "costs", "rows_of_the_spike", "validation_diverges", "numbers_differ")
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
@own_process
def test_fault_prints_its_sample(name: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    sys.argv[1:] = [name]
    warnings.simplefilter("default")  # a user's filters; those of the tests turn alerts into errors
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert_printed(SAMPLES[name], output.getvalue())


@pytest.mark.ranks
@pytest.mark.slow
def test_rank_that_evaluates_alone_prints_its_sample(tmp_path: Path) -> None:
    words = [*["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], str(SCRIPT), "hang"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert_printed(SAMPLES["hang"], done.stdout)


def test_every_symptom_has_an_output_and_a_table() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) >= 11
    for section in sections:
        assert "\n|---|" in section, section
        assert "printed by" in section or section.startswith("Too slow"), section


def test_every_fault_is_shown() -> None:
    """The functions without arguments are the faults."""
    functions = set(re.findall(r"^def (\w+)\(\):", SCRIPT.read_text(encoding="utf-8"), re.M))
    assert set(SAMPLES) == functions
