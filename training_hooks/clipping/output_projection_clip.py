"""Clipping of the gradient through the output projection of a tied matrix, by the norms through its embedding."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StatePart
from loopscope.errors import UnsuitableError, UsageError, require
from loopscope.hooks import GradientTap, MetricPanel, Metrics, ModelDataContext, Remembering, RunInfo, TapOwner
from loopscope.option_words import hook_option_text
from loopscope.taps import TapSet
from loopscope.tensors import joint_norm
from loopscope.training import ObservedPass, Ranks
from torch import Tensor, nn

from .tied_embeddings import NORMS, PICTURE, EmbeddingPair, TiedGradients, pair_of, squares

Scope = Literal["weight", "logits"]
NAME = "output_projection_clip"
Decision = tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]
"""What was measured of a step, and what is added to its gradient: g_out, scaled like the loss, and (c − 1) / scale."""


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """Options of the output projection's clipping.

    Args:
        window_size: number of steps whose embedding-gradient norms are averaged.
        scale_factor: the threshold is this times their mean.
        scope: ``weight`` clips only the output projection's share of the tied gradient, once per optimizer step;
            ``logits`` clips d loss/d logits, and with it all that flows from it, in every backward pass.
    """

    window_size: int = 5
    scale_factor: float = 0.1
    scope: Scope = "weight"

    def __post_init__(self) -> None:
        """Check every value; raises :class:`UsageError`."""
        size, factor, scopes = self.window_size, self.scale_factor, get_args(Scope)
        require(size >= 1, f"{NAME}.window_size is {size}; it must be at least 1.")
        require(0 < factor < math.inf, f"{NAME}.scale_factor is {factor}; it must be positive.")
        require(self.scope in scopes, f"{NAME}.scope is {self.scope!r}; it is one of {', '.join(scopes)}.")


class NormHistory(Remembering):
    """The last embedding-gradient norms that were finite, newest last, on their device; NaN before the first."""

    norms = Remembered(partial(torch.empty, 0))

    def __init__(self, size: int) -> None:
        self.size = size

    def add(self, norm: Tensor) -> None:
        """Append a norm (zero-dimensional), unless it is infinite or NaN."""
        if not self.norms.numel():
            self.norms = torch.full((self.size,), torch.nan, dtype=norm.dtype, device=norm.device)
        kept = self.norms.to(norm)
        self.norms = torch.where(norm.isfinite(), torch.cat((kept[1:], norm[None])), kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the norms of a state, none if it is empty; raises :class:`UsageError` for another window size."""
        super().load_state_dict({"norms": torch.empty(0), **state})
        length = self.norms.numel()
        if length not in (0, self.size):
            raise UsageError(f"The saved history has a window of {length} steps, but window_size is {self.size}.")

    @property
    def mean(self) -> Tensor | None:
        """The mean of those that are there; ``None`` before the first step, NaN while all were infinite."""
        return self.norms.nanmean() if self.norms.numel() else None


class OutputProjectionClipper:
    """Computes, once per optimizer step, the scale factor of the gradient through the output projection.

    The threshold is ``scale_factor`` times the mean of the last ``window_size`` norms of the gradient through the
    embedding; before there is one, nothing is clipped. Under the scope ``logits`` those norms are themselves of scaled
    gradients, since what is scaled flows on to the embedding.
    """

    def __init__(self, pair: EmbeddingPair, options: ClipOptions) -> None:
        pair.must_be_tied(NAME)
        if options.scope == "logits" and not pair.projection:
            raise UnsuitableError(
                f"{NAME}.scope is 'logits', but the head is functional and has no output to tap; choose scope=weight, "
                "or make the head an nn.Linear that is given the embedding's weight."
            )
        self.pair, self.options = pair, options
        self.history = NormHistory(options.window_size)
        self._gradients = TiedGradients(squares)
        self._logits: list[tuple[Tensor, Tensor]] = []

    def taps(self) -> list[GradientTap]:
        """Return what has to be watched: both uses of the matrix and, under that scope, the logits.

        All say that they replace: as parts of a treatment they may end the graphs of a compiled model.
        """
        watched = self.pair.taps(self._gradients, replaces=True)
        if self.options.scope == "logits":
            watched.append(GradientTap(self.pair.projection, "output", self._scaled_logits, replaces=True))
        return watched

    def forget(self) -> None:
        """Discard the gradients of the last step."""
        self._gradients.forget()
        self._logits = []

    def threshold(self) -> Tensor | None:
        """Return the largest norm that is let through; ``None`` before the first step, NaN if none was finite yet."""
        mean = self.history.mean
        return None if mean is None else self.options.scale_factor * mean

    def _scaled_logits(self, gradient: Tensor) -> Tensor:
        """Scale d loss/d logits of one backward pass; its norm is remembered."""
        norm = joint_norm([gradient.detach()])
        factor = clip_factor(norm, self.threshold())
        self._logits.append((norm, factor))
        return gradient * factor.to(gradient.dtype)

    def decide(self, gradient: Tensor | None, loss_scale: float, ranks: Ranks | None = None) -> Decision:
        """Decide what becomes of the step's gradients and take their norm into the history.

        ``gradient`` is the whole gradient of the tied matrix, unscaled, a mean over the ``ranks``. Nothing is returned
        where nothing flowed through both uses.
        """
        sums = self._gradients.measure(gradient, loss_scale, ranks)
        output, mean, threshold = self._gradients.output, self.history.mean, self.threshold()
        logits = self._logits
        self.forget()
        if sums is None or output is None:
            return {}, None
        if logits and loss_scale != 1.0:
            raise UnsuitableError(
                f"{NAME}.scope is 'logits', whose gradients are multiplied by the loss scale of float16 while they are "
                f"clipped; choose {hook_option_text(NAME, scope='weight')}, or train in bfloat16."
            )
        input_norm, output_norm = (sums.sqrt() / loss_scale).unbind()
        factors = [factor for _, factor in logits]
        if self.options.scope == "weight":
            factors = [clip_factor(output_norm, threshold)]
        else:
            output_norm = torch.stack([norm for norm, _ in logits]).square().sum().sqrt() / loss_scale
        metrics = {
            "embedding_grad_l2_norm": input_norm,
            "output_proj_grad_l2_norm": output_norm,
            "clipped_fraction": (torch.stack(factors) < 1).to(input_norm.dtype).mean(),
        }
        change = None
        if mean is not None and threshold is not None:
            metrics |= {"embedding_grad_rolling_avg": mean, "output_proj_clip_threshold": threshold}
            # g_in + c·g_out = g + (c − 1)·g_out, where ``output`` is g_out multiplied by the loss scale
            change = (output, (factors[0] - 1) / loss_scale) if self.options.scope == "weight" else None
        self.history.add(input_norm)
        return metrics, change


def clip_factor(norm: Tensor, threshold: Tensor | None) -> Tensor:
    """Return min(1, threshold / norm); 1 where either is undefined."""
    if threshold is None:
        return torch.ones_like(norm)
    return torch.nan_to_num((threshold / norm).clamp(max=1.0), nan=1.0)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class OutputProjectionClip(InterventionHook):
    """Keep the output projection's gradient in a tied matrix below a multiple of the embedding's.

    A tied matrix gets g_in + g_out. g_out is scaled down so that its norm is at most ``scale_factor`` times the mean
    norm of g_in over the last ``window_size`` steps; the first step has none, and is not clipped. ``window_size`` 1
    with ``scale_factor`` 1 clips to the previous step's g_in. One decision is made for each optimizer step.

    ``scope`` ``weight`` changes g_out alone. ``logits`` scales d loss/d logits in every backward pass, so that all
    gradients of the model are scaled with it; then the norms of g_in in the history are of gradients so scaled, too,
    and the threshold falls with them.

    The pair is found, and verified, in one forward pass of the first batch: the output projection is what makes the
    model's output, be it a module or, under ``weight`` and not compiled, a functional head (``F.linear(h,
    wte.weight)``). A line at the start says which.

    Assumes one embedding and one output projection that share their weight, dense gradients, unsharded weights (no
    FSDP2, and under tensor parallelism neither in the plan); under data parallelism the scope ``weight``.

    Args:
        window_size: steps whose g_in norms are averaged.
        scale_factor: the threshold is this times their mean.
        scope: weight (g_out alone) or logits (and all that flows from them).
        embedding: the name of the embedding in the model; by default it is found.
        projection: the name of the output projection; by default it is found. A functional head has none.
    """

    name = NAME
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    mutates = False
    commits = frozenset({StatePart.GRADIENTS})
    panels = (
        MetricPanel(
            picture=PICTURE,
            place=2,
            title="Gradients before clipping, and the clip threshold",
            y_label="L2 norm",
            curves={**NORMS, "output_proj_clip_threshold": "clip threshold"},
            log_y=True,
            shares={"clipped_fraction": "clipped"},
        ),
    )
    _clipper = Remembered[OutputProjectionClipper | None](None, saved=False)
    _history = Remembered[Mapping[str, Any]](dict, saved=False)
    """What a checkpoint had of the history, until the clipper is made."""
    metrics = """
        embedding_grad_l2_norm | ‖g_in‖₂ of the step, under the scope in use | [0, ∞)
            | The gradient through the input embedding, by which the other one is measured.
        output_proj_grad_l2_norm | ‖g_out‖₂ before clipping; scope logits: root of the sum over backward passes of ‖d
            loss/d logits‖₂² | [0, ∞) | Far above the threshold throughout: the clip, not the loss, sets its size.
        embedding_grad_rolling_avg | mean of embedding_grad_l2_norm over the last window_size steps before this one,
            those there are | [0, ∞) | From the second step on; infinite and NaN norms are left out.
        output_proj_clip_threshold | scale_factor · embedding_grad_rolling_avg | [0, ∞)
            | The largest norm that is let through; from the second step on.
        clipped_fraction | share of this step's decisions with threshold < norm: of one, or of one for each backward
            pass | [0, 1] | Its mean over steps is how often the clip acts.
    """

    window_size: int = 5
    scale_factor: float = 0.1
    scope: Scope = "weight"
    embedding: str | None = None
    projection: str | None = None

    def __post_init__(self) -> None:
        self.options = ClipOptions(window_size=self.window_size, scale_factor=self.scale_factor, scope=self.scope)

    def start(self, run: RunInfo) -> None:
        """Find the tied modules; raises :class:`UnsuitableError` for a model without them."""
        if self.scope == "logits" and run.ranks.data:
            raise UnsuitableError(
                f"{NAME}.scope is 'logits', which scales within every backward pass, when ranks under data parallelism "
                "do not know each other's gradients yet; choose scope=weight."
            )
        self._clipper = OutputProjectionClipper(pair_of(run, self.name, self.embedding, self.projection), self.options)
        self._clipper.history.load_state_dict(self._history)

    def taps(self, model: nn.Module) -> Iterable[GradientTap]:
        """Watch both uses of the tied matrix."""
        return [] if self._clipper is None else self._clipper.taps()

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Request the scaled gradient, and return the norms and the threshold."""
        if self._clipper is None:
            return {}
        name = f"{self._clipper.pair.embedding}.weight"
        weight = run_ctx.model.get_parameter(name)
        metrics, change = self._clipper.decide(weight.grad, run_ctx.loss_scale or 1.0, run_ctx.ranks)
        if change is not None:
            model_ctx.add_to_gradients({name: change[0]}, change[1])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the history of norms."""
        return dict(self._history) if self._clipper is None else self._clipper.history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the history of :meth:`state_dict`."""
        self._history = state
        if self._clipper is not None:
            self._clipper.history.load_state_dict(state)


class TiedGradientClipping:
    """Clips the gradient through a tied output projection in a custom training loop; can be enabled and disabled.

    The first forward pass that it sees must show that the pair makes the model's output; else
    :class:`UnsuitableError` is raised from it.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    >>> model[1].weight = model[0].weight
    >>> clipping = TiedGradientClipping(model, ClipOptions(window_size=1, scale_factor=1.0))
    >>> clipping.enable()
    >>> model(torch.arange(5)).square().sum().backward()
    >>> sorted(clipping.clip())
    ['clipped_fraction', 'embedding_grad_l2_norm', 'output_proj_grad_l2_norm']
    >>> clipping.disable()
    """

    def __init__(self, model: nn.Module, options: ClipOptions | None = None, *, embedding: str | None = None,
                 projection: str | None = None) -> None:  # fmt: skip
        self._model, self._wanted = model, (embedding, projection)
        pair = EmbeddingPair.tied_in(model, NAME, embedding, projection)
        self.clipper = OutputProjectionClipper(pair, options or ClipOptions())
        self._weight = model.get_parameter(f"{pair.embedding}.weight")
        self._taps, self._watch = TapSet(model), ExitStack()

    def enable(self) -> None:
        """Follow the two gradients from the next backward pass on."""

        def is_due() -> bool:
            return True

        def call(target: str, function: Callable[[], Tensor | None]) -> Tensor | None:
            return function()

        self.disable()
        self._taps.attach(TapOwner(NAME, is_due, call, may_replace=True), self.clipper.taps())
        seen = ObservedPass()
        self._watch = seen.observe(self._model, partial(self._verify, seen))

    def _verify(self, seen: ObservedPass) -> None:
        """Raise :class:`UnsuitableError` if the first pass shows another pair."""
        self._watch.close()
        if (pair := EmbeddingPair.of(self._model, NAME, *self._wanted, seen)) != self.clipper.pair:
            pair.must_be_tied(NAME)
            raise UnsuitableError(f"{NAME} should clip {self.clipper.pair}, but the model's output depends on {pair}.")

    def disable(self) -> None:
        """Stop clipping, but keep the history."""
        self._taps.remove()
        self._watch.close()
        self.clipper.forget()

    @torch.no_grad()
    def clip(self, loss_scale: float = 1.0) -> dict[str, Tensor]:
        """Clip, after all backward passes of a step and before ``optimizer.step()``; returns the metrics.

        Gradients are unscaled; ``loss_scale`` is the factor on the loss.
        """
        gradient = self._weight.grad
        metrics, change = self.clipper.decide(gradient, loss_scale)
        if change is not None and gradient is not None:
            gradient.addcmul_(*(factor.to(gradient) for factor in change))
        return metrics

    def state_dict(self) -> dict[str, Tensor]:
        """Return the history of norms."""
        return self.clipper.history.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume with the history of :meth:`state_dict`."""
        self.clipper.history.load_state_dict(state)
