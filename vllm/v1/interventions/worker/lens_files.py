# SPDX-License-Identifier: Apache-2.0
"""Lenses from files: matrices that rows are multiplied with before the final norm.

A file is safetensors with `{layer}.weight` [hidden, hidden], and `kind` in its metadata: `tuned`,
x + W x + b with `{layer}.bias` [hidden] (Belrose et al. 2023), or `jacobian`, J x. x is
post_block of the layer.
"""

import re
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open

from vllm.v1.interventions.errors import describe, show
from vllm.v1.interventions.plan import TapShape

_KEY = re.compile(r"(\d{1,9})\.(weight|bias)")
_KINDS = {"tuned": ("weight", "bias"), "jacobian": ("weight",)}


class FileLens:
    """The matrices of one lens, on the device in the model's dtype.

    Raises:
        ValueError: the file cannot be read, or is not of this model.
    """

    def __init__(self, name: str, path: str, shape: TapShape, device: torch.device) -> None:
        self._lens = f"capture_lens: {name} ({path})"
        try:
            with safe_open(path, framework="pt") as file:
                self._kind = (file.metadata() or {}).get("kind", "")
                given = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            self._refuse(f"cannot be read: {describe(error)}")
        if self._kind not in _KINDS:
            self._refuse(f"has kind {show(self._kind)} in its metadata, allowed are {[*_KINDS]}")
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        for key, tensor in given.items():
            match = _KEY.fullmatch(key)
            layer, part = (int(match[1]), match[2]) if match else (-1, "")
            if part not in _KINDS[self._kind] or "post_block" not in shape.points.get(layer, ()):
                self._refuse(f"{show(key)} is not of this model's layers and the lens's kind")
            wanted = [shape.hidden_size] * (1 + (part == "weight"))
            if list(tensor.shape) != wanted or not tensor.is_floating_point():
                self._refuse(f"{key} is {tensor.dtype} {list(tensor.shape)}, needed are {wanted}")
            self._tensors[layer, part] = tensor.to(device, shape.torch_dtype)
            if not self._tensors[layer, part].isfinite().all():
                self._refuse(f"{key} has numbers that are not finite in {shape.dtype}")
        self.layers = sorted({layer for layer, _ in self._tensors})
        for layer in self.layers:
            if lacks := [part for part in _KINDS[self._kind] if (layer, part) not in self._tensors]:
                self._refuse(f"{layer}.{lacks[0]} is missing")
        if not self.layers:
            self._refuse("has no layer")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self._lens}: {why}")

    def apply(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """Rows [n, hidden] after the layer's matrix, in their dtype, as the model's own layers
        multiply."""
        weight, bias = self._tensors[layer, "weight"], self._tensors.get((layer, "bias"))
        made = torch.nn.functional.linear(rows, weight, bias)
        return rows + made if self._kind == "tuned" else made
