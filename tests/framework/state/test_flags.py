from typing import Any

import pytest
import torch
from loopscope.state import Transient
from loopscope.state.settings import entered_modes, leave_modes
from loopscope.state.settings.flags import _CUDA_CHOICES, GlobalFlags, _choice
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
)

from tests.support.misbehaving_hooks import Refusing, Spoiling


def set_one_backend():
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


def set_the_products_of_one_backend():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def set_all_backends():
    torch.backends.fp32_precision = "tf32"


def fill_memory():
    torch.utils.deterministic.fill_uninitialized_memory = False


def another_engine():
    return next(engine for engine in torch._C._supported_qengines() if engine != torch._C._get_qengine())


CHANGES = {
    "function modes": lambda: Spoiling().__enter__(),
    "dispatch modes": lambda: Refusing().__enter__(),
    "inference mode": lambda: KEPT.append(torch._C._InferenceMode(True)),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "CPU autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "CPU autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast nesting": torch.autocast_increment_nesting,
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "warnings instead of deterministic algorithms": lambda: torch.use_deterministic_algorithms(False, warn_only=True),
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "float32 precision by operation": set_one_backend,
    "oneDNN matmul precision": set_the_products_of_one_backend,
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "math attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "order of attention kernels": lambda: torch._C._set_sdp_priority_order([0, 1, 2, 3, 4]),
    "oneDNN": lambda: torch._C._set_mkldnn_enabled(False),
    "oneDNN determinism": lambda: torch._C._set_mkldnn_deterministic(True),
    "filling of uninitialised memory": fill_memory,
    "flushing of denormals": lambda: torch.set_flush_denormal(True),
    "anomaly detection": lambda: torch.set_anomaly_enabled(True, False),
    "forward-mode gradients": lambda: torch._C._set_fwd_grad_enabled(False),
    "multithreaded backward": lambda: torch._C._set_multithreading_enabled(False),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__(),
    "hooks on all modules or optimizers": lambda: nn.modules.module.register_module_forward_pre_hook(print),
    "fast path of multi-head attention": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "NNPACK": lambda: torch.backends.nnpack.set_flags(not torch._C._get_nnpack_enabled()),
    "quantised engine": lambda: torch._C._set_qengine(another_engine()),
}
KEPT = []


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_named_and_restored(name):
    """Every process setting that affects results is compared by name and restored after an intervention."""
    flags = GlobalFlags()
    original = flags.read_all()
    CHANGES[name]()
    differing = flags.differences(original)
    flags.restore(original)
    assert name in differing
    assert flags.differences(original) == []


class Watcher(Transient):
    """An object of loopscope whose method is a hook."""

    def hook(self, *_: Any) -> None:
        """Do nothing."""


def test_own_hooks_are_not_of_training():
    """Methods of our objects do not count, nor what torch leaves of removed hooks with keyword arguments."""
    flags = GlobalFlags()
    original = flags.read_all()
    handle = nn.modules.module.register_module_forward_hook(Watcher().hook, with_kwargs=True)
    assert flags.differences(original) == []
    handle.remove()
    assert flags.differences(original) == []
    nn.modules.module._global_forward_hooks_with_kwargs.clear()  # torch.compile warns about what is left there


def test_default_device_is_cpu_after_restore():
    """torch.get_default_device() is correct after another default device was set and the flags were restored."""
    flags = GlobalFlags()
    original = flags.read_all()
    torch.set_default_device("meta")
    flags.restore(original)
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_readers_give_default_device_at_refresh(device):
    """The readers give the settings with which they were refreshed, also after another default device was set."""
    flags = GlobalFlags()
    original = flags.read_all()
    torch.set_default_device(device)
    flags.refresh()
    quick, at_refresh = flags.read(), flags.values_of([reader() for reader in flags.readers])
    torch.set_default_device("cpu")
    changes = flags.differences(at_refresh)
    flags.restore(original)
    assert at_refresh == quick
    assert {"default device", "function modes"} <= {*changes}


def test_left_dispatch_mode_clears_variables_of_torch():
    flags = GlobalFlags()
    original = flags.read_all()
    Refusing().__enter__()
    flags.restore(original)
    assert not is_in_torch_dispatch_mode(include_infra_modes=True)
    assert not is_in_torch_dispatch_mode(include_infra_modes=False)
    assert not is_in_any_mode_without_ignore_compile_internals()


# Set without a device: they are settings of the process, which only matrix products on CUDA read.
CHOSEN = {
    "CUDA float16 reductions": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "CUDA bfloat16 reductions": lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "CUDA float16 accumulation": lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "preferred linear algebra of CUDA": lambda: torch.backends.cuda.preferred_linalg_library("cusolver"),
    "preferred BLAS of CUDA": lambda: torch.backends.cuda.preferred_blas_library("cublaslt"),
}


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("name", _CUDA_CHOICES)
def test_cuda_matmul_settings_are_read_and_restored(name):
    """The settings are reduced-precision reductions, float16 accumulation and the preferred libraries."""
    if name.startswith("preferred") and torch.version.cuda is None:
        pytest.skip("torch refuses to set it in a build without CUDA")
    choice = _choice(_CUDA_CHOICES[name])
    original = choice.get()
    try:
        CHOSEN[name]()
        assert choice.get() != original
    finally:
        choice.put(original)
    assert choice.get() == original


def test_every_setting_is_tried():
    optional = {"opt_einsum"}
    names = [name for name in GlobalFlags().names if "cuDNN" not in name and "CUDA" not in name]
    assert {name for name in names if "accelerator" not in name and name != "current device"} - optional == set(CHANGES)


def test_all_changes_at_once_are_restored():
    flags = GlobalFlags()
    original = flags.read_all()
    for change in CHANGES.values():
        change()
    flags.restore(original)
    assert flags.differences(original) == []
    assert torch.is_grad_enabled()
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad


def test_the_quick_settings_are_the_first_of_all():
    flags = GlobalFlags()
    assert flags.read() == flags.read_all()[: len(flags.read())]


def test_mixed_fp32_precision_settings_are_restored():
    """The run may set fp32_precision for all backends and then for one of them."""
    flags = GlobalFlags()
    original = flags.read_all()
    set_all_backends()
    mixed = flags.read_all()
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    flags.restore(mixed)
    assert flags.read_all() == mixed != original
    flags.restore(original)
    assert flags.read_all() == original


def test_cached_casts_of_autocast_are_dropped():
    flags = GlobalFlags()
    original = flags.read_all()
    model = nn.Linear(2, 2)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    stale = model(torch.ones(2))
    flags.restore(original)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(2)).tolist() == [0, 0] != stale.tolist()


class Passive(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassiveDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_only_newer_modes_are_left():
    with Passive() as function_mode, PassiveDispatch(), torch.device("cpu"):
        modes = entered_modes()
        Spoiling().__enter__()
        Refusing().__enter__()
        leave_modes(modes)
        assert entered_modes() == modes
        assert torch.ones(2).tolist() == [1, 1]
        assert function_mode in [torch._C._get_function_stack_at(index) for index in range(modes[0])]
    assert entered_modes() == (0, 0)
