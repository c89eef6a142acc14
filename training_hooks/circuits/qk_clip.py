"""Clipping of attention logits by scaling the weights of queries and keys (QK-Clip of MuonClip)."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StatePart, StepSchedule
from loopscope.errors import UnsuitableError, listed, require, shortened
from loopscope.hooks import AttentionCall, AttentionTap, Metrics, ModelDataContext, RunInfo, Tap
from loopscope.taps import attention_read
from loopscope.training import Ranks, is_compiled
from torch import Tensor, nn

from ..measures import notice
from .query_key_weights import QueryKeyLayer, ScaledRows


def largest_products(call: AttentionCall) -> Tensor:
    """Return the largest scale·q·k of each head over visible keys, before soft caps and biases, shape (heads,)."""
    largest: Tensor | None = None
    for block in call.blocks():
        assert block.products is not None
        part = block.products.amax(dim=(0, 2, 3))
        largest = part if largest is None else torch.maximum(largest, part)
    assert largest is not None
    return largest


def clip_factors(logits: Tensor, threshold: float) -> Tensor:
    """Return min(1, τ/S) for each logit S; 1 for a logit that is not finite."""
    clipped = (logits > threshold) & logits.isfinite()
    return torch.where(clipped, threshold / logits, 1.0)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class QKClip(InterventionHook):
    """Scale the weights of queries and keys of every head whose largest attention logit exceeds a threshold.

    S is the largest scale·q·k of a head in the step's training passes: over its micro-batches, all ranks, queries and
    visible keys, before soft caps and biases. After the optimizer's step, a head with S > τ gets the factor γ = τ/S:
    W_q and W_k of the head are multiplied by √γ (QK-Clip, a part of MuonClip: Kimi K2, arXiv 2507.20534), and so are
    their biases. With learning rate 0, clipped heads of the first layer then have the largest logit τ on the same
    batch. The clip changes the inputs of later layers, whose logits may differ from τ. The other heads keep their bits.

    Keys that several heads share (GQA, MQA) stay as they are, and W_q of the head is multiplied by γ. In multi-head
    latent attention (MLA), the parts of W_q and W_k without rotary positions are multiplied by √γ, the rotary part of
    W_q by γ, and the rotary key, which all heads share, stays. Rows of fused projections are scaled by head.

    Supports ``nn.MultiheadAttention`` and modules with usual names of projections (``q_proj`` and ``k_proj``,
    ``c_attn``, ``qkv``, ``query_key_value``, ``q_b_proj`` and ``kv_b_proj``, ...) that are ``nn.Linear`` or the
    ``Conv1D`` of Hugging Face. The first measured pass verifies that the queries and keys are proportional to the
    outputs of the projections, in the order of rows that is then scaled.

    Assumes that the optimizer updates the model's own parameters (no separate float32 copies). Unsuitable for layers
    that normalise queries or keys after their projection (QK-norm): scaling has no effect there. Unsuitable under
    tensor parallelism, where each rank has only some heads. Layers whose query and key weights are frozen are left out.

    Args:
        threshold: the largest logit τ that a head may have.
        interval: steps between two measurements, each with a clip if needed.
    """

    name = "qk_clip"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_STEP})
    intervention_points = frozenset({HookPoint.POST_STEP})
    mutates = False
    commits = frozenset({StatePart.PARAMETERS})
    _layers = Remembered(dict[str, QueryKeyLayer], saved=False)
    _scalings = Remembered(dict[str, list[ScaledRows]], saved=False)
    _logits = Remembered(dict[str, Tensor], saved=False)
    metrics = """
        largest_logit | max over all heads of S, before the clip | (−∞, ∞)
            | Falls back to threshold while the clip acts, plus the growth within a step. NaN or ∞: a query or key is
            not finite, and its head is not clipped.
        clipped_heads | number of heads with S > threshold | [0, heads]
            | Many at every step: threshold is too low, or the learning rate too high. In the training of Kimi K2 it
            fell to 0 after the early phase.
        clipped_share | clipped_heads / all heads | [0, 1] | The same, comparable between models.
        smallest_factor | min of threshold/S over the clipped heads, 1 without any | (0, 1]
            | 1: no head is clipped. Far below 1: the logits grow much within a step, or did before the first clip.
    """

    threshold: float = 100.0
    interval: int = 1

    def __post_init__(self) -> None:
        require(
            0 < self.threshold < math.inf, f"{self.name}.threshold is {self.threshold}; it must be positive and finite."
        )
        require(self.interval >= 1, f"{self.name}.interval is {self.interval}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)

    def start(self, run: RunInfo) -> None:
        """Find the layers, and verify their projections in the first pass if the run can compute one.

        Raises:
            UnsuitableError: the model has no attention that can be scaled, or the run shards layers over ranks.
        """
        if run.ranks.shares_layers:
            raise UnsuitableError(
                f"Hook {self.name!r} needs all heads of a layer, but under tensor parallelism each rank has only some "
                "of them; train without tensor parallelism."
            )
        self._layers = self._found_layers(run.model)
        if run.first_pass is not None and not (run.ranks.are_many or is_compiled(run.model)):
            with ExitStack() as stack:
                for name, layer in self._layers.items():
                    stack.enter_context(attention_read(layer.module, partial(self._verify, name), _always))
                run.first_pass()

    def _found_layers(self, model: nn.Module) -> dict[str, QueryKeyLayer]:
        named = model.named_modules()
        found = [layer for name, module in named if (layer := QueryKeyLayer.of(name, module)) is not None]
        for layer in found:
            layer.check(self.name)
        layers = _innermost(found)
        if not layers:
            raise UnsuitableError(
                f"Hook {self.name!r} finds no attention in {shortened(type(model).__name__, 40)} whose queries and "
                "keys it can scale: no nn.MultiheadAttention, and no linear layers named like q_proj and k_proj or qkv."
            )
        weights = Counter(weight for layer in layers.values() for weight in layer.weights())
        if shared := [layer.name for layer in layers.values() if _is_shared(layer, weights)]:
            raise UnsuitableError(
                f"Hook {self.name!r} scales the weights of each layer, but {listed(shared, 2)} share those of queries "
                "or keys; leave the hook out."
            )
        if frozen := [layer.name for layer in layers.values() if not layer.trains]:
            notice(f"{self.name} leaves out {listed(frozen, 3)}, whose weights of queries and keys are frozen.")
        trained = {name: layer for name, layer in layers.items() if layer.trains}
        if not trained:
            raise UnsuitableError(f"Hook {self.name!r} finds only frozen weights of queries and keys.")
        return trained

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Tap the attention of every layer."""
        return [AttentionTap(name, partial(self._see, name)) for name in self._layers]

    def _verify(self, name: str, call: AttentionCall) -> None:
        if name not in self._scalings:
            self._scalings[name] = self._layers[name].scalings(call, self.name)

    def _see(self, name: str, call: AttentionCall) -> None:
        self._verify(name, call)
        logits = largest_products(call)
        self._logits[name] = torch.maximum(self._logits[name], logits) if name in self._logits else logits

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Discard the logits of the last measured step."""
        self._logits.clear()
        return {}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Scale the weights of heads with too large logits, and return the metrics of the step."""
        logits = _over_ranks(self._logits, run_ctx.ranks)
        self._logits.clear()
        if not logits:
            return {}
        joined = torch.cat([*logits.values()])
        factors = clip_factors(joined, self.threshold)
        clipped = int((factors < 1).sum())
        targets: dict[str, Tensor] = {}
        parts = torch.split(factors, [len(values) for values in logits.values()])
        for name, values in zip(logits, parts, strict=True):
            if (values < 1).any():
                targets |= self._layers[name].scaled(run_ctx.model, self._scalings[name], values)
        if targets:
            model_ctx.blend_parameters(targets, 1.0)
        return {
            "largest_logit": float(joined.max()),
            "clipped_heads": clipped,
            "clipped_share": clipped / len(joined),
            "smallest_factor": float(factors.min()),
        }


def _innermost(layers: Iterable[QueryKeyLayer]) -> dict[str, QueryKeyLayer]:
    """Return the layers by name, without those whose projections are those of a module inside of them."""
    kept: list[QueryKeyLayer] = []
    for layer in layers:  # a module comes before those inside of it
        if kept and layer.is_inside(kept[-1]) and layer.weights() == kept[-1].weights():
            kept.pop()
        kept.append(layer)
    return {layer.name: layer for layer in kept}


def _always() -> bool:
    return True


def _is_shared(layer: QueryKeyLayer, weights: Mapping[int, int]) -> bool:
    return any(weights[weight] > 1 for weight in layer.weights())


def _over_ranks(logits: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return the largest logits over all ranks, on the host, in one transfer."""
    values: dict[str, list[float]] = {}
    if logits:
        device = next(iter(logits.values())).device
        flat = iter(torch.cat([part.to(device) for part in logits.values()]).tolist())
        values = {name: [next(flat) for _ in range(len(part))] for name, part in logits.items()}
    if ranks.data:
        ranks.join()
    largest: dict[str, Tensor] = {}
    for part in ranks.gather(values) if ranks.data else [values]:
        for name, numbers in part.items():
            tensor = torch.tensor(numbers, dtype=torch.float64)
            largest[name] = torch.maximum(largest[name], tensor) if name in largest else tensor
    return largest
