"""The token gradient hook compared with brute force over rows and pairs, on planted and uniform gradients."""

import itertools
import math

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.errors import UnsuitableError, UsageError
from loopscope.training_hooks.circuits import TokenGradient
from loopscope.training_hooks.circuits.token_gradient import agreement, concentration

from tests.support import BATCH, ROWS, Case, TiedModel, data_for, train
from tests.training_hooks.epoch_end import epoch_end


def random_rows(count=9, width=5, zeros=()):
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[list(zeros)] = 0
    return rows


def inner(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def measured(rows):
    norms = rows.norm(dim=1)
    return {name: value.item() for name, value in (concentration(norms, 2) | agreement(rows, norms)).items()}


def test_metrics_match_explicit_sums():
    rows = random_rows(zeros=[3]).tolist()
    norms = [math.hypot(*row) for row in rows]
    energy = sorted((norm**2 for norm in norms), reverse=True)
    live = [(row, norm) for row, norm in zip(rows, norms, strict=True) if norm]
    cosines = [inner(a, b) / (p * q) for (a, p), (b, q) in itertools.combinations(live, 2)]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    assert measured(torch.tensor(rows, dtype=torch.float64)) == pytest.approx(
        {
            "mean_norm": sum(norms) / 9,
            "max_norm": max(norms),
            "gini": sum(abs(p - q) for p in norms for q in norms) / (2 * 9 * sum(norms)),
            "effective_tokens": sum(energy) ** 2 / sum(e**2 for e in energy),
            "top_k_share": sum(energy[:2]) / sum(energy),
            "untouched_fraction": 1 / 9,
            "mean_cosine": sum(cosines) / len(cosines),
            "shared_fraction": 9 * inner(mean, mean) / sum(energy),
        }
    )


def test_equal_rows_share_the_whole_energy():
    values = measured(torch.ones(6, 4, dtype=torch.float64))
    assert values["mean_cosine"] == values["shared_fraction"] == pytest.approx(1)
    assert values["effective_tokens"] == pytest.approx(6)
    assert values["gini"] == pytest.approx(0)


def test_orthogonal_rows_share_the_chance_level():
    values = measured(torch.eye(4, dtype=torch.float64))
    assert values["mean_cosine"] == pytest.approx(0)
    assert values["shared_fraction"] == pytest.approx(1 / 4)


def test_single_token_holds_the_whole_gradient():
    """The mean cosine is NaN, since there is no pair of tokens."""
    values = measured(random_rows(zeros=[0, 1, 2, 3, 5, 6, 7, 8]))
    assert values["effective_tokens"] == values["top_k_share"] == pytest.approx(1)
    assert values["gini"] == pytest.approx(8 / 9)
    assert math.isnan(values["mean_cosine"])


def test_zero_gradient_has_undefined_shares():
    values = measured(torch.zeros(3, 2))
    assert values["untouched_fraction"] == 1
    assert all(math.isnan(values[name]) for name in ("gini", "effective_tokens", "mean_cosine", "shared_fraction"))


def test_top_tokens_are_capped_at_token_count():
    model = TiedModel()
    metrics = TokenGradient(top_k=50).compute(epoch_end(model, accumulated_grads={"embedding.weight": random_rows(7)}))
    assert sorted(map(int, metrics["top_tokens"])) == list(range(7))
    assert metrics["top_k_share"].item() == pytest.approx(1)


def test_planted_row_is_listed_first():
    rows = random_rows(7)
    rows[4] *= 10
    metrics = TokenGradient().compute(epoch_end(TiedModel(), accumulated_grads={"embedding.weight": rows}))
    assert metrics["top_tokens"][0] == 4
    assert metrics["max_norm"] == rows[4].norm()


def without_token_three(task, state):
    inputs, targets = data_for("transformer")
    task.loader = TensorLoader((inputs.where(inputs != 3, 2), targets), BATCH, fixed_order(torch.arange(ROWS)))


def test_tokens_in_no_batch_have_no_gradient():
    run = train(Case("transformer"), [TokenGradient(top_k=7)], introduce=without_token_three)
    assert run.sink.emitted[0][0]["token_gradient/untouched_fraction"] == pytest.approx(1 / 7)


def test_tied_embedding_touches_every_token():
    """As a classifier, a tied embedding gives every token a gradient."""
    run = train(Case("tied"), [TokenGradient()], introduce=without_token_three)
    assert run.sink.emitted[0][0]["token_gradient/untouched_fraction"] == 0


@pytest.mark.parametrize("name", ["embedding.weight", "decoder.weight"])
def test_both_names_of_tied_embedding_work(name):
    metrics = TokenGradient(embedding=name).compute(
        epoch_end(TiedModel(), accumulated_grads={"embedding.weight": random_rows(7)})
    )
    assert metrics["max_norm"] == random_rows(7).norm(dim=1).max()


def test_sparse_gradient_matches_dense_gradient():
    dense = random_rows(7, zeros=[2])
    of_sparse, of_dense = (
        TokenGradient().compute(epoch_end(TiedModel(), accumulated_grads={"embedding.weight": gradient}))
        for gradient in (dense.to_sparse(), dense)
    )
    assert str(of_sparse) == str(of_dense)


def test_an_epoch_without_gradient_reports_nothing():
    assert TokenGradient().compute(epoch_end(TiedModel(), accumulated_grads={"mix.bias": torch.ones(8)})) == {}


def test_step_loop_measures_since_last_flush():
    run = train(Case("transformer", loop="step"), [TokenGradient()], steps=4)
    assert [step for _, _, step, _ in run.sink.rows("token_gradient/max_norm")] == [2, 4]


def test_a_frozen_embedding_is_refused_before_the_run():
    def freeze(task, state):
        task.model.embedding.requires_grad_(requires_grad=False)

    with pytest.raises(UnsuitableError, match=r"'token_gradient'.*'embedding\.weight' has requires_grad = False"):
        train(Case("transformer"), [TokenGradient()], introduce=freeze)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ("batchnorm_mlp", {}, r"'token_gradient' needs a token embedding.*'token_gradient': {'embedding': 'NAME'}"),
        ("tied", {"embedding": "mix.bias"}, "must be a matrix"),
        ("tied", {"embedding": "mix.wait"}, "Did you mean 'mix.weight'"),
    ],
)
def test_unsuitable_models_and_names_are_refused(model, options, sentence):
    """The error suggests the embedding option or the nearest parameter name."""
    with pytest.raises(UsageError, match=sentence):
        train(Case(model), [TokenGradient(**options)])


def test_top_k_below_one_is_refused():
    with pytest.raises(UsageError, match="top_k is 0"):
        TokenGradient(top_k=0)
