"""Environment of a record: settings that the oracle fixes, and the name of all other dependencies of its bits."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FIXED = {
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "PYTHONHASHSEED": "0",
    "LOOPSCOPE_COMPILE_CASTS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
LESSER_VECTORS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}
"""Limits for processors with AVX2: torch, oneDNN and NumPy's BLAS use no wider instructions, so processors that differ
only in those share an environment and its stored digests.
"""
PACKAGES = {"experiments": ("tokenizers",), "trainers": ("transformers", "accelerate", "lightning")}
"""The dependencies of the digests in addition to torch and NumPy, by part."""


def fix() -> None:
    """Set the fixed variables of this process and its children; call it before torch is imported."""
    os.environ.update(FIXED)
    processor = Path("/proc/cpuinfo")
    if processor.exists() and " avx2 " in processor.read_text():
        os.environ.update(LESSER_VECTORS)


def name_of(part: str) -> str:
    """Return the name of the current environment for the digests of a part of the record."""
    import torch

    python = ".".join(platform.python_version_tuple()[:2])
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "")
    pieces = [f"python{python}", f"torch{torch.__version__}", f"numpy{version('numpy')}"]
    pieces += [f"{package}{installed(package)}" for package in PACKAGES.get(part, ())]
    return "-".join([platform.system().lower(), platform.machine(), capability.lower(), *pieces])


def installed(package: str) -> str:
    """Return the version of a package, or ``none``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
