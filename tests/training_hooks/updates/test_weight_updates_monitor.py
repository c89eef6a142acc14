"""The weight update monitor against full clones in float64, on planted layers, and in edge cases of optimizers."""

import math

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.tensors import trainable
from loopscope.training_hooks.updates.element_samples import sample_indices
from loopscope.training_hooks.updates.weight_updates import WeightUpdateMonitor
from torch import nn

from tests.support import MODELS, TiedModel, data_for, mean_loss
from tests.training_hooks.reloading import through_a_file

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


def backward(model: nn.Module, data) -> None:
    model.zero_grad()
    mean_loss(model, data).backward()


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters in float64, shared ones once."""
    return {name: value.detach().double() for name, value in model.named_parameters()}


def length(tensor: torch.Tensor) -> float:
    return math.sqrt(tensor.double().square().sum().item())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_exact_checks_match_full_clones(name, optimizer):
    torch.manual_seed(0)
    model, data = MODELS[name](), data_for(name)
    optimizer, monitor = OPTIMIZERS[optimizer](model.parameters()), WeightUpdateMonitor(exact=True)
    for _ in range(4):
        backward(model, data)
        before, gradients = clones(model), monitor.check_gradients(model, optimizer)
        optimizer.step()
        updates = monitor.check_updates(model, optimizer)
        assert gradients.keys() == updates.keys() == trainable(model).keys()
        for key, parameter in model.named_parameters():
            g, gradient, update = parameter.grad.double(), gradients[key], updates[key]
            assert gradient.l2_norm == pytest.approx(length(g), rel=1e-6, abs=1e-12)
            assert gradient.max_abs == pytest.approx(g.abs().max().item(), rel=1e-6)
            assert gradient.mean_abs == pytest.approx(g.abs().mean().item(), rel=1e-6, abs=1e-12)
            change = length(parameter.detach().double() - before[key])
            assert update.update_norm == pytest.approx(change, rel=1e-6)
            assert update.weight_norm == pytest.approx(length(before[key]), rel=1e-6)
            assert update.update_ratio == pytest.approx(change / (length(before[key]) + 1e-12), rel=1e-6)


def sampling_error(sample: torch.Tensor, elements: int) -> float:
    """Estimate the standard error of n times the mean of a sample drawn without replacement, from its variance."""
    count = len(sample)
    return elements * math.sqrt(sample.var().item() / count * (1 - count / elements))


class WideTied(TiedModel):
    """The tied model with more elements than a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(7, 64), nn.Linear(64, 64)
        self.decoder = nn.Linear(64, 7, bias=False)
        self.decoder.weight = self.embedding.weight


WIDE = {
    "batchnorm_mlp": lambda: nn.Sequential(nn.Linear(4, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 7)),
    "transformer": lambda: nn.Sequential(
        nn.Embedding(7, 32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), nn.Flatten(), nn.Linear(64, 7)
    ),
    "tied": WideTied,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", WIDE)
def test_sampled_checks_stay_within_sampling_error(name, optimizer):
    """The bound is five standard errors, estimated from the sample; complete parameters must be exact."""
    torch.manual_seed(0)
    model, data = WIDE[name](), data_for(name)
    optimizer, monitor = OPTIMIZERS[optimizer](model.parameters()), WeightUpdateMonitor(sample_size=150)
    for _ in range(3):
        backward(model, data)
        before, gradients = clones(model), monitor.check_gradients(model, optimizer)
        optimizer.step()
        updates = monitor.check_updates(model, optimizer)
        for key, parameter in model.named_parameters():
            indices = sample_indices(key, parameter.shape, 150)
            change = parameter.detach().double() - before[key]
            measured = (gradients[key].l2_norm, updates[key].update_norm, updates[key].weight_norm)
            for norm, tensor in zip(measured, (parameter.grad.double(), change, before[key]), strict=True):
                squares = tensor.flatten().square()
                error = 0 if indices is None else sampling_error(squares[indices.long()], len(squares))
                assert norm**2 == pytest.approx(squares.sum().item(), rel=1e-5, abs=5 * error + 1e-20), key


FACTORS = {"4.weight": 1e-9, "6.weight": 1e6}


def examine(sick: str, *, rate: float = 1e-2, **options):
    """Train a deep model with one faulty layer for three checked steps; return the diagnostics of the last."""
    torch.manual_seed(1)
    model = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(24, 24), nn.Tanh())], nn.Linear(24, 7))
    layer, monitor = model.get_parameter(sick), WeightUpdateMonitor(**options)
    groups = [{"params": [value], "lr": rate if value is layer else 1e-2} for value in model.parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for _ in range(3):
        backward(model, (torch.randn(8, 24), torch.randint(7, (8,))))
        layer.grad *= FACTORS.get(sick, 1.0)
        gradients = monitor.check_gradients(model, optimizer)
        optimizer.step()
        updates = monitor.check_updates(model, optimizer)
    return gradients, updates


def conditions(gradients, updates) -> tuple[list[str], list[str], list[str]]:
    """Return the names of parameters with vanishing gradients, with exploding gradients, and of frozen ones."""
    return (
        [name for name, diagnostics in gradients.items() if diagnostics.is_vanishing],
        [name for name, diagnostics in gradients.items() if diagnostics.is_exploding],
        [name for name, diagnostics in updates.items() if diagnostics.is_frozen],
    )


@pytest.mark.parametrize("options", [{}, {"sample_size": 100}, {"exact": True}], ids=str)
def test_planted_layers_are_the_only_findings(options):
    """One layer vanishes, explodes or is frozen."""
    assert conditions(*examine("0.weight", **options)) == ([], [], [])
    assert conditions(*examine("4.weight", **options)) == (["4.weight"], [], [])
    assert conditions(*examine("6.weight", **options)) == ([], ["6.weight"], [])
    assert conditions(*examine("2.weight", rate=0.0, **options)) == ([], [], ["2.weight"])


def one_check(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: WeightUpdateMonitor):
    gradients = monitor.check_gradients(model, optimizer)
    optimizer.step()
    return gradients, monitor.check_updates(model, optimizer)


def ones(**parameters: float) -> nn.Module:
    """Make a model with named parameters of four equal elements and gradients of ones."""
    model = nn.Module()
    for name, value in parameters.items():
        model.register_parameter(name, nn.Parameter(torch.full((4,), value)))
        model.get_parameter(name).grad = torch.ones(4)
    return model


def test_unused_parameters_are_skipped():
    model = ones(used=1.0, unused=1.0, fixed=1.0)
    model.unused.grad, model.fixed.requires_grad = None, False
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model.empty.grad = torch.empty(0, 3)
    gradients, updates = one_check(model, torch.optim.SGD(model.parameters(), lr=0.1), WeightUpdateMonitor())
    assert [*gradients] == [*updates] == ["used"]
    assert updates["used"].update_ratio == pytest.approx(0.1)


def test_missing_gradients_give_empty_checks():
    model, monitor = ones(a=1.0), WeightUpdateMonitor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert monitor.check_updates(model, optimizer) == {}
    model.a.grad = None
    assert one_check(model, optimizer, monitor) == ({}, {})


def test_weight_decay_moves_a_parameter_without_gradient():
    model = ones(decayed=1.0, plain=1.0)
    model.decayed.grad.zero_(), model.plain.grad.zero_()
    groups = [{"params": [model.decayed], "weight_decay": 0.5}, {"params": [model.plain], "lr": 0.2}]
    optimizer, monitor = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0), WeightUpdateMonitor()
    for check in (1, 2, 3):
        gradients, updates = one_check(model, optimizer, monitor)
        assert all(diagnostics.is_vanishing for diagnostics in gradients.values())
        assert updates["decayed"].update_ratio == pytest.approx(0.05)
        assert (updates["plain"].frozen_checks, updates["decayed"].frozen_checks) == (check, 0)
    assert (gradients["decayed"].learning_rate, gradients["plain"].learning_rate) == (0.1, 0.2)
    assert [name for name, diagnostics in updates.items() if diagnostics.is_frozen] == ["plain"]


def test_parameter_outside_the_optimizer_is_frozen():
    """Its learning rate is NaN."""
    model, monitor = ones(trained=1.0, forgotten=1.0), WeightUpdateMonitor(frozen_patience_steps=1)
    _, updates = one_check(model, torch.optim.SGD([model.trained], lr=0.1), monitor)
    assert [name for name, update in updates.items() if update.is_frozen] == ["forgotten"]
    assert math.isnan(updates["forgotten"].learning_rate)


def test_one_movement_resets_the_frozen_count():
    model, monitor = ones(a=1.0), WeightUpdateMonitor()
    counts = []
    for rate in (0.0, 0.0, 0.1, 0.0, 0.0, 0.0):
        _, updates = one_check(model, torch.optim.SGD(model.parameters(), lr=rate), monitor)
        counts.append((updates["a"].frozen_checks, updates["a"].is_frozen))
    assert counts == [(1, False), (2, False), (0, False), (1, False), (2, False), (3, True)]


@pytest.mark.parametrize("exact", [False, True])
def test_bfloat16_rounding_is_distinguished_from_freezing(exact):
    """At 1.0 the spacing of bfloat16 is 2⁻⁷ (2⁻⁸ below), so 1e-4 is lost; at 0.001 it is not."""
    model = ones(rounded=1.0, moving=0.001, frozen=1.0, idle=1.0).bfloat16()
    model.idle.grad = torch.zeros(4, dtype=torch.bfloat16)
    groups = [{"params": [model.rounded, model.moving, model.idle]}, {"params": [model.frozen], "lr": 0.0}]
    monitor = WeightUpdateMonitor(exact=exact, frozen_patience_steps=2)
    for _ in range(2):
        _, updates = one_check(model, torch.optim.SGD(groups, lr=1e-4), monitor)
    assert [name for name, update in updates.items() if update.is_rounded_away] == ["rounded"]
    assert [name for name, update in updates.items() if update.is_frozen] == ["frozen", "idle"]
    assert [updates[name].rounded_away for name in ("rounded", "moving")] == [1, 0]
    assert all(math.isnan(updates[name].rounded_away) for name in ("idle", "frozen"))  # at rate 0 nothing is driven
    assert updates["frozen"].driven_elements == updates["frozen"].stuck_elements == 0
    assert monitor.aggregate_update_stats(updates)["rounded_away_fraction"] == 4 / 8


def test_learning_rate_is_read_before_the_scheduler():
    model, monitor = ones(a=1.0, b=1.0).bfloat16(), WeightUpdateMonitor(frozen_patience_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    updates = []
    for _ in range(2):
        gradients = monitor.check_gradients(model, optimizer)
        optimizer.step()
        warm_up.step()
        updates.append(monitor.check_updates(model, optimizer)["a"])
        assert gradients["a"].learning_rate == updates[-1].learning_rate
    assert [update.learning_rate for update in updates] == pytest.approx([0, 1e-5])
    assert [(update.driven_elements, update.is_rounded_away) for update in updates] == [(0, False), (4, True)]


def after_a_step(kind, fused: bool, *, decay: float, rate: float, size: float):
    """Return weights before and after a step of AdamW in bfloat16, their gradient, and the diagnostics."""
    generator = torch.Generator().manual_seed(int(1 / rate))
    model = nn.Module()
    model.w = nn.Parameter((size * torch.randn(4000, generator=generator)).bfloat16())
    model.w.grad = torch.randn(4000, generator=generator).bfloat16()
    model.w.grad[:1000] = 0
    before, optimizer = model.w.detach().clone(), kind(model.parameters(), lr=rate, weight_decay=decay, fused=fused)
    _, updates = one_check(model, optimizer, WeightUpdateMonitor(exact=True))
    return before, model, updates["w"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("decay", "rate", "size"), [(0.1, 1e-3, 0.02), (0.1, 1e-5, 1.0), (1000.0, 1e-5, 1.0)])
def test_bfloat16_losses_are_counted_per_term(fused, decay, rate, size):
    """The gradient term and the decay term of AdamW are counted separately."""
    before, model, update = after_a_step(torch.optim.AdamW, fused, decay=decay, rate=rate, size=size)
    decayed_only = (before.double() * (1 - rate * decay)).bfloat16()
    driven = model.w.grad != 0
    assert (update.driven_elements, update.decayed_elements) == (driven.sum(), (before != 0).sum())
    assert update.stuck_elements == (driven & (model.w == decayed_only)).sum()
    assert update.undecayed_elements == pytest.approx(
        (decayed_only == before).sum().item(), abs=2
    )  # double, then float
    assert (update.decay_rounded_away > 0.99) == (decay < 1)
    assert (update.rounded_away > 0.9) == (rate == 1e-5)


def test_lost_gradient_with_decay_is_reported():
    """The decay moves the weight while the gradient is rounded away; a lost decay is reported as well."""
    model = ones(w=1.0).bfloat16()
    model.w.grad *= 1e-3
    groups = [{"params": [model.w], "weight_decay": 0.1}]
    monitor = WeightUpdateMonitor()
    _, updates = one_check(model, torch.optim.AdamW(groups, lr=1e-1, eps=1e3), monitor)
    assert updates["w"].lost == ("gradient",)
    assert updates["w"].update_ratio > 1e-3
    model.w.grad.zero_()
    _, updates = one_check(model, torch.optim.AdamW([model.w], lr=1e-4, weight_decay=0.1), monitor)
    assert (updates["w"].lost, updates["w"].frozen_checks) == (("decay",), 0)


def test_coupled_decay_is_not_a_separate_term():
    model = ones(w=1.0).bfloat16()
    _, updates = one_check(model, torch.optim.SGD([model.w], lr=1e-4, weight_decay=0.1), WeightUpdateMonitor())
    assert updates["w"].decayed_elements == 0
    assert math.isnan(updates["w"].decay_rounded_away)


def unseen_rows(size: float) -> nn.Module:
    """Return an embedding with a gradient in a single row that a sample of 16 elements misses."""
    model = nn.Module()
    model.table = nn.Embedding(1000, 8)
    sampled = set((sample_indices("table.weight", (1000, 8), 16).long() // 8).tolist())
    row = next(row for row in range(1000) if row not in sampled)
    model.table.weight.grad = torch.zeros(1000, 8)
    model.table.weight.grad[row] = size
    return model


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e3])
def test_gradient_missed_by_sampling_is_measured_exactly(size, sparse):
    """The embedding has a gradient in a single row, dense or sparse."""
    model, monitor = unseen_rows(size), WeightUpdateMonitor(sample_size=16, frozen_patience_steps=1)
    true = length(model.table.weight.grad)
    if sparse:
        model.table.weight.grad = model.table.weight.grad.to_sparse()
    gradients, updates = one_check(model, torch.optim.SGD(model.parameters(), lr=0.1), monitor)
    gradient = gradients["table.weight"]
    assert gradient.l2_norm == pytest.approx(true, rel=1e-6)
    assert (gradient.max_abs, gradient.mean_abs) == pytest.approx((size, 8 * size / 8000), rel=1e-6)
    assert (gradient.is_vanishing, gradient.is_exploding) == (size == 1e-9, size == 1e3)
    # Elements outside the sample may have moved, so the update is omitted.
    assert [update.is_frozen for update in updates.values()] == ([True] if size == 1e-9 else [])


def test_rounded_away_fraction_matches_full_clones():
    torch.manual_seed(0)
    model = nn.Linear(60, 60).bfloat16()
    model(torch.randn(9, 60, dtype=torch.bfloat16)).square().mean().backward()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    _, updates = one_check(model, optimizer, WeightUpdateMonitor(exact=True))
    stuck = (model.weight == before) & (model.weight.grad != 0)
    assert 0.1 < updates["weight"].rounded_away < 0.9
    assert updates["weight"].rounded_away == pytest.approx((stuck.sum() / (model.weight.grad != 0).sum()).item())
    assert updates["weight"].update_norm == pytest.approx(length(model.weight.double() - before.double()), rel=1e-6)


def test_infinite_and_missing_numbers_count_as_exploding():
    model = ones(inf=1.0, nan=1.0, fine=1.0)
    model.inf.grad[1], model.nan.grad[2] = math.inf, math.nan
    monitor = WeightUpdateMonitor()
    gradients = monitor.check_gradients(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [name for name, gradient in gradients.items() if gradient.is_exploding] == ["inf", "nan"]
    stats = monitor.aggregate_gradient_stats(gradients)
    assert (stats["exploding_count"], stats["nonfinite_count"]) == (2, 2)
    assert (stats["grad_norm_min"], stats["grad_norm_max"]) == (2.0, math.inf)
    assert {name for name, _ in monitor.top_k_largest_gradients(gradients, 2)} == {"inf", "nan"}


def test_zero_weights_are_excluded_from_ratios():
    model, monitor = ones(zero=0.0, one=1.0), WeightUpdateMonitor()
    _, updates = one_check(model, torch.optim.SGD(model.parameters(), lr=0.1), monitor)
    assert updates["zero"].update_ratio == pytest.approx(0.2 / 1e-12)
    assert monitor.aggregate_update_stats(updates)["update_ratio_max"] == pytest.approx(0.1)
    assert monitor.top_k_smallest_updates(updates, 1) == [("one", pytest.approx(0.1))]


@pytest.mark.parametrize("exact", [False, True])
def test_sparse_complex_and_double_parameters_are_measured(exact):
    model = nn.Module()
    model.table = nn.Embedding(9, 4, sparse=True)
    model.wave = nn.Parameter(torch.tensor([3 + 4j, 0j]))
    model.fine = nn.Parameter(torch.ones(3, dtype=torch.float64))
    (model.table(torch.tensor([1, 1, 2])).sum() + model.wave.abs().sum() + model.fine.sum() * 1e-9).backward()
    monitor = WeightUpdateMonitor(exact=exact)
    gradients, updates = one_check(model, torch.optim.SGD(model.parameters(), lr=1.0), monitor)
    assert gradients["table.weight"].l2_norm == pytest.approx(math.sqrt(4 * 4 + 4))
    assert gradients["table.weight"].mean_abs == pytest.approx(12 / 36)
    assert updates["wave"].weight_norm == pytest.approx(5)
    assert updates["wave"].update_norm == pytest.approx(1)
    assert updates["fine"].update_ratio == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_monitor_resumes_between_both_checks_of_step(exact):
    torch.manual_seed(0)
    model, monitor = nn.Linear(70, 70), WeightUpdateMonitor(exact=exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model, (torch.randn(5, 70), torch.randint(70, (5,))))
        monitor.check_gradients(model, optimizer)
        resumed = WeightUpdateMonitor(exact=exact)
        resumed.load_state_dict(through_a_file(monitor.state_dict()))
        optimizer.step()
        assert monitor.check_updates(model, optimizer) == resumed.check_updates(model, optimizer) != {}


def test_monitor_memory_is_bounded():
    """A sample takes eight bytes per element; exact mode takes one copy of the parameters."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(20)])
    backward(model, (torch.randn(2, 128), torch.tensor([0, 1])))
    sampled = [({"sample_size": size}, 40 * 8 * size) for size in (256, 1024, 5000)]
    for options, bar in (*sampled, ({"exact": True}, sum(p.nbytes + 4096 for p in model.parameters()))):
        monitor = WeightUpdateMonitor(**options)
        monitor.check_gradients(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert 0 < monitor.bytes <= bar


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sample_size": 0}, "sample_size is 0; it must be at least 1"),
        ({"frozen_patience_steps": 0}, "frozen_patience_steps is 0; it must be at least 1"),
        ({"frozen_update_ratio_threshold": -1.0}, "frozen_update_ratio_threshold is -1.0; it must be a number"),
        ({"exploding_grad_threshold": math.nan}, "exploding_grad_threshold is nan; it must be a number"),
        (
            {"vanishing_grad_threshold": 200.0},
            "is 200.0 and exploding_grad_threshold is 100.0; the first must be smaller",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        WeightUpdateMonitor(**options)


class Dithered(torch.optim.SGD):
    """SGD on bfloat16 weights whose sums it rounds stochastically, named as in other packages."""

    def __init__(self, parameters, option: str, **options) -> None:
        super().__init__(parameters, **options)
        (vars(self) if option != "group" else self.param_groups[0])["stochastic_rounding"] = True
        if option == "torchao":
            del self.stochastic_rounding
            self.bf16_stochastic_round = True


@pytest.mark.parametrize("option", ["attribute", "group", "torchao", "plain"])
def test_stochastic_rounding_is_not_judged(option):
    """No element counts as rounded away, and no parameter as frozen, if a step moves weights by chance."""
    model = nn.Linear(8, 8, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if option != "plain":
        optimizer = Dithered(model.parameters(), option, lr=1e-6)
    monitor = WeightUpdateMonitor(frozen_patience_steps=1)
    model.weight.grad = torch.ones_like(model.weight)
    monitor.check_gradients(model, optimizer)
    optimizer.step()  # lost to rounding
    (update,) = monitor.check_updates(model, optimizer).values()
    stats = monitor.aggregate_update_stats({"weight": update})
    assert update.is_rounded_away is (option == "plain")
    assert not update.is_frozen
    assert ("rounded_away_fraction" in stats) is (option == "plain")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("size", [7, 1024])
def test_embedding_gradients_are_exact(kind, size):
    """The tokens have Zipf frequencies, so that few rows have most of the gradient and samples miss them."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(2000, 8), nn.Linear(8, 3))
    tokens = torch.multinomial(torch.arange(1.0, 2001).reciprocal(), 4 * 64, replacement=True).view(4, 64)
    model(tokens).square().sum().backward()
    monitor, optimizer = WeightUpdateMonitor(sample_size=size), torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = monitor.check_gradients(model, optimizer)["0.weight"]
    gradient = model[0].weight.grad
    expected = torch.stack([gradient.norm(), gradient.abs().max(), gradient.abs().mean()]).tolist()
    assert [diagnostics.l2_norm, diagnostics.max_abs, diagnostics.mean_abs] == pytest.approx(expected, rel=1e-5)
    optimizer.step()
    assert set(monitor.check_updates(model, optimizer)) <= {"0.weight", "1.weight", "1.bias"}
