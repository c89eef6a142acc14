"""The experiment lowbit_lm: strategies differ in their casts only, and invalid options are short errors."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.experiments.lowbit_lm import LowbitLMRunner
from loopscope.experiments.lowbit_lm.runner import QUICK, LowbitLMConfig
from loopscope.lowbit import BitLinear, RangePenalty
from loopscope.runs import RunOptions, Session, build_run
from loopscope.sinks import read_jsonl
from loopscope.training import forward_backward

from tests.framework.runs.small_experiment import read_json

FILLED = (experiments, sinks, training_hooks)
TINY: dict[str, Any] = {
    **{"steps": 4, "vocabulary": 300, "context": 16, "width": 16, "layers": 1, "heads": 2, "batch_size": 4},
    **{"evaluation_windows": 4, "warmup_steps": 1, "sample_tokens": 5, "log_every": 2},
    **{"forward_warmup_steps": 1, "merge_steps": 2},
}
PROOF = QUICK | {"vocabulary": 512, "width": 64, "layers": 2, "batch_size": 8, "steps": 150, "sample_tokens": 0}
"""The preset quick with a smaller model and fewer steps."""
WORDS = " ".join(f"--{name} {value}" for name, value in TINY.items())
QUANTISED = [strategy for strategy in LowbitLMRunner.strategies if strategy != "fp32"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of tokens, which needs no tokenizer."""
    path = tmp_path_factory.mktemp("data") / "tokens.u16"
    np.random.default_rng(1).zipf(1.5, 5000).clip(max=299).astype("<u2").tofile(path)
    return path


def tiny(tokens: Path, **options: Any) -> LowbitLMRunner:
    return LowbitLMRunner(LowbitLMConfig(**(TINY | {"data": tokens} | options)))


def run(folder: Path, tokens: Path, words: str = "") -> int:
    return main(f"run lowbit_lm {WORDS} --data {tokens} --output-dir {folder} --hook-jsonl {words}".split())


def test_strategies_have_the_same_data_and_initial_weights(tokens: Path) -> None:
    built = [build_run(tiny(tokens), strategy)[0] for strategy in LowbitLMRunner.strategies]
    for task in built[1:]:
        assert task.model.state_dict().keys() == built[0].model.state_dict().keys()
        assert all(torch.equal(weight, built[0].model.state_dict()[name])
                   for name, weight in task.model.state_dict().items())  # fmt: skip
        assert torch.equal(built[0].loader.batch(3)[0], task.loader.batch(3)[0])


@pytest.mark.parametrize("strategy", QUANTISED)
def test_only_linear_layers_of_blocks_are_cast(tokens: Path, strategy: str) -> None:
    """The head is the only linear layer without casts."""
    model = build_run(tiny(tokens, layers=2), strategy)[0].model
    cast = {name for name, module in model.named_modules() if isinstance(module, BitLinear)}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear - cast == {"head"}
    assert len(cast) == 2 * 7


def test_patterns_choose_the_layers(tokens: Path) -> None:
    model = build_run(tiny(tokens, include="blocks.0.ff.*, head", exclude="*.up_proj"), "fp8")[0].model
    cast = [name for name, module in model.named_modules() if isinstance(module, BitLinear)]
    assert cast == ["blocks.0.ff.gate_proj", "blocks.0.ff.down_proj", "head"]


def test_options_reach_the_casts() -> None:
    config = LowbitLMConfig(**TINY, q_scalar=0.5, stochastic_output_grad=True, rank=3, gains="long_tail")
    recipe = config.build_recipe("fp4_metis")
    assert recipe.metis is not None
    assert recipe.output_grad is not None
    assert {cast.q_scalar for cast in recipe.casts.values()} == {0.5}
    assert [role for role, cast in recipe.casts.items() if cast.rounding == "stochastic"] == ["output_grad"]
    assert (recipe.metis.rank, recipe.metis.gains, recipe.metis.merge_steps) == (3, "long_tail", 2)
    assert config.build_recipe("fp32").casts == {}
    assert config.build_recipe("fp4_block").metis is None


def test_the_two_published_recipes_are_presets() -> None:
    published = [LowbitLMConfig(**LowbitLMRunner.presets[name]) for name in ("gpt2", "llama")]
    assert [(config.rank, config.max_norm) for config in published] == [(60, 2.0), (64, 1.0)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> tuple[Path, str]:
    """The folder of all strategies, and the console output."""
    folder = tmp_path_factory.mktemp("all")
    with redirect_stdout(StringIO()) as shown:
        assert run(folder, tokens, "--strategy all") == 0
    return folder / "lowbit_lm", shown.getvalue()


@pytest.mark.slow
def test_the_command_compares_all_strategies(trained: tuple[Path, str]) -> None:
    words = ("val_loss − fp32", "cumulative_element_overflow_rate", "cumulative_underflow_rate", "output_grad")
    assert all(word in trained[1] for word in words)


@pytest.mark.slow
def test_quantised_strategies_count_and_all_clip(trained: tuple[Path, str]) -> None:
    for strategy in LowbitLMRunner.strategies:
        config, summary = (
            read_json(trained[0] / strategy / name) for name in ("experiment_config.json", "summary.json")
        )
        assert (summary["status"], summary["steps"]) == ("completed", 4)
        assert ("gradient_overflow" in config["hooks"]) == (strategy in QUANTISED)
        assert [*summary["treatments"]] == (["metis_split"] * (strategy == "fp4_metis")) + ["grad_clip"]
        assert len(summary["metrics"]) == (4 if strategy in QUANTISED else 0)


@pytest.mark.slow
def test_strategies_differ_by_their_casts_only(trained: tuple[Path, str], tokens: Path) -> None:
    first = {}
    for strategy in LowbitLMRunner.strategies:
        records = read_jsonl(trained[0] / strategy / f"{strategy}.jsonl")
        first[strategy] = next(found for record in records if (found := record.metrics.get("training_metrics/loss")))
    losses = {strategy: series.values[0] for strategy, series in first.items()}
    runner = tiny(tokens)
    task = build_run(runner, "fp32")[0]
    assert losses["fp32"] == runner.compute_loss(task.model, task.loader.batch(0)).item()
    assert losses["fp4_metis"] == losses["fp4_block"]
    assert first["fp4_metis"].values[1] != first["fp4_block"].values[1]
    assert losses["fp8_delayed"] == losses["fp8"]  # delayed scaling has no history yet
    assert (
        losses["fp8_rowwise"] == losses["fp8_block"]
    )  # a power of two on the scale of e4m3 only affects values that underflow
    assert len(set(losses.values())) == len(losses) - 3
    assert all(abs(losses[strategy] - losses["fp32"]) < 0.05 for strategy in QUANTISED)


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> tuple[Path, str]:
    """The folder of two strategies with the penalty, and the console output."""
    folder = tmp_path_factory.mktemp("penalised")
    with redirect_stdout(StringIO()) as shown:
        assert run(folder, tokens, "--strategy fp32 nvfp4 --reg-lambda 1e-12 --reg-alpha1 5 --silent") == 0
    return folder / "lowbit_lm", shown.getvalue()


@pytest.mark.slow
def test_progress_line_shows_both_losses_and_overflows(penalised: tuple[Path, str]) -> None:
    """The line has the loss, the penalized loss and, with casts, the overflow rates of elements and tensors."""
    for strategy, over in (("fp32", False), ("nvfp4", True)):
        line = [line for line in penalised[1].splitlines() if line.startswith(f"{strategy}: 100%, step 4/4, epoch ")][
            -1
        ]
        assert ", loss " in line
        assert ", with reg " in line
        assert (re.search(r", over 0\.0\d+/(0\.\d+|1)$", line) is not None) == over


@pytest.mark.parametrize("strategy", ["fp32", "nvfp4"])
def test_loss_is_data_loss_plus_penalty(penalised: tuple[Path, str], strategy: str) -> None:
    """The recorded loss is the sum of the recorded data loss and penalty, at every step."""
    values: dict[str, list[float]] = {}
    for record in read_jsonl(penalised[0] / strategy / f"{strategy}.jsonl"):
        for name, series in record.metrics.items():
            if name.startswith(("range_penalty/", "training_metrics/loss")):
                values.setdefault(name.partition("/")[2], []).extend(series.values)
    sums = [data + penalty for data, penalty in zip(values["data_loss"], values["penalty"], strict=True)]
    assert values["loss"] == pytest.approx(sums)
    assert all(0 < share < 1 for share in values["share"])


def test_penalty_covers_the_matrices_of_the_blocks(tokens: Path) -> None:
    """The penalty adds RangePenalty of exactly the seven matrices of the block to the loss."""
    runner, plain = tiny(tokens, reg_lambda=1e-9, reg_alpha1=2.0), tiny(tokens)
    task = build_run(runner, "fp4_metis")[0]
    batch = task.loader.batch(0)
    matrices = {
        name: weight
        for name, weight in task.model.state_dict().items()
        if name.startswith("blocks.") and weight.ndim == 2
    }
    assert len(matrices) == 7
    expected = RangePenalty(weight=1e-9, large=2.0)(matrices)
    with torch.no_grad():
        difference = runner.compute_loss(task.model, batch) - plain.compute_loss(task.model, batch)
    assert torch.allclose(difference, expected, rtol=1e-3)


@pytest.mark.slow
def test_custom_recipes_are_strategies_in_the_comparison(tmp_path: Path, tokens: Path) -> None:
    """A recipe equal to nvfp4 gives the same result, and the recipes that differ give other losses."""
    mine = (
        "--recipe mine=e2m1/mx_even,output_grad=e5m2/current as_nvfp4=nvfp4 --recipe split=fp4_metis,output_grad=none"
    )
    with redirect_stdout(StringIO()) as shown:
        assert run(tmp_path, tokens, f"{mine} --strategy fp32 nvfp4 as_nvfp4 mine split") == 0
    assert all(name in shown.getvalue() for name in ("as_nvfp4", "mine", "split", "val_loss − fp32"))
    summaries = {name: read_json(tmp_path / "lowbit_lm" / name / "summary.json")
                 for name in ("fp32", "nvfp4", "as_nvfp4", "mine", "split")}  # fmt: skip
    assert summaries["as_nvfp4"]["final"] == summaries["nvfp4"]["final"]
    assert len({summary["final"]["val_loss"] for summary in summaries.values()}) == 4
    assert [*summaries["split"]["treatments"]] == ["metis_split", "grad_clip"]


def test_custom_recipe_has_the_described_casts(tokens: Path) -> None:
    """Formats, rules and q_scalar of each role match the --recipe text."""
    runner = tiny(tokens, recipe=["mine=e2m1/mx_even,output_grad=e5m2/current"], q_scalar=0.5)
    (layer, *_) = [module for module in build_run(runner, "mine")[0].model.modules() if isinstance(module, BitLinear)]
    casts = {role: f"{cast.format}/{cast.rule}/{cast.q_scalar}" for role, cast in layer.recipe.casts.items()}
    assert (layer.recipe.name, casts.pop("output_grad"), {*casts.values()}) == (
        "mine", "e5m2/current/0.5", {"e2m1/mx_even/0.5"}
    )  # fmt: skip
    assert runner.strategies == (*LowbitLMRunner.strategies, "mine")


BAD = {
    "--recipe mine": "recipe is 'mine'; write NAME=RECIPE with one of fp32, ",
    "--recipe mine=": "recipe is 'mine='; write NAME=RECIPE",
    "--recipe mine=fp9": "Unknown recipe 'fp9'. Did you mean 'fp8'?",
    "--recipe mine=e2m1/nvfp3": "Unknown scaling rule 'nvfp3'. Did you mean 'nvfp4'?",
    "--recipe fp8=nvfp4": "recipe 'fp8=nvfp4' has the invalid name 'fp8'; use lower-case letters",
    "--recipe output_grad=e5m2/current": "has the invalid name 'output_grad'",
    "--recipe ../mine=nvfp4": "has the invalid name '../mine'",
    "--recipe mine=nvfp4 --recipe mine=fp8": "recipe 'mine=fp8' has the invalid name 'mine'",
    "--recipe mine=nvfp4 --strategy yours": "fp8_rowwise, int8, mine, mxfp4",
    "--include blocks.9.*": "No linear layer's name matches 'blocks.9.*'",
    "--include ,": "include is empty; name layers by patterns, such as blocks.*",
    "--exclude nothing": "No linear layer's name matches 'nothing'",
    "--exclude blocks.*": "No linear layer is left",
    "--rank 17": "The rank of Metis is 17, but the weight of 'blocks.0.attention.q_proj' is a 16 x 16 matrix; choose",
    "--rank 0": "The rank of Metis is 0; it must be a whole number of at least 1, or a fraction",
    "--rank 1.5": "The rank of Metis is 1.5; it must be a whole number",
    "--niter -1": "niter of Metis is -1; it must be at least 0",
    "--q-scalar 0": "q_scalar is 0",
    "--max-norm -1": "max_norm is -1.0; it must be at least 0",
    "--reg-lambda -1": "reg_lambda is -1.0; it must be at least 0",
    "--metis-forward false --metis-backward false": "use the strategy fp4_block",
    "--strategy fp4_metiss": "Did you mean 'fp4_metis'?",
}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence_before_the_run(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert run(tmp_path, tokens, f"--no-console-output {words}") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert BAD[words] in sentence
    assert [*tmp_path.iterdir()] == []


def gradient(tokens: Path, strategy: str) -> torch.Tensor:
    """Return the first gradient of the matrices of the blocks, flat."""
    runner = tiny(tokens, width=64, batch_size=8, context=32)
    task = build_run(runner, strategy)[0]
    forward_backward(task, task.loader.batch(0))
    named = task.model.named_parameters()
    return torch.cat(
        [
            parameter.grad.flatten()
            for name, parameter in named
            if name.startswith("blocks.") and parameter.grad is not None
        ]
    )


@pytest.mark.longer
def test_finer_casts_give_more_accurate_first_gradient(tokens: Path) -> None:
    """Relative errors are ordered fp8, fp4_block, nvfp4, fp4_direct."""
    exact = gradient(tokens, "fp32")
    errors = {strategy: float((gradient(tokens, strategy) - exact).norm() / exact.norm()) for strategy in QUANTISED}
    assert 2 * errors["fp8"] < errors["fp4_block"] < errors["nvfp4"] < errors["fp4_direct"]
    assert max(errors, key=lambda strategy: errors[strategy]) == "fp4_direct"


def spread(values: list[float]) -> float:
    return max(values) - min(values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient-to-noise ratio")
def test_metis_beats_direct_casts_beyond_seed_noise(tmp_path: Path) -> None:
    """Over three seeds, the mean gap to full precision shrinks by more than the spread between seeds."""
    gaps: dict[str, list[float]] = {"fp4_direct": [], "fp4_metis": []}
    for seed in range(3):
        config = LowbitLMConfig(**PROOF, seed=seed, output_dir=tmp_path / str(seed))
        options = RunOptions(strategies=["fp32", *gaps], with_hooks="none")
        exact, *others = (summary["final"]["val_loss"] for summary in Session(LowbitLMRunner(config), options).run())
        for strategy_gaps, loss in zip(gaps.values(), others, strict=True):
            strategy_gaps.append(abs(loss - exact))
    margin = (sum(gaps["fp4_direct"]) - sum(gaps["fp4_metis"])) / 3
    assert margin > max(map(spread, gaps.values()))
