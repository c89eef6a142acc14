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

PENALISED = "blocks.*"  # pattern of the decoder's matrices; its norms are no matrices
COUNT_INTERVAL = 4  # steps from one step whose casts are counted to the next: counting costs a tenth of a step


@dataclass(frozen=True, kw_only=True)
class LowbitLMConfig(LanguageModelConfig):
    """Options of lowbit_lm; the defaults are for a workstation, ``--preset quick`` is for a laptop.

    Args:
        recipe: strategies of your own, NAME=RECIPE: a recipe's name or casts, such as
            mine=e2m1/nvfp4,output_grad=e5m2/current; may be repeated.
        include: patterns of the names of the linear layers that are cast, separated by commas.
        exclude: patterns of names that are not.
        q_scalar: factor on all scales; below 1, values leave the range.
        stochastic_output_grad: round the output's gradient stochastically.
        rank: components of the low-rank part of fp4_metis: a number of them, or as a fraction in (0, 1) a share of the
            matrix's smaller side.
        gains: factors on the components of decomposed gradients: none or long_tail.
        niter: power iterations of the randomised SVD.
        compensated: take the residual of a gradient from the low-rank part as it was quantised.
        metis_forward: split weights into trained factors and a residual.
        metis_backward: decompose the output's gradient before it is cast.
        forward_warmup_steps: steps before weights are split.
        merge_steps: steps after which the factors are merged and split anew; 0 never does.
        max_norm: clip all gradients together to this norm; 0 does not clip.
        reg_lambda: weight of the regulariser that holds matrices away from both ends of the range; 0 has none.
        reg_alpha1: its weight on w².
        reg_alpha2: its weight on (w + 1e-6)⁻².
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
            "metis_forward and metis_backward are both off, which leaves fp4_metis without Metis; that is fp4_block.",
        )
        for strategy in (*RECIPES, *self.own_recipes()):
            self.recipe_of(strategy)

    def own_recipes(self) -> dict[str, str]:
        """Return the descriptions given with ``recipe`` by strategy; raises :class:`UsageError` for a bad name."""
        found: dict[str, str] = {}
        for text in self.recipe:
            name, equals, description = (part.strip() for part in text.partition("="))
            require(
                bool(equals and description),
                f"recipe is {text!r}; write NAME=RECIPE, a recipe being one of {', '.join(RECIPES)}, or casts such as "
                "e2m1/nvfp4,output_grad=e5m2/current.",
            )
            free = re.fullmatch("[a-z][a-z0-9_]*", name) and name not in {*RECIPES, *ROLES, *found, "all"}
            require(
                bool(free),
                f"recipe {text!r} cannot be called {name!r}; take lower-case letters, digits and _, and no name that a "
                f"recipe or role has: {', '.join((*RECIPES, *ROLES, *found))}.",
            )
            found[name] = description
        return found

    def recipe_of(self, strategy: str) -> Recipe:
        """Return the casts of one strategy under these options; raises :class:`UsageError` for bad ones."""
        recipe = replace(lowbit.find_recipe(self.own_recipes().get(strategy, strategy)), name=strategy)
        if recipe.casts:
            recipe = recipe.with_every(q_scalar=self.q_scalar)
        if recipe.output_grad is not None and self.stochastic_output_grad:
            recipe = replace(recipe, output_grad=replace(recipe.output_grad, rounding="stochastic"))
        return replace(recipe, metis=self.metis) if recipe.metis is not None else recipe

    @property
    def metis(self) -> MetisOptions:
        """How fp4_metis decomposes; raises :class:`UsageError` for what cannot be."""
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
        """The regulariser."""
        return RangePenalty(weight=self.reg_lambda, large=self.reg_alpha1, small=self.reg_alpha2)


def patterns(text: str) -> list[str]:
    """Return the parts of a text between commas.

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
    """A language model trained with 4- and 8-bit numbers: how far each recipe stays behind full precision, and why."""

    name: ClassVar[str] = "lowbit_lm"
    config_class = LowbitLMConfig
    strategies = tuple(RECIPES)
    """To which an instance adds those of its option ``recipe``."""
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
        self.strategies = (*RECIPES, *config.own_recipes())

    def prepare_model(self, model: nn.Module, strategy: str) -> nn.Module:
        """Make the linear layers of the blocks cast by a recipe; options that suit no model are refused at once."""
        config = self.config
        include, exclude = patterns(config.include), patterns(config.exclude)
        for recipe in map(config.recipe_of, self.strategies):
            lowbit.layers_to_quantize(model, recipe, include=include, exclude=exclude)
        if config.recipe_of(strategy).casts:
            seed = derived_seed(config.seed, self.name)
            lowbit.quantize_model(model, config.recipe_of(strategy), include=include, exclude=exclude, seed=seed)
        return model

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the language model's plan where layers are plain; those that cast are not cut up."""
        return {} if lowbit.quantized_modules(model) else super().tensor_parallel_plan(model)

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return the regulariser of the decoder's matrices, if it is on."""
        return self.config.range_penalty(lowbit.penalised(model, PENALISED)) if self.config.reg_lambda else None

    def strategy_hooks(self, strategy: str) -> OptionsByHook:
        """Clip and penalise under every strategy, count what the quantisers lose, split weights under Metis."""
        config = self.config
        recipe = config.recipe_of(strategy)
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
