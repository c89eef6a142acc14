"""The experiment ``lowbit_lm`` and its configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from loopscope import lowbit
from loopscope.data import derived_seed
from loopscope.hooks import ExperimentRegistry
from loopscope.lowbit import RECIPES, ROLES, Gains, MetisOptions, RangePenalty, Recipe
from loopscope.runs import OptionsByHook, require
from torch import Tensor, nn

from ..tied_lm import QUICK, LanguageModelConfig, LanguageModelRunner

PENALISED = "blocks.*"  # pattern of the matrices in the decoder
COUNT_INTERVAL = 4  # steps between two counts of the casts, since a count costs a tenth of a step


@dataclass(frozen=True, kw_only=True)
class LowbitLMConfig(LanguageModelConfig):
    """Options of lowbit_lm; the defaults are for a workstation, ``--preset quick`` is for a laptop.

    Args:
        recipe: further strategies as NAME=RECIPE, with the name of a recipe or with casts, such as
            mine=e2m1/nvfp4,output_grad=e5m2/current; may be repeated.
        include: patterns of the names of the linear layers to cast, separated by commas.
        exclude: patterns of the names of layers not to cast.
        q_scalar: factor on all scales; below 1, values overflow.
        stochastic_output_grad: round output gradients stochastically.
        rank: components of the low-rank part of fp4_metis, as a number, or as a fraction in (0, 1) of the smaller side
            of the matrix.
        gains: factors on the components of decomposed gradients; none or long_tail.
        niter: power iterations of the randomised SVD.
        compensated: compute the residual of a gradient from the quantised low-rank part.
        metis_forward: split weights into trained factors and a residual.
        metis_backward: decompose output gradients before they are cast.
        forward_warmup_steps: steps before weights are split.
        merge_steps: steps after which the factors are merged and split again; 0 never merges.
        max_norm: clip the joint norm of all gradients to this norm; 0 does not clip.
        reg_lambda: weight λ of the penalty that keeps matrices away from both ends of the range; 0 is no penalty.
        reg_alpha1: weight of w² in the penalty.
        reg_alpha2: weight of (w + 1e-6)⁻² in the penalty.
    """

    recipe: list[str] = field(default_factory=list)
    include: str = "blocks.*"
    exclude: str = ""
    q_scalar: float = 1.0
    stochastic_output_grad: bool = False
    rank: int | float = 0.25
    gains: Gains = "none"
    niter: int = 0
    compensated: bool = False
    metis_forward: bool = True
    metis_backward: bool = True
    forward_warmup_steps: int = 100
    merge_steps: int = 1000
    max_norm: float = 1.0
    reg_lambda: float = 0.0
    reg_alpha1: float = 1.0
    reg_alpha2: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "max_norm", "reg_lambda", "reg_alpha1", "reg_alpha2")
        require(bool(patterns(self.include)), "include is empty; name layers by patterns, such as blocks.*.")
        require(
            self.metis_forward or self.metis_backward,
            "metis_forward and metis_backward are both false; set one of them to true, or use the strategy fp4_block, "
            "which is fp4_metis without either.",
        )
        for strategy in (*RECIPES, *self.custom_recipes()):
            self.build_recipe(strategy)

    def custom_recipes(self) -> dict[str, str]:
        """Return the descriptions of the option ``recipe`` by strategy.

        Raises:
            UsageError: for an invalid name, or without a description.
        """
        descriptions: dict[str, str] = {}
        for text in self.recipe:
            name, equals, description = (part.strip() for part in text.partition("="))
            require(
                bool(equals and description),
                f"recipe is {text!r}; write NAME=RECIPE with one of {', '.join(RECIPES)}, or with casts such as "
                "e2m1/nvfp4,output_grad=e5m2/current.",
            )
            is_valid = re.fullmatch("[a-z][a-z0-9_]*", name) and name not in {*RECIPES, *ROLES, *descriptions, "all"}
            require(
                bool(is_valid),
                f"recipe {text!r} has the invalid name {name!r}; use lower-case letters, digits and _, and none of the "
                f"names all, {', '.join((*RECIPES, *ROLES, *descriptions))}.",
            )
            descriptions[name] = description
        return descriptions

    def build_recipe(self, strategy: str) -> Recipe:
        """Return the casts of one strategy under these options.

        Raises:
            UsageError: for invalid options.
        """
        recipe = replace(lowbit.find_recipe(self.custom_recipes().get(strategy, strategy)), name=strategy)
        if recipe.casts:
            recipe = recipe.with_every(q_scalar=self.q_scalar)
        if recipe.output_grad is not None and self.stochastic_output_grad:
            recipe = replace(recipe, output_grad=replace(recipe.output_grad, rounding="stochastic"))
        return replace(recipe, metis=self.metis) if recipe.metis is not None else recipe

    @property
    def metis(self) -> MetisOptions:
        """The options of the decomposition in fp4_metis; raises :class:`UsageError` for invalid ones."""
        return MetisOptions(
            rank=self.rank,
            gains=self.gains,
            niter=self.niter,
            compensated=self.compensated,
            forward=self.metis_forward,
            backward=self.metis_backward,
            forward_warmup_steps=self.forward_warmup_steps,
            merge_steps=self.merge_steps,
        )

    @property
    def range_penalty(self) -> RangePenalty:
        """The penalty on the matrices of the decoder."""
        return RangePenalty(weight=self.reg_lambda, large=self.reg_alpha1, small=self.reg_alpha2)


def patterns(text: str) -> list[str]:
    """Split a text at commas.

    >>> patterns("blocks.*, head")
    ['blocks.*', 'head']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


LARGE: dict[str, Any] = dict(batch_size=512, steps=20_000, amp="bf16", merge_steps=2000, max_norm=1.0)
GPT2_SHAPE: dict[str, Any] = dict(LARGE, vocabulary=50_257, context=1024, width=768, layers=12, heads=12, rank=60)
LLAMA_SHAPE: dict[str, Any] = dict(LARGE, vocabulary=32_000, context=2048, width=2048, layers=16, heads=16, rank=64)
GPT2 = dict(GPT2_SHAPE, accumulation_steps=32, lr=6e-4, min_lr=6e-5, warmup_steps=700, forward_warmup_steps=700)
LLAMA = dict(LLAMA_SHAPE, accumulation_steps=64, lr=4e-4, min_lr=4e-5, warmup_steps=2000, forward_warmup_steps=2000)


@ExperimentRegistry.register
class LowbitLMRunner(LanguageModelRunner[LowbitLMConfig]):
    """A language model trained with 4- and 8-bit numbers: the gap of each recipe to full precision, and its causes."""

    name: ClassVar[str] = "lowbit_lm"
    config_class = LowbitLMConfig
    strategies = tuple(RECIPES)
    """The built-in strategies; an instance adds those of its option ``recipe``."""
    compared_to = {"val_loss": "fp32"}
    compared_metrics = (
        "gradient_overflow/cumulative_element_overflow_rate",
        "gradient_overflow/cumulative_batch_overflow_rate",
        "gradient_overflow/cumulative_underflow_rate",
        "gradient_overflow/gradient_to_noise_ratio_of/output_grad",
    )
    progress_metrics = {
        "loss": ["range_penalty/data_loss"],
        "with reg": ["training_metrics/loss"],
        "over": ["gradient_overflow/element_overflow_rate", "gradient_overflow/batch_overflow_rate"],
    }
    live_metrics = {
        "loss": ["training_metrics/loss", "training_metrics/evaluation/val_loss"],
        "quantised": [
            "gradient_overflow/element_overflow_rate",
            "gradient_overflow/batch_overflow_rate",
            "gradient_overflow/underflow_rate",
            "gradient_overflow/gradient_to_noise_ratio",
        ],
        "health": ["grad_clip/norm_before", "grad_clip/coefficient", "weight_updates/update_ratio_median"],
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {**QUICK, "forward_warmup_steps": 40, "merge_steps": 200},
        "gpt2": {**GPT2, "max_norm": 2.0},
        "llama": LLAMA,
    }

    def __init__(self, config: LowbitLMConfig, device: torch.device | None = None) -> None:
        super().__init__(config, device)
        self.strategies = (*RECIPES, *config.custom_recipes())

    def prepare_model(self, model: nn.Module, strategy: str) -> nn.Module:
        """Replace the linear layers of the blocks by layers that cast with the strategy's recipe.

        Raises:
            UsageError: if the recipe of any strategy does not suit the model.
        """
        config = self.config
        include, exclude = patterns(config.include), patterns(config.exclude)
        for recipe in map(config.build_recipe, self.strategies):
            lowbit.layers_to_quantize(model, recipe, include=include, exclude=exclude)
        if config.build_recipe(strategy).casts:
            seed = derived_seed(config.seed, self.name)
            lowbit.quantize_model(model, config.build_recipe(strategy), include=include, exclude=exclude, seed=seed)
        return model

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the plan of the language model; a model with quantised layers is not split."""
        return {} if lowbit.quantized_modules(model) else super().tensor_parallel_plan(model)

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return the penalty on the decoder's matrices, if enabled; zero-dimensional."""
        return (
            self.config.range_penalty(lowbit.penalised_matrices(model, PENALISED)) if self.config.reg_lambda else None
        )

    def strategy_hooks(self, strategy: str) -> OptionsByHook:
        """Return hooks that clip and penalise, count overflow and underflow of casts, and split weights for Metis."""
        config = self.config
        recipe = config.build_recipe(strategy)
        hooks: dict[str, Mapping[str, Any]] = {}
        if recipe.metis is not None and recipe.metis.forward:
            hooks["metis_split"] = {}
        if config.max_norm:
            hooks["grad_clip"] = {"max_norm": config.max_norm}
        if config.reg_lambda:
            hooks["range_penalty"] = {**vars(config.range_penalty), "pattern": PENALISED, "every_n_steps": 1}
        if recipe.casts:
            hooks["gradient_overflow"] = {"count_interval": COUNT_INTERVAL}
        return hooks
