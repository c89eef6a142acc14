"""The compiled backend of the device "fake", built once per environment; ``python -m`` builds it in a new process."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("fake_device.cpp")
NAME = "fake_backend"
FLAGS = ["-O0"]
"""Without optimisation, compilation takes 25 seconds instead of two minutes, and the kernels are torch's own."""


def missing_tool() -> str:
    """Return which tool for compiling is missing, or an empty string."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"the compiler {compiler}"
    if shutil.which("ninja") is None:
        return "ninja"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python"
    return ""


def library() -> Path:
    """Return the path of the compiled backend, after building it if it is missing.

    Two processes that need it at the same time build it once: the second one waits for the lock.
    """
    folder = cache_folder()
    path = folder / f"{NAME}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(folder)]
            built = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
            if built.returncode:
                raise RuntimeError(f"{SOURCE.name} cannot be compiled:\n{built.stdout}\n{built.stderr}")
    return path


def _environment() -> dict[str, str]:
    # One compiler at a time, below the priority of the tests; ninja of the environment, which may not be activated.
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return os.environ | {"PATH": os.pathsep.join(folders), "MAX_JOBS": "1"}


def cache_folder() -> Path:
    """Return the folder for this source and this torch: in the environment, or in a temporary folder."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    key = f"{python}-torch-{torch.__version__}-{digest}"
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "fake_device" / key
    return Path(tempfile.gettempdir()) / f"loopscope-fake-device-{os.getuid()}" / key


def build(folder: Path) -> None:
    """Compile the source and move the library into ``folder``, complete or not at all.

    ``load`` also loads the library into the calling process, which is why it is called in a separate one.
    """
    from torch.utils.cpp_extension import load

    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        load(NAME, [str(SOURCE)], extra_cflags=FLAGS, build_directory=temporary, verbose=True)
        os.replace(Path(temporary, f"{NAME}.so"), folder / f"{NAME}.so")


def load_backend(path: Path) -> ModuleType:
    """Import the compiled backend, which registers the kernels of the device in this process."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    build(Path(sys.argv[1]))
