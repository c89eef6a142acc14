"""The Fourier hook compared with planted frequencies, an explicit transform and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.training_hooks.circuits import Fourier
from loopscope.training_hooks.circuits.embeddings import first_embedding
from loopscope.training_hooks.circuits.modular_addition import one_sided_power
from loopscope.training_hooks.measures.spectra import entropy_of_shares, gini
from torch import nn

from tests.support import Case, TiedModel, train
from tests.training_hooks.epoch_end import epoch_end

signals = st.builds(
    lambda rows, columns, seed: torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)),
    st.integers(2, 30),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
shares = st.lists(st.floats(0, 1e3), min_size=1, max_size=20).filter(lambda values: sum(values) > 1e-3)


def power_by_definition(signal: np.ndarray) -> np.ndarray:
    """Return the sum of |X_k|²/n over a frequency and its conjugate, X_k = Σ x_j exp(−2πi jk/n)."""
    n = len(signal)
    angles = -2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n
    energy = (np.abs(np.exp(angles) @ signal.astype(np.float64)) ** 2).sum(axis=1) / n
    return np.array([sum(energy[bin_] for bin_ in {k, n - k}) for k in range(1, n // 2 + 1)])


@settings(deadline=None, max_examples=40)
@given(signals)
def test_power_matches_explicit_transform(signal):
    assert np.allclose(one_sided_power(signal).numpy(), power_by_definition(signal.numpy()), atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(signals)
def test_power_equals_numpys_two_sided_transform(signal):
    two_sided = (np.abs(np.fft.fft(signal.numpy().astype(np.float64), axis=0)) ** 2).sum(axis=1) / len(signal)
    assert np.isclose(one_sided_power(signal).sum().item(), two_sided[1:].sum())


@settings(deadline=None, max_examples=40)
@given(signals)
def test_powers_sum_to_squared_distance_from_mean(signal):
    """The mean is that over the tokens, in every dimension of the embedding."""
    wide = signal.double()
    assert math.isclose(one_sided_power(signal).sum(), (wide - wide.mean(dim=0)).square().sum(), rel_tol=1e-9)


@settings(deadline=None, max_examples=20)
@given(signals, st.floats(-100, 100))
def test_power_ignores_a_constant_offset(signal, constant):
    assert torch.allclose(one_sided_power(signal.double() + constant), one_sided_power(signal), atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(signals, st.integers(0, 29))
def test_power_ignores_rotation_of_tokens(signal, shift):
    assert torch.allclose(one_sided_power(signal.roll(shift, dims=0)), one_sided_power(signal), atol=1e-9)


@pytest.mark.parametrize("frequency", [1, 5, 48])
def test_planted_wave_has_power_only_at_its_frequency(frequency):
    phase = torch.tensor([0.0, 1.0, 2.0])
    wave = 3 * torch.cos(2 * torch.pi * frequency * torch.arange(97).double()[:, None] / 97 + phase)
    power = one_sided_power(wave)
    assert power.shape == (48,)
    assert math.isclose(power[frequency - 1], 3 * 97 * 9 / 2, rel_tol=1e-12)
    assert power.sum() - power[frequency - 1] < 1e-9


def test_nyquist_frequency_counts_once():
    """This frequency is its own conjugate."""
    alternating = torch.tensor([1.0, -1.0] * 4)[:, None]
    assert torch.allclose(one_sided_power(alternating), torch.tensor([0, 0, 0, 8.0], dtype=torch.float64))


@pytest.mark.longer
@given(shares)
def test_gini_is_mean_difference_over_twice_mean(values):
    x = np.array(values)
    by_pairs = np.abs(x[:, None] - x[None, :]).mean() / (2 * x.mean())
    assert math.isclose(gini(torch.tensor(values, dtype=torch.float64)), by_pairs, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([2, 2, 2, 2], 0), ([0, 0, 0, 7], 3 / 4), ([1, 2, 3, 4, 5], 4 / 15), ([5], 0), ([0, 1, 1, 0], 1 / 2)],
)
def test_gini_has_its_closed_forms(values, expected):
    assert math.isclose(gini(torch.tensor(values, dtype=torch.float64)), expected, abs_tol=1e-12)


def test_gini_of_zeros_is_nan():
    assert gini(torch.zeros(3)).isnan()


@given(shares)
def test_entropy_lies_between_one_and_all_frequencies(values):
    fractions = torch.tensor(values, dtype=torch.float64) / sum(values)
    by_hand = -sum(float(f) * math.log(f) for f in fractions if f > 0)
    entropy = entropy_of_shares(fractions)
    assert math.isclose(entropy, by_hand, abs_tol=1e-12)
    assert -1e-12 <= entropy <= math.log(len(values)) + 1e-12


def test_equal_shares_give_as_many_effective_frequencies():
    assert math.isclose(entropy_of_shares(torch.full((6,), 1 / 6, dtype=torch.float64)).exp(), 6, rel_tol=1e-12)


def embed_waves(model: nn.Module, amplitudes: dict[int, float]) -> None:
    """Make the first two columns of the embedding cosines and sines with the given amplitudes."""
    tokens = torch.arange(model.embedding.num_embeddings)
    with torch.no_grad():
        model.embedding.weight.zero_()
        for frequency, amplitude in amplitudes.items():
            angle = 2 * torch.pi * frequency * tokens / len(tokens)
            model.embedding.weight[:, 0] += amplitude * angle.cos()
            model.embedding.weight[:, 1] += amplitude * angle.sin()


@torch.no_grad()
def test_planted_frequencies_and_shares_are_reported():
    model = TiedModel()
    embed_waves(model, {2: 3.0, 3: 1.0})
    metrics = Fourier(top_k=2).compute(epoch_end(model))
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert metrics["key_frequencies"] == [2, 3]
    assert metrics["key_fractions"] == pytest.approx([0.9, 0.1])
    assert metrics["top_k_fraction"].item() == pytest.approx(1)
    assert metrics["total_power"].item() == pytest.approx(7 * (9 + 1))
    assert metrics["gini"].item() == pytest.approx((0 * -2 + 1 * 0 + 9 * 2) / (3 * 10))
    assert metrics["entropy"].item() == pytest.approx(entropy)
    assert metrics["effective_frequencies"].item() == pytest.approx(math.exp(entropy))


def test_period_excludes_extra_tokens():
    run = train(Case("tied"), [Fourier(period=6, top_k=3)])
    metrics, *_ = run.sink.emitted[0]
    expected = one_sided_power(run.task.model.embedding.weight.detach()[:6])
    assert metrics["fourier/total_power"] == expected.sum().item()
    assert sorted(metrics["fourier/key_frequencies"]) == [1, 2, 3]


def test_parameter_name_can_replace_the_first_embedding():
    run = train(Case("tied"), [Fourier(embedding="mix.weight", top_k=1)])
    metrics, *_ = run.sink.emitted[0]
    assert metrics["fourier/total_power"] == one_sided_power(run.task.model.mix.weight.detach()).sum().item()


@torch.no_grad()
def test_a_constant_embedding_has_no_spectrum():
    model = TiedModel()
    model.embedding.weight.copy_(torch.randn(8).expand(7, 8))
    metrics = Fourier(top_k=1).compute(epoch_end(model))
    assert metrics["total_power"] == 0
    assert metrics["gini"].isnan()


def test_first_embedding_is_found_at_any_depth():
    assert first_embedding(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Embedding(3, 2))), "x") == "1.0.weight"
    assert first_embedding(nn.Embedding(3, 2), "x") == "weight"


def test_model_without_embedding_is_refused():
    """The error lists the modules and the option fourier.embedding."""
    with pytest.raises(
        UsageError, match=r"no nn\.Embedding.*0 \(Linear\), 1 \(BatchNorm1d\).*'fourier': {'embedding': 'NAME'}"
    ):
        train(Case("batchnorm_mlp"), [Fourier()])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"embedding": "embeding.weight"}, "Did you mean 'embedding.weight'"),
        ({"embedding": "mix.bias"}, "must be a matrix"),
        ({"period": 8}, "has 7 rows"),
        ({"stride": 4}, "7 rows have only 3 frequencies"),
        ({"decoder": "mix.bias"}, "fourier.decoder is 'mix.bias', of shape"),
    ],
)
def test_options_that_contradict_the_model_are_refused(options, sentence):
    """The run does not start."""
    with pytest.raises(UsageError, match=sentence):
        train(Case("tied"), [Fourier(**{"top_k": 1, **options})])


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"period": 1}, {"period": -3}, {"stride": -1}, {"rows": -1}, {"key_factor": 0}]
)
def test_options_out_of_range_are_refused_at_construction(options):
    with pytest.raises(UsageError, match=f"{next(iter(options))} is {next(iter(options.values()))}"):
        Fourier(**options)
