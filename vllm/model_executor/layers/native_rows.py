# SPDX-License-Identifier: Apache-2.0
"""Loads the native ops of the taps (csrc/, `torch.ops.pilot`), where somebody built them.

`python -m tools.native VLLM_PACKAGE_DIRECTORY` builds `_pilot.so`. Without it, or where it has no
kernels for this platform, taps use torch and Triton, with the same results.
"""

from pathlib import Path

import torch

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)


def load(library: Path, key: str) -> bool:
    """Are the ops there, with kernels for this dispatch key? Loading twice does nothing."""
    if not library.exists():
        logger.debug("%s is not built: taps use torch and Triton", library)
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        logger.warning("%s cannot be loaded, taps use torch and Triton: %s", library, error)
        return False
    found = torch._C._dispatch_has_kernel_for_dispatch_key("pilot::steer_rows", key)
    logger.debug("%s %s for %s", library, "is used" if found else "has nothing", key)
    return found


NATIVE_ROWS = load(Path(__file__).parents[2] / "_pilot.so", current_platform.dispatch_key)
