"""``loopscope check`` on accumulation by the Trainer of transformers, and by those of trl."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "trainers"
LAW = "micro_batches_add_up"


def verdict(kind: str, folder: Path, script: str = "hugging_face.py") -> tuple[str, str]:
    training = [sys.executable, str(FOLDER / script)]
    command = [sys.executable, "-m", "loopscope", "check", "--json", "--laws", LAW, "--", *training]
    paths = [str(FOLDER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, kind], capture_output=True, text=True, cwd=folder, env=environment, check=False)
    (law,) = json.loads(done.stdout)["laws"]
    return law["verdict"], law.get("evidence", "")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.trainer
@pytest.mark.parametrize("kind", ["causal_lm", "label_smoothing", "override_with_items"])
def test_accumulation_of_a_trainer_holds(kind: str, tmp_path: Path) -> None:
    assert verdict(kind, tmp_path)[0] == "holds"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.trainer
@pytest.mark.parametrize(
    ("kind", "evidence"),
    [("override", "differ from the batch's"), ("mean_of_means", "differ from the batch's"), ("classifier", "4 times")],
)
def test_wrong_accumulation_of_a_trainer_is_found(kind: str, evidence: str, tmp_path: Path) -> None:
    """Classifiers of transformers accept the number of items and ignore it (issue 47688, present in 5.23)."""
    outcome = verdict(kind, tmp_path)
    assert outcome[0] == "broken"
    assert evidence in outcome[1]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.trainer
@pytest.mark.parametrize("kind", ["dpo", "precomputed_dpo", "ipo", "lora_dpo", "reward", "centered_reward"])
def test_accumulation_of_preferences_holds(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert verdict(kind, tmp_path, "preferences.py")[0] == "holds"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.trainer
@pytest.mark.parametrize("kind", ["override_dpo", "override_reward", "undivided_dpo", "undivided_reward"])
def test_wrong_accumulation_of_preferences_is_found(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    outcome = verdict(kind, tmp_path, "preferences.py")
    assert outcome[0] == "broken"
    assert ("4 times" if "undivided" in kind else "differ from the batch's") in outcome[1]
