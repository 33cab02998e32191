"""Where kernels for CUDA devices are tested: on one, else in Triton's interpreter."""

import os

import torch

HAS_DEVICE = torch.cuda.is_available()
if not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read as kernels are imported

DEVICE = torch.device("cuda" if HAS_DEVICE else "cpu")
TYPES = [torch.float16, torch.bfloat16] if HAS_DEVICE else [torch.float16]
"""The interpreter multiplies no bfloat16."""
