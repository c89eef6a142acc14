"""Activations of real models: equal to those captured by hand, for every kind of step."""

import json
import math
from functools import partial

import loopscope
import numpy as np
import pytest
import torch
from loopscope.errors import UnsuitableError, UsageError
from loopscope.training_hooks import Activations
from torch import distributed, nn
from torch.utils._pytree import tree_leaves

from tests.support import Case, train
from tests.support.ranks import on_ranks
from tests.support.tiny_transformers import ARCHITECTURES, build, micro_batches


def captured(name: str, count: int, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """Return the outputs of a model's modules in a first step, as float64 arrays of shape (tokens, units)."""
    model, batch, loss = build(name)
    seen: dict[str, list[np.ndarray]] = {}

    def keep(module: str, output: object) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        values = torch.atleast_1d(tensors[0].detach().double())
        values = values.movedim(1, -1) if values.ndim == 4 else values
        seen.setdefault(module, []).append(values.reshape(-1, values.shape[-1]).numpy())

    for module, child in model.named_modules():
        child.register_forward_hook(lambda _, inputs, output, module=module: keep(module, output))
    for part in micro_batches(batch, count):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss(model, part)
    return {module: np.concatenate(arrays) for module, arrays in seen.items() if len({a.shape[1] for a in arrays}) == 1}


def recorded(folder, name: str, count: int = 1, dtype: torch.dtype = torch.float32, **options) -> dict[str, float]:
    """Return the metrics of the first step of an attached loop, by name within the hook."""
    model, batch, loss = build(name)
    if options.pop("recompute", False):
        model.activation_checkpointing_enable({"use_reentrant": options.pop("use_reentrant")})
        model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook_options = {"activations": {"names": "*"}}
    choices = {"out": folder / name, "display": "none", "accumulate": count, "hook_options": hook_options}
    with loopscope.attach(model, optimizer, hooks=["activations"], **choices) as scope:
        for index, part in enumerate(scope.batches(micro_batches(batch, count)), start=1):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                value = loss(model, part)
            scope.backward(value)
            if index == count:
                optimizer.step()
    lines = (folder / name / f"{name}.jsonl").read_text().splitlines()
    rows = {key: value for line in lines for key, value in json.loads(line).items() if key.startswith("activations/")}
    return {key.removeprefix("activations/"): value["values"][0] for key, value in rows.items()}


def assert_equal_to_captured(values: dict[str, float], arrays: dict[str, np.ndarray]) -> None:
    measured = [key.removeprefix("rms/") for key in values if key.startswith("rms/")]
    assert measured
    for module in measured:
        x = arrays[module]
        sizes = (x**2).mean(0)
        assert values[f"rms/{module}"] == pytest.approx(math.sqrt((x**2).mean()), rel=1e-4)
        assert values[f"max_abs/{module}"] == pytest.approx(np.abs(x).max(), rel=1e-6)
        assert values[f"outlier_kurtosis/{module}"] == pytest.approx((sizes**2).mean() / sizes.mean() ** 2, rel=1e-4)
        if f"dead_fraction/{module}" in values:
            assert values[f"dead_fraction/{module}"] == (np.ptp(x, axis=0) <= 1e-6 * np.abs(x).max()).mean()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_match_captured_outputs(tmp_path, name):
    """Blocks and activation functions of five architectures, in one pass."""
    assert_equal_to_captured(recorded(tmp_path, name), captured(name, 1))


@pytest.mark.longer
@pytest.mark.parametrize("name", ["vit", "llama", "lstm"])
@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_equal_the_whole_batch(tmp_path, name, count):
    values, whole = recorded(tmp_path, name, count), recorded(tmp_path / "whole", name)
    assert values == pytest.approx(whole, rel=1e-4, nan_ok=True)


@pytest.mark.longer
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["vit", "llama", "mixtral"])
def test_checkpointed_models_are_measured_once(tmp_path, name, use_reentrant):
    plain = recorded(tmp_path, name)
    recomputed = recorded(tmp_path / "recomputed", name, recompute=True, use_reentrant=use_reentrant)
    assert recomputed == pytest.approx(plain, rel=1e-4, nan_ok=True)


@pytest.mark.longer
@pytest.mark.parametrize("name", ["llama", "convnet"])
def test_autocast_outputs_are_measured_as_computed(tmp_path, name):
    """The outputs are those of the pass in bfloat16."""
    assert_equal_to_captured(recorded(tmp_path, name, 1, torch.bfloat16), captured(name, 1, torch.bfloat16))


def test_growth_compares_neighbouring_blocks(tmp_path):
    values = recorded(tmp_path, "llama")
    sizes = values["rms/model.layers.1"] / values["rms/model.layers.0"]
    assert values["growth/model.layers.1"] == pytest.approx(sizes)
    assert "growth/model.layers.0" not in values


class Deep(nn.Sequential):
    """Forty blocks."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(40)), nn.Linear(4, 3))


@pytest.mark.longer
def test_budget_limits_every_family(tmp_path):
    """Of 40 blocks, the ten largest and the five smallest values of each family are reported, and all are written."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"activations": {"write_all": True}}
    with loopscope.attach(
        model, optimizer, hooks=["activations"], hook_options=options, out=tmp_path / "deep", display="none"
    ) as scope:
        for batch in scope.batches([torch.randn(8, 4)]):
            scope.backward(model(batch).square().mean())
            optimizer.step()
    (line,) = (tmp_path / "deep" / "deep.activations.jsonl").read_text().splitlines()
    everything = json.loads(line)
    assert len(everything["rms"]) == 80
    rows = [json.loads(row) for row in (tmp_path / "deep" / "deep.jsonl").read_text().splitlines()]
    names = [key for row in rows for key in row if key.startswith("activations/rms/")]
    ranked = sorted(everything["rms"], key=everything["rms"].get)
    assert {name.removeprefix("activations/rms/") for name in names} == {*ranked[:5], *ranked[-10:]}


def test_models_without_subjects_are_refused():
    with pytest.raises(UnsuitableError, match=r"has neither; name modules with activations\.modules"):
        train(Case("tied"), [Activations()])


@pytest.mark.parametrize("options", [{"interval": 0}, {"dormant_threshold": 1.0}, {"top": -1}])
def test_invalid_options_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=f"activations.{name} is {value}; "):
        Activations(**options)


def test_patterns_without_modules_are_refused():
    with pytest.raises(UsageError, match=r"activations\.modules has the pattern 'nine\.\*', which matches no"):
        train(Case(), [Activations(modules="0, nine.*")])


class Experts(nn.Module):
    """Two experts, each for the rows that name it; an expert without rows is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU()) for _ in range(2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        parts = [expert(x[choice == place]) for place, expert in enumerate(self.experts) if (choice == place).any()]
        return self.out(torch.cat(parts))


def of_experts(folder, choice: list[int], *, dead: int = 4, ranks: bool = False) -> dict[str, float]:
    """Return the metrics of the experts after one step, with ``dead`` dead units in the first one."""
    torch.manual_seed(0)
    model, rows = Experts(), torch.randn(len(choice), 4)
    model.experts[0][0].bias.data[:dead] = -50.0
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ranks else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"activations": {"modules": "experts.*.1", "names": "*"}}
    with loopscope.attach(
        parallel, optimizer, hooks=["activations"], hook_options=options, out=folder, display="none"
    ) as scope:
        for batch in scope.batches([(rows, torch.tensor(choice))]):
            scope.backward(parallel(*batch).square().mean())
            optimizer.step()
        metrics = scope.last_metrics()
    return {name.removeprefix("activations/"): value for name, value in metrics.items()}


@pytest.mark.parametrize("dead", [4, 8])
def test_undefined_values_hide_no_others(tmp_path, dead):
    """An expert with one token has no dead units, one whose outputs are 0 no kurtosis: the largest are of the other."""
    values = of_experts(tmp_path / "run", [0] * 8 + [1], dead=dead)
    assert math.isnan(values["dead_fraction/experts.1.1"])
    assert values["largest_dead_fraction"] == values["dead_fraction/experts.0.1"] == dead / 8
    kurtoses = [values[f"outlier_kurtosis/experts.{place}.1"] for place in range(2)]
    assert values["largest_outlier_kurtosis"] == max(value for value in kurtoses if not math.isnan(value))


def test_single_tokens_alone_are_undefined(tmp_path):
    assert math.isnan(of_experts(tmp_path / "run", [0, 1])["largest_dead_fraction"])


def expert_of_one_rank(folder) -> dict[str, float]:
    """Only the last rank has rows for the second expert."""
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    return of_experts(folder, [0, 0, 0, 1, 1, 1] if is_last else [0] * 6, ranks=True)


@pytest.mark.ranks
def test_module_of_one_rank_is_measured(tmp_path):
    """The values of a module cover the ranks that call it."""
    torch.manual_seed(0)
    model, rows = Experts(), torch.randn(6, 4)
    expected = model.experts[1](rows[3:]).detach()
    for values in on_ranks(partial(expert_of_one_rank, tmp_path / "run"), tmp_path, 3):
        assert values["max_abs/experts.1.1"] == pytest.approx(expected.abs().max().item())
        assert values["rms/experts.1.1"] == pytest.approx(expected.square().mean().sqrt().item())
        assert values["dead_fraction/experts.0.1"] == 0.5
