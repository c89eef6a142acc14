"""Growth and decay of the gradient between blocks during the backward pass."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, listed, require
from loopscope.hooks import Alert, GradientTap, Metrics, Recovery, RunInfo, Severity
from loopscope.option_words import hook_option_text
from loopscope.tensors import is_sharded, joint_norm
from torch import Tensor, nn

from ..measures import FamilyFile, SeriesBudget, is_overflowed, notice, reported_series, stacked

SMALLEST_STACK = 2
HYSTERESIS = 2.0  # a condition ends when the gain is back within its threshold by this factor
LISTED = 5  # blocks that a warning names
SERIOUS_GAIN = 1e4
"""Factor over a whole chain above which its first and last blocks cannot learn at one learning rate; residual stacks
stay within 100, and an optimizer that scales each parameter, such as Adam, compensates that."""
IDS = {"smallest_gain": "vanishing-gradients", "largest_gain": "exploding-gradients"}
"""The id of the doctor's finding, by the metric of the alert."""
Chains = Mapping[str, Sequence[str]]
"""Names of modules that run one after another, first to last. The key is the name of their container in the model
(``model`` for the model itself), or the pattern that matched them."""


def find_chains(model: nn.Module, patterns: str = "") -> Chains:
    """Find the chains of blocks of a model; return an empty mapping if it has none.

    Without patterns, every ``nn.ModuleList`` and ``nn.Sequential`` that has at least two members of one class with
    parameters is a chain. Its blocks are the members of the most frequent class (the first of several equally frequent
    ones). The search does not enter blocks, so only the outermost stack counts. An encoder and a decoder are two
    chains.

    Args:
        model: the model.
        patterns: globs on the names of modules, separated by commas; each makes one chain of the modules that it
            matches, in the order of the model. ``*`` and ``?`` stop at dots: ``blocks.*`` matches ``blocks.0`` but not
            ``blocks.0.attention``.
    """
    if patterns.strip():
        names = [name for name, _ in model.named_modules() if name]
        globs = filter(None, map(str.strip, patterns.split(",")))
        matches = {glob: [name for name in names if _matches(name.split("."), glob.split("."))] for glob in globs}
        return {glob: blocks for glob, blocks in matches.items() if len(blocks) >= SMALLEST_STACK}
    stacks = dict(_stacks(model, ""))
    root = "model" if "model" not in stacks else "(model)"
    return {name or root: blocks for name, blocks in stacks.items()}


def _matches(parts: Sequence[str], globs: Sequence[str]) -> bool:
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _stacks(module: nn.Module, name: str) -> Iterator[tuple[str, list[str]]]:
    blocks = _blocks(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    if blocks:
        yield name, [f"{name}.{block}".lstrip(".") for block in blocks]
    for child_name, child in module.named_children():
        if child_name not in blocks:
            yield from _stacks(child, f"{name}.{child_name}".lstrip("."))


def _blocks(container: nn.Module) -> list[str]:
    """Return the names of the members of the most frequent class with parameters; nothing if it has fewer than two."""
    classes: dict[type[nn.Module], list[str]] = {}
    for name, member in container.named_children():
        if next(member.parameters(), None) is not None:
            # FSDP2's fully_shard replaces the class of a module by a subclass of FSDPModule, a new one for each class,
            # so take the first base outside of torch.distributed.fsdp: the class that the user wrote.
            bases = type(member).__mro__
            user_class = next(base for base in bases if not base.__module__.startswith("torch.distributed.fsdp"))
            classes.setdefault(user_class, []).append(name)
    largest_class: list[str] = max(classes.values(), key=len, default=[])
    return largest_class if len(largest_class) >= SMALLEST_STACK else []


def square_norm(gradient: Tensor) -> Tensor:
    """Return ‖g‖₂² as a zero-dimensional tensor."""
    return joint_norm([gradient.detach()]).square()


@HookRegistry.register
class GradientFlow(TrainingHook):
    """Measure the gradient at the output of every block, and how much it grows or shrinks from block to block.

    The gradient at the output h_i of block i is ∂L/∂h_i over the whole batch, L the step's loss. The gain of block
    i + 1 is ‖∂L/∂h_i‖₂ / ‖∂L/∂h_{i+1}‖₂: the factor by which the backward pass through that block multiplies the norm.
    The first block of a chain has no gain. Residual connections keep gains near 1, since the identity bypasses the
    block; without them equal gains multiply to their power of the depth.

    Blocks are the members of one class in an ``nn.ModuleList`` or ``nn.Sequential``: the class with the most members
    that have parameters, and at least two of them. Only the outermost stack counts, and each stack is a separate chain.
    For other models or other blocks, give a ``pattern``.

    With micro-batches the norm is the root of the sum of their squared norms, which equals the norm of the whole
    batch's gradient. If a step uses a block several times, all uses count together. Under float16 the loss scale is
    divided out; in a skipped step the norms may be infinite or NaN, and the hook reports them as they are. With several
    processes the batch consists of the rows of all ranks, and L is the mean of their losses. Tensor parallelism must
    leave the complete output of a block on every rank, which sequence parallelism does not.

    Assumes that the members of a chain run one after another, each on the output of the previous one (parallel heads or
    experts are not a chain), and that the next block receives the first tensor of a block's output. The hook omits a
    block in steps in which it has no gradient because it is frozen or was dropped at random.

    Args:
        interval: steps between two measurements.
        pattern: globs on module names, such as ``blocks.*`` or ``layer?.*``; of several, separated by commas, each
            makes one chain in the order of the model. ``*`` stops at dots. By default the hook searches for stacks.
        vanishing_gain: a gain of at most this is vanishing: ten such blocks leave 1e-10 of the gradient.
        amplifying_gain: a gain of at least this is amplifying.
        names: globs, separated by commas, of blocks that are always reported; ``*`` selects all.
        top: number of blocks with the largest values that each family reports in addition; at least 1.
        bottom: number of blocks with the smallest values that each family reports in addition; at least 1.
        write_all: write the values of all blocks to a file in the run's folder.
    """

    name = "gradient_flow"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _squares = Remembered(dict[str, Tensor], saved=False)
    _vanishing = Remembered(list[str])  # blocks in a reported condition that has not ended
    _amplifying = Remembered(list[str])
    _without_gain = Remembered(list[str], saved=False)  # chains without a gain, which a notice has reported
    _file = Remembered(FamilyFile)
    metrics = """
        norm/<parameter> | ‖∂L/∂h_i‖₂, h_i the output of the block over the whole batch, L the step's loss; of a model
            with more than top + bottom blocks, of those where it is largest or smallest, and of names | [0, ∞)
            | The size of the gradient that reaches the block. Compare between blocks and steps of equal batches only.
        gain/<parameter> | ‖∂L/∂h_i‖₂ / ‖∂L/∂h_{i+1}‖₂, h_{i+1} the output of the block, h_i that of the one before it;
            of blocks chosen in the same way | [0, ∞], NaN | The factor by which the block multiplies the gradient. Far
            from 1 in one block: look at its normalisation layers and the scale of its weights. NaN: both gradients are
            zero.
        total_gain/<parameter> | ‖∂L/∂h_1‖₂ / ‖∂L/∂h_n‖₂, h_1 and h_n the outputs of the first and the last block of the
            chain that had a gradient | [0, ∞], NaN | The product of the gains, if all blocks had a gradient. Far below
            1: the first blocks hardly learn. Far above 1: they dominate the norm that clipping uses.
        smallest_gain | min over all blocks of gain/<block> | [0, ∞], NaN | Gain of the block that loses most gradient.
        largest_gain | max over all blocks of gain/<block> | [0, ∞], NaN | Gain of the block where gradients explode
            first.
        vanishing_count | number of blocks with gain ≤ vanishing_gain | 0, 1, 2, …
            | Constantly above 0: saturated activations, weights too small, or normalisation that divides by a large
            number.
        amplifying_count | number of blocks with gain ≥ amplifying_gain | 0, 1, 2, …
            | Constantly above 0: weights too large, or normalisation that divides by a small number.
    """

    def __init__(
        self,
        *,
        interval: int = 100,
        pattern: str = "",
        vanishing_gain: float = 0.1,
        amplifying_gain: float = 10.0,
        names: str = "",
        top: int = 10,
        bottom: int = 10,
        write_all: bool = False,
    ) -> None:
        require(interval >= 1, f"gradient_flow.interval is {interval}; it must be at least 1 step.")
        low, high = vanishing_gain, amplifying_gain
        require(0 < low < 1, f"gradient_flow.vanishing_gain is {low}; it must be between 0 and 1.")
        require(1 < high < math.inf, f"gradient_flow.amplifying_gain is {high}; it must be a number above 1.")
        for option, value in {"top": top, "bottom": bottom}.items():  # alerts need the extreme gains
            require(value >= 1, f"gradient_flow.{option} is {value}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=interval)
        self._budget, self._write_all = SeriesBudget(self.name, names, top, bottom), write_all
        self._pattern = pattern
        self._vanishing_gain, self._amplifying_gain = low, high
        self._chains: Chains = {}

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file of ``write_all``."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Find the blocks of the model.

        Raises:
            UnsuitableError: if a pattern, or the model without patterns, has no chain of blocks, or if tensor
                parallelism may split the output of a block.
        """
        self._chains = find_chains(run.model, self._pattern)
        globs = [glob.strip() for glob in self._pattern.split(",") if glob.strip()]
        unmatched = [glob for glob in globs if glob not in self._chains]
        if unmatched or not self._chains:
            raise UnsuitableError(_describe_missing_blocks(run.model, ", ".join(unmatched) or self._pattern))
        parameters = {block: run.model.get_submodule(block).parameters(recurse=False) for block in self._blocks()}
        split_blocks = [
            block for block, leaves in parameters.items() if run.ranks.shares_layers and any(map(is_sharded, leaves))
        ]
        self._budget.check_names([*dict.fromkeys(self._blocks())])
        if self._write_all:
            self._file.start(self.name, run)
        if split_blocks:
            raise UnsuitableError(
                f"Hook 'gradient_flow' needs the complete output of every block on every rank, but tensor parallelism "
                f"may split the outputs of {listed(split_blocks, 3)}; name blocks whose outputs stay complete with "
                f"{hook_option_text(self.name, pattern='GLOB')}."
            )

    def taps(self, model: nn.Module) -> Iterable[GradientTap]:
        """Tap the output of every block, once if it is in several chains."""
        return [
            GradientTap(block, "output", partial(self._add_square, block)) for block in dict.fromkeys(self._blocks())
        ]

    def _blocks(self) -> Iterable[str]:
        return chain.from_iterable(self._chains.values())

    def _add_square(self, block: str, gradient: Tensor) -> None:
        # Micro-batches and uses are separate parts of one output vector, so their squared norms add up.
        square = square_norm(gradient)
        self._squares[block] = self._squares[block] + square if block in self._squares else square

    def _combine_ranks(self, ctx: RunDataContext) -> dict[str, Tensor]:
        """Return the squared norms over the rows of all ranks."""
        ranks, squares = ctx.ranks, self._squares
        if not ranks.data:
            return squares
        ranks.join()
        reached = {block for rank_blocks in ranks.gather(list(squares)) for block in rank_blocks}
        blocks = [block for block in dict.fromkeys(self._blocks()) if block in reached]  # the same order on all ranks
        zero = torch.zeros((), dtype=torch.float64, device=next(ctx.model.parameters()).device)
        # L is the mean of the ranks' losses L_r, so ‖∂L/∂h‖² = Σ_r ‖∂L_r/∂h_r‖² / R² = mean over ranks / R
        means = ranks.means([squares.get(block, zero) for block in blocks])
        return {block: mean / ranks.size for block, mean in zip(blocks, means, strict=True)}

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return norms, gains and their extremes; nothing if no block had a gradient, or the scaler skips the step."""
        squares, self._squares = self._combine_ranks(ctx), {}
        if is_overflowed(ctx):
            return {}
        scale = 1.0 if ctx.loss_scale is None else ctx.loss_scale
        norms = {block: square.sqrt() / scale for block, square in squares.items()}
        metrics: dict[str, Tensor] = {}
        families: dict[str, dict[str, Tensor]] = {"norm": {}, "gain": {}}
        gains = families["gain"]
        for name, blocks in self._chains.items():
            reached = [block for block in blocks if block in norms]
            families["norm"] |= {block: norms[block] for block in reached}
            pairs = [pair for pair in pairwise(blocks) if norms.keys() >= set(pair)]
            # gain = ‖∂L/∂h_i‖/‖∂L/∂h_{i+1}‖ of block i + 1; neighbours of a block without a gradient form no pair.
            gains |= {block: norms[previous] / norms[block] for previous, block in pairs}
            if len(reached) > 1:
                metrics[f"total_gain/{name}"] = norms[reached[0]] / norms[reached[-1]]
            elif name not in self._without_gain:
                self._without_gain.append(name)
                self._report_missing(name, blocks, reached, ctx.step)
        if gains:
            all_gains = stacked(gains.values())
            metrics |= {
                "smallest_gain": all_gains.min(),
                "largest_gain": all_gains.max(),
                "vanishing_count": (all_gains <= self._vanishing_gain).sum(),
                "amplifying_count": (all_gains >= self._amplifying_gain).sum(),
            }
        file = self._file if self._write_all else None
        return reported_series(families, self._budget, metrics, step=ctx.step, file=file)

    def _report_missing(self, chain_name: str, blocks: Sequence[str], reached: Sequence[str], step: int) -> None:
        missing = [block for block in blocks if block not in reached]
        notice(
            f"gradient_flow has no gain for {chain_name!r} at step {step:,}: no gradient arrived at the outputs of "
            f"{listed(missing, 3)}. A block is measured if it is called itself, unlike an nn.ModuleDict whose members "
            f"are called, and trained; name other modules with {hook_option_text(self.name, pattern='GLOB')}."
        )

    def check(self, values: Mapping[str, Any], step: int) -> Iterator[Alert]:
        """Yield an alert when blocks start to vanish or to amplify the gradient, and a recovery when a condition ends.

        A block leaves a condition once its gain is within the threshold by a factor of 2, so gains that fluctuate
        around the threshold cause no repeated alerts. Steps with infinite or NaN norms are ignored. A block without a
        reported gain has one between the reported extremes, so it leaves the condition if all reported blocks do.

        An alert is a warning if the gain of a whole chain is at most 1e-4 or at least 1e4, otherwise a remark.
        """
        gains = {name.removeprefix("gain/"): value for name, value in values.items() if name.startswith("gain/")}
        norms = [value for name, value in values.items() if name.startswith("norm/")]
        if not all(map(math.isfinite, norms)):
            return
        total_gains = [value for name, value in values.items() if name.startswith("total_gain/")]
        smallest, largest = min(total_gains, default=1.0), max(total_gains, default=1.0)
        low, high = self._vanishing_gain, self._amplifying_gain
        ascending = sorted(gains.items(), key=itemgetter(1))
        vanishing = {block: gain for block, gain in ascending if gain <= low}
        amplifying = {block: gain for block, gain in reversed(ascending) if gain >= high}
        reported = self._vanishing
        lingering = self._lingering(reported, {block: low * HYSTERESIS >= gain for block, gain in gains.items()})
        self._vanishing = sorted({*vanishing} | lingering)
        fault = f"vanishes (gain ≤ {low:g})"
        severity: Severity = "warning" if smallest <= 1 / SERIOUS_GAIN else "info"
        yield from _changes(
            reported, self._vanishing, vanishing, fault, metric="smallest_gain", step=step, limit=low, severity=severity
        )
        reported = self._amplifying
        lingering = self._lingering(reported, {block: gain >= high / HYSTERESIS for block, gain in gains.items()})
        self._amplifying = sorted({*amplifying} | lingering)
        fault = f"is amplified (gain ≥ {high:g})"
        severity = "warning" if largest >= SERIOUS_GAIN else "info"
        yield from _changes(
            reported,
            self._amplifying,
            amplifying,
            fault,
            metric="largest_gain",
            step=step,
            limit=high,
            severity=severity,
        )

    def _lingering(self, reported: Iterable[str], affected: Mapping[str, bool]) -> set[str]:
        """Return the reported blocks that have not recovered; ``affected`` tells it of the blocks with a known gain."""
        # Without a budget, a block without a gain had none in this step, and keeps its condition.
        is_chosen = len(affected) >= self._budget.top + self._budget.bottom
        unknown = any(affected.values()) or not is_chosen
        return {block for block in reported if affected.get(block, unknown)}


def _changes(
    reported: Sequence[str],
    affected: Sequence[str],
    gains: Mapping[str, float],
    fault: str,
    *,
    metric: str,
    step: int,
    limit: float,
    severity: Severity,
) -> Iterator[Alert]:
    """Yield an alert if blocks are affected that were not ``reported``, or a recovery if no block is affected any more.

    ``gains`` has the blocks beyond the ``limit``, worst first; ``fault`` is the predicate of the sentence.
    """
    if gains.keys() - reported:
        named = listed([f"{block} ({gain:.2g})" for block, gain in gains.items()], LISTED)
        sentence = f"Step {step:,}: the backpropagated gradient {fault} in {named}."
        worst = next(iter(gains.values()))
        yield Alert(sentence, metric=metric, step=step, value=worst, limit=limit, severity=severity, id=IDS[metric])
    elif reported and not affected:
        sentence = f"Step {step:,}: the backpropagated gradient no longer {fault} in any block."
        yield Recovery(sentence, metric=metric, step=step, limit=limit, id=IDS[metric])


def _describe_missing_blocks(model: nn.Module, pattern: str) -> str:
    named = hook_option_text("gradient_flow", pattern="GLOB")
    modules = listed([name for name, _ in model.named_modules() if name], 10) or "none"
    remedy = (
        f"name the blocks with {named}, such as 'blocks.*' (* stops at dots); the modules of the model are {modules}"
    )
    if pattern.strip():
        requirement = f"at least two blocks, but the pattern {pattern!r} matches fewer modules"
    else:
        stack = "an nn.ModuleList or nn.Sequential with at least two members of one class that have parameters"
        requirement = f"{stack}, but the model has none"
    return f"Hook 'gradient_flow' needs {requirement}; {remedy}."
