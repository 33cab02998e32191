"""The device for testing CUDA kernels: a real one, or Triton's interpreter.

That is chosen in `tests.support.interpreter`.
"""

import torch

from tests.support.interpreter import multiply_alike

HAS_DEVICE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_DEVICE else "cpu")
TYPES = [torch.float16, torch.bfloat16] if HAS_DEVICE else [torch.float16]
"""The interpreter multiplies no bfloat16."""

if not HAS_DEVICE:
    multiply_alike()
