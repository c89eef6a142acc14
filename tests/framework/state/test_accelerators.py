"""Backends of accelerators that lack functions which CUDA has."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from loopscope import accelerators
from loopscope.errors import UsageError
from loopscope.state import RandomStreams, TrainingState, seed_everything
from loopscope.state.settings.flags import GlobalFlags
from loopscope.training.profiler import start_peak_measurement
from torch import nn

DEVICE = torch.device("mps", 0)
OPTIONAL = ("is_initialized", "manual_seed_all")
SEEDING = ("manual_seed",)
GENERATOR = ("get_rng_state", "set_rng_state")


def backend(generator, missing):
    """Stand for a backend module with one device, without some functions."""

    def seed(value):
        generator.manual_seed(value)

    functions = {
        "is_initialized": lambda: True,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda device: generator.get_state(),
        "set_rng_state": lambda state, device: generator.set_state(state),
    }
    return SimpleNamespace(**{name: function for name, function in functions.items() if name not in missing})


@pytest.fixture
def install(monkeypatch):
    """Return a function that puts a backend in place of the accelerator, and returns its generator."""

    def put(*missing, **replaced):
        generator = torch.Generator().manual_seed(5)
        module = backend(generator, missing)
        vars(module).update(replaced)
        monkeypatch.setattr(accelerators, "is_present", lambda: True)
        monkeypatch.setattr(accelerators, "_backend", lambda kind: module)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: DEVICE)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr("loopscope.state.generators.random_streams.is_present", lambda: True)
        accelerators._has_readable_generator.cache_clear()
        return generator

    yield put
    accelerators._has_readable_generator.cache_clear()


@pytest.mark.parametrize("missing", [(), *[(name,) for name in OPTIONAL], OPTIONAL, SEEDING], ids=str)
def test_streams_are_isolated_without_optional_functions(install, missing):
    """`torch.mps` has neither of them."""
    generator = install(*missing)
    original = generator.get_state()
    with RandomStreams(1).preserved():
        seed_everything(7)
        assert generator.initial_seed() == 7
        torch.rand(3, generator=generator)
    assert torch.equal(generator.get_state(), original)


@pytest.mark.parametrize("missing", [*[(name,) for name in GENERATOR], GENERATOR], ids=str)
def test_unreadable_generator_is_left_out(install, missing):
    generator = install(*missing)
    original = generator.get_state()
    with RandomStreams(1).preserved() as saved:
        seed_everything(7)
    assert saved.accelerators == ()
    assert torch.equal(generator.get_state(), original)


def test_backend_without_module_is_left_out(install, monkeypatch):
    """``torch.get_device_module`` raises for a third-party backend that registered none."""
    original = accelerators._backend
    install()
    monkeypatch.setattr(accelerators, "_backend", original)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: (_ for _ in ()).throw(RuntimeError("no module")))
    assert accelerators.devices_in_use() == []
    with pytest.raises(UsageError, match="cannot read the random generator"):
        accelerators.refuse_unprotected({DEVICE})


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, TypeError])
def test_failing_generator_is_left_out(install, error):
    def fail(*_):
        raise error("not here")

    install(get_rng_state=fail)
    assert accelerators.devices_in_use() == []


def test_unused_backend_is_not_asked_for_generators(install):
    install("get_rng_state", is_initialized=lambda: False)
    assert accelerators.devices_in_use() == []


def test_model_on_unprotected_device_is_refused(install):
    install(*GENERATOR)
    with pytest.raises(UsageError, match=r"torch\.mps cannot read the random generator of mps:0.*train on the CPU"):
        accelerators.refuse_unprotected({torch.device("cpu"), DEVICE})


def test_model_on_other_devices_is_accepted(install):
    """A run on the CPU of a Mac, and parameters without memory."""
    install(*GENERATOR)
    for device in ("cpu", "meta"):
        model = nn.Linear(2, 2, device=device)
        TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), RandomStreams(1))


def test_settings_that_backend_lacks_are_left_out(install, monkeypatch):
    def fail():
        raise RuntimeError("no such thing")

    install()
    monkeypatch.setattr(torch.accelerator, "current_device_index", fail)
    flags = GlobalFlags()
    assert "current device" not in flags.names
    flags.restore(flags.read_all())


def test_uncounted_memory_is_not_measured(install, monkeypatch):
    """For a backend without memory statistics torch raises; torch 2.15 returns 0 for a simulated one."""

    def fail():
        raise RuntimeError("no statistics")

    install()
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", fail)
    assert start_peak_measurement() is None


@pytest.mark.slow
@pytest.mark.process
def test_cpu_run_trains_where_mps_is_present(tmp_path):
    """A Mac's accelerator is there also for a run on its CPU."""
    code = """
import torch
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
import loopscope
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with loopscope.attach(model, optimizer, with_hooks="full", display="none", audit=True) as scope:
    for batch in scope.batches([torch.randn(8, 4)] * 2):
        scope.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
