# SPDX-License-Identifier: Apache-2.0
"""Taps for a model that runs without torch.compile, on the ops of csrc/ where somebody built them.

`python -m tools.native VLLM_PACKAGE_DIRECTORY` builds `_pilot.so`. Without it, or where it has no
kernels for this platform, taps use torch and Triton, with the same results bit for bit.

`pilot::add_rows` returns the stream with each token's row of the table added, which is all that the
family `add` needs. Engines with other families run `vllm::steer_rows` (`steering_terms.py`), which
changes the stream in place.
"""

from pathlib import Path

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.residual_taps import SiteTap, whole
from vllm.platforms import current_platform

logger = init_logger(__name__)


def load(library: Path, key: str) -> bool:
    """Load the ops; whether they have kernels for this dispatch key. Loading twice does nothing."""
    if not library.exists():
        logger.debug("%s is not built: taps use torch and Triton", library)
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        logger.warning("%s cannot be loaded, taps use torch and Triton: %s", library, error)
        return False
    found = torch._C._dispatch_has_kernel_for_dispatch_key("pilot::add_rows", key)
    logger.debug("%s %s for %s", library, "is used" if found else "has nothing", key)
    return found


NATIVE_ROWS = load(Path(__file__).parents[2] / "_pilot.so", current_platform.dispatch_key)
"""True if this process has the ops of csrc/."""


class NativeTap(SiteTap):
    """One launch where `SiteTap` has up to five. Traced code wants `SiteTap`: Inductor fuses it."""

    def _adds(self, *rows: torch.Tensor) -> bool:
        """Tell whether this tap steers, by an addition in the dtype that all of `rows` have."""
        table = self.table
        return (
            table is not None and self.terms is None and all(r.dtype is table.dtype for r in rows)
        )

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        if self.arena is None or not self._adds(h):
            return super().__call__(h)
        return torch.ops.pilot.add_and_capture_rows(
            h, None, self.table, self.slots, self.arena, self.dest
        )

    def steer(self, h: torch.Tensor) -> torch.Tensor:
        """Steer in one launch, where that is an addition."""
        if not self._adds(h):
            return super().steer(h)
        return torch.ops.pilot.add_rows(h, self.table, self.slots)

    def read(self, h: torch.Tensor) -> None:
        """Capture in one launch, where dtypes are equal."""
        if self.arena is None or h.dtype is not self.arena.dtype:
            return super().read(h)
        torch.ops.pilot.capture_rows(h, None, self.arena, self.dest)

    def steer_and_capture_pair(
        self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Steer and capture both halves in one launch, where steering is an addition or none."""
        if self.arena is None or r is None:
            return super().steer_and_capture_pair(h, r, partial)
        if self._adds(h, r):
            return h, torch.ops.pilot.add_and_capture_rows(
                r, whole(h, partial), self.table, self.slots, self.arena, self.dest
            )
        if self.table is None and h.dtype is r.dtype is self.arena.dtype:
            torch.ops.pilot.capture_rows(r, whole(h, partial), self.arena, self.dest)
            return h, r
        return super().steer_and_capture_pair(h, r, partial)
