"""Recipes: their casts, changes to them, and recipes in text form."""

from dataclasses import replace

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.lowbit import RECIPES, ROLES, MetisOptions, Recipe, find_recipe, quantize_model
from loopscope.lowbit.casts import Cast
from loopscope.lowbit.hadamard import hadamard_transform
from loopscope.lowbit.recipes import parse_cast, uniform
from torch import nn


def test_recipe_names_match_the_specification():
    expected = ["fp32", "fp8", "fp4_direct", "fp4_block", "nvfp4", "mxfp4", "fp4_metis"]
    expected += ["fp8_delayed", "fp8_rowwise", "fp8_block", "int8"]
    assert list(RECIPES) == expected
    assert all(recipe.name == name for name, recipe in RECIPES.items())


def test_every_recipe_except_fp32_casts_all_roles():
    """The recipe fp32 has no casts."""
    assert not RECIPES["fp32"].casts
    assert all(tuple(recipe.casts) == ROLES for name, recipe in RECIPES.items() if name != "fp32")


def test_fp8_uses_e5m2_only_for_output_gradient():
    """The four other roles use E4M3."""
    formats = [cast.format for cast in RECIPES["fp8"].casts.values()]
    assert formats == ["e4m3"] * 4 + ["e5m2"]


@pytest.mark.parametrize("values", ["gaussian", "laplace", "student", "log_normal"])
def test_mxfp4_rule_has_the_smallest_error(values):
    """The test compares four scaling rules on Gaussian, Laplace, Student and log-normal values."""
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


def test_recipe_draws_and_varies_with_its_casts():
    """A stochastic cast makes a recipe draw, and a stochastic or delayed forward cast makes it vary."""
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
        ("fp8,output_grad=none,output_grad=none", r"'fp8,.*' names output_grad twice; give each name only once\."),
        ("nvfp4,keep_first=1,keep_first=2", r"names keep_first twice"),
        ("e2m1/block/block=3/block=4", r"'e2m1/block/block=3/block=4' names block twice"),
        ("e2m1/block/soft/stochastic", r"names rounding twice"),
        ("nvfp4,hadamard=12", r"hadamard of recipe '.*' is 12; it must be a power of two"),
        ("mxfp4,hadamard=16", r"it needs along_sum=True"),
        ("nvfp4,keep_first=some", r"The keep_first of recipe '.*' is 'some'; it must be a number\."),
        ("nvfp4,keep_last=-1", r"keep_last of recipe '.*' is -1; it must be at least 0\."),
        ("e2m1/block/scale_dtype=e4m3", r"Unknown scale_dtype 'e4m3'\. Known: e8m0, float32\.|Unknown scale_dtype"),
        ("e2m1/current/rows=16", r"16 rows to a block do not suit scaling rule 'current'"),
        ("e2m1/block/history=4", r"A history of 4 and amax 'max' do not suit scaling rule 'block'"),
        ("e4m3/delayed/history=0", r"A history of 0 and .* has one tensor or more"),
        ("e4m3/delayed/amax=mean", r"Unknown amax 'mean'"),
        ("e4m3/delayed/margin=65", r"The margin is 65; it must be an exponent of two from -64 to 64\."),
    ],
)
def test_invalid_recipe_text_is_refused(text, sentence):
    """Each error names the invalid part and, where one exists, the nearest valid name."""
    with pytest.raises(UsageError, match=sentence):
        find_recipe(text)


def test_metis_refuses_rule_with_history():
    with pytest.raises(UsageError, match=r"casts forward_input as several matrices .*other than 'delayed'\."):
        replace(uniform("x", Cast("e4m3", "delayed")), metis=MetisOptions())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"niter": 1.5}, r"niter of Metis is 1\.5; it must be a whole number\."),
        ({"niter": True}, r"niter of Metis is True; it must be a whole number\."),
        ({"rank": "8"}, r"The rank of Metis is '8'; it must be a whole number of at least 1"),
        ({"rank": 2.5}, r"The rank of Metis is 2\.5"),
        ({"merge_steps": "9"}, r"merge_steps of Metis is '9'; it must be a whole number\."),
        ({"backward": "no"}, r"backward of Metis is 'no'; it must be True or False\."),
    ],
)
def test_metis_options_of_wrong_type_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        MetisOptions(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"forward_input": "e2m1/block"}, r"forward_input of recipe 'x' is 'e2m1/block'; it must be a Cast, or None\."),
        ({"keep_first": 0.5}, r"keep_first of recipe 'x' is 0\.5; it must be a whole number\."),
        ({"along_sum": "yes"}, r"along_sum of recipe 'x' is 'yes'; it must be True or False\."),
    ],
)
def test_recipe_options_of_wrong_type_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        Recipe("x", **options)


@pytest.mark.parametrize(
    "options", [{"block": 2.0}, {"rows": 1.5}, {"margin": "1"}, {"q_scalar": "2"}, {"block": True}]
)
def test_cast_options_of_wrong_type_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Cast("e2m1", "block", **options)


def test_first_and_last_layers_stay_unquantized():
    """Layers count in model order, and a recipe that keeps every layer is refused."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    assert quantize_model(model, find_recipe("nvfp4,keep_first=1,keep_last=2"), exclude=["2"]) == ["1"]
    with pytest.raises(
        UsageError, match=r"the first 3 and the last 2 of 5 matrices in full precision, so none is cast"
    ):
        find_recipe("nvfp4,keep_first=3,keep_last=2").layers_to_cast(list("abcde"))
    with pytest.raises(UsageError, match=r"the first 0 and the last 9 of 5 matrices"):
        find_recipe("nvfp4,keep_last=9").layers_to_cast(list("abcde"))


def test_nvfp4_matches_nvidias_report():
    """arXiv 2509.25149: 2D scales of weights, stochastic gradients, and a transform of size 16 for the weight's."""
    recipe = RECIPES["nvfp4"]
    assert recipe.forward_weight == recipe.backward_weight == Cast("e2m1", "nvfp4", rows=16)
    assert recipe.forward_input == recipe.backward_input == Cast("e2m1", "nvfp4")
    assert recipe.output_grad == Cast("e2m1", "nvfp4", "stochastic")
    assert (recipe.along_sum, recipe.hadamard) == (True, 16)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block"])
def test_forward_and_backward_use_equal_weights(name):
    weight = torch.randn(70, 150, generator=torch.Generator().manual_seed(0))
    cast = RECIPES[name].forward_weight
    assert torch.equal(cast(weight), cast(weight.t()).t())


def test_metis_can_round_every_role_stochastically():
    """with_every and a recipe text select the published rule for all five roles."""
    recipe = find_recipe("fp4_metis").with_every(rule="metis_block", rounding="stochastic")
    assert [(cast.rule, cast.rounding) for cast in recipe.casts.values()] == [("metis_block", "stochastic")] * 5
    text = ",".join(["fp4_metis", *(f"{role}=e2m1/metis_block/stochastic" for role in ROLES)])
    assert find_recipe(text) == replace(recipe, name=text)


def test_cast_text_describes_every_option():
    assert parse_cast("e4m3/tensor/nearest/q_scalar=2") == Cast("e4m3", "tensor", q_scalar=2.0)


@pytest.mark.parametrize("shape", [(0, 20), (3, 0)])
def test_an_empty_matrix_is_transformed(shape: tuple[int, int]) -> None:
    found = hadamard_transform(torch.ones(shape), 16)
    assert found.shape == (shape[0], -(-shape[1] // 16) * 16)
