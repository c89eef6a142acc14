"""The experiment ``tied_lm`` and its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from loopscope.hooks import ExperimentRegistry
from loopscope.runs import OptionsByHook

from .training import QUICK, LanguageModelConfig, LanguageModelRunner


@dataclass(frozen=True, kw_only=True)
class TiedLMConfig(LanguageModelConfig):
    """Options of tied_lm; the defaults are for a workstation, ``--preset quick`` is for a laptop."""


SHAPE: dict[str, Any] = dict(vocabulary=50_304, context=2048, width=2048, layers=16, heads=16, hidden=8192)
ONE_BILLION = dict(SHAPE, batch_size=512, accumulation_steps=64, lr=4e-4, min_lr=4e-5, warmup_steps=2000, amp="bf16")


@ExperimentRegistry.register
class TiedLMRunner(LanguageModelRunner[TiedLMConfig]):
    """A language model with tied embeddings: the two gradients of the shared matrix, and clipping of the larger one."""

    name: ClassVar[str] = "tied_lm"
    config_class = TiedLMConfig
    strategies = ("baseline", "clip_previous", "clip_rolling")
    compared_metrics = ("embedding_provenance/output_to_embedding_ratio", "embedding_provenance/cosine")
    live_metrics = {
        "loss": ["training_metrics/loss", "training_metrics/evaluation/val_loss"],
        "tied matrix": [
            "embedding_provenance/embedding_grad_l2_norm",
            "embedding_provenance/output_proj_grad_l2_norm",
            "embedding_provenance/output_to_embedding_ratio",
            "output_projection_clip/clipped_fraction",
        ],
        "health": ["weight_updates/grad_norm_max", "weight_updates/update_ratio_median"],
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": QUICK, "1b": ONE_BILLION}

    def strategy_hooks(self, strategy: str) -> OptionsByHook:
        """Measure both gradients under every strategy; clip that of the output projection under two of them."""
        clips: Mapping[str, OptionsByHook] = {
            "clip_previous": {"output_projection_clip": {"window_size": 1, "scale_factor": 1.0}},
            "clip_rolling": {"output_projection_clip": {"window_size": 5, "scale_factor": 0.1}},
        }
        return {"embedding_provenance": {}, **clips.get(strategy, {})}
