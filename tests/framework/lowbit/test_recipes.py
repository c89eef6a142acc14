"""Recipes: what each of them casts, and how one is made from another or from a text."""

from dataclasses import replace

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.lowbit import RECIPES, ROLES, MetisOptions, Recipe, find_recipe
from loopscope.lowbit.casts import Cast
from loopscope.lowbit.recipes import parse_cast, uniform


def test_the_recipes_are_those_of_the_issue():
    assert list(RECIPES) == ["fp32", "fp8", "fp4_direct", "fp4_block", "nvfp4", "mxfp4", "fp4_metis"]
    assert all(recipe.name == name for name, recipe in RECIPES.items())


def test_fp32_casts_nothing_and_every_other_recipe_casts_every_role():
    assert not RECIPES["fp32"].casts
    assert all(tuple(recipe.casts) == ROLES for name, recipe in RECIPES.items() if name != "fp32")


def test_fp8_is_finer_forward_and_wider_for_the_output_gradient():
    formats = [cast.format for cast in RECIPES["fp8"].casts.values()]
    assert formats == ["e4m3"] * 4 + ["e5m2"]


@pytest.mark.parametrize("values", ["gaussian", "laplace", "student", "log_normal"])
def test_the_rule_of_mxfp4_has_the_smallest_error_of_the_four(values):
    torch.manual_seed(0)
    drawn = {
        "gaussian": torch.randn(60, 256),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((60, 256)),
        "student": torch.distributions.StudentT(3.0).sample((60, 256)),
        "log_normal": torch.randn(60, 256) * torch.randn(60, 256).exp(),
    }[values]
    rules = ("mx_floor", "mx_ceil", "mx_rceil", "mx_even")
    errors = {rule: float((Cast("e2m1", rule)(drawn) - drawn).norm()) for rule in rules}
    assert RECIPES["mxfp4"].forward_weight == Cast("e2m1", min(errors, key=errors.__getitem__))


def test_a_recipe_draws_if_any_cast_is_stochastic_and_varies_if_a_forward_one_is():
    plain, stochastic = Cast("e2m1", "block"), Cast("e2m1", "block", "stochastic")
    backward = replace(uniform("x", plain), output_grad=stochastic)
    forward = replace(uniform("x", plain), forward_weight=stochastic)
    assert [(recipe.draws, recipe.varies) for recipe in (uniform("x", plain), backward, forward)] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert find_recipe("fp8").with_every(rule="delayed").varies
    assert RECIPES["fp4_metis"].draws


def test_options_are_changed_in_every_cast_at_once():
    changed = find_recipe("fp8").with_every(rule="delayed", q_scalar=0.5)
    assert {(cast.rule, cast.q_scalar) for cast in changed.casts.values()} == {("delayed", 0.5)}
    assert [cast.format for cast in changed.casts.values()] == ["e4m3"] * 4 + ["e5m2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvfp4", RECIPES["nvfp4"]),
        ("e2m1/block", uniform("e2m1/block", Cast("e2m1", "block"))),
        (
            "fp8,output_grad=e5m2/current/stochastic",
            replace(
                RECIPES["fp8"],
                name="fp8,output_grad=e5m2/current/stochastic",
                output_grad=Cast("e5m2", "current", "stochastic"),
            ),
        ),
        (
            "forward_weight=e2m1/block/block=32/q_scalar=0.5",
            Recipe(
                "forward_weight=e2m1/block/block=32/q_scalar=0.5",
                forward_weight=Cast("e2m1", "block", block=32, q_scalar=0.5),
            ),
        ),
        (
            "e2m1/block/soft, forward_input=none",
            replace(uniform("e2m1/block/soft, forward_input=none", Cast("e2m1", "block", "soft")), forward_input=None),
        ),
    ],
)
def test_a_text_describes_a_recipe(text, expected):
    assert find_recipe(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fp9", r"Unknown recipe 'fp9'\. Did you mean 'fp8'\? Known: fp32, fp4_block, .*\."),
        ("e2m2/block", r"Unknown format 'e2m2'\. Did you mean 'e5m2'\?"),
        ("e2m1/blok", r"Unknown scaling rule 'blok'\. Did you mean 'block'\?"),
        ("e2m1/block/stochastik", r"Unknown rounding 'stochastik'\. Did you mean 'stochastic'\?"),
        ("e2m1/block/blok=3", r"Unknown option of a cast 'blok'\. Did you mean 'block'\?"),
        ("e2m1/block/block=many", r"The block of the cast 'e2m1/block/block=many' is 'many'; it must be a number\."),
        ("e2m1/nvfp4/block=32", r"A block of 32 does not suit scaling rule 'nvfp4'"),
        ("fp8,output_grads=none", r"Unknown role 'output_grads'\. Did you mean 'output_grad'\?"),
        ("fp8,output_grad=e5m2", r"The cast 'e5m2' has no scaling rule; write format/rule, such as e2m1/block\."),
        ("fp8,", r"Unknown role ''\."),
    ],
)
def test_a_text_that_describes_none_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        find_recipe(text)


def test_metis_is_refused_with_a_rule_that_has_a_history():
    with pytest.raises(UsageError, match=r"several matrices as one forward_input .*other than 'delayed'\."):
        replace(uniform("x", Cast("e4m3", "delayed")), metis=MetisOptions())


def test_a_cast_is_read_as_it_is_written():
    assert parse_cast("e4m3/tensor/nearest/q_scalar=2") == Cast("e4m3", "tensor", q_scalar=2.0)
