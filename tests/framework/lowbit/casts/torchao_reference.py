"""Reference results of torchao, decoded to float32; importing torchao takes seconds and prints to the console."""

import contextlib
import importlib
import io
import logging
import warnings
from types import ModuleType

import torch
from torch import Tensor

ELEMENTS = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e2m3": "fp6_e2m3",
    "e3m2": "fp6_e3m2",
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def load(module: str, package: str = "torchao.prototype.mx_formats") -> ModuleType:
    """Import a module of torchao, by default of its MX formats, without its output, logs and warnings."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(f"{package}.{module}")
    finally:
        logging.disable(previous)


def decoded(codes: Tensor, name: str) -> Tensor:
    """Decode unpacked codes (FP4, FP6) or torch's dtypes (FP8) to numbers."""
    kernels = load("kernels")
    if name == "e2m1":
        return kernels.f4_unpacked_to_f32(codes)
    if name in ("e2m3", "e3m2"):
        return getattr(kernels, f"f6_{name}_unpacked_to_f32")(codes)
    return codes.float()


def rounded(values: Tensor, name: str) -> Tensor:
    """Round float32 values to the format."""
    kernels = load("kernels")
    if name == "e2m1":
        return decoded(kernels.f32_to_f4_unpacked(values), name)
    if name in ("e2m3", "e3m2"):
        return decoded(getattr(kernels, f"f32_to_f6_{name}_unpacked")(values), name)
    return values.to(ELEMENTS[name]).float()


def microscaled(values: Tensor, name: str, mode: str) -> tuple[Tensor, Tensor]:
    """Return the scales, one for 32 values of a row, and the values divided by them and rounded."""
    mx_tensor, config = load("mx_tensor"), load("config")
    scales, codes = mx_tensor.to_mx(values, ELEMENTS[name], 32, config.ScaleCalculationMode[mode])
    if name == "e2m1":
        codes = load("kernels").unpack_uint4(codes)
    return scales.view(torch.uint8).double().sub(127).exp2(), decoded(codes, name).reshape(values.shape)


def nvfp4(values: Tensor, of_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks of 16, without that of the tensor, and the values divided by both and rounded."""
    scales, codes = load("nvfp4_tensor").nvfp4_quantize(values, per_tensor_scale=of_tensor)
    numbers = decoded(load("kernels").unpack_uint4(codes), "e2m1").reshape(values.shape)
    return scales.float().reshape(*values.shape[:-1], -1), numbers
