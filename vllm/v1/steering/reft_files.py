# SPDX-License-Identifier: Apache-2.0
"""Interventions that pyreft saved, as operations `low_rank`. Nothing of a file is run.

A folder has `config.json`, which says where each intervention acts and of which class it is, and
`intkey_{key}.bin` for each, tensors as `torch.save` writes them. With R [hidden, r] the rotation,
P, p, W and b the projection and the learned source (Wu et al. 2024, arXiv:2404.03592):

    LoReFT    h + R (W h + b - R^T h)        NoReFT    h + P^T (W h + b - P h - p)
    ConsReFT  h + R (b - R^T h)              LobiReFT  h + R b
    DiReFT    h + R (W h + b)                NodiReFT  h + P^T (W h + b)

pyreft may put a function around W h + b, which its files do not name; by default there is none.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm.v1.interventions.errors import describe, reject, show
from vllm.v1.interventions.values import says

MOST_INTERVENTIONS = 1024
"""The most interventions of a folder."""

_MOST_BYTES = 1 << 28
"""Most bytes of a file, and of what its tensors say that they hold."""

_CLASS = re.compile(r"<class '[\w.]*\.(Lo|No|Cons|Lobi|Di|Nodi)reftIntervention'>", re.ASCII)
_BLOCK = re.compile(r"\w+(?:\.\w+)*\[(\d{1,4})\]\.output", re.ASCII)
_POINTS = {"block_output": "post_block", "block_input": "pre_attn"}
_ROTATED = "rotate_layer.parametrizations.weight"


def read_reft(folder: str | Path) -> list[dict[str, Any]]:
    """Read the interventions in a folder that pyreft saved, to be given in `steering`.

    They act at all positions: pyreft's act at those that a program names, most often the first and
    the last of the prompt, so add `"positions": [0, -1]`.

    Returns:
        An operation for each intervention, in the order of the file: {"op": "low_rank", "point",
        "layers", "A" [r, hidden], "B" [hidden, r], "c" [r]}, tensors float32.

    Raises:
        ValueError: the folder has interventions of other classes or other places, or a tensor is
            missing, of another shape or not finite; the message names the file.
        OSError: a file cannot be read.
    """
    config = Path(folder) / "config.json"
    file = str(config)
    _need_few(config.stat().st_size, file)
    try:
        said = json.loads(config.read_bytes())
        keys, types = said["sorted_keys"], said["intervention_types"]
        places = said["representations"]
        if not len(keys) == len(types) == len(places) <= MOST_INTERVENTIONS:
            raise ValueError(f"it has {len(keys)} keys of {len(places)} interventions")
        listed = [(str(k), str(t), _place(p)) for k, t, p in zip(keys, types, places, strict=True)]
    except Exception as error:  # whatever there may be in JSON
        reject(file, f"is not pyreft's: {describe(error)[:200]}")
    found = []
    for i, (key, kind, (layer, component)) in enumerate(listed):
        where = f"{file}[representations][{i}]"
        point, layer = _site(layer, component, where)
        match = _CLASS.fullmatch(kind)
        if match is None:
            known = "Loreft, Noreft, Consreft, Lobireft, Direft, Nodireft"
            reject(where, f"is of {show(kind)}; of pyreft's are read {known}")
        if not re.fullmatch(r"[\w.#\[\]-]+", key, re.ASCII):
            reject(where, f"has the key {show(key)}, which names no file")
        matrices = _read(Path(folder) / f"intkey_{key}.bin", match[1])
        found.append({"op": "low_rank", "point": point, "layers": layer, **matrices})
    return found


def module_of_reft(folder: str | Path) -> dict[str, Any]:
    """Return the fields of a module whose operations are those of `read_reft`.

    Raises:
        ValueError: as `read_reft`; or two interventions are at one place, each for positions of its
            own, which a module does not have.
    """
    ops = read_reft(folder)
    places = [(op["point"], op["layers"]) for op in ops]
    for point, layer in places:
        if places.count((point, layer)) > 1:
            reject(
                str(folder),
                f"has several interventions at {point} of layer {layer}, each for positions of its "
                "own: give those of vllm.v1.steering.reft_files.read_reft in a request",
            )
    return {"ops": ops}


def _need_few(num_bytes: int, file: str) -> None:
    if num_bytes > _MOST_BYTES:
        reject(file, f"has {num_bytes} bytes, interventions have at most {_MOST_BYTES}")


def _place(said: Any) -> tuple[Any, Any]:
    """The layer and the component of an entry, which is a list, or an object of names."""
    if isinstance(said, Mapping):
        return said.get("layer"), said.get("component")
    return said[0], said[1]


def _site(layer: Any, component: Any, where: str) -> tuple[str, int]:
    named = _BLOCK.fullmatch(component) if isinstance(component, str) else None
    if named is not None:
        return "post_block", int(named[1])
    for name, point in _POINTS.items():
        if says(component, name) and isinstance(layer, int) and layer >= 0:
            return point, layer
    acts = f"acts at {show(component)} of layer {show(layer)}"
    reject(where, f"{acts}; block_output and block_input are read")


def _read(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """The matrices of an intervention."""
    file = str(path)
    _need_few(path.stat().st_size, file)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a library makes of bytes that may be anything
        reject(file, f"is not tensors alone: {describe(error)[:200]}")
    if not isinstance(tensors, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors.values()
    ):
        reject(file, "is not tensors alone: it is no mapping of them")
    _need_few(sum(tensor.nbytes for tensor in tensors.values()), file)

    def need(name: str, shape: list[int]) -> torch.Tensor:
        if name not in tensors:
            reject(file, f"has no tensor {name!r}")
        tensor = tensors[name]
        if list(tensor.shape) != shape or not tensor.is_floating_point():
            reject(f"{file}[{name}]", f"is of shape {list(tensor.shape)}, needed is {shape}")
        if not tensor.isfinite().all():
            reject(f"{file}[{name}]", "is not finite")
        return tensor.double()

    key = {"Lo": "rotate_layer", "No": "proj_layer.weight", "Nodi": "proj_layer.weight"}.get(kind)
    key = key or f"{_ROTATED}.original"
    shape = list(tensors[key].shape) if key in tensors else []
    if len(shape) != 2 or not shape[0] or not shape[1]:
        reject(file, f"has no tensor {key!r} of two dimensions")
    up = need(key, shape)
    if key.startswith("proj"):
        up = up.T
    hidden, rank = up.shape
    if key.startswith(_ROTATED):
        up = _rotation(up, need(f"{_ROTATED}.0.base", [hidden, hidden]))
    down, shift = torch.zeros(rank, hidden, dtype=up.dtype), torch.zeros(rank, dtype=up.dtype)
    if kind in ("Cons", "Lobi"):
        shift = shift + need("learned_source", [rank])
    else:
        source = "" if kind == "Lo" else "learned_source."
        down = down + need(f"{source}weight", [rank, hidden])
        if f"{source}bias" in tensors:
            shift = shift + need(f"{source}bias", [rank])
    if kind in ("Lo", "No", "Cons"):
        down = down - up.T
    if kind == "No" and "proj_layer.bias" in tensors:
        shift = shift - need("proj_layer.bias", [rank])
    return {"A": down.float(), "B": up.float(), "c": shift.float()}


def _rotation(original: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The matrix [hidden, r] of orthogonal columns that torch keeps in two parts."""
    held = torch.nn.Module()
    held.register_parameter("weight", torch.nn.Parameter(torch.eye(*original.shape).double()))
    torch.nn.utils.parametrizations.orthogonal(held)
    prefix = "parametrizations.weight."
    held.load_state_dict({f"{prefix}original": original, f"{prefix}0.base": base})
    made = held.weight
    assert isinstance(made, torch.Tensor)
    return made.detach()
