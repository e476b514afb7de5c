# SPDX-License-Identifier: Apache-2.0
"""torchvision beside a CPU build of torch, for processes whose models read images.

The builds that package registries have are for CUDA: their library of operators does not load here,
and importing the package then fails, for it adds shapes to operators that nobody declared. Image
processors use its resizing, which is plain torch. So these operators are declared before, and
nothing else of the package is changed; what would call one fails.
"""

from __future__ import annotations

import sys

_DECLARED = ("nms", "qnms")
"""The operators that `torchvision/_meta_registrations.py` expects."""


def add_torchvision() -> None:
    """Make `import torchvision` work in this process.

    Raises:
        RuntimeError: transformers is imported already, and has noted that there is no torchvision.
        FileNotFoundError: the package cannot be had.
    """
    if "transformers" in sys.modules:
        raise RuntimeError("transformers imported before add_torchvision(); call it first")
    from tests.peers.packages import fetched

    sys.path.append(str(fetched("vision")))
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in _DECLARED:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[object] = []
"""Declarations end with the object that made them."""
