"""Clipping of the gradient through the output projection of a tied matrix, as a declared change of the run."""

from collections.abc import Iterable, Mapping
from typing import Any

from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StatePart
from loopscope.hooks import GradientTap, MetricPanel, Metrics, ModelDataContext, RunInfo
from torch import nn

from .output_projection import ClipOptions, OutputProjectionClipper, Scope
from .tied_embeddings import PICTURE, THROUGH_INPUT, THROUGH_OUTPUT, EmbeddingPair


@HookRegistry.register
class OutputProjectionClip(InterventionHook):
    """Keep the output projection's gradient in a tied matrix below a multiple of the embedding's.

    A tied matrix gets g_in + g_out. g_out is scaled down so that its norm is at most ``scale_factor`` times the mean
    norm of g_in over the last ``window_size`` steps; the first step has none, and is not clipped. ``window_size`` 1
    with ``scale_factor`` 1 clips to the previous step's g_in. One decision is made for each optimizer step.

    ``scope`` ``weight`` changes g_out alone. ``logits`` scales d loss/d logits in every backward pass, so that all
    gradients of the model are scaled with it; then the norms of g_in in the history are of gradients so scaled, too,
    and the threshold falls with them.

    Assumes one embedding and one output projection that share their weight, dense gradients, unsharded weights.

    Args:
        window_size: steps whose g_in norms are averaged.
        scale_factor: the threshold is this times their mean.
        scope: weight (g_out alone) or logits (and all that flows from them).
        embedding: the name of the embedding in the model; by default it is found.
        projection: the name of the output projection; by default it is found.
    """

    name = "output_projection_clip"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    mutates = False
    commits = frozenset({StatePart.GRADIENTS})
    panels = (
        MetricPanel(
            picture=PICTURE,
            place=2,
            title="Gradients before clipping, and the clip threshold",
            y_label="L2 norm",
            curves={
                "embedding_grad_l2_norm": THROUGH_INPUT,
                "output_proj_grad_l2_norm": THROUGH_OUTPUT,
                "output_proj_clip_threshold": "clip threshold",
            },
            log_y=True,
            shares={"clipped_fraction": "clipped"},
        ),
    )
    _clipper = Remembered[OutputProjectionClipper | None](lambda: None, saved=False)
    _history = Remembered[Mapping[str, Any]](dict, saved=False)
    """What a checkpoint had of the history, until the clipper is made."""
    metrics = """
        embedding_grad_l2_norm | ‖g_in‖₂ of the step, under the scope in use | [0, ∞)
            | The gradient through the input embedding, by which the other one is measured.
        output_proj_grad_l2_norm | ‖g_out‖₂ before clipping; scope logits: root of the sum over backward passes of ‖d
            loss/d logits‖₂² | [0, ∞)
            | Far above the threshold throughout: the clip, not the loss, sets its size.
        embedding_grad_rolling_avg | mean of embedding_grad_l2_norm over the last window_size steps before this one,
            those there are | [0, ∞)
            | From the second step on; infinite and NaN norms are left out.
        output_proj_clip_threshold | scale_factor · embedding_grad_rolling_avg | [0, ∞)
            | The largest norm that is let through; from the second step on.
        clipped_fraction | share of this step's decisions with threshold < norm: of one, or of one for each backward
            pass | [0, 1]
            | Its mean over steps is how often the clip acts.
    """

    def __init__(
        self,
        *,
        window_size: int = 5,
        scale_factor: float = 0.1,
        scope: Scope = "weight",
        embedding: str | None = None,
        projection: str | None = None,
    ) -> None:
        self.options = ClipOptions(window_size=window_size, scale_factor=scale_factor, scope=scope)
        self._wanted = embedding, projection

    def start(self, run: RunInfo) -> None:
        """Find the tied modules; refuse a model without them."""
        pair = EmbeddingPair.of(run.model, self.name, *self._wanted)
        pair.must_be_tied(self.name)
        self._clipper = OutputProjectionClipper(pair, self.options)
        self._clipper.history.load_state_dict(self._history)

    def taps(self, model: nn.Module) -> Iterable[GradientTap]:
        """Watch both uses of the tied matrix."""
        return [] if self._clipper is None else self._clipper.taps()

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Ask for the scaled share, and return the norms and the threshold."""
        if self._clipper is None:
            return {}
        name = f"{self._clipper.pair.embedding}.weight"
        weight = run_ctx.model.get_parameter(name)
        decision = self._clipper.decide(weight.grad, run_ctx.loss_scale or 1.0)
        if decision is None:
            return {}
        if self.options.scope == "weight" and decision.threshold is not None:
            model_ctx.add_to_gradients({name: decision.output}, decision.change)
        return decision.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the history of norms."""
        return dict(self._history) if self._clipper is None else self._clipper.history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the history of :meth:`state_dict`."""
        self._history = state
        if self._clipper is not None:
            self._clipper.history.load_state_dict(state)
