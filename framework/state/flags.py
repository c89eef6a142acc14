"""Process-wide torch settings on which a run's bytes depend: read quickly, put back exactly; deterministic mode."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import call
from typing import Any, NamedTuple

import torch
from torch.backends import mha
from torch.nn.modules import module as module_hooks
from torch.utils import _device as default_device
from torch.utils import _python_dispatch

from ..errors import LoopscopeError, text_of
from .accelerators import UNSUPPORTED, devices_in_use

# Any, since the stubs of torch._C lack most of the functions that are used here.
_C: Any = torch._C
_dispatch: Any = _python_dispatch
# torch/optim/__init__.py deletes the module's name after its imports; only sys.modules still has it.
_optimizer_hooks: Any = sys.modules["torch.optim.optimizer"]
# Parents before children: a setting that is "none" inherits the one above it, so setting one may change others.
_PRECISIONS = [("generic", "all"), *(("mkldnn", operation) for operation in ("all", "conv", "rnn"))]
_MATMUL = [("mkldnn", "matmul")]
_CUDA_PRECISIONS = [("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")]
# Hooks on all modules or optimizers lie in private dicts of two modules of torch, which has no list of them. The names
# of those in torch.nn begin with _global_ in torch 2.9 to 2.15.
_HOOKS_OF_ALL: list[dict[Any, Any]] = [
    *(table for name, table in vars(module_hooks).items() if name.startswith("_global_") and isinstance(table, dict)),
    _optimizer_hooks._global_optimizer_pre_hooks,
    _optimizer_hooks._global_optimizer_post_hooks,
]
# What matrix products on CUDA are computed with, by the end of the names of torch's getter and setter. All versions
# from 2.9 to 2.15 have them; others are left out.
_CUDA_CHOICES = {
    "CUDA float16 reductions": "cublas_allow_fp16_reduced_precision_reduction",
    "CUDA bfloat16 reductions": "cublas_allow_bf16_reduced_precision_reduction",
    "CUDA float16 accumulation": "cublas_allow_fp16_accumulation",
    "preferred linear algebra of CUDA": "linalg_preferred_backend",
    "preferred BLAS of CUDA": "blas_preferred_backend",
}
# The smallest positive double, which is denormal.
_SMALLEST = 5e-324
# cuBLAS repeats its results only with a workspace of its own: ":4096:8" is eight buffers of 4 MiB for each handle.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# torch raises a plain RuntimeError (alertNotDeterministic in ATen/Context.cpp), which only its text tells apart.
MISSING = " does not have a deterministic implementation"
# Guards in C++ undo their setting when they are freed: those that set one for good are never let go.
_guards: list[Any] = []


class Flag(NamedTuple):
    """One setting: how to read it and how to set it."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


def entered_modes() -> tuple[int, int]:
    """Return how many function modes and how many dispatch modes are entered."""
    return _C._len_torch_function_stack(), _C._len_torch_dispatch_stack()


def leave_modes(before: tuple[int, int]) -> None:
    """Leave the modes entered since ``entered_modes`` returned ``before``: they could answer any check."""
    if before != (_C._len_torch_function_stack(), _C._len_torch_dispatch_stack()):
        _set_function_modes(_function_modes()[: before[0]])
        _set_dispatch_modes(_dispatch_modes()[: before[1]])


# torch has no public way to read or set the two stacks of modes. These are the functions that its own context managers
# use (torch/overrides.py, torch/utils/_python_dispatch.py), there in torch 2.9 to 2.15.


def _function_modes() -> tuple[Any, ...]:
    length = _C._len_torch_function_stack()
    return tuple([_C._get_function_stack_at(index) for index in range(length)]) if length else ()


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    while _C._len_torch_function_stack():
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def _dispatch_modes() -> tuple[Any, ...]:
    length = _C._len_torch_dispatch_stack()
    return tuple([_C._get_dispatch_stack_at(index) for index in range(length)]) if length else ()


def _set_dispatch_modes(modes: tuple[Any, ...]) -> None:
    held = _dispatch_modes()  # torch 2.9 frees a mode that nobody else holds before its pop returns it: a crash
    for _ in held:
        _C._pop_torch_dispatch_stack(None)
    for mode in modes:
        _C._push_on_torch_dispatch_stack(mode)
    # torch.compile looks at these, which otherwise only a mode's own __enter__ and __exit__ set.
    _dispatch._is_in_torch_dispatch_mode = bool(modes)
    _dispatch._is_in_non_infra_torch_dispatch_mode = not all(mode.is_infra_mode() for mode in modes)
    _dispatch._is_in_any_mode_without_ignore_compile_internals = not all(
        mode.ignore_compile_internals() for mode in modes
    )


def _set_inference_mode(enabled: bool) -> None:
    """Leave or enter inference mode, which only a guard object can: it is kept, since its end would undo it."""
    _guards.append(_C._InferenceMode(enabled))


def _default_device() -> tuple[Any, Any]:
    # a mode on the function stack, which one thread remembers in _GLOBAL_DEVICE_CONTEXT, and the device it gives out
    return vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context"), default_device.CURRENT_DEVICE  # type: ignore[attr-defined]


def _set_default_device(saved: tuple[Any, Any]) -> None:
    context, default_device.CURRENT_DEVICE = saved
    if context is None:  # not set to None: torch 2.9 asks a context that is there for its device
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # type: ignore[attr-defined]
    else:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = context  # type: ignore[attr-defined]


def _autocast_nesting() -> int:  # torch counts, but tells the count only where it changes it
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_autocast_nesting(depth: int) -> None:
    # autocast empties its cache of cast weights when this count reaches 0; were it wrong, stale casts would be used.
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < depth:
        torch.autocast_increment_nesting()


def _autocast(device: str) -> tuple[Flag, Flag]:
    return (
        Flag(partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        Flag(partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    )


def set_deterministic_algorithms(on: bool, warn_only: bool = False) -> None:
    """Do what torch's function of that name does, without importing its compiler for it, which takes seconds."""
    # torch's function also sets an option of the compiler, which matters only where that has been imported.
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    else:
        _C._set_deterministic_algorithms(on, warn_only=warn_only)


def _precisions(keys: list[tuple[str, str]]) -> list[str]:
    return [_C._get_fp32_precision_getter(*key) for key in keys]


def _set_precisions(keys: list[tuple[str, str]], saved: list[str]) -> None:
    for key, value in zip(keys, saved, strict=True):
        if _C._get_fp32_precision_getter(*key) != value:  # read again: the generic ones are inherited
            _C._set_fp32_precision_setter(*key, value)


def _matmul_precision() -> Any:
    """Return the legacy setting; it has no value while the settings by backend say something else."""
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(saved: str | None) -> None:
    if saved is not None:
        torch.set_float32_matmul_precision(saved)


# only the top of the stack can be read; True: also while hooks are disabled
_saved_tensor_hooks: Callable[[], Any] = partial(_C._autograd._top_saved_tensors_default_hooks, True)


def _set_saved_tensor_hooks(saved: Any) -> None:
    while _saved_tensor_hooks() is not None and _saved_tensor_hooks() != saved:
        _C._autograd._pop_saved_tensors_default_hooks()


def _hooks_of_all() -> list[list[tuple[Any, Any]]]:
    # Nearly always all of them are empty, and then nothing is built.
    return [[*table.items()] for table in _HOOKS_OF_ALL] if any(_HOOKS_OF_ALL) else []


def _set_hooks_of_all(saved: list[list[tuple[Any, Any]]]) -> None:
    # In place: torch's handles and its calls of the hooks refer to the very dicts.
    for table in _HOOKS_OF_ALL:
        table.clear()
    for table, items in zip(_HOOKS_OF_ALL, saved, strict=False):
        table.update(items)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _choice(name: str) -> Flag:
    return Flag(getattr(_C, f"_get_{name}"), _put(getattr(_C, f"_set_{name}")))


def _put(setter: Callable[..., None]) -> Callable[[Any], None]:
    # torch 2.9 has one value where newer ones have two, and sets what its getter returns
    return lambda saved: setter(*saved) if isinstance(saved, tuple) else setter(saved)


# Getters that take at most 0.15 µs each, 1.7 µs together, and are read twice a fire. Most are functions in C: after a
# training step, which empties the caches, one in Python takes up to 2 µs.
_QUICK = {
    "function modes": Flag(_function_modes, _set_function_modes),
    "dispatch modes": Flag(_dispatch_modes, _set_dispatch_modes),
    "inference mode": Flag(torch.is_inference_mode_enabled, _set_inference_mode),
    "grad mode": Flag(torch.is_grad_enabled, _C._set_grad_enabled),
    "forward-mode gradients": Flag(_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    "multithreaded backward": Flag(_C._is_multithreading_enabled, _C._set_multithreading_enabled),
    "CPU autocast": _autocast("cpu")[0],
    "CPU autocast dtype": _autocast("cpu")[1],
    "autocast nesting": Flag(_autocast_nesting, _set_autocast_nesting),
    "default device": Flag(_default_device, _set_default_device),
    "default dtype": Flag(torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": Flag(
        _C._get_deterministic_algorithms,
        lambda on: set_deterministic_algorithms(on, _C._get_deterministic_algorithms_warn_only()),
    ),
    "warnings instead of deterministic algorithms": Flag(
        _C._get_deterministic_algorithms_warn_only,
        lambda warn: set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn),
    ),
    "float32 matmul precision": Flag(_matmul_precision, _set_matmul_precision),
    "threads": Flag(torch.get_num_threads, torch.set_num_threads),
    "flash attention": Flag(_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "memory-efficient attention": Flag(_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "math attention": Flag(_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "oneDNN": Flag(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    # the processor's mode cannot be asked for, but the smallest denormal times one is 0 where they are flushed
    "flushing of denormals": Flag(lambda: _SMALLEST * 1.0 == 0.0, torch.set_flush_denormal),
    "saved-tensor hooks": Flag(_saved_tensor_hooks, _set_saved_tensor_hooks),
    "hooks on all modules or optimizers": Flag(_hooks_of_all, _set_hooks_of_all),
}
# what costs more, or changes at most how the same is computed; only the guardian and the audit read it
_SLOW = {
    "float32 precision by operation": Flag(partial(_precisions, _PRECISIONS), partial(_set_precisions, _PRECISIONS)),
    "oneDNN matmul precision": Flag(partial(_precisions, _MATMUL), partial(_set_precisions, _MATMUL)),
    "order of attention kernels": Flag(_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    "oneDNN determinism": Flag(_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    "filling of uninitialised memory": Flag(
        _C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory
    ),
    "autocast cache": Flag(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "anomaly detection": Flag(_anomaly, lambda saved: torch.set_anomaly_enabled(*saved)),
    "fast path of multi-head attention": Flag(mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    "NNPACK": Flag(_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    "quantised engine": Flag(_C._get_qengine, _C._set_qengine),
}
_FOLLOWS = {"float32 matmul precision": "oneDNN matmul precision"}
if (opt_einsum := torch.backends.opt_einsum).is_available():
    _SLOW["opt_einsum"] = Flag(partial(getattr, opt_einsum, "enabled"), partial(setattr, opt_einsum, "enabled"))


def _accelerator_flags() -> dict[str, Flag]:
    """Return the settings of the accelerator that is in use, as far as its backend has them."""
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
    """The settings as one tuple: those that a tripwire reads at every call, and all of them, which begin with those."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # torch 2.9 warns, once in a process, of a setting that newer ones replace, and it is read at each call
            warnings.simplefilter("ignore")
            _matmul_precision()
        # Modes come first and so are left first: one that is still entered could answer the other calls.
        flags = {**_QUICK, **_accelerator_flags(), **_SLOW}
        self.names = tuple(flags)
        self._setters = tuple([flag.put for flag in flags.values()])
        self._getters = tuple([flag.get for flag in flags.values()])
        self._quick_getters = self._getters[: -len(_SLOW)]

    def read(self) -> tuple[Any, ...]:
        """Return the settings that are quick to read."""
        return (*map(call, self._quick_getters),)

    def read_slow(self) -> dict[str, Any]:
        """Return, by name, the settings that :meth:`read` leaves out."""
        start = len(self._quick_getters)
        return dict(zip(self.names[start:], map(call, self._getters[start:]), strict=True))

    def read_all(self) -> tuple[Any, ...]:
        """Return every setting, in the order of ``names``."""
        return (*map(call, self._getters),)

    def restore_quick(self, quick: tuple[Any, ...], known: tuple[Any, ...]) -> None:
        """Put back what ``read`` returned, unless a setting that it does not read is no longer ``known``.

        Then all stays as it is, for a check to tell of it. A setting that is set along with one that ``read`` does
        read is put back too, where all of these were as they were when ``known`` was read.
        """
        changed = {*self.differences(quick)}
        others = {*self.differences(known)}.difference(self.names[: len(quick)])
        if known[: len(quick)] == quick:
            others -= {follower for name, follower in _FOLLOWS.items() if name in changed}
        if not others:
            self.restore((*quick, *known[len(quick) :]))

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Put back the settings that differ from ``saved`` (of ``read`` or ``read_all``), modes first."""
        getters = self._getters[: len(saved)]
        if tuple([get() for get in getters]) != saved:
            for put, get, before in zip(self._setters, getters, saved, strict=False):
                if get() != before:
                    put(before)
        torch.clear_autocast_cache()  # it may hold casts of parameters that are rolled back

    def differences(self, saved: tuple[Any, ...]) -> list[str]:
        """Name the settings that differ from ``saved`` (of ``read`` or ``read_all``)."""
        return [name for name, get, before in zip(self.names, self._getters, saved, strict=False) if get() != before]


class NotDeterministicError(LoopscopeError):
    """An operation has no deterministic implementation, so it does not run in deterministic mode."""


@contextmanager
def deterministic(*, on: bool) -> Iterator[None]:
    """Have torch use deterministic algorithms in the body.

    An operation without one raises there, which leaves the body as a :class:`NotDeterministicError`.

    Memory is not filled before use, as torch otherwise does in this mode: that costs a pass over every new tensor, and
    helps only code that reads what it never wrote.
    """
    if not on:
        yield
        return
    flags = GlobalFlags()
    saved, workspace = flags.read_all(), os.environ.get(CUBLAS)
    # Beside the flags, which have cuDNN's only once an accelerator has been used; that may happen within the body.
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        set_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        os.environ.setdefault(CUBLAS, ":4096:8")  # read by CUDA's matrix products when they are first used
        yield
    except RuntimeError as error:
        if (told := explain_nondeterminism(error)) is error:
            raise
        raise told from error
    finally:
        flags.restore(saved)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop(CUBLAS, None)


def explain_nondeterminism(error: BaseException) -> BaseException:
    """Return the error that names the remedy, if torch refused an operation in deterministic mode; else the same."""
    operation, refused, _ = text_of(error).partition(MISSING)
    if not refused or not isinstance(error, RuntimeError):
        return error
    return NotDeterministicError(
        f"{operation} has no deterministic implementation here, so its results may differ from run to run: use another "
        "operation, or start the run with --no-determinism."
    ).with_traceback(error.__traceback__)


def settings() -> Mapping[str, Any]:
    """Return the settings that decide whether the same bits come out again, as plain values."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(CUBLAS, "not set"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
