"""Process-wide torch settings on which a run's bytes depend, read and restored, and deterministic mode."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from operator import call, eq
from typing import Any

import torch
from torch.backends import mha
from torch.nn.modules import module as module_hooks
from torch.utils import _device as default_device
from torch.utils import _python_dispatch

from ...accelerators import UNSUPPORTED, devices_in_use
from ...errors import LoopscopeError
from ...option_words import option_text
from ..values import Transient

# Any, since the stubs of torch._C lack most of the functions used here.
_C: Any = torch._C
_dispatch: Any = _python_dispatch
# torch/optim/__init__.py deletes the module's name after its imports; only sys.modules still has it.
_optimizer_hooks: Any = sys.modules["torch.optim.optimizer"]
# Parents before children: a setting that is "none" inherits the one above it, so setting one may change others.
_PRECISIONS = [("generic", "all"), *(("mkldnn", operation) for operation in ("all", "conv", "rnn"))]
_MATMUL = [("mkldnn", "matmul")]
_CUDA_PRECISIONS = [("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")]
# Hooks on all modules or optimizers are in private dicts of two modules of torch, which has no public list of them. In
# torch 2.9 to 2.15 the names of those in torch.nn begin with _global_.
_HOOKS_OF_ALL: list[dict[Any, Any]] = [
    *(table for name, table in vars(module_hooks).items() if name.startswith("_global_") and isinstance(table, dict)),
    _optimizer_hooks._global_optimizer_pre_hooks,
    _optimizer_hooks._global_optimizer_post_hooks,
]
# Settings of matrix products on CUDA, with the suffix of torch's getter and setter. Versions 2.9 to 2.15 have all of
# them; missing ones are left out.
_CUDA_CHOICES = {
    "CUDA float16 reductions": "cublas_allow_fp16_reduced_precision_reduction",
    "CUDA bfloat16 reductions": "cublas_allow_bf16_reduced_precision_reduction",
    "CUDA float16 accumulation": "cublas_allow_fp16_accumulation",
    "preferred linear algebra of CUDA": "linalg_preferred_backend",
    "preferred BLAS of CUDA": "blas_preferred_backend",
}
# The smallest positive double, a denormal number.
_SMALLEST = 5e-324
# cuBLAS is deterministic only with a fixed workspace: ":4096:8" means eight buffers of 4 MiB per handle.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# torch raises a plain RuntimeError (alertNotDeterministic in ATen/Context.cpp), recognisable only by its text.
MISSING = " does not have a deterministic implementation"
# C++ guards undo their setting when they are freed, so guards of permanent settings are kept here.
_guards: list[Any] = []


class Flag:
    """Getter and setter of one setting.

    A subclass whose getter is a Python function also returns readers, functions implemented in C that a tripwire calls
    instead, and computes the setting from what they return.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.get, self.put = get, put

    def readers(self) -> Sequence[Callable[[], Any]]:
        """Return functions without arguments that together read the setting."""
        return (self.get,)

    def value_of(self, readings: Sequence[Any]) -> Any:
        """Return the setting, given the results of the readers; a reader that raised gives ``None``."""
        return readings[0]


class ModeStack(Flag):
    """A stack of entered modes: one reader for its length and one for each mode that is entered now."""

    def __init__(
        self, length: Callable[[], int], at: Callable[[int], Any], put: Callable[[tuple[Any, ...]], None]
    ) -> None:
        self.length, self._at = length, at
        super().__init__(self._modes, put)

    def _modes(self) -> tuple[Any, ...]:
        length = self.length()
        return tuple([self._at(index) for index in range(length)]) if length else ()

    def readers(self) -> Sequence[Callable[[], Any]]:
        """Return the readers, which are valid while the stack is not longer."""
        return (self.length, *[partial(self._at, index) for index in range(self.length())])

    def value_of(self, readings: Sequence[Any]) -> Any:
        """Return the modes; with a newer mode, which has no reader, those that are entered now."""
        return self.get() if readings[0] > len(readings) - 1 else tuple(readings[1 : 1 + readings[0]])


class DefaultDevice(Flag):
    """The device of ``torch.set_default_device``: a mode on the function stack, stored per thread, and its device.

    The mode is nearly always missing, and then getattr() on the thread-local object would create and drop an error, in
    13 µs after a training step. With an empty stack there is none, which the length of the stack shows.
    """

    def readers(self) -> Sequence[Callable[[], Any]]:
        """Return the reader of the device, and that of the mode if any mode is entered now."""
        read_device = partial(getattr, default_device, "CURRENT_DEVICE")
        return (read_device, _device_context) if _C._len_torch_function_stack() else (read_device,)

    def value_of(self, readings: Sequence[Any]) -> Any:
        """Return the mode and the device."""
        device, *modes = readings
        return (*(modes or [None]), device)


class AutocastNesting(Flag):
    """The nesting depth of autocast, which torch returns only when it changes it: incremented, then decremented."""

    def readers(self) -> Sequence[Callable[[], Any]]:
        """Return two functions whose calls in this order leave the depth unchanged."""
        return (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)

    def value_of(self, readings: Sequence[Any]) -> Any:
        """Return the depth after the decrement."""
        return readings[1]


class MatmulPrecision(Flag):
    """The legacy precision of float32 products, whose C getter raises while it contradicts those by backend."""

    def readers(self) -> Sequence[Callable[[], Any]]:
        """Return the C getter; the value of a reader that raises is ``None``."""
        return (_C._get_float32_matmul_precision,)


class GlobalHooks(Flag):
    """The hooks on all modules or optimizers; almost always there are none, which one call can tell."""

    def readers(self) -> Sequence[Callable[[], Any]]:
        """Return one reader of all tables if they are empty, otherwise one per table."""
        if any(_HOOKS_OF_ALL):
            return [partial(tuple, table.items()) for table in _HOOKS_OF_ALL]
        return (partial(any, _HOOKS_OF_ALL),)

    def value_of(self, readings: Sequence[Any]) -> Any:
        """Return the items of every table, or an empty list if all are empty."""
        if len(readings) == 1:
            return self.get() if readings[0] else []
        return _without_internal(readings)


MODE_COUNTERS = (_C._len_torch_function_stack, _C._len_torch_dispatch_stack)
"""C functions that return the numbers of entered function modes and dispatch modes."""


def entered_modes() -> tuple[int, int]:
    """Return the numbers of entered function modes and dispatch modes."""
    return _C._len_torch_function_stack(), _C._len_torch_dispatch_stack()


def leave_modes(previous: tuple[int, ...]) -> None:
    """Leave the modes entered since ``entered_modes`` returned ``previous``; they could intercept any check."""
    if previous != (_C._len_torch_function_stack(), _C._len_torch_dispatch_stack()):
        _set_function_modes(_FUNCTION_MODES.get()[: previous[0]])
        _set_dispatch_modes(_DISPATCH_MODES.get()[: previous[1]])


# torch has no public functions to read or set the two stacks of modes. Its own context managers use these private ones
# (torch/overrides.py, torch/utils/_python_dispatch.py), which torch 2.9 to 2.15 have.


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    while _C._len_torch_function_stack():
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def _set_dispatch_modes(modes: tuple[Any, ...]) -> None:
    entered = _DISPATCH_MODES.get()  # kept, since torch 2.9 crashes when it pops a mode without another reference
    for _ in entered:
        _C._pop_torch_dispatch_stack(None)
    for mode in modes:
        _C._push_on_torch_dispatch_stack(mode)
    # torch.compile reads these variables, which otherwise only a mode's __enter__ and __exit__ set.
    _dispatch._is_in_torch_dispatch_mode = bool(modes)
    _dispatch._is_in_non_infra_torch_dispatch_mode = not all(mode.is_infra_mode() for mode in modes)
    ignore_internals = [mode.ignore_compile_internals() for mode in modes]
    _dispatch._is_in_any_mode_without_ignore_compile_internals = not all(ignore_internals)


_FUNCTION_MODES = ModeStack(_C._len_torch_function_stack, _C._get_function_stack_at, _set_function_modes)
_DISPATCH_MODES = ModeStack(_C._len_torch_dispatch_stack, _C._get_dispatch_stack_at, _set_dispatch_modes)


def _set_inference_mode(enabled: bool) -> None:
    """Leave or enter inference mode by a guard object, which is kept, since freeing it would undo the setting."""
    _guards.append(_C._InferenceMode(enabled))


def _device_context() -> Any:
    return vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context")  # type: ignore[attr-defined]


def _default_device() -> tuple[Any, Any]:
    return _device_context(), default_device.CURRENT_DEVICE


def _set_default_device(saved: tuple[Any, Any]) -> None:
    context, default_device.CURRENT_DEVICE = saved
    if context is None:  # deleted instead of set to None, since torch 2.9 reads the device of any context
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # type: ignore[attr-defined]
    else:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = context  # type: ignore[attr-defined]


def _autocast_nesting() -> int:  # torch returns the count only when changing it
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_autocast_nesting(depth: int) -> None:
    # Autocast clears its cache of cast weights when this count reaches 0; with a wrong count it would use stale casts.
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < depth:
        torch.autocast_increment_nesting()
    if not depth:
        torch.clear_autocast_cache()


def _autocast(device: str) -> tuple[Flag, Flag]:
    return (
        Flag(partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        Flag(partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    )


def set_deterministic_algorithms(on: bool, warn_only: bool = False) -> None:
    """Set the mode like ``torch.use_deterministic_algorithms``, without importing the compiler, which takes seconds."""
    # torch's function also sets an option of the compiler, which matters only if the compiler has been imported.
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    else:
        _C._set_deterministic_algorithms(on, warn_only=warn_only)


def _set_deterministic(on: bool) -> None:
    set_deterministic_algorithms(on, _C._get_deterministic_algorithms_warn_only())


def _set_deterministic_warnings(warn_only: bool) -> None:
    set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only)


def _precisions(keys: list[tuple[str, str]]) -> list[str]:
    return [_C._get_fp32_precision_getter(*key) for key in keys]


def _set_precisions(keys: list[tuple[str, str]], saved: list[str]) -> None:
    for key, value in zip(keys, saved, strict=True):
        # Read one by one, since setting a generic precision changes inherited ones.
        if _C._get_fp32_precision_getter(*key) != value:
            _C._set_fp32_precision_setter(*key, value)


def _matmul_precision() -> Any:
    """Return the legacy setting; ``None`` while it contradicts the settings by backend."""
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(saved: str | None) -> None:
    if saved is not None:
        torch.set_float32_matmul_precision(saved)


# Only the top of the stack can be read; True: also while hooks are disabled.
_saved_tensor_hooks: Callable[[], Any] = partial(_C._autograd._top_saved_tensors_default_hooks, True)


def _set_saved_tensor_hooks(saved: Any) -> None:
    while _saved_tensor_hooks() is not None and _saved_tensor_hooks() != saved:
        _C._autograd._pop_saved_tensors_default_hooks()


def _hooks_of_all() -> list[list[tuple[Any, Any]]]:
    # Almost always all tables are empty, and then no lists are built.
    return _without_internal([table.items() for table in _HOOKS_OF_ALL]) if any(_HOOKS_OF_ALL) else []


def _without_internal(tables: Sequence[Iterable[tuple[Any, Any]]]) -> list[list[tuple[Any, Any]]]:
    """Return the items of every table without loopscope's own hooks, or an empty list if there are no others."""
    all_items = [[*table] for table in tables]
    others = _others(all_items)
    return [[item for item in table if item[0] in others] for table in all_items] if others else []


def _others(tables: Iterable[Iterable[tuple[Any, Any]]]) -> set[Any]:
    """Return the ids of hooks that are neither objects of loopscope nor methods of one.

    Some tables have flags of hooks by these ids, which torch leaves there after a hook is removed.
    """
    return {
        number
        for table in tables
        for number, hook in table
        if callable(hook) and not isinstance(getattr(hook, "__self__", hook), Transient)
    }


def _set_hooks_of_all(saved: list[list[tuple[Any, Any]]]) -> None:
    # In place, since torch's handles and its calls of the hooks refer to these dicts.
    others = _others(table.items() for table in _HOOKS_OF_ALL)
    for table in _HOOKS_OF_ALL:
        for number in [number for number in table if number in others]:
            del table[number]
    for table, items in zip(_HOOKS_OF_ALL, saved, strict=False):
        table.update(items)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(saved: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*saved)


def _choice(name: str) -> Flag:
    setter = getattr(_C, f"_set_{name}")

    def put(saved: Any) -> None:
        # torch 2.9 has one value, newer versions two; the setter takes the result of the getter
        setter(*saved) if isinstance(saved, tuple) else setter(saved)

    return Flag(getattr(_C, f"_get_{name}"), put)


# Their readers take at most 0.15 µs each and are called twice per visit. They are implemented in C: after a training
# step, which evicts the processor's caches, a Python function takes up to 2 µs.
QUICK_FLAGS = {
    "function modes": _FUNCTION_MODES,
    "dispatch modes": _DISPATCH_MODES,
    "inference mode": Flag(torch.is_inference_mode_enabled, _set_inference_mode),
    "grad mode": Flag(torch.is_grad_enabled, _C._set_grad_enabled),
    "forward-mode gradients": Flag(_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    "multithreaded backward": Flag(_C._is_multithreading_enabled, _C._set_multithreading_enabled),
    "CPU autocast": _autocast("cpu")[0],
    "CPU autocast dtype": _autocast("cpu")[1],
    "autocast nesting": AutocastNesting(_autocast_nesting, _set_autocast_nesting),
    "default device": DefaultDevice(_default_device, _set_default_device),
    "default dtype": Flag(torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": Flag(_C._get_deterministic_algorithms, _set_deterministic),
    "warnings instead of deterministic algorithms": Flag(
        _C._get_deterministic_algorithms_warn_only, _set_deterministic_warnings
    ),
    "float32 matmul precision": MatmulPrecision(_matmul_precision, _set_matmul_precision),
    "threads": Flag(torch.get_num_threads, torch.set_num_threads),
    "flash attention": Flag(_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "memory-efficient attention": Flag(_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "math attention": Flag(_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "oneDNN": Flag(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    # The processor's mode cannot be read, but in it the smallest denormal equals 0.
    "flushing of denormals": Flag(partial(eq, _SMALLEST, 0.0), torch.set_flush_denormal),
    "saved-tensor hooks": Flag(_saved_tensor_hooks, _set_saved_tensor_hooks),
    "hooks on all modules or optimizers": GlobalHooks(_hooks_of_all, _set_hooks_of_all),
}
# Settings that cost more to read or only select an algorithm; guardian, audit and complete checks read them.
_SLOW = {
    "float32 precision by operation": Flag(partial(_precisions, _PRECISIONS), partial(_set_precisions, _PRECISIONS)),
    "oneDNN matmul precision": Flag(partial(_precisions, _MATMUL), partial(_set_precisions, _MATMUL)),
    "order of attention kernels": Flag(_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    "oneDNN determinism": Flag(_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    "filling of uninitialised memory": Flag(
        _C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory
    ),
    "autocast cache": Flag(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "anomaly detection": Flag(_anomaly, _set_anomaly),
    "fast path of multi-head attention": Flag(mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    "NNPACK": Flag(_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    "quantised engine": Flag(_C._get_qengine, _C._set_qengine),
}
# torch.set_float32_matmul_precision() also sets the precision of oneDNN's matrix products.
_FOLLOWS = {"float32 matmul precision": "oneDNN matmul precision"}
if (opt_einsum := torch.backends.opt_einsum).is_available():
    _SLOW["opt_einsum"] = Flag(partial(getattr, opt_einsum, "enabled"), partial(setattr, opt_einsum, "enabled"))


def _accelerator_flags() -> dict[str, Flag]:
    """Return the settings that the backend of the accelerator in use has."""
    devices = devices_in_use()
    if not devices:
        return {}
    enabled, dtype = _autocast(devices[0].type)
    flags = {
        "accelerator autocast": enabled,
        "accelerator autocast dtype": dtype,
        "current device": Flag(torch.accelerator.current_device_index, torch.accelerator.set_device_index),
        "CUDA float32 precision": Flag(
            partial(_precisions, _CUDA_PRECISIONS), partial(_set_precisions, _CUDA_PRECISIONS)
        ),
        "cuDNN": Flag(_C._get_cudnn_enabled, _C._set_cudnn_enabled),
        "cuDNN benchmark": Flag(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
        "cuDNN deterministic": Flag(_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
        "cuDNN attention": Flag(_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
        **{label: _choice(name) for label, name in _CUDA_CHOICES.items() if hasattr(_C, f"_get_{name}")},
    }
    return {name: flag for name, flag in flags.items() if _is_readable(flag)}


def _is_readable(flag: Flag) -> bool:
    try:
        flag.get()
    except UNSUPPORTED:
        return False
    return True


class GlobalFlags:
    """All settings as one tuple, which starts with the quick ones that a tripwire reads at every call.

    A tripwire calls ``readers``, which are valid until a function of ``key`` returns another value; :meth:`refresh`
    updates them.
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # torch 2.9 warns, once per process, about this setting, which newer versions replace.
            warnings.simplefilter("ignore")
            _matmul_precision()
        # Modes come first and are left first, since an entered mode could intercept the other calls.
        flags = {**QUICK_FLAGS, **_accelerator_flags(), **_SLOW}
        self.names = tuple(flags)
        self._setters = tuple([flag.put for flag in flags.values()])
        self._getters = tuple([flag.get for flag in flags.values()])
        self._quick_flags = [*flags.values()][: -len(_SLOW)]
        self._quick_getters = self._getters[: -len(_SLOW)]
        self.readers: list[Callable[[], Any]] = []
        self._counts: list[int] = []
        self.refresh()

    # The lengths of both stacks of modes, and whether there are hooks on all modules or optimizers; all C functions.
    key = (_FUNCTION_MODES.length, _DISPATCH_MODES.length, partial(any, _HOOKS_OF_ALL))

    def refresh(self) -> bool:
        """Update the list of readers of the quick settings; always returns ``True``."""
        readers = [flag.readers() for flag in self._quick_flags]
        self._counts = [*map(len, readers)]
        self.readers[:] = chain.from_iterable(readers)
        return True

    def values_of(self, readings: Sequence[Any]) -> tuple[Any, ...]:
        """Return the quick settings, as :meth:`read` does, given the results of ``readers``."""
        rest = iter(readings)
        flags = zip(self._quick_flags, self._counts, strict=True)
        return tuple([flag.value_of([*islice(rest, count)]) for flag, count in flags])

    def read(self) -> tuple[Any, ...]:
        """Return the settings that are quick to read."""
        return (*map(call, self._quick_getters),)

    def read_slow(self) -> dict[str, Any]:
        """Return, by name, the settings that :meth:`read` omits."""
        start = len(self._quick_getters)
        return dict(zip(self.names[start:], map(call, self._getters[start:]), strict=True))

    def read_all(self) -> tuple[Any, ...]:
        """Return every setting, in the order of ``names``."""
        return (*map(call, self._getters),)

    def restore_quick(self, quick: tuple[Any, ...], all_settings: tuple[Any, ...]) -> None:
        """Restore the settings ``quick`` (of ``read``), or nothing if a call has changed a slow setting.

        The slow settings are compared with ``all_settings`` (of ``read_all``). A difference is left for a check to
        report. The exception is a slow setting that torch changes together with a quick one (``_FOLLOWS``): if that
        quick setting has changed, and the quick part of ``all_settings`` equals ``quick``, both are restored.
        """
        changed = {*self.differences(quick)}
        changed_slow = {*self.differences(all_settings)}.difference(self.names[: len(quick)])
        if all_settings[: len(quick)] == quick:
            changed_slow -= {follower for name, follower in _FOLLOWS.items() if name in changed}
        if not changed_slow:
            self.restore((*quick, *all_settings[len(quick) :]))

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Restore the settings that differ from ``saved`` (a result of ``read`` or ``read_all``), modes first."""
        for put, get, previous in zip(self._setters, self._getters, saved, strict=False):
            if get() != previous:
                put(previous)

    def differences(self, saved: tuple[Any, ...]) -> list[str]:
        """Return the names of settings that differ from ``saved`` (a result of ``read`` or ``read_all``)."""
        triples = zip(self.names, self._getters, saved, strict=False)
        return [name for name, get, previous in triples if get() != previous]


class NotDeterministicError(LoopscopeError):
    """An operation has no deterministic implementation, so deterministic mode rejects it."""


@contextmanager
def deterministic(*, on: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms in the body.

    New memory is not filled, as torch otherwise does in this mode: that would cost a pass over every new tensor, and
    matters only to code that reads uninitialised memory.

    Raises:
        NotDeterministicError: for an operation without a deterministic algorithm.
    """
    if not on:
        yield
        return
    flags = GlobalFlags()
    saved, workspace = flags.read_all(), os.environ.get(CUBLAS)
    # Saved separately, since the flags include cuDNN only after an accelerator was used, which may happen in the body.
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        set_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        os.environ.setdefault(CUBLAS, ":4096:8")  # read by CUDA's matrix products when they are first used
        yield
    except RuntimeError as error:
        if (explanation := explain_nondeterminism(error)) is error:
            raise
        raise explanation from error
    finally:
        flags.restore(saved)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop(CUBLAS, None)


def explain_nondeterminism(error: BaseException) -> BaseException:
    """Return an error with advice if torch rejected an operation in deterministic mode, otherwise ``error``."""
    operation, refused, _ = str(error).partition(MISSING)
    if not refused or not isinstance(error, RuntimeError):
        return error
    return NotDeterministicError(
        f"{operation} has no deterministic implementation here, so its results may differ from run to run: use another "
        f"operation, or start the run with {option_text('no_determinism', True)}."
    ).with_traceback(error.__traceback__)


def settings() -> Mapping[str, Any]:
    """Return the settings that determine whether results are reproducible bit for bit, as plain values."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(CUBLAS, "not set"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
