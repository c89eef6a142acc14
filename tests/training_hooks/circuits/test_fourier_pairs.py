"""The Fourier hook on pairs of tokens, compared with NumPy's transforms and planted models."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.circuits import Fourier, fourier
from loopscope.training_hooks.circuits.embeddings import feed_forward_inputs, output_projection
from loopscope.training_hooks.circuits.fourier import acquisition, fixed_rows, neuron_spectra, sampled_rows
from loopscope.training_hooks.circuits.modular_addition import (
    ablated_losses,
    data_stride,
    one_sided_power,
    rows_of_pairs,
    stride_harmonics,
    token_pairs,
    waves,
)
from loopscope.training_hooks.measures.spectra import gini
from torch import nn
from torch.nn import functional

from tests.support import (
    BATCH,
    ROWS,
    TOKENS,
    Case,
    RecordingSink,
    TiedModel,
    TokenConfig,
    data_for,
    mean_loss,
    run_info,
    train,
    transformer,
)
from tests.training_hooks.epoch_end import epoch_end

LOSSES = ("restricted_loss", "excluded_loss", "full_loss", "full_train_loss")


def grid(p):
    return rows_of_pairs(torch.arange(p), p)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def measure(pairs, logits, p, frequencies, training_pairs, pieces=1):
    parts = list(zip(pairs.chunk(pieces), logits.chunk(pieces), strict=True))
    found = ablated_losses(lambda: parts, p, torch.tensor(frequencies), training_pairs)
    return {name: value.item() for name, value in found.items()}


def part_by_numpy(logits, p, frequencies):
    """Keep only (k, k) and (−k, −k) of the two-dimensional transform of logits on the full grid."""
    transform = np.fft.fft2(logits.numpy().reshape(p, p, p), axes=(0, 1))
    kept = np.zeros_like(transform)
    for k in frequencies:
        for index in {k, p - k}:
            kept[index, index] = transform[index, index]
    return torch.from_numpy(np.fft.ifft2(kept, axes=(0, 1)).real.reshape(p * p, p))


@pytest.mark.parametrize(("p", "frequencies", "pieces"), [(7, [1, 3], 1), (8, [4, 1, 2], 3), (11, [5], 4), (2, [1], 1)])
def test_losses_match_logits_masked_by_numpy_fft(p, frequencies, pieces):
    """Restricted and excluded losses match NumPy for several moduli and piece sizes."""
    pairs, logits, trained = grid(p), noise(p * p, p), torch.arange(p * p) % 3 == 0
    part, sums = part_by_numpy(logits, p, frequencies), pairs.sum(dim=1) % p
    restricted = functional.cross_entropy(logits.mean(dim=0) + part, sums)
    excluded = functional.cross_entropy((logits - part)[trained], sums[trained])
    assert measure(pairs, logits, p, frequencies, pairs[trained], pieces) == pytest.approx(
        {
            "restricted_loss": restricted.item(),
            "excluded_loss": excluded.item(),
            "full_loss": functional.cross_entropy(logits, sums).item(),
            "full_train_loss": functional.cross_entropy(logits[trained], sums[trained]).item(),
        }
    )


def clock(pairs, p, frequencies, height=3.0):
    """Return the logits of a model that adds on circles, Σ_k height·cos(2πk(a + b − c)/p)."""
    turns = pairs.sum(dim=1)[:, None] - torch.arange(p)
    return sum(height * torch.cos(2 * math.pi * k * turns.double() / p) for k in frequencies)


def test_used_frequencies_carry_the_whole_loss():
    """The restricted loss equals the full loss, and the excluded loss is that of chance."""
    pairs = grid(13)
    losses = measure(pairs, clock(pairs, 13, [2, 5]), 13, [2, 5], pairs[::2])
    assert losses["restricted_loss"] == pytest.approx(losses["full_loss"])
    assert losses["excluded_loss"] == pytest.approx(math.log(13))


def test_excluding_unused_frequencies_changes_no_loss():
    """The restricted loss is then that of chance."""
    pairs = grid(13)
    losses = measure(pairs, clock(pairs, 13, [2, 5]), 13, [1, 3], pairs)
    assert losses["restricted_loss"] == pytest.approx(math.log(13))
    assert losses["excluded_loss"] == pytest.approx(losses["full_train_loss"])


def test_exclusion_hardly_affects_memorising_model():
    pairs = grid(31)
    sums = pairs.sum(dim=1) % 31
    trained = torch.rand(len(pairs), generator=torch.Generator().manual_seed(1)) < 0.3
    logits = 8 * functional.one_hot(sums, 31).double() * trained[:, None]
    losses = measure(pairs, logits, 31, [3], pairs[trained])
    assert losses["full_train_loss"] < losses["excluded_loss"] < losses["full_train_loss"] + 0.02
    assert losses["restricted_loss"] > 3


@settings(deadline=None, max_examples=20)
@given(st.sets(st.integers(0, 12), min_size=1))
def test_sum_only_logits_have_equal_losses_on_subsets(rows):
    """The losses on any subset of rows equal those on all pairs."""
    some, table = rows_of_pairs(torch.tensor(sorted(rows)), 13), noise(13, 13)
    on_some, on_all = (measure(pairs, table[pairs.sum(dim=1) % 13], 13, [2, 6], pairs) for pairs in (some, grid(13)))
    assert on_some == pytest.approx(on_all)


def test_excluded_loss_is_nan_without_training_pairs():
    losses = measure(grid(5), noise(25, 5), 5, [1], torch.empty(0, 2, dtype=torch.long))
    assert math.isnan(losses["excluded_loss"])
    assert losses["full_loss"] > 0


@pytest.mark.longer
@given(st.integers(2, 30).flatmap(lambda p: st.tuples(st.just(p), st.sets(st.integers(1, p // 2), min_size=1))))
def test_the_waves_are_orthonormal_and_have_no_mean(case):
    p, frequencies = case
    columns = waves(p, torch.tensor(sorted(frequencies)))
    lengths = torch.tensor([1.0] * (2 * len(frequencies)), dtype=torch.float64)
    lengths[-1] = 0 if 2 * max(frequencies) == p else 1
    assert torch.allclose(columns.T @ columns, lengths.diag(), atol=1e-12)
    assert torch.allclose(columns.sum(dim=0), torch.zeros(()).double(), atol=1e-12)


def test_sampled_rows_are_distinct_and_sorted():
    """All rows are returned if they fit."""
    assert sampled_rows(5, 9).tolist() == sampled_rows(5, 5).tolist() == [0, 1, 2, 3, 4]
    drawn = sampled_rows(100, 30).tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 30


def leaky(p, seed=0):
    """Return logits with waves in a + b, in a − b and in b alone, and noise; shape (p², p)."""
    (a, b), c = grid(p).T[:, :, None], torch.arange(p)
    turns = [(2.0, a + b - c), (1.5, a - b - c), (1.0, b - 2 * c)]
    return sum(h * torch.cos(4 * math.pi * t.double() / p) for h, t in turns) + noise(p * p, p, seed=seed) / 2


def on_groups(logits, p, groups, frequencies, training_pairs):
    pieces = [(rows_of_pairs(rows, p), logits.view(p, p, p)[rows].flatten(0, 1)) for rows in groups]
    found = ablated_losses(lambda: pieces, p, torch.tensor(frequencies), training_pairs, groups)
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (1,) * 6])
def test_few_row_bias_and_error_match_jackknife(sizes):
    """Bias and error match a grouped jackknife computed in NumPy."""
    p, logits, trained = 13, leaky(13), grid(13)[::2]
    rows = torch.randperm(p, generator=torch.Generator().manual_seed(2))[: sum(sizes)]
    groups = rows.split(sizes)

    def losses(some):
        picked = torch.cat(some)
        return measure(rows_of_pairs(picked, p), logits.view(p, p, p)[picked].flatten(0, 1), p, [2], trained)

    everything, count, unseen = losses(groups), len(sizes), 1 - sum(sizes) / p
    left = [losses([other for other in groups if other is not group]) for group in groups]
    expected = dict(everything)
    for name in LOSSES:
        values = np.array([each[name] for each in left])
        expected[f"{name}_error"] = math.sqrt(unseen * (count - 1) * values.var())
        if not name.startswith("full"):
            expected[f"{name}_bias"] = unseen * (count - 1) * (values.mean() - everything[name])
    assert on_groups(logits, p, groups, [2], trained) == pytest.approx(expected)


def scatter_of_few_rows(trials):
    """Return observed and stated bias, and observed and stated scatter, of each loss over draws of 6 of 17 rows."""
    p, logits, trained = 17, leaky(17), grid(17)[::3]
    truth, generator = measure(grid(p), logits, p, [2], trained), torch.Generator().manual_seed(0)
    found = [
        on_groups(logits, p, torch.randperm(p, generator=generator)[:6].split(1), [2], trained) for _ in range(trials)
    ]
    columns = {name: np.array([each[name] for each in found]) for name in found[0]}
    return {
        name: (
            columns[name].mean() - truth[name],
            columns.get(f"{name}_bias", np.zeros(1)).mean(),
            (columns[name] - columns.get(f"{name}_bias", 0)).std(),
            math.sqrt((columns[f"{name}_error"] ** 2).mean()),
        )
        for name in LOSSES
    }


@pytest.mark.longer
@pytest.mark.parametrize("trials", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_few_row_estimates_stay_within_stated_error(trials):
    """Over many draws, bias and scatter agree with the reported bias and error."""
    for name, (bias, stated_bias, scatter, stated) in scatter_of_few_rows(trials).items():
        assert abs(bias - stated_bias) < 0.25 * stated + 3 * scatter / math.sqrt(trials), name
        assert 0.8 * scatter < stated < 2 * scatter, name


def test_fixed_rows_are_reproducible_disjoint_groups():
    """The random seed has no effect on them."""
    groups = fixed_rows(97, 40)
    torch.manual_seed(5)
    assert [group.tolist() for group in fixed_rows(97, 40)] == [group.tolist() for group in groups]
    assert len(groups) == 16
    assert len(set(torch.cat(groups).tolist())) == 40
    assert [group.tolist() for group in fixed_rows(5, 9)] == [[0, 1, 2, 3, 4]]
    assert [len(group) for group in fixed_rows(97, 3)] == [1, 1, 1]


def test_neuron_spectra_match_numpy():
    layers = [noise(3 * 7, 2, 4), noise(3 * 7, 5, seed=1)]
    expected = []
    for layer in layers:
        by_row = layer.view(3, 7, -1, layer.shape[-1]).numpy()
        energy = (np.abs(np.fft.fft(by_row, axis=1)) ** 2 / 7).sum(axis=(0, 2))
        expected.append(energy[1:4] + energy[:3:-1])
    assert np.allclose(neuron_spectra(layers, 7).numpy(), np.concatenate(expected, axis=1))


class Circles(nn.Module):
    """An MLP on pairs whose neurons are planted waves of b with two frequencies."""

    def __init__(self, p=11, frequencies=(2, 5)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(p, 4)
        self.up, self.down, self.decoder = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, p)
        angles = 2 * math.pi * torch.outer(torch.arange(p), torch.tensor(frequencies)) / p
        with torch.no_grad():
            self.embedding.weight.copy_(torch.cat([angles.cos(), angles.sin()], dim=1))
            self.up.weight.copy_(torch.eye(4).repeat(2, 1))
            self.up.weight[0] *= 3

    def forward(self, pairs):
        return self.decoder(self.down(functional.relu(self.up(self.embedding(pairs).sum(dim=1)))))


def all_pairs(p=11, width=2, operation=torch.add):
    """Return a loader of all p² pairs; a width of 3 repeats the first token."""
    pairs = grid(p)
    inputs = torch.cat([pairs, pairs[:, :1]], dim=1)[:, :width]
    return TensorLoader((inputs, operation(pairs[:, 0], pairs[:, 1]) % p), 16, fixed_order(torch.arange(p * p)))


def reported(model, loader, point=HookPoint.SNAPSHOT, *, config=None, reference=None, **options):
    """Return the metrics of the hook at one point of a run without a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    task = TrainingTask(model, optimizer, loader, mean_loss, length=1, config=config)
    sink = RecordingSink()
    state = TrainingState(model, optimizer, RandomStreams(7))
    hooks = [Fourier(top_k=2, **options)]
    manager = HookManager(
        hooks, task, state, sinks=[sink], audit=True, required=["fourier"], reference_weights=reference
    )
    manager.start(replace(run_info(task, manager, "epoch"), reference_weights=reference))
    manager.fire(point)
    manager.end("completed")
    return {name.removeprefix("fourier/"): value for emitted in sink.emitted for name, value in emitted[0].items()}


def test_planted_neurons_are_pure_and_show_their_frequencies():
    metrics = reported(Circles(), all_pairs())
    assert metrics["neuron_key_frequencies"] == [2, 5]
    assert metrics["neuron_key_fractions"] == pytest.approx([12 / 16, 4 / 16])
    assert [metrics["neuron_top_k_fraction"], metrics["neuron_purity"]] == pytest.approx([1, 1])
    assert metrics["neuron_gini"] == pytest.approx((4 * 12 + 2 * 4) / (5 * 16))


@pytest.mark.parametrize("piece", [16, 10**6])
def test_hook_reports_losses_of_all_pairs(piece, monkeypatch):
    """Losses match those of the logits of the model for every batch size."""
    monkeypatch.setattr(fourier, "PAIRS_AT_ONCE", piece)
    model, loader = Circles().double(), all_pairs()
    metrics = reported(model, loader)
    with torch.no_grad():
        expected = measure(grid(11), model(grid(11)), 11, [2, 5], grid(11))
    assert {name: metrics[name] for name in LOSSES} == pytest.approx(expected)


@pytest.mark.longer
@pytest.mark.parametrize("cached", [10**9, 1])
@pytest.mark.parametrize("options", [{"rows": 5}, {}])
def test_many_pairs_use_fixed_rows_with_errors(options, cached, monkeypatch):
    """Losses, bias and error match those of the same groups of rows."""
    monkeypatch.setattr(fourier, "ALL_PAIRS", 10 * 11)
    monkeypatch.setattr(fourier, "GROUPS", 8)
    monkeypatch.setattr(fourier, "LOGITS_AT_ONCE", cached)
    model, groups = Circles().double(), fixed_rows(11, options.get("rows", 10))
    metrics = reported(model, all_pairs(), **options)
    with torch.no_grad():
        expected = on_groups(model(grid(11)), 11, groups, [2, 5], grid(11))
    assert {f"{name}_error" for name in LOSSES} < set(expected)
    assert metrics["loss_rows"] == sum(map(len, groups))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.longer
def test_all_pairs_have_no_bias_or_error():
    """With a single row there is a notice that errors need at least two rows."""
    names = set(reported(Circles(), all_pairs()))
    assert not [name for name in names if name.endswith(("_bias", "_error"))]
    with pytest.warns(RunNotice, match=r"fourier\.rows is 1; .* need at least 2 rows"):
        assert set(reported(Circles(), all_pairs(), rows=1)) == names


@pytest.mark.parametrize("given", ["a list", "reference"])
def test_the_frequencies_of_the_losses_can_be_fixed(given):
    model, final = Circles().double(), Circles(frequencies=(3, 1))
    weights = {name: value.detach() for name, value in final.named_parameters()}
    option = [3, 1] if given == "a list" else "reference"
    metrics = reported(model, all_pairs(), reference=weights, frequencies=option)
    with torch.no_grad():
        expected = measure(grid(11), model(grid(11)), 11, [3, 1], grid(11))
    assert {name: metrics[name] for name in LOSSES} == pytest.approx(expected)
    assert sorted(metrics["loss_frequencies"]) == [1, 3]
    assert sorted(reported(model, all_pairs())["loss_frequencies"]) == [2, 5]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("reference", "the run has no reference solution.*reference='PATH'"),
        ([2, 6], "names 6; 11 rows have .* 1 to 5"),
        ([0, 1.5], "names 0, 1.5;"),
    ],
)
def test_unavailable_frequencies_are_refused_before_run(option, sentence):
    """A missing reference solution and impossible frequencies raise."""
    with pytest.raises(UsageError, match=sentence):
        reported(Circles(), all_pairs(), frequencies=option)


@pytest.mark.parametrize("option", ["later", [], [2, 2]])
def test_invalid_frequency_option_is_refused_at_construction(option):
    with pytest.raises(
        UsageError, match=r"fourier\.frequencies is .*; it must be now, reference or a list of different"
    ):
        Fourier(frequencies=option)


@pytest.mark.parametrize(
    ("loader", "options"),
    [(all_pairs(operation=torch.mul), {}), (all_pairs(), {"rows": 0}), (all_pairs(), {"period": 10})],
    ids=["products", "no rows", "a period that is not the number of classes"],
)
def test_undefined_losses_are_omitted(loader, options):
    """Other operations, no rows or another period leave the other metrics in place."""
    metrics = reported(Circles(), loader, **options)
    assert "neuron_purity" in metrics
    assert not set(LOSSES) & set(metrics)


def test_non_pair_inputs_measure_weights_only():
    assert reported(Circles(), all_pairs(width=3)) == {}
    assert "decoder_gini" in reported(Circles(), all_pairs(width=3), HookPoint.POST_EPOCH)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 2),
        (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)),
        (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long)),
        (torch.zeros(4, 2, dtype=torch.long), torch.zeros(4)),
        (torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long)),
        {"inputs": torch.zeros(4, 2, dtype=torch.long)},
    ],
)
def test_token_pairs_need_integer_pairs_and_targets(batch):
    """Other batches give no pairs."""
    assert token_pairs(batch) is None


def teach_sums(task, state):
    inputs, _ = data_for("transformer")
    task.loader = TensorLoader((inputs, inputs.sum(dim=1) % TOKENS), BATCH, fixed_order(torch.arange(ROWS)))


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("model", ["transformer", "tied"])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_fourier_hook_leaves_run_bytes_unchanged(model, loop):
    """The hook reports all losses on a run that learns sums."""
    case = Case(model, loop=loop)
    bare, hooked = (train(case, hooks, steps=6, introduce=teach_sums) for hooks in ([], [Fourier()]))
    assert hooked.digests == bare.digests
    assert {f"fourier/{name}" for name in LOSSES} <= {name for name, *_ in hooked.sink.rows("fourier/")}


def test_decoder_spectrum_matches_embedding():
    model = Circles()
    with torch.no_grad():
        model.decoder.weight.copy_(torch.roll(model.embedding.weight, 3, dims=0))
        model.decoder.weight[:, 1::2] *= 2
    metrics = reported(model, all_pairs(), HookPoint.POST_EPOCH)
    assert metrics["decoder_key_frequencies"] == [5, 2]
    assert metrics["decoder_key_fractions"] == pytest.approx([0.8, 0.2])
    assert metrics["decoder_top_k_fraction"] == pytest.approx(1)


def test_decoder_is_found_unless_tied():
    """It is the last layer with a row per token, and an option can name another one."""
    assert output_projection(Circles(), "embedding.weight") == "decoder.weight"
    assert output_projection(TiedModel(), "embedding.weight") == ""
    run = train(Case("tied"), [Fourier(decoder="mix.weight")])
    expected = gini(one_sided_power(run.task.model.mix.weight.detach()[:7]))
    assert run.sink.emitted[0][0]["fourier/decoder_gini"] == expected.item()


def test_feed_forward_layers_are_found_by_their_shapes():
    assert feed_forward_inputs(transformer()) == ["blocks.0.ff_in"]
    assert feed_forward_inputs(nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)) == ["linear1"]
    assert feed_forward_inputs(TiedModel()) == []


flags = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12)


@given(flags)
def test_frequency_date_starts_its_last_series(history):
    """A frequency that is absent at the end has no date."""
    since = torch.full((3,), math.nan, dtype=torch.float64)
    for epoch, now in enumerate(history):
        since = acquisition(since, torch.tensor(now), 10 + epoch)
    for k in range(3):
        series = [now[k] for now in history]
        length = len(series) if all(series) else series[::-1].index(False)
        assert since[k].isnan() if length == 0 else since[k] == 10 + len(series) - length


def plant(model, *strong):
    """Give an embedding equal power at all frequencies, and much more at those in ``strong``."""
    tokens = torch.arange(97)
    waves_of = [torch.cos(2 * math.pi * k * tokens / 97) * (10 if k in strong else 1) for k in range(1, 49)]
    with torch.no_grad():
        model.weight.copy_(torch.stack(waves_of, dim=1))
    return model


@torch.no_grad()
def test_planted_frequencies_are_acquired_and_lost():
    """Dates match the planted epochs, survive a saved state, and restart after a reset."""
    model, hook = nn.Embedding(97, 48), Fourier(top_k=2)
    for epoch, strong in enumerate([(), (5,), (5, 7), (7,), (7, 9), (7, 9)]):
        metrics = hook.compute(epoch_end(plant(model, *strong), epoch=epoch))
        epochs = dict(zip(map(int, metrics["key_frequencies"]), map(float, metrics["acquired_epochs"]), strict=True))
        assert metrics["acquired_count"] == len(strong)
        assert {k: epochs[k] for k in strong} == {k: {5: 1, 7: 2, 9: 4}[k] for k in strong}
    fresh = Fourier(top_k=2)
    fresh.load_state_dict(hook.state_dict())
    assert str(fresh.compute(epoch_end(model, epoch=6))) == str(hook.compute(epoch_end(model, epoch=6)))
    hook.reset()
    assert set(map(float, hook.compute(epoch_end(model, epoch=8))["acquired_epochs"])) == {8.0}


@pytest.mark.parametrize(("p", "stride"), [(97, 9), (113, 10), (101, 4)])
def test_stride_harmonics_are_strongest_residue_frequencies(p, stride):
    """They are the strongest frequencies of the indicator of each residue class."""
    harmonics = stride_harmonics(p, stride)
    assert len(harmonics) == stride // 2
    for first in range(stride):
        members = (torch.arange(p) % stride == first).double()[:, None]
        strongest = one_sided_power(members).topk(len(harmonics)).indices + 1
        assert sorted(strongest.tolist()) == harmonics


@pytest.mark.parametrize(("strong", "excess"), [((11, 22, 32, 43), 12), ((1, 2, 3, 4), 0)])
@torch.no_grad()
def test_harmonic_power_is_separated_from_other_power(strong, excess):
    """Share and excess match planted power at and next to the harmonics of the order."""
    model = plant(nn.Embedding(97, 48), *strong)
    model.weight.sub_(plant(nn.Embedding(97, 48)).weight)
    for hook, config in ((Fourier(stride=9), None), (Fourier(), Data(97)), (Fourier(), Data(97, 9))):
        metrics = hook.compute(replace(epoch_end(model), config=config))
        assert metrics["stride_share"] == pytest.approx(excess / 12, abs=1e-6)
        assert metrics["stride_excess"] == pytest.approx(excess, abs=1e-5)


@dataclass(frozen=True)
class Data:
    """A configuration of strided data."""

    p: int
    stride: int | None = None


def test_stride_of_other_data_is_ignored():
    """The stride counts only if the modulus of the data equals the number of tokens."""
    assert data_stride(Data(97), 97) == 9
    assert data_stride(Data(97, 5), 97) == 5
    assert data_stride(Data(113), 97) == data_stride(TokenConfig(), 7) == data_stride(None, 7) == 0
    assert stride_harmonics(7, 2) == [3]
    assert stride_harmonics(7, 1) == []
