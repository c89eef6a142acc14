"""The step at which laws are tried: its rows, repetitions with other inputs, and the noise of rounding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ..doctor.senses import leaves_of
from ..state import RandomStreams
from ..tensors import laid_out_like, trainable
from .bundles import Bundles
from .equal_noise import EqualNoise
from .recorded_step import Constant, RecordedCall, RecordedStep
from .rows import RowLayout, Rows, UndecidedError
from .values import leaves_by_name, tensors_within

MOVES = 6
"""Moved copies of the weights from which the noise of rounding is measured."""
TIMES_NOISE = 3.0
"""A difference beyond this multiple of the largest noise breaks a law."""
STATISTICS = {"batch_norm", "mean", "std", "var", "std_mean", "var_mean"}
LEAST_PART = 1e-4
"""The part of a gradient that a difference must be as well: kernels of other shapes may sum in another order, which
moved weights do not show, and mistakes change percents."""


@dataclass
class Evaluation:
    """Results of a repetition, without graphs."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    draws: bool = False
    """Whether random numbers were drawn."""

    def joint_gradient(self) -> Tensor:
        """Return all gradients as one float64 vector."""
        return torch.cat([item.detach().double().flatten() for item in self.gradients.values()])


class Trial:
    """One step of a training, after its backward passes and before its update, in which laws are tried."""

    def __init__(
        self,
        steps: Sequence[RecordedStep],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        branch: Callable[[], AbstractContextManager[None]],
        streams: RandomStreams,
        number: int,
        earlier: Sequence[Tensor] = (),
    ) -> None:
        """Take the recorded micro-batches of step ``number``; ``branch`` rolls back everything after its body.

        ``earlier`` are the constants of an earlier step.
        """
        self.streams = streams
        self.steps, self.model, self.optimizers = list(steps), model, list(optimizers)
        self.branch, self.number, self._earlier = branch, number, earlier
        self.writes = max((item._version for item in model.parameters()), default=0)
        """The changes in place of the parameter with most of them, before the tries, which restore parameters."""
        self.clipping: tuple[float, float] | None = None
        """The norm of the gradients of the step before, before and after it was clipped, if the loop clips."""
        self.fixed_divisors: list[float] = []
        """Multiples of the number of rows by which the script divides a loss that is a sum over rows."""

    @property
    def _precision(self) -> torch.dtype | None:
        """The dtype of autocast in the passes, if it is on."""
        found = [dtype for call in self.step.passes for _, is_on, dtype in call.autocast if is_on]
        return found[0] if found else None

    @property
    def step(self) -> RecordedStep:
        """The first micro-batch of the step."""
        if not self.steps:
            raise UndecidedError("the step has no pass of the model that can be recorded")
        return self.steps[0]

    def loss_step(self) -> RecordedStep:
        """Return the first micro-batch, of which the loss can be computed again."""
        if self.step.problem:
            raise UndecidedError(self.step.problem)
        if self.step.uses_numbers:
            raise UndecidedError("the loss may contain numbers that the script has read from tensors by .item()")
        return self.step

    @cached_property
    def inputs(self) -> dict[int, Tensor]:
        """The tensors that the passes get as arguments, by the index of the constant."""
        step = self.step
        return {index: step.constants[index] for index in step.constants_of_passes() if step.constants[index].ndim}

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the inputs among the arguments of the model's ``forward``, by the index of the constant."""
        names: dict[int, str] = {}
        for call in self.step.passes:
            inputs, options = call.arguments.entries
            with suppress(AttributeError, TypeError, ValueError):  # a function, perhaps not written in Python
                forward = call.function.forward  # type: ignore[attr-defined]
                bound = signature(forward).bind(*inputs.entries, **options.entries).arguments
                for name, value in (leaf for key, item in bound.items() for leaf in leaves_by_name(item, key)):
                    if isinstance(value, Constant):
                        names.setdefault(value.index, name)
        return names

    @cached_property
    def layout(self) -> Rows:
        """The rows of the batch."""
        return Rows.of(self.step, self.model, self._earlier)

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return self.layout.count

    def with_rows(self, order: Tensor) -> dict[int, Tensor]:
        """Return all constants of rows with the rows of the batch in another order, some perhaps repeated.

        They end with the longest of these rows, as some models expect, if one of the inputs has the rows' lengths.
        """
        return self._cropped(self._reordered(order))

    def with_bundles(self, bundles: Bundles, order: Tensor) -> dict[int, Tensor]:
        """Return all constants with bundles of rows in another order, also those with an entry for each bundle."""
        constants = self.with_rows(bundles.rows(order))
        if bundles.members > 1:
            constants |= {
                index: self.step.constants[index][order] for index in self.layout.of_bundles(self.step, len(bundles))
            }
        return constants

    @cached_property
    def _lengths(self) -> int:
        """The index of the only input with the lengths of the rows; -1 without it."""
        known = [
            index
            for index, value in self.inputs.items()
            if "len" in self.names.get(index, "") and value.ndim == 1 and not value.is_floating_point()
        ]
        return known[0] if len(known) == 1 else -1

    @property
    def longest_first(self) -> Tensor:
        """The rows in the order of their lengths, the longest first; as they are if no input has lengths."""
        rows = torch.arange(self.rows)
        return rows if self._lengths < 0 else self.step.constants[self._lengths].cpu().argsort(descending=True)

    def _reordered(self, order: Tensor) -> dict[int, Tensor]:
        layout = self.layout
        return {
            index: layout.reordered(self.step.constants[index], kind, order) for index, kind in layout.layouts.items()
        }

    def _cropped(self, constants: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return constants without positions after the longest row."""
        lengths = constants.get(self._lengths, torch.zeros(0))
        if self._lengths < 0 or int(self.step.constants[self._lengths].max()) <= int(lengths.max()):
            return dict(constants)
        before, now, rows = int(self.step.constants[self._lengths].max()), int(lengths.max()), len(lengths)
        places = torch.arange(before)
        every = dict(enumerate(self.step.constants)) | dict(constants)
        cropped = {}
        for index, value in every.items():
            if value.ndim > 1 and value.shape[:2] == (rows, before):
                cropped[index] = value[:, :now]
            elif value.shape == places.shape and torch.equal(value.cpu(), places):
                cropped[index] = value[:now]
        return {**constants, **cropped}

    def inputs_with_rows(self, order: Tensor) -> dict[int, Tensor]:
        """Return the inputs alone with the rows in another order."""
        return {index: value for index, value in self._reordered(order).items() if index in self.inputs}

    @contextmanager
    def eval_pass(self) -> Iterator[None]:
        """Roll back the body, which runs in eval mode with the random numbers of the step."""
        with self.branch():
            for module in self.model.modules():
                module.training = False
            self.step.streams.restore()
            yield

    @cached_property
    def shapes_of_calls(self) -> list[tuple[RecordedCall, list[tuple[int, ...]]]]:
        """The calls after the passes, each with the shapes of the tensors among its arguments."""
        found: list[tuple[RecordedCall, list[tuple[int, ...]]]] = []

        def note(call: RecordedCall, arguments: Any, options: Any) -> None:
            found.append((call, [tuple(item.shape) for item in tensors_within((arguments, options))]))

        with self.branch(), torch.no_grad():
            self.step.replay(outputs=self.step.outputs, observe=note)
        return found

    def evaluate(
        self,
        constants: Mapping[int, Tensor] | None = None,
        *,
        step: RecordedStep | None = None,
        gradients: bool = False,
        move: int | None = None,
        needs_loss: bool = True,
        train: bool = True,
        owner: nn.Module | None = None,
        mode: AbstractContextManager[Any] | None = None,
        **options: Any,
    ) -> Evaluation:
        """Repeat the step with other constants and the same random numbers; everything is rolled back.

        Args:
            constants: tensors in place of constants, by index.
            step: the micro-batch; by default the first one.
            gradients: compute the gradients of the loss.
            move: move every weight by its smallest possible step, in directions drawn from this seed.
            needs_loss: ``False`` for outputs alone.
            train: ``False`` sets all modules to eval mode, so that dropout and batch statistics are off.
            owner: the module with the parameters of the gradients, by default the model.
            mode: a mode of torch that is active in the passes and calls; by default, gradients in eval mode have the
                same random numbers in all rows.
            options: further arguments of :meth:`.RecordedStep.replay`.
        """
        step = step or self.step
        if gradients and not train and mode is None:
            mode = self.equal_noise
        with self.branch():
            if move is not None:
                move_weights(self.model, move, self._precision)
            for module in () if train else self.model.modules():
                module.training = False
            step.streams.restore()
            start = self.streams.save()
            with torch.set_grad_enabled(gradients), mode or nullcontext():
                replay = step.replay(constants, needs_loss=needs_loss, **options)
            result = Evaluation([item.detach().clone() for item in replay.outputs], replay.loss.detach().clone())
            result.draws = not self.streams.save().equals(start)
            if gradients:
                parameters = trainable(owner or self.model)
                found = torch.autograd.grad(replay.loss, list(parameters.values()), allow_unused=True)
                pairs = zip(parameters.items(), found, strict=True)
                result.gradients = {
                    name: torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
                    for (name, parameter), gradient in pairs
                }
            return result

    @cached_property
    def derivation(self) -> dict[str, Any]:
        """Options of :meth:`evaluate` with which the constants that the loss derives from others are derived again.

        None if that does not give the loss of the step.
        """
        if not self.step.derivations or self.step.problem:
            return {}
        roots = {
            item.index
            for call in self.step.derivations
            for item in self.step.items_of(call)
            if isinstance(item, Constant)
        }
        if any(self.layout.layouts.get(index) is RowLayout.COPIES for index in roots):  # perhaps all rows of an epoch
            return {}
        try:
            one, other = (self.evaluate(train=False, derive=derive).loss for derive in (False, True))
        except Exception:  # of calls on data that the script has changed since
            return {}
        return {"derive": True} if torch.equal(one.nan_to_num(), other.nan_to_num()) else {}

    def output_gradient(self, constants: Mapping[int, Tensor] | None = None) -> Tensor | None:
        """Return the gradient of the loss with respect to the first output that it depends on, in eval mode."""
        with self.eval_pass(), torch.enable_grad():
            replay = self.step.replay(constants)
            outputs = [item for item in replay.outputs if item.requires_grad and item is not replay.loss and item.ndim]
            gradients = torch.autograd.grad(replay.loss, outputs, allow_unused=True) if outputs else ()
        return next((gradient.detach().clone() for gradient in gradients if gradient is not None), None)

    def leaves(self) -> list[Tensor]:
        """Return the tensors whose gradients a backward pass of the loss computes."""
        with self.branch(), torch.enable_grad():
            self.step.streams.restore()
            return leaves_of(self.step.replay().loss)

    def gradient(self) -> Tensor:
        """Return the joint gradient of the first micro-batch in eval mode, as float64.

        Raises:
            UndecidedError: the loss cannot be computed again, or draws random numbers by position.
        """
        self.loss_step()
        if self._gradient.draws:
            raise UndecidedError("the step draws random numbers by position, also in eval mode")
        return self._gradient.joint_gradient()

    @cached_property
    def equal_noise(self) -> EqualNoise:
        """The mode of torch in which all rows have the same random numbers."""
        try:
            return EqualNoise(self.streams, self.layout.dimension)
        except UndecidedError:
            return EqualNoise(self.streams)

    @cached_property
    def bundles(self) -> Bundles:
        """The rows that belong together: the gradient is the same in another order of these bundles.

        They are single rows if any order gives the same gradient, or none of those that were tried.
        """
        single = Bundles.of_single_rows(self.rows)
        return next((item for item in (single, *Bundles.candidates(self.rows)) if not self.depends_on(item)), single)

    def depends_on(self, bundles: Bundles) -> float:
        """Return how much another order of bundles changes the gradient; 0.0 if rounding explains it."""
        count = len(bundles)
        order = (
            torch.randperm(count, generator=torch.Generator().manual_seed(0))
            if count > 2
            else torch.arange(count).flip(0)
        )
        other = self.evaluate(self.with_bundles(bundles, order), gradients=True, train=False).joint_gradient()
        difference = distance(other, self.gradient())
        return 0.0 if self.is_noise(difference) else difference

    @cached_property
    def _gradient(self) -> Evaluation:
        return self.evaluate(gradients=True, train=False)

    @cached_property
    def gradient_noise(self) -> float:
        """The largest distance by which the smallest steps of all weights change :meth:`gradient`."""
        exact = self.gradient()
        moved = (self.evaluate(gradients=True, train=False, move=seed) for seed in range(MOVES))
        return max(distance(item.joint_gradient(), exact) for item in moved)

    def is_noise(self, difference: float, *, gradients: int = 1) -> bool:
        """Return whether rounding explains a difference of gradients, each of them the sum of ``gradients``."""
        size = float(self.gradient().norm())
        return difference <= max(TIMES_NOISE * self.gradient_noise, LEAST_PART * size) * gradients

    @cached_property
    def output_noise(self) -> list[float]:
        """The largest change of an element of each output in eval mode, if all weights make their smallest steps."""
        exact = self.evaluate(needs_loss=False, train=False).outputs
        largest = [0.0] * len(exact)
        for seed in range(MOVES):
            moved = self.evaluate(needs_loss=False, train=False, move=seed).outputs
            for position, (one, other) in enumerate(zip(exact, moved, strict=True)):
                if one.numel():
                    difference = float((one.double() - other.double()).abs().nan_to_num().max())
                    largest[position] = max(largest[position], difference)
        return largest

    def loss_noise(self, exact: Tensor) -> float:
        """Return the largest distance by which the smallest steps of all weights change the loss in eval mode."""
        return max(distance(self.evaluate(move=seed, train=False).loss, exact) for seed in range(MOVES))

    @property
    def compares_rows(self) -> bool:
        """Whether a value of the loss has an entry for each pair of rows, also of several ranks or views."""
        pairs = {(self.rows * by,) * 2 for by in (1, 2)}
        if dist.is_available() and dist.is_initialized():
            pairs.add((self.rows, self.rows * dist.get_world_size()))
        return any(shape[-2:] in pairs for shape in self.step.shapes)

    @property
    def may_use_statistics(self) -> bool:
        """Whether functions of a model that is no module compute means, which may be those of the batch by design."""
        return bool(self.step.weights) and any(call.name in STATISTICS for call in self.step.passes)

    def normalisations(self) -> list[nn.Module]:
        """Return the batch normalisations that use the statistics of the batch, by which rows depend on each other."""
        return [
            item for item in self.model.modules() if isinstance(item, _BatchNorm) and _uses_statistics_of_batch(item)
        ]


def _uses_statistics_of_batch(module: _BatchNorm) -> bool:
    return module.training or module.running_mean is None


def set_gradients(leaves: Sequence[Tensor], loss: Tensor, **options: Any) -> None:
    """Give leaves the gradients of a loss, with options of :func:`torch.autograd.grad`."""
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient


def distance(one: Tensor, other: Tensor) -> float:
    """Return the Euclidean distance of two tensors, in float64."""
    return float((one.double() - other.double()).norm())


@torch.no_grad()
def move_weights(model: nn.Module, seed: int, precision: torch.dtype | None) -> None:
    """Move every weight to one of its neighbours; see :func:`moved_weights`."""
    moved = moved_weights(model, seed, precision)
    for name, parameter in model.named_parameters():
        if name in moved:
            parameter.copy_(moved[name])


@torch.no_grad()
def moved_weights(model: nn.Module, seed: int, precision: torch.dtype | None) -> dict[str, Tensor]:
    """Return for every weight the next larger or smaller number of its type, in random directions.

    With autocast to a lower ``precision``, it is the next number of that type, since smaller moves are rounded away.
    """
    moved = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(1000 * seed + index)
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
        signs = laid_out_like(signs, parameter).to(parameter.dtype)
        if parameter.dtype in (torch.float32, torch.float64) and precision is None:
            moved[name] = torch.nextafter(parameter, signs * torch.inf)
        else:  # torch.nextafter does not support float16 and bfloat16 on every device
            moved[name] = parameter * (1 + signs * torch.finfo(precision or parameter.dtype).eps)
    return moved
