"""The experiment tied_lm: strategies differ in clipping only, invalid data is a short error, the preset learns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.experiments.tied_lm import TiedLMRunner
from loopscope.experiments.tied_lm.runner import TiedLMConfig
from loopscope.runs import build_run
from loopscope.sinks import read_jsonl

from tests.framework.runs.small_experiment import read_json
from tests.support.processes import own_process

FILLED = (experiments, sinks, training_hooks)
TINY: dict[str, Any] = {
    **{"steps": 4, "vocabulary": 300, "context": 16, "width": 16, "layers": 1, "heads": 2, "batch_size": 4},
    **{"evaluation_windows": 4, "warmup_steps": 1, "sample_tokens": 5},
}
WORDS = " ".join(f"--{name} {value}" for name, value in TINY.items())


def tiny(**options: Any) -> TiedLMRunner:
    return TiedLMRunner(TiedLMConfig(**(TINY | options)))


def run(folder: Path, words: str = "") -> int:
    return main(f"run tied_lm {WORDS} --output-dir {folder} --hook-jsonl {words}".split())


@pytest.mark.slow
@own_process
def test_strategies_have_the_same_data_and_initial_weights() -> None:
    built = [build_run(tiny(), strategy)[0] for strategy in TiedLMRunner.strategies]
    for task in built[1:]:
        for one, other in zip(built[0].model.parameters(), task.model.parameters(), strict=True):
            assert torch.equal(one, other)
        for number in (0, 3):
            assert torch.equal(built[0].loader.batch(number)[0], task.loader.batch(number)[0])


@pytest.mark.longer
def test_command_trains_and_compares_all_strategies(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    words = ("output_to_embedding_ratio", "embedding_row_norm", "unigram_entropy", "sample:")
    assert all(word in shown for word in words)
    treatments = {}
    for strategy in TiedLMRunner.strategies:
        folder = tmp_path / "tied_lm" / strategy
        config, summary = (read_json(folder / name) for name in ("experiment_config.json", "summary.json"))
        assert (summary["status"], summary["steps"]) == ("completed", 4)
        assert (config["data"]["source"], len(config["data"]["xxh3_64"])) == ("pydoc_data.topics", 16)
        assert {"weight_updates", "embedding_provenance", "training_metrics"} <= config["hooks"].keys()
        treatments[strategy] = [*summary["treatments"]]
    assert treatments == {
        "baseline": [], "clip_previous": ["output_projection_clip"], "clip_rolling": ["output_projection_clip"]
    }  # fmt: skip


@pytest.mark.slow
def test_strategies_differ_only_after_first_clip(tmp_path: Path) -> None:
    """The losses of all strategies are equal for two steps, then rolling clipping diverges from the baseline."""
    assert run(tmp_path, "--no-console-output") == 0
    losses = {}
    for strategy in TiedLMRunner.strategies:
        records = read_jsonl(tmp_path / "tied_lm" / strategy / f"{strategy}.jsonl")
        series = [record.metrics.get("training_metrics/loss") for record in records]
        losses[strategy] = next(losses_of_run for losses_of_run in series if losses_of_run is not None).values
    assert losses["baseline"][:2] == losses["clip_previous"][:2] == losses["clip_rolling"][:2]
    assert losses["baseline"][2:] != losses["clip_rolling"][2:]


BAD = {
    "--data nowhere.txt": "does not exist; name a text file, a folder of texts or a file of tokens",
    "--vocabulary 255": "vocabulary is 255; it must be at least 256",
    "--vocabulary 256": "vocabulary is 256; for texts it must be at least 257",
    "--data tokens.u16 --context 5000": "The training data has 900 tokens, but a context of 5000 needs at least 5001",
    "--data tokens.u16 --vocabulary 300": "contains the token id 999, which is outside the vocabulary of 300; set",
    "--data odd.u32": "it must have a multiple of 4 bytes",
    "--heads 3": "width is 16; it must be a multiple of twice the heads (6)",
    "--min_lr 1": "min_lr is 1.0; it must be in 0..lr",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.arange(1000, dtype="<u2").tofile("tokens.u16")
    Path("odd.u32").write_bytes(b"12345")
    assert run(tmp_path / "out", f"--strategy baseline --no-console-output {words}") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert BAD[words] in sentence


@pytest.mark.longer
def test_token_files_are_trained_on_without_a_sample(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 300, 2000).astype("<u2")
    tokens.tofile(tmp_path / "tokens.bin")
    words = f"--strategy baseline --no-console-output --data {tmp_path / 'tokens.bin'}"
    assert run(tmp_path, words) == 0
    summary = read_json(tmp_path / "tied_lm/baseline/summary.json")
    assert summary["sample"] is None
    assert summary["final"]["unigram_entropy"] == pytest.approx(np.log(300), abs=0.1)


@pytest.mark.slow
def test_quick_preset_beats_unigram_entropy(tmp_path: Path) -> None:
    """The validation loss ends at least 0.7 below the unigram entropy."""
    words = f"run tied_lm --preset quick --strategy baseline --no-console-output --output-dir {tmp_path}"
    assert main(words.split()) == 0
    final = read_json(tmp_path / "tied_lm/baseline/summary.json")["final"]
    assert final["val_loss"] < final["unigram_entropy"] - 0.7
