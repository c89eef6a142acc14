"""output_logits against loops over rows in float64, with planted biases, and on runs that it cannot measure."""

import math
from types import SimpleNamespace
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import RunNotice, UsageError
from loopscope.state import without_on_demand
from loopscope.training_hooks.outputs import OutputLogits
from loopscope.training_hooks.outputs.output_logits import BINS, calibration, sum_logits
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from tests.support import differences
from tests.training_hooks.outputs.output_runs import CASES, case, cases, drawn, pair_loss, rows_of, softmax, trained


def measured(name: str, hook: OutputLogits | None = None, **options: Any) -> dict[str, Any]:
    model, loss, batch = case(name)
    return trained(model, [hook or OutputLogits(interval=1)], loss, batch, **options)[0][1]


def by_loops(rows: list[tuple[list[float], int, int]]) -> dict[str, float]:
    """Compute the measures row by row."""
    count, log_z, entropy, confidence, correct = len(rows), [], 0.0, [], []
    for logits, target, _ in rows:
        probabilities, row_log_z = softmax(logits)
        log_z.append(row_log_z)
        entropy -= sum(p * math.log(p) for p in probabilities) / count
        confidence.append(max(probabilities))
        correct.append(float(probabilities.index(max(probabilities)) == target))
    mean = sum(log_z) / count
    error = noise = 0.0
    for number in range(BINS):
        members = [i for i, p in enumerate(confidence) if number / BINS < p <= (number + 1) / BINS]
        error += abs(sum(confidence[i] - correct[i] for i in members)) / count
        p = sum(confidence[i] for i in members) / max(1, len(members))
        chances = stats.binom.pmf(range(len(members) + 1), len(members), p)
        noise += sum(chance * abs(k - len(members) * p) for k, chance in enumerate(chances)) / count
    everything = [logit for logits, _, _ in rows for logit in logits]
    return {
        "log_z_mean": mean,
        "log_z_std": math.sqrt(sum((value - mean) ** 2 for value in log_z) / count),
        "log_z_square": sum(value**2 for value in log_z) / count,
        "log_z_drift": 0.0,
        "max_logit": max(everything),
        "max_abs_logit": max(map(abs, everything)),
        "entropy": entropy,
        "entropy_share": entropy / math.log(len(rows[0][0])),
        "accuracy": sum(correct) / count,
        "confidence": sum(confidence) / count,
        "overconfidence": (sum(confidence) - sum(correct)) / count,
        "calibration_error": error,
        "calibration_noise": noise,
    }


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("name", CASES)
def test_measures_match_loops(name):
    """Rows without a target do not count, and logits of causal models are compared with the next label."""
    model, _, batch = case(name)
    model.train()
    assert measured(name) == pytest.approx(by_loops(rows_of(name, model, batch)), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("constant", [5.0, -300.0])
def test_planted_constant_moves_log_z_only(constant):
    """A constant in the head's bias changes log Z, its drift and the largest logit by itself, and nothing else."""
    torch.manual_seed(0)
    tokens = drawn(4, 6)

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.step = nn.Embedding(23, 23), 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.step += 1
            return self.embedding(tokens) + (constant if self.step > 1 else 0)

    model = Biased()
    hook = OutputLogits(interval=1)

    def frozen(model: nn.Module, batch: Any) -> Tensor:
        return 0 * pair_loss(model, batch)

    model.embedding.weight.register_hook(torch.zeros_like)
    options = {"audit": False}
    metrics, _ = trained(model, [hook], frozen, (tokens, tokens), (tokens, tokens), **options)
    first, second = metrics[1], metrics[2]
    for name in ("log_z_mean", "max_logit"):
        assert second[name] - first[name] == pytest.approx(constant, rel=2e-2)
    assert second["log_z_drift"] == pytest.approx(constant, rel=2e-2)
    for name in ("entropy", "calibration_error", "accuracy"):
        assert second[name] == pytest.approx(first[name], rel=2e-2, abs=1e-3)


@pytest.mark.longer
@pytest.mark.slow_rows("llama-3")
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", cases("llama", "lstm"))
def test_micro_batches_add_up(name, parts):
    """Also where the labels come from the batch and not with the call."""
    assert measured(name, accumulation_steps=parts) == pytest.approx(measured(name), rel=1e-4, abs=1e-6)


@pytest.mark.trainer
def test_unlabelled_logits_have_no_calibration():
    """The output calls them logits; the loss is computed elsewhere."""
    model, _, batch = case("llama")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["input_ids"]).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    metrics, _ = trained(model, [OutputLogits(interval=1)], loss, {"input_ids": batch["input_ids"]})
    assert "calibration_error" not in metrics[1]
    with torch.no_grad():
        expected = case("llama")[0](batch["input_ids"]).logits.double().logsumexp(-1).mean().item()
    assert metrics[1]["log_z_mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.trainer
def test_named_labels_and_shift_are_used():
    """The tokens are the labels of the tokens before."""
    model, _, batch = case("llama")
    tokens = batch["input_ids"]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    metrics, _ = trained(model, [OutputLogits(interval=1, labels="0", shift="yes")], loss, (tokens,))
    with torch.no_grad():
        logits = case("llama")[0](tokens).logits
    expected = (logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean().item()
    assert metrics[1]["accuracy"] == pytest.approx(expected)


@pytest.mark.longer
def test_head_is_measured_by_name():
    """A model that returns only its loss."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = case("lstm")[0]

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(self.body(tokens).flatten(0, 1), targets.flatten())

    tokens, labels = case("lstm")[2]
    hook = OutputLogits(interval=1, module="body.head")
    metrics, _ = trained(WithLoss(), [hook], lambda model, batch: model(*batch), (tokens, labels))
    assert metrics[1] == pytest.approx(measured("lstm"), rel=1e-4, abs=1e-6)


def test_regression_is_not_measured():
    """A plain output without targets that are classes may be anything: one notice, no metrics."""
    model = nn.Linear(3, 4)
    data = (torch.randn(5, 3), torch.randn(5, 4))
    with pytest.warns(
        RunNotice, match="no known targets: the labels have shape .5, 4. and dtype torch.float32"
    ) as seen:
        metrics, _ = trained(
            model,
            [OutputLogits(interval=1)],
            lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
            data,
            data,
        )
    assert metrics == {1: {}, 2: {}}
    assert len([item for item in seen if "output_logits" in str(item.message)]) == 1


def test_calls_beyond_the_batch_are_not_measured():
    """The model is called twice with the same rows, so the second call has no rows left."""
    model, _, batch = case("lstm")
    with pytest.warns(RunNotice, match="called 2 times in a step, which does not account for every row"):
        metrics, _ = trained(
            model,
            [OutputLogits(interval=1)],
            lambda model, batch: pair_loss(model, batch) + pair_loss(model, batch),
            batch,
        )
    assert metrics[1] == {}


@pytest.mark.longer
def test_model_that_is_not_called_is_reported():
    model, _, batch = case("lstm")
    outer = nn.ModuleDict({"inner": model})
    with pytest.warns(RunNotice, match="was not called in the training pass; name the module"):
        trained(outer, [OutputLogits(interval=1)], lambda outer, batch: pair_loss(outer["inner"], batch), batch)
    found, _ = trained(
        nn.ModuleDict({"inner": case("lstm")[0]}),
        [OutputLogits(interval=1, module="inner")],
        lambda outer, batch: pair_loss(outer["inner"], batch),
        batch,
    )
    assert found[1] == pytest.approx(measured("lstm"), rel=1e-6)


@pytest.mark.slow_rows("llama")
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("name", cases("llama", "segmenter"))
def test_run_has_the_bytes_of_the_bare_run(name):
    """The hook reads the logits of the training and changes no byte of it."""
    model, loss, batch = case(name)
    _, hooked = trained(model, [OutputLogits(interval=1)], loss, batch, batch)
    model, loss, batch = case(name)
    _, bare = trained(model, [], loss, batch, batch)
    assert not differences(without_on_demand(hooked.digest()), without_on_demand(bare.digest()))


@pytest.mark.slow_rows("True")
@pytest.mark.trainer
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models_have_the_same_measures(reentrant):
    model, loss, batch = case("llama")
    model._set_gradient_checkpointing(
        enable=True,
        gradient_checkpointing_func=lambda function, *inputs: torch.utils.checkpoint.checkpoint(
            function, *inputs, use_reentrant=reentrant
        ),
    )
    model.train()
    found, _ = trained(model, [OutputLogits(interval=1)], loss, batch)
    assert found[1] == pytest.approx(measured("llama"), rel=1e-5)


@pytest.mark.trainer
def test_bfloat16_logits_are_measured_in_float32():
    model, loss, batch = case("llama")
    found, _ = trained(model.bfloat16(), [OutputLogits(interval=1)], loss, batch)
    assert found[1]["log_z_mean"] == pytest.approx(measured("llama")["log_z_mean"], rel=2e-2)


@pytest.mark.parametrize("power", [-126, -40, 40, 126])
def test_powers_of_two_are_safe(power):
    """(ln Z)² neither overflows nor vanishes."""
    logits = torch.randn(5, 4) * 2.0**power
    sums, maxima = sum_logits(logits, None)
    assert sums[2].item() == pytest.approx(logits.double().logsumexp(-1).square().sum().item(), rel=1e-6)
    assert maxima[1] == logits.double().abs().max()


@pytest.mark.some_rows(2)
@pytest.mark.parametrize(("scale", "rows"), [(2, 200), (2, 4), (30, 4), (30, 1), (8, 16)])
def test_calibrated_predictions_have_the_error_of_calibration_noise(scale, rows):
    """Over draws of correct answers with the stated confidences, the mean calibration error is the noise.

    Also for few rows, and for confident models.
    """
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(rows, 10, generator=generator, dtype=torch.float64)
    probabilities, errors = logits.softmax(-1), []
    for _ in range(800):
        targets = probabilities.multinomial(1, generator=generator).squeeze(1)
        found = calibration(sum_logits(logits, targets)[0][4:].view(BINS, 3))
        errors.append(found["calibration_error"].item())
    noise, values = found["calibration_noise"].item(), torch.tensor(errors)
    assert abs(values.mean() - noise) <= max(0.06 * noise, 4 * values.std().item() / len(values) ** 0.5) + 1e-9


def test_step_without_targets_is_not_a_number(tmp_path):
    """No maximum is −∞, and the drift of later steps starts at the first step with rows."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randint(9, (3, 2, 5))
    targets = torch.stack([torch.full((2, 5), -100), inputs[1], inputs[2]])
    options = {"output_logits": {"interval": 1}}
    found = []
    with loopscope.attach(
        model, optimizer, hooks=["output_logits"], hook_options=options, out=tmp_path, display="none", log_every=1
    ) as scope:
        for batch in scope.batches([*zip(inputs, targets, strict=True)]):
            losses = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
            scope.backward(losses / 10)
            optimizer.step()
            optimizer.zero_grad()
            found.append({name: value for name, value in scope.last_metrics().items() if "output_logits" in name})
    assert all(math.isnan(value) for value in found[0].values())
    assert all(math.isfinite(value) for values in found[1:] for value in values.values())
    assert found[1]["output_logits/log_z_drift"] == 0.0


@pytest.mark.parametrize(("option", "value"), [("interval", 0), ("shift", "maybe")])
def test_invalid_options_are_refused(option, value):
    with pytest.raises(UsageError, match=f"output_logits.{option} is {value!r}"):
        OutputLogits(**{option: value})


def test_unknown_modules_are_refused():
    model, loss, batch = case("lstm")
    with pytest.raises(UsageError, match=r"output_logits.module is 'tail', which is no module of the model"):
        trained(model, [OutputLogits(module="tail")], loss, batch)


def test_fused_losses_are_reported():
    """The output has no logits in training."""
    model, _, batch = case("lstm")

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: Tensor, labels: Tensor) -> Any:
            return SimpleNamespace(loss=pair_loss(self.inner, (tokens, labels)), logits=None)

    with pytest.warns(RunNotice, match="has no logits, as with a fused loss"):
        metrics, _ = trained(Fused(), [OutputLogits(interval=1)], lambda model, batch: model(*batch).loss, batch)
    assert metrics[1] == {}
