"""How the gradient grows and shrinks on its way backward from block to block."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, listed, require
from loopscope.hooks import Alert, GradientTap, Metrics, Recovery, RunInfo
from loopscope.state import is_sharded, joint_norm
from torch import Tensor, nn

from ..measures import stacked

SMALLEST_STACK = 2
HYSTERESIS = 2.0  # a warned condition ends where the gain is back within its threshold by this factor
LISTED = 5
Chains = Mapping[str, Sequence[str]]
"""Modules that run one after another, by their names in the model, first to last: by the name of the container in the
model (``model`` if it is the model itself), or by the pattern that found them."""


def find_chains(model: nn.Module, patterns: str = "") -> Chains:
    """Return the chains of blocks of a model, none if it has none.

    Without patterns: every ``nn.ModuleList`` and ``nn.Sequential`` with at least two members of one class that have
    parameters. The members of the class that has most are the blocks (of two as frequent, the first one's); what lies
    inside a block is not looked at, so that the outermost stack counts; encoder and decoder are chains of their own.

    Args:
        model: the model.
        patterns: globs on the names of modules, separated by commas; each makes one chain of what fits it, in the order
            of the model. ``*`` and ``?`` stop at dots: ``blocks.*`` fits ``blocks.0`` but not ``blocks.0.attention``.
    """
    if patterns.strip():
        names = [name for name, _ in model.named_modules() if name]
        globs = filter(None, map(str.strip, patterns.split(",")))
        found = {glob: [name for name in names if _fits(name.split("."), glob.split("."))] for glob in globs}
        return {glob: blocks for glob, blocks in found.items() if len(blocks) >= SMALLEST_STACK}
    stacks = dict(_stacks(model, ""))
    whole = "model" if "model" not in stacks else "(model)"
    return {name or whole: blocks for name, blocks in stacks.items()}


def _fits(parts: Sequence[str], globs: Sequence[str]) -> bool:
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _stacks(module: nn.Module, name: str) -> Iterator[tuple[str, list[str]]]:
    blocks = _blocks(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    if blocks:
        yield name, [f"{name}.{block}".lstrip(".") for block in blocks]
    for child_name, child in module.named_children():
        if child_name not in blocks:
            yield from _stacks(child, f"{name}.{child_name}".lstrip("."))


def _blocks(container: nn.Module) -> list[str]:
    """Return the names of the most frequent class of members with parameters, if there are two of them."""
    classes: dict[type[nn.Module], list[str]] = {}
    for name, member in container.named_children():
        if next(member.parameters(), None) is not None:
            # the class as it was written: FSDP2 replaces that of a module by one derived from it
            bases = type(member).__mro__
            own = next(base for base in bases if not base.__module__.startswith("torch.distributed.fsdp"))
            classes.setdefault(own, []).append(name)
    most: list[str] = max(classes.values(), key=len, default=[])
    return most if len(most) >= SMALLEST_STACK else []


def square_norm(gradient: Tensor) -> Tensor:
    """Return ‖g‖₂² as a zero-dimensional float64 tensor, whose range also holds the squares of vanishing gradients."""
    if is_sharded(gradient):
        return joint_norm([gradient]).double().square()
    return torch.square(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))


@HookRegistry.register
class GradientFlow(TrainingHook):
    """Measure the gradient at the output of every block, and how much it grows or shrinks from block to block.

    At the output h_i of block i the gradient is ∂L/∂h_i over the whole batch, L the step's loss. The gain of block
    i + 1 is ‖∂L/∂h_i‖₂ / ‖∂L/∂h_{i+1}‖₂: the factor by which that block multiplies the norm on its way backward. The
    first block of a chain has none. With residual connections the identity passes beside the block, and gains stay near
    1; without, gains that are the same in every block multiply to their power of the depth.

    Blocks are the members of one class of an ``nn.ModuleList`` or ``nn.Sequential`` (of the class that has most members
    with parameters, and at least two); the outermost such stack counts, and each stack is a chain of its own. For other
    models, or other blocks, give a ``pattern``.

    With micro-batches the norm is the root of the sum of their squares, which is that of the whole batch's gradient. A
    block that is used several times in a step counts with all its uses together. Under float16 the scale of the loss is
    divided out; in a step that is skipped the norms may be infinite or NaN, and are reported so. Over several processes
    the batch is that of all ranks, of whose losses L is the mean; tensor parallelism must leave the blocks' outputs
    whole on every rank, which sequence parallelism does not.

    Assumes that the members of a chain run one after another, each on the output of the one before (heads or experts
    side by side are no chain), and that the first tensor of a block's output is what the next one gets. A block that
    had no gradient in a step, frozen or left out at random, is left out there.

    Args:
        interval: steps between two measurements.
        pattern: globs on module names instead, such as ``blocks.*`` or ``layer?.*``; each of several, separated by
            commas, makes one chain in the order of the model. ``*`` stops at dots.
        vanishing_gain: a gain of at most this is vanishing: ten such blocks leave 1e-10 of the gradient.
        amplifying_gain: a gain of at least this is amplifying.
    """

    name = "gradient_flow"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _squares = Remembered(dict[str, Tensor], saved=False)
    _vanishing = Remembered(list[str])  # blocks that were warned of and are not over it
    _amplifying = Remembered(list[str])
    metrics = """
        norm/<parameter> | ‖∂L/∂h_i‖₂, h_i the output of the block over the whole batch, L the step's loss | [0, ∞)
            | How much of the gradient reaches the block. Compare between blocks and steps of equal batches only.
        gain/<parameter> | ‖∂L/∂h_i‖₂ / ‖∂L/∂h_{i+1}‖₂, h_{i+1} the output of the block, h_i that of the one before it
            | [0, ∞] | What the block multiplies the gradient by. Far from 1 in one block: look at its norms and the
            scale of its weights. NaN: no gradient on either side.
        total_gain/<parameter> | ‖∂L/∂h_1‖₂ / ‖∂L/∂h_n‖₂, h_1 and h_n the outputs of the first and the last block of the
            chain that had a gradient | [0, ∞] | The product of the gains, if all blocks had a gradient. Far below 1 the
            first blocks hardly learn; far above, they set the norm that clipping sees.
        smallest_gain | min over all blocks of gain/<block> | [0, ∞] | The narrowest place.
        largest_gain | max over all blocks of gain/<block> | [0, ∞] | Where gradients explode first.
        vanishing_count | number of blocks with gain ≤ vanishing_gain | 0, 1, 2, …
            | Above 0 throughout: saturated activations, weights too small, or a norm that divides by much.
        amplifying_count | number of blocks with gain ≥ amplifying_gain | 0, 1, 2, …
            | Above 0 throughout: weights too large, or a norm that divides by little.
    """

    def __init__(
        self, *, interval: int = 100, pattern: str = "", vanishing_gain: float = 0.1, amplifying_gain: float = 10.0
    ) -> None:
        require(interval >= 1, f"gradient_flow.interval is {interval}; it must be at least 1 step.")
        low, high = vanishing_gain, amplifying_gain
        require(0 < low < 1, f"gradient_flow.vanishing_gain is {low}; it must lie between 0 and 1.")
        require(1 < high < math.inf, f"gradient_flow.amplifying_gain is {high}; it must be a number above 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=interval)
        self._pattern = pattern
        self._vanishing_gain, self._amplifying_gain = low, high
        self._chains: Chains = {}

    def start(self, run: RunInfo) -> None:
        """Find the blocks; raises :class:`UnsuitableError` if there are none, or none for one of several patterns."""
        self._chains = find_chains(run.model, self._pattern)
        globs = [glob.strip() for glob in self._pattern.split(",") if glob.strip()]
        misfits = [glob for glob in globs if glob not in self._chains]
        if misfits or not self._chains:
            raise UnsuitableError(_no_blocks(run.model, ", ".join(misfits) or self._pattern))
        own = {block: run.model.get_submodule(block).parameters(recurse=False) for block in self._blocks()}
        parts = [block for block, leaves in own.items() if run.ranks.shares_layers and any(map(is_sharded, leaves))]
        if parts:
            raise UnsuitableError(
                f"Hook 'gradient_flow' needs whole outputs of blocks, and under tensor parallelism those of "
                f"{listed(parts, 3)} may lie in parts on the ranks; name blocks that end with a whole output by "
                "--hook-config gradient_flow.pattern=GLOB."
            )

    def taps(self, model: nn.Module) -> Iterable[GradientTap]:
        """Tap the output of every block, once if it is in several chains."""
        return [GradientTap(block, "output", partial(self._see, block)) for block in dict.fromkeys(self._blocks())]

    def _blocks(self) -> Iterable[str]:
        return chain.from_iterable(self._chains.values())

    def _see(self, block: str, gradient: Tensor) -> None:
        square = square_norm(gradient)
        self._squares[block] = self._squares[block] + square if block in self._squares else square

    def _on_all_ranks(self, ctx: RunDataContext) -> dict[str, Tensor]:
        """Return the squared norms over the rows of all ranks, of whose losses the step's is the mean."""
        ranks, squares = ctx.ranks, self._squares
        if not ranks.data:
            return squares
        ranks.join()
        seen = {block for each in ranks.gather(list(squares)) for block in each}
        blocks = [block for block in dict.fromkeys(self._blocks()) if block in seen]  # in one order on all ranks
        none = torch.zeros((), dtype=torch.float64, device=next(ctx.model.parameters()).device)
        means = ranks.means([squares.get(block, none) for block in blocks])
        return {block: mean / ranks.size for block, mean in zip(blocks, means, strict=True)}

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return norms, gains and what is unusual among them; nothing if no block had a gradient."""
        squares, self._squares = self._on_all_ranks(ctx), {}
        scale = 1.0 if ctx.loss_scale is None else ctx.loss_scale
        norms = {block: square.sqrt() / scale for block, square in squares.items()}
        metrics: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, blocks in self._chains.items():
            reached = [block for block in blocks if block in norms]
            metrics |= {f"norm/{block}": norms[block] for block in reached}
            pairs = [pair for pair in pairwise(blocks) if norms.keys() >= set(pair)]
            found |= {after: norms[before] / norms[after] for before, after in pairs}
            if len(reached) > 1:
                metrics[f"total_gain/{name}"] = norms[reached[0]] / norms[reached[-1]]
        if not found:
            return metrics
        together = stacked(found.values())
        return {
            **metrics,
            **{f"gain/{block}": gain for block, gain in found.items()},
            "smallest_gain": together.min(),
            "largest_gain": together.max(),
            "vanishing_count": (together <= self._vanishing_gain).sum(),
            "amplifying_count": (together >= self._amplifying_gain).sum(),
        }

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Warn where the gradient begins to vanish or to be amplified, and note where neither is so any more.

        A condition ends where the gain is within its threshold by a factor of 2, so that gains which scatter about the
        threshold are not told of again and again. Values that are not finite change nothing.
        """
        gains = {name.removeprefix("gain/"): value for name, value in values.items() if name.startswith("gain/")}
        norms = [value for name, value in values.items() if name.startswith("norm/")]
        if not all(map(math.isfinite, norms)):
            return
        low, high = self._vanishing_gain, self._amplifying_gain
        ascending = sorted(gains.items(), key=itemgetter(1))
        vanishing = {block: gain for block, gain in ascending if gain <= low}
        amplifying = {block: gain for block, gain in reversed(ascending) if gain >= high}
        over = {block for block, gain in gains.items() if gain > low * HYSTERESIS}
        what = f"vanishes: gains of at most {low:g}"
        self._vanishing = _told(self._vanishing, vanishing, over, what, metric="smallest_gain", step=step, limit=low)
        over = {block for block, gain in gains.items() if gain < high / HYSTERESIS}
        what = f"is amplified: gains of at least {high:g}"
        self._amplifying = _told(self._amplifying, amplifying, over, what, metric="largest_gain", step=step, limit=high)


def _told(
    told: Sequence[str], found: Mapping[str, float], over: set[str], what: str, *, metric: str, step: int, limit: float
) -> list[str]:
    """Warn if blocks are found that the user has not been told of, note if none is left; return who is now."""
    now = sorted({*found} | ({*told} - over))
    if found.keys() - told:
        named = listed([f"{block} ({gain:.2g})" for block, gain in found.items()], LISTED)
        sentence = f"Step {step:,}: on its way backward the gradient {what} in {named}."
        worst = next(iter(found.values()))
        warnings.warn(Alert(sentence, metric=metric, step=step, value=worst, limit=limit), stacklevel=3)
    elif told and not now:
        sentence = f"Step {step:,}: it is over that the gradient {what}."
        warnings.warn(Recovery(sentence, metric=metric, step=step, limit=limit), stacklevel=3)
    return now


def _no_blocks(model: nn.Module, pattern: str) -> str:
    remedy = (
        "name them by --hook-config gradient_flow.pattern=GLOB, such as 'blocks.*', where * stops at dots; modules of "
        f"the model are {listed([name for name, _ in model.named_modules() if name], 10) or 'none'}"
    )
    if pattern.strip():
        lack = f"at least two blocks, and the pattern {pattern!r} fits fewer modules"
    else:
        stack = "an nn.ModuleList or nn.Sequential with at least two members of one class that have parameters"
        lack = f"{stack}, and the model has none"
    return f"Hook 'gradient_flow' needs {lack}; {remedy}."
