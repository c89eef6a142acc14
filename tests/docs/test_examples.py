"""Every script in docs/examples runs, and ends with the weights of the same script without the lines of loopscope."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.markdown import PAGES, ROOT, blocks, links
from tests.docs.samples import assert_printed
from tests.support.processes import own_process

FOLDER = ROOT / "docs/examples"
ADDED = re.compile(r"^.*  # added\n", re.M)
CHANGED = re.compile(r"^( *)\S.*  # in place of: (.*)$", re.M)
EVALUATIONS = {
    "hugging_face.py": ('eval_strategy="epoch"', 'eval_strategy="no"'),
    "lightning_module.py": ("batches, validation)", "batches)"),
}
"""The evaluation of the trainers, which changes the weights of a script without loopscope, and its replacement."""
LIBRARIES = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*:UserWarning:lightning")


def unedited(name: str) -> str:
    """Return a script without the lines of loopscope."""
    return CHANGED.sub(r"\1\2", ADDED.sub("", (FOLDER / name).read_text(encoding="utf-8")))


def plain(name: str) -> str:
    """Return a script without the lines of loopscope, and without the evaluation of a trainer."""
    text = unedited(name)
    original, replacement = EVALUATIONS.get(name, ("", ""))
    assert original in text
    return text.replace(original, replacement)


def run(text: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Run a script; return its names, and the state of torch's generator at its end."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "example.py", "exec"), names)
    return names, torch.get_rng_state()


def assert_equal_without_loopscope(name: str, model: str, folder: Path) -> set[str]:
    """Run a script with and without loopscope in ``folder``; return the names of the metrics in its record."""
    os.chdir(folder)  # of the separate process
    assert not re.search(r"import loopscope|scope\.\w", plain(name))
    names, generator = run((FOLDER / name).read_text(encoding="utf-8"))
    plain_names, plain_generator = run(plain(name))
    weights, plain_weights = names[model].state_dict(), plain_names[model].state_dict()
    assert weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[key], plain_weights[key]) for key in weights)
    assert torch.equal(generator, plain_generator)
    run_folder = names["scope"].folder
    assert json.loads((run_folder / "summary.json").read_text())["status"] == "completed"
    assert (run_folder / "alerts.jsonl").read_text() == ""
    (record,) = [path for path in run_folder.glob("*.jsonl") if path.name not in ("alerts.jsonl", "digests.jsonl")]
    return {metric for line in record.read_text().splitlines() for metric in json.loads(line)}


@pytest.mark.slow
@own_process
def test_nanogpt_keeps_its_weights(tmp_path: Path) -> None:
    metrics = assert_equal_without_loopscope("nanogpt.py", "model", tmp_path)
    assert {"training_metrics/evaluation", "gradient_flow/gain/blocks.1"} <= metrics


@pytest.mark.slow
@pytest.mark.trainer
@own_process
def test_hugging_face_keeps_its_weights(tmp_path: Path) -> None:
    metrics = assert_equal_without_loopscope("hugging_face.py", "model", tmp_path)
    assert {"training_metrics/evaluation", "norms/total_grad_norm"} <= metrics


@pytest.mark.slow
@pytest.mark.trainer
@LIBRARIES
@own_process
def test_lightning_keeps_its_weights(tmp_path: Path) -> None:
    metrics = assert_equal_without_loopscope("lightning_module.py", "module", tmp_path)
    assert {"training_metrics/evaluation", "norms/total_grad_norm"} <= metrics


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize(
    ("name", "model"), [("nanogpt", "model"), ("hugging_face", "model"), ("lightning_module", "module")]
)
def test_watched_examples_keep_their_weights(name: str, model: str, tmp_path: Path) -> None:
    """Scripts without a line of loopscope, with their evaluations, are the same twice alone and under ``watch``."""
    state = f"[*{model}.state_dict().values(), torch.get_rng_state()]"
    last = f"\nprint('BYTES', [value.double().sum().item().hex() for value in {state}])\n"
    (tmp_path / "train.py").write_text(unedited(f"{name}.py") + last, encoding="utf-8")
    watch = ["-m", "loopscope", "watch", "--out", "record", sys.executable]
    outputs = []
    for words in ([], [], watch):
        done = subprocess.run([sys.executable, *words, "train.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append([line for line in done.stdout.splitlines() if line.startswith("BYTES")])
    assert outputs[0] == outputs[1] == outputs[2] != []
    summary = json.loads((tmp_path / "record/summary.json").read_text())
    assert (summary["status"], summary["hook_errors"]) == ("completed", [])


@pytest.mark.longer
def test_first_program_on_custom_loops_prints_its_sample(tmp_path: Path, monkeypatch, capsys) -> None:
    shown = blocks(ROOT / "docs/custom-loop.md")
    program = next(block.text for block in shown if block.language == "python")
    sample = next(block.text for block in shown if block.language == "text")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # a user's filters; those of the tests ignore notices
        exec(compile(program, "mine.py", "exec"), {"__name__": "__main__"})
    assert_printed(sample, capsys.readouterr().out)


def test_every_example_is_linked_from_a_page() -> None:
    """The site has a page of each."""
    linked = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert set(FOLDER.glob("*.py")) <= linked
