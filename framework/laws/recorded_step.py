"""Recording of a training step from the arguments of its passes to the loss, which can be evaluated again.

Between the first pass of the model and the backward pass, a function mode of torch sees every call. Calls that depend
on outputs of the model are recorded with their arguments; all other values count as constants of the step, such as its
targets. A replay repeats passes and calls with other constants.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..doctor.senses import all_nodes, inputs_of, operation_of, output_of, saved_value
from ..errors import with_lines
from .values import assembled, dismantled, leaves_by_name, tensors_within

NUMBERS = {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__"}
"""Functions that turn values of the step into numbers of Python, which a replay does not compute again."""
RANDOM = {"bernoulli", "dropout", "multinomial", "normal", "poisson", "rand_like", "randint_like", "randn_like"}
"""Functions that draw numbers: a replay uses those that the step has drawn."""
BLANK = {"zeros_like", "empty_like", "new_zeros", "new_empty"}
"""Functions that make tensors which a function that is not recorded, such as a collective, may fill."""
DIVISIONS = {"div", "truediv", "true_divide", "divide"}
SCALINGS = DIVISIONS | {"mul", "rmul", "multiply"}
MOST_DERIVED = 1000
"""Calls on data that are recorded in a micro-batch."""


@dataclass(frozen=True)
class Constant:
    """A tensor that the step does not compute: the position in :attr:`RecordedStep.constants`."""

    index: int


@dataclass(frozen=True)
class Value:
    """A tensor that a pass or a call of the step computes: its number."""

    index: int


@dataclass(frozen=True)
class Derived:
    """A tensor that the script computes between pass and loss from constants alone: its number."""

    index: int


@dataclass
class RecordedCall:
    """A call of a function of torch, or a pass of a module, with constants and values in place of tensors."""

    function: Callable[..., Any]
    arguments: Any
    results: tuple[Any, ...]
    """The values of the tensors in its result, in the order of :func:`.tensors_within`."""
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    has_gradients: bool
    is_pass: bool = False
    writes: bool = False
    """Whether the call changes one of its arguments."""
    uses_numbers: bool = False
    """Whether the script has turned a value into a number of Python before, and an argument may have come from it."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__name__", ""))

    @property
    def operation(self) -> str:
        """The name of the operation, also of one in place or between operands: ``div`` of ``div_``."""
        return self.name.strip("_i")

    def run(
        self,
        resolved: Callable[[Any], Any],
        function: Callable[..., Any],
        *,
        autocast: bool,
        observe: Callable[..., None] | None = None,
    ) -> list[Tensor]:
        """Call the function again, and return the tensors in its result.

        Constants that it changes are copied, since the script and later replays use them.
        """

        def copied(item: Any) -> Any:
            value = resolved(item)
            return value.clone() if isinstance(item, Constant) and not isinstance(value, nn.Parameter) else value

        arguments, options = assembled(self.arguments, copied if self.writes else resolved)
        if observe is not None:
            observe(self, arguments, options)
        with self.settings(autocast=autocast):
            result = function(*arguments, **options)
        found = tensors_within(arguments[0] if self.name == "__setitem__" else result)
        if len(found) < len(self.results):
            raise RuntimeError("a call returned fewer tensors in the replay")
        return found

    @contextmanager
    def settings(self, *, autocast: bool = True) -> Iterator[None]:
        """Restore the gradient mode and autocast of the call for the body."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.has_gradients))
            for device, is_on, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled=is_on and autocast, cache_enabled=False))
            yield


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@dataclass
class Replay:
    """A repetition of a step: the outputs of its passes, and its loss."""

    outputs: list[Tensor]
    loss: Tensor


@dataclass
class RecordedStep:
    """Passes and calls of one micro-batch, from the arguments of the model to the loss."""

    calls: list[RecordedCall] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    """The tensors that the step does not compute: inputs, targets, masks, weights of classes."""
    streams: Any = None
    """The random streams at the start of the first pass."""
    outputs: dict[Value, Tensor] = field(default_factory=dict)
    """Copies of the outputs of all passes."""
    loss: Value | None = None
    loss_value: Tensor | None = None
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """The shapes of all values."""
    reads_numbers: bool = False
    """Whether the script has turned a value of the step into a number of Python."""
    problem: str = ""
    """Why the step cannot be replayed."""
    derivations: list[RecordedCall] = field(default_factory=list)
    """Calls that compute constants of the loss from other constants, such as class weights from targets."""
    origins: dict[int, Derived] = field(default_factory=dict)
    """The results of derivations that are constants of calls, by the index of the constant."""
    weights: frozenset[int] = frozenset()
    """The constants that are weights of a model that is no module, or masks and positions in it."""
    factors: tuple[float, ...] = ()
    """The numbers by which the loss was multiplied last, such as 1 / 4 for ``loss / 4``; outermost first."""

    @property
    def passes(self) -> list[RecordedCall]:
        """The passes of the model."""
        return [call for call in self.calls if call.is_pass]

    @property
    def uses_numbers(self) -> bool:
        """Whether a call has a float that may have been computed from a value which the script has read."""
        return any(call.uses_numbers for call in self.calls)

    def constants_of_passes(self) -> list[int]:
        """Return the indices of the constants that are arguments of passes of the model: its inputs."""
        return sorted(self._constants_of(self.passes))

    def constants_of_calls(self) -> set[int]:
        """Return the indices of the constants that are arguments of calls after the passes."""
        return self._constants_of([call for call in self.calls if not call.is_pass])

    def used_constants(self) -> list[int]:
        """Return the indices of the constants on which the outputs and the loss depend."""
        return sorted(self._constants_of([*self.calls, *self.derivations]))

    def targets_are_inputs(self) -> bool:
        """Return whether a call after the passes gets one of the inputs, such as the loss of an autoencoder."""
        inputs = {id(self.constants[index]) for index in self.constants_of_passes()}
        return any(id(self.constants[index]) in inputs for index in self.constants_of_calls())

    def direct_inputs(self) -> set[int]:
        """Return the indices of the constants that are arguments of passes themselves, not within containers."""
        given = [call.arguments.entries for call in self.passes]
        items = [item for inputs, options in given for item in (*inputs.entries, *options.entries.values())]
        return {item.index for item in items if isinstance(item, Constant)}

    @staticmethod
    def items_of(call: RecordedCall) -> list[Any]:
        """Return the arguments of a call, without their containers."""
        return _items(call.arguments)

    def scalings(self) -> list[tuple[str, float]]:
        """Return the operations that multiply or divide by a number other than 0, with the number."""
        found = []
        for call in self.calls:
            for item in () if call.is_pass or call.operation not in SCALINGS else self.items_of(call):
                if number := self.number_of(item):
                    found.append((call.operation, number))
        return found

    def number_of(self, item: Any) -> float:
        """Return a number among the arguments of a call, also that of a tensor of shape (); 0 for anything else."""
        value = self.constants[item.index] if isinstance(item, Constant) else item
        is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim)
        return float(value) if is_number else 0.0

    def _constants_of(self, calls: Sequence[RecordedCall]) -> set[int]:
        found = {item.index for call in calls for item in _items(call.arguments) if isinstance(item, Constant)}
        return found - self.weights

    def replay(
        self,
        constants: Mapping[int, Tensor] | None = None,
        *,
        outputs: Mapping[Value, Tensor] | None = None,
        modules: Mapping[nn.Module, nn.Module] | None = None,
        autocast: bool = True,
        needs_loss: bool = True,
        derive: bool = False,
        observe: Callable[..., None] | None = None,
    ) -> Replay:
        """Repeat the step, and return its outputs and its loss with their graph.

        Args:
            constants: tensors in place of constants, by index.
            outputs: outputs of passes, in place of running them.
            modules: modules in place of those of the passes.
            autocast: ``False`` computes everything in the precision of the parameters.
            needs_loss: ``False`` ends after the last pass.
            derive: compute derived constants again from the given ones.
            observe: receives each call before it is repeated, with its arguments and options.
        """
        known = dict(enumerate(self.constants)) | dict(constants or {})
        if derive:
            known |= self._derived(known, set(constants or ()))
        values: dict[Value, Tensor] = {key: item.clone() for key, item in (outputs or {}).items()}
        seen: list[Tensor] = []
        remaining = len(self.passes)

        def resolved(item: Any) -> Any:
            if isinstance(item, Constant):
                return known[item.index]
            return values[item] if isinstance(item, Value) else item

        for call in self.calls:
            if call.is_pass and outputs is not None:
                continue
            if not needs_loss and not remaining:
                break
            function = call.function
            if modules and isinstance(function, nn.Module):
                function = modules.get(function, function)
            found = call.run(resolved, function, autocast=autocast, observe=observe)
            values.update(zip(call.results, found, strict=False))
            if call.is_pass:
                remaining -= 1
                seen += [item for value, item in zip(call.results, found, strict=False) if value in self.outputs]
        loss = values.get(self.loss) if self.loss is not None else None
        return Replay(seen, loss if loss is not None else torch.tensor(float("nan")))

    def _derived(self, known: Mapping[int, Tensor], given: set[int]) -> dict[int, Tensor]:
        """Return the derived constants, computed from others.

        A given one is only computed again if it comes from another given one: the targets of a batch that a script
        takes from those of an epoch do not.
        """
        results: dict[Derived, Tensor] = {}
        replaced = {self.origins[index]: known[index] for index in given if index in self.origins}
        following: set[Derived] = set()

        def follows(item: Any) -> bool:
            return (
                item.index in given if isinstance(item, Constant) else isinstance(item, Derived) and item in following
            )

        def resolved(item: Any) -> Any:
            if isinstance(item, Constant):
                return known[item.index]
            return results[item] if isinstance(item, Derived) else item

        for call in self.derivations:
            results.update(zip(call.results, call.run(resolved, call.function, autocast=True), strict=False))
            if any(map(follows, self.items_of(call))):
                following.update(call.results)
            else:
                results.update((item, replaced[item]) for item in call.results if item in replaced)
                following.update(replaced.keys() & {*call.results})
        return {index: results[item] for index, item in self.origins.items()}

    def forget_unused(self) -> None:
        """Drop the derivations on which no constant of a call depends."""
        used = self._constants_of(self.calls)
        self.origins = {index: item for index, item in self.origins.items() if index in used}
        needed: set[Any] = set(self.origins.values())
        kept = []
        for call in reversed(self.derivations):
            if needed & set(call.results):
                needed |= {item for item in _items(call.arguments) if isinstance(item, Derived)}
                kept.append(call)
        self.derivations = kept[::-1]

    def forget_metrics(self) -> None:
        """Drop the calls on which the loss does not depend, such as those for accuracies."""
        needed: set[Any] = {self.loss}
        kept = []
        for call in reversed(self.calls):
            if call.is_pass or call.writes or call.operation in RANDOM or needed & {*call.results}:
                needed |= {item for item in _items(call.arguments) if isinstance(item, Value)}
                kept.append(call)
        self.calls = kept[::-1]

    def split(self, weights: set[int], made: Mapping[Value, Tensor]) -> None:
        """Take the calls up to the last one that combines weights with data as passes.

        Args:
            weights: the ids of the weights.
            made: the tensors of all values.
        """
        own = (index for index, item in enumerate(self.constants) if id(item) in weights or _is_structure(item))
        self.weights = frozenset(own)
        known: set[Any] = {Constant(index) for index in self.weights}
        """Weights, and values of weights alone."""
        last = -1
        for place, call in enumerate(self.calls):
            items = [item for item in _items(call.arguments) if isinstance(item, (Constant, Value))]
            if all(item in known for item in items):
                known.update(call.results)
            elif any(item in known for item in items) and any(made[item].ndim for item in call.results):
                last = place
        for call in self.calls[: last + 1]:
            call.is_pass = True
        later = {item for call in self.calls[last + 1 :] for item in _items(call.arguments) if isinstance(item, Value)}
        given = {item for call in self.passes for item in call.results} & later
        self.outputs = {item: _copy(made[item]) for item in given}
        after = {item for call in self.calls[last + 1 :] for item in call.results}
        self.shapes = {tuple(made[item].shape) for item in given | after}
        others = [item for index, item in enumerate(self.constants) if index not in self.weights]
        if not self.outputs or any(item.grad_fn is not None for item in others):
            self.problem = "the calls from the weights to the loss were not all seen"

    def verify(self) -> None:
        """Note a problem unless a replay of the calls from the recorded outputs computes the same bits."""
        if self.problem:
            return
        if self.loss is None or self.loss_value is None:
            self.problem = "the loss was not computed from outputs of the model by functions of torch"
            return
        try:
            with torch.no_grad():
                loss = self.replay(outputs=self.outputs).loss.detach()
        except Exception as error:
            self.problem = f"the loss cannot be computed again ({type(error).__name__})"
            return
        if loss.shape != self.loss_value.shape or not torch.equal(loss.nan_to_num(), self.loss_value.nan_to_num()):
            self.problem = "the loss, computed again from the same outputs, has other bits"


def _items(arguments: Any) -> list[Any]:
    return [item for _, item in leaves_by_name(arguments)]


def _always() -> bool:
    return True


class StepRecorder(TorchFunctionMode):
    """Records the steps of a model.

    It is a function mode only from the end of a pass until the backward pass; torch functions then behave as without
    it. Each backward pass ends a recorded step, so that a step with micro-batches has several.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[RecordedStep] = []
        self._step: RecordedStep | None = None
        self._values: dict[int, Value] = {}
        self._constants: dict[int, Constant] = {}
        self._inputs: dict[int, Constant] = {}
        self._blank: set[int] = set()
        """Values that were blank, and that no recorded call has filled."""
        self._derived: dict[int, Derived] = {}
        self._kept: list[Any] = []
        self._count = 0
        self.foreign_depth = 0
        """The number of running passes of other modules with parameters, such as teachers."""
        self._depth = 0
        self._streams: Any = None
        self._weights: set[int] = set()
        """The ids of the weights of a model that is no module."""
        self._made: dict[Value, Tensor] = {}
        self.is_active: Callable[[], bool] = _always
        """Returns whether the training computes, and no hook does."""

    def begin_calls(self, weights: Sequence[Tensor], streams: Any) -> None:
        """Record all calls from here to the loss, of a model that is no module but has these weights.

        After a backward pass, this is still the active mode.
        """
        is_active = bool(self._weights) and bool(self.steps)
        self.forget()
        self._weights, self._step = set(map(id, weights)), RecordedStep(streams=streams)
        if not is_active:
            self._enter()

    def begin_pass(self, streams: Any) -> None:
        """Note the start of a pass, with the random streams at that time."""
        self._depth += 1
        if self._depth == 1:
            self.note_streams(streams)

    def note_streams(self, streams: Any) -> None:
        """Note the random streams at the start of a pass, if it is the first one of a micro-batch."""
        if self._step is None:
            self._streams = streams

    def end_pass(
        self, module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any], output: Any, *, is_whole: bool
    ) -> None:
        """Record a pass, and all calls after it; ``is_whole`` is set for the model itself, not for a part of it."""
        if is_whole and not self._depth:  # the start of this pass was not seen, so its parts were taken for passes
            self.forget()
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self.leave()
        if self._step is None:
            self._step = RecordedStep(streams=self._streams)
            self._enter()
        try:
            arguments = self._recorded((inputs, dict(options)), is_pass=True)
        except Exception as error:  # which must not reach the training
            self._step.problem = f"a pass cannot be recorded ({with_lines(error)})"
            return
        copies = [_copy(tensor) for tensor in tensors_within(output)]
        results = self._results(output)
        self._step.outputs.update(zip(results, copies, strict=True))
        call = RecordedCall(module, arguments, results, _autocast(), torch.is_grad_enabled(), is_pass=True)
        self._step.calls.append(call)

    def end_step(self, roots: Sequence[Tensor]) -> None:
        """Note that a backward pass starts from ``roots``."""
        step, self._step = self._step, None
        if step is None:
            return
        root = roots[0] if len(roots) == 1 else None
        step.loss = None if root is None else self._values.get(id(root))
        step.loss_value = None if root is None else _copy(root)
        step.factors = () if root is None else factors_of(root)
        if root is not None and step.loss in step.outputs:
            step.shapes |= _products(root)
        if step.loss is not None:
            step.forget_metrics()
        step.forget_unused()
        if self._weights:
            step.split(self._weights, self._made)
        self.steps.append(step)
        self.forget()

    def forget(self) -> None:
        """Drop the open step."""
        self._step, self._made = None, {}
        self._values, self._constants, self._inputs, self._derived, self._kept = {}, {}, {}, {}, []
        self.foreign_depth = 0
        self._blank = set()

    def stop(self) -> None:
        """Drop what was recorded, and stop being a function mode."""
        self.steps, self._depth = [], 0
        self.forget()
        self.leave()

    def _enter(self) -> None:
        if self._is_innermost():
            return
        innermost: Any = torch.overrides._get_current_function_mode
        if innermost() is self:  # a hook has left it within the isolation, which puts it back
            self._is_entered = True
            return
        if torch._C._len_torch_function_stack():  # a mode below would be left in the wrong order
            assert self._step is not None
            self._step.problem = "another function mode of torch is active in the step"
            return
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Leave the stack of modes if no step is open; called where no function of torch is running."""
        if self._step is None and self._is_innermost():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _is_innermost(self) -> bool:
        """Return whether this is the mode that torch calls first; what rolls back a visit may have restored it."""
        innermost: Any = torch.overrides._get_current_function_mode
        return innermost() is self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and record it if it depends on outputs of the model."""
        options = kwargs or {}
        is_skipped = self._step is None or self._depth or (self._weights and not torch.is_grad_enabled())
        if is_skipped or not self.is_active():
            return func(*args, **options)
        tensors = tensors_within((args, options))
        name = getattr(func, "__name__", "")
        has_weights = torch.is_grad_enabled() or not self.foreign_depth  # otherwise, those of a reference model
        if not any(id(item) in self._values or (has_weights and item.requires_grad) for item in tensors):
            result = func(*args, **options)
            if tensors and not self.foreign_depth:
                self._derive(func, name, args, options, result)
            return result
        arguments = self._noted(func, name, args, options)
        versions = [item._version for item in tensors]
        result = func(*args, **options)
        changed = args[0] if name == "__setitem__" else result
        if arguments is not None and self._step is not None and tensors_within(changed):
            writes = versions != [item._version for item in tensors]
            results = self._results(changed)
            call = RecordedCall(func, arguments, results, _autocast(), torch.is_grad_enabled(), writes=writes)
            has_float = any(isinstance(item, float) for item in _items(arguments))
            call.uses_numbers = self._step.reads_numbers and has_float
            self._step.calls.append(call)
            if name in BLANK:
                self._blank.update(map(id, tensors_within(result)))
        return result

    def _derive(self, func: Any, name: str, args: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> None:
        """Note a call on constants alone, such as one that computes the divisor of the loss."""
        step = self._step
        assert step is not None
        found = tensors_within(result)
        if _writes(name, options):  # which makes the derivation of this tensor invalid
            for item in tensors_within(args[:1]):
                self._derived.pop(id(item), None)
            return
        if not found or name in RANDOM or name in NUMBERS or len(step.derivations) >= MOST_DERIVED:
            return
        try:
            arguments = self._recorded((args, dict(options)), is_derived=True)
        except Exception:  # which must not reach the training; the result is a constant
            return
        results: list[Derived] = []
        for tensor in found:
            derived = self._derived[id(tensor)] = Derived(self._count)
            self._count += 1
            self._kept.append(tensor)
            results.append(derived)
        step.derivations.append(RecordedCall(func, arguments, tuple(results), _autocast(), torch.is_grad_enabled()))

    def _noted(self, func: Any, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Return the arguments of a call to record; ``None`` for one that only reads, or cannot be recorded."""
        assert self._step is not None
        if name in NUMBERS:
            self._step.reads_numbers = True
            return None
        try:
            arguments = self._recorded((args, dict(options)), copies=_writes(name, options))
        except Exception as error:  # which must not reach the training
            self._step.problem = f"a call cannot be recorded ({with_lines(error)})"
            return None
        return arguments

    def _recorded(
        self, arguments: Any, *, copies: bool = False, is_pass: bool = False, is_derived: bool = False
    ) -> Any:
        """Return arguments with constants and values in place of tensors.

        Args:
            arguments: the arguments of a call.
            copies: copy constants, which the call changes.
            is_pass: the arguments are inputs, whose constants no other calls have; a tensor that is given twice, as
                input and as label, is two constants.
            is_derived: results of derivations are no constants.
        """
        step = self._step
        assert step is not None
        given: set[int] = set()
        constants = self._inputs if is_pass else self._constants

        def recorded(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            key = id(item)
            if key in self._blank and bool((item != 0).any()):
                del self._values[key]
                self._blank.discard(key)
            if key in self._values:
                return self._values[key]
            if is_derived and key in self._derived:
                return self._derived[key]
            is_repeated = is_pass and key in given
            given.add(key)
            if key not in constants or copies or is_repeated:
                constant = Constant(len(step.constants))
                step.constants.append(_copy(item) if copies else item)
                if key in self._derived:
                    step.origins[constant.index] = self._derived[key]
                if copies or is_repeated:
                    return constant
                constants[key] = constant
                self._kept.append(item)
            return constants[key]

        return dismantled(arguments, recorded)

    def _results(self, result: Any) -> tuple[Value, ...]:
        values = []
        for tensor in tensors_within(result):
            value = self._values[id(tensor)] = Value(self._count)
            self._blank.discard(id(tensor))
            self._count += 1
            self._made[value] = tensor
            values.append(value)
            if self._step is not None:
                with torch._C.DisableTorchFunction():
                    self._step.shapes.add(tuple(tensor.shape))
        return tuple(values)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy without recording this as a call of the step."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().clone()


def _writes(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether a function of this name changes one of its arguments."""
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name.startswith("__i") or name == "__setitem__" or options.get("out") is not None


def _is_structure(tensor: Tensor) -> bool:
    """Return whether a tensor is a square mask, or numbers the positions of a sequence."""
    table = tensor.detach().squeeze()
    if table.ndim == 2:
        return table.shape[0] == table.shape[1] and len(torch.unique(table)) < 3
    return table.ndim == 1 and bool((table == torch.arange(len(table), device=table.device)).all())


def _products(root: Tensor) -> set[tuple[int, ...]]:
    """Return the shapes of products of two results of a model that returns its loss, such as those of pairs of rows.

    Products with a weight do not count.
    """
    shapes = set()
    for node in all_nodes(root.grad_fn):
        factors = inputs_of(node)
        if operation_of(node) in ("Mm", "Bmm") and len(factors) == 2 and not any(map(_is_weight, factors)):
            shape, _ = output_of(node)
            if len(shape) == 2 or shape[:1] == (1,):  # einsum adds a dimension of one entry
                shapes.add(shape[-2:])
    return shapes


def _is_weight(node: Any) -> bool:
    inner = inputs_of(node) if operation_of(node) in ("T", "Transpose", "Permute") else [node]
    return any(operation_of(item) == "AccumulateGrad" or item.name().endswith("AccumulateGrad") for item in inner)


def factors_of(root: Tensor) -> tuple[float, ...]:
    """Return the numbers by which a scalar was multiplied or divided last, outermost first."""
    factors: list[float] = []
    node: Any = root.grad_fn
    while node is not None and not root.ndim:
        name = node.name()
        if name not in ("DivBackward0", "MulBackward0"):
            break
        inputs = [item for item, _ in node.next_functions if item is not None]
        numbers = [saved_value(node, part) for part in ("self", "other")]
        found = [item for item in numbers if isinstance(item, Tensor) and not item.ndim and not item.requires_grad]
        if len(inputs) != 1 or len(found) != 1 or not (number := float(found[0])):
            break
        factors.append(1 / number if name == "DivBackward0" else number)
        node = inputs[0]
    return tuple(factors)
