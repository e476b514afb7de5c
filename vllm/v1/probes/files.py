# SPDX-License-Identifier: Apache-2.0
"""Files of probes, and probes of what scikit-learn and torch save.

A file is safetensors: `weight` float32 [units, sites, hidden] and `bias` [units]; of an MLP also
`output_weight` [outputs, units] and `output_bias` [outputs]. `vllm_probe` in its metadata is JSON:

    {"version": 1, "sites": [["post_block", 12]], "activation": "relu", "pool": {"kind": "mean"},
     "threshold": 0.5, "about": {}}

`activation` is of an MLP alone; `pool` is one of `pools.AnyPool`. Nothing is ever unpickled.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vllm.v1.probes.heads import ACTIVATIONS, MAX_OUTPUTS, MAX_UNITS, Linear, Mlp
from vllm.v1.probes.pools import AnyPool, Attention, Each
from vllm.v1.probes.probe import ServedProbe, Site

KEY = "vllm_probe"
"""The key of the metadata."""
MAX_FILE_BYTES = 256 << 20
"""The largest file: more than 256 units over 16 layers of 16,384."""


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    sites: list[tuple[str, int]]
    activation: str = ""
    pool: AnyPool = Each()
    threshold: float | None = None
    about: dict[str, Any] = {}


def made_probe(
    sites: Sequence[Site],
    weight: np.ndarray,
    bias: np.ndarray,
    *,
    activation: str = "",
    output_weight: np.ndarray | None = None,
    output_bias: np.ndarray | None = None,
    pool: AnyPool | None = None,
    threshold: float | None = None,
    about: dict[str, Any] | None = None,
) -> ServedProbe:
    """Make a probe of arrays.

    Args:
        sites: point and layer of each of its rows.
        weight: [units, sites, hidden], or [units, sites * hidden].
        bias: [units].
        activation: name of the hidden units' function for an MLP, one of `ACTIVATIONS`; "" for a
            linear head, which has as many outputs as units.
        output_weight: [outputs, units] of an MLP.
        output_bias: [outputs] of an MLP.

    Raises:
        ValueError: shapes do not fit together, there are too many units or outputs, or a number is
            not finite; the message begins with the argument's name.
    """
    if not len(sites):
        raise ValueError("sites: none is named")
    if weight.ndim < 2 or weight.shape[0] > MAX_UNITS or not weight.size:
        raise ValueError(
            f"weight: has shape {list(weight.shape)}, needed is [units, sites, hidden] with "
            f"1-{MAX_UNITS} units"
        )
    if weight.size % (len(weight) * len(sites)):
        raise ValueError(f"weight: rows of {weight[0].size} are not of {len(sites)} sites")
    weight = _float32(weight.reshape(len(weight), len(sites), -1), "weight")
    bias = _float32(bias, "bias", (len(weight),))
    if not activation:
        if output_weight is not None or output_bias is not None:
            raise ValueError("output_weight: is of an MLP, which has an activation")
        if len(bias) > MAX_OUTPUTS:
            raise ValueError(f"bias: has {len(bias)} numbers, a linear head at most {MAX_OUTPUTS}")
        head: Linear | Mlp = Linear(tuple(bias.astype(float).tolist()))
    else:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
        if output_weight is None or output_bias is None:
            raise ValueError("output_weight: an MLP needs it, and output_bias")
        outputs = len(output_bias) if output_bias.ndim else 0
        if not 1 <= outputs <= MAX_OUTPUTS:
            raise ValueError(f"output_bias: has {outputs} numbers, allowed are 1-{MAX_OUTPUTS}")
        last = _float32(output_weight, "output_weight", (outputs, len(bias)))
        shift = _float32(output_bias, "output_bias", (outputs,))
        head = Mlp(activation, bias.tobytes(), last.tobytes(), shift.tobytes())
    if threshold is not None and not np.isfinite(threshold):
        raise ValueError("threshold: is not finite")
    return ServedProbe(tuple(sites), weight, head, pool or Each(), threshold, about or {})


def _float32(values: np.ndarray, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Return an array as float32 in C order; raises ValueError by its name."""
    if shape is not None and values.shape != shape:
        raise ValueError(f"{name}: has shape {list(values.shape)}, needed is {list(shape)}")
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(made).all():
        raise ValueError(f"{name}: is not finite in float32")
    return made


def save_probe(probe: ServedProbe, path: str | Path) -> None:
    """Write a probe's file."""
    fields = probe.head.fields()
    activation = fields.pop("activation", "")
    header = _Header(1, [*probe.sites], activation, probe.pool, probe.threshold, probe.about)
    save_file(
        {"weight": probe.weight, **fields},
        str(path),
        {KEY: msgspec.json.encode(header).decode()},
    )


def load_probe(path: str | Path) -> ServedProbe:
    """Read a probe's file.

    Raises:
        ValueError: it is no such file, a tensor is missing or does not fit, or a number is not
            finite; the message names the file and what is wrong in it.
        OSError: the file cannot be read.
    """
    if (size := Path(path).stat().st_size) > MAX_FILE_BYTES:
        raise _unreadable(path, f"it has {size} bytes, a probe at most {MAX_FILE_BYTES}")
    try:
        with safe_open(path, framework="np") as file:
            said = _header((file.metadata() or {}).get(KEY))
            tensors = {name: file.get_tensor(name) for name in _needed(said, set(file.keys()))}
        return made_probe(
            said.sites,
            **tensors,
            activation=said.activation,
            pool=said.pool,
            threshold=said.threshold,
            about=said.about,
        )
    except (SafetensorError, TypeError, ValueError) as error:  # TypeError: numpy has no such dtype
        raise _unreadable(path, str(error)) from None


def _unreadable(path: str | Path, reason: str) -> ValueError:
    return ValueError(f"probe {path} cannot be read: {reason}")


def _header(text: str | None) -> _Header:
    """Return what the metadata says; raises ValueError where it is of no probe."""
    if text is None:
        raise ValueError(f"has no {KEY!r} in its metadata")
    try:
        said = msgspec.json.decode(text, type=_Header)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{KEY}: {error}") from None
    if said.version != 1:
        raise ValueError(f"{KEY}: version {said.version} is not known, only 1 is")
    return said


def _needed(said: _Header, names: set[str]) -> set[str]:
    """Return the names of a probe's tensors, which must be those of the file."""
    needed = {"weight", "bias", *(("output_weight", "output_bias") if said.activation else ())}
    if lacks := sorted(needed - names):
        raise ValueError(f"the tensor {lacks[0]!r} is missing")
    if more := sorted(names - needed):
        raise ValueError(f"{more[0]!r} is no tensor of such a probe")
    return needed


def probe_from_sklearn(estimator: Any, sites: Sequence[Site], **more: Any) -> ServedProbe:
    """Make a probe of a fitted scikit-learn classifier of two classes, whose `decision_function`
    it gives: a linear model, or an `MLPClassifier` with one hidden layer (before the logistic
    function), alone or in a pipeline after a `StandardScaler`.

    Args:
        sites: whose rows it was fitted on, one after the other.
        more: `pool`, `threshold` and `about`, as `made_probe` takes them.

    Raises:
        ValueError: it is of another kind.
    """
    from sklearn.linear_model._base import LinearClassifierMixin
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler

    mean, scale = np.zeros(1), np.ones(1)
    if isinstance(estimator, Pipeline):
        steps = [step for _, step in estimator.steps]
        if len(steps) != 2 or not isinstance(steps[0], StandardScaler):
            _unknown("a pipeline of other steps than a StandardScaler and a classifier")
        scaler, estimator = steps
        mean = scaler.mean_ if scaler.with_mean else mean
        scale = scaler.scale_ if scaler.with_std else scale
    if len(estimator.classes_) != 2:
        _unknown(f"a classifier of {len(estimator.classes_)} classes")
    if isinstance(estimator, LinearClassifierMixin):
        weight = np.atleast_2d(estimator.coef_) / scale
        bias = np.atleast_1d(estimator.intercept_) - weight @ np.broadcast_to(mean, weight.shape[1])
        return made_probe(sites, weight, bias, **more)
    if not isinstance(estimator, MLPClassifier) or len(estimator.coefs_) != 2:
        _unknown(f"a {type(estimator).__name__}")
    names = {"logistic": "sigmoid"}
    weight = estimator.coefs_[0].T / scale
    return made_probe(
        sites,
        weight,
        estimator.intercepts_[0] - weight @ np.broadcast_to(mean, weight.shape[1]),
        activation=names.get(estimator.activation, estimator.activation),
        output_weight=estimator.coefs_[1].T,
        output_bias=estimator.intercepts_[1],
        **more,
    )


def _unknown(what: str) -> NoReturn:
    raise ValueError(
        f"estimator: is {what}; taken are linear classifiers and MLPClassifier with one hidden "
        "layer, of two classes, alone or after a StandardScaler"
    )


def probe_from_torch(
    path: str | Path, sites: Sequence[Site], activation: str = "relu", **more: Any
) -> ServedProbe:
    """Make a probe of a state dict that torch saved, read with `weights_only`: of a `Linear`
    (`weight`, `bias`), of a `Sequential` of Linear, activation and Linear (`0.weight`, `0.bias`,
    `2.weight`, `2.bias`), or of an attention probe's two `Linear`s without biases
    (`query.weight`, `value.weight`, each [heads, sites * hidden]).

    Args:
        sites: whose rows it takes, one after the other.
        activation: of the Sequential, one of `ACTIVATIONS`; a state dict does not say it.
        more: `pool`, `threshold` and `about`, as `made_probe` takes them.

    Raises:
        ValueError: the file has other tensors, or is no state dict.
        OSError: the file cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever torch makes of bytes that may be anything
        raise _unreadable(path, f"no state dict: {str(error)[:200]}") from None
    is_state = isinstance(state, dict) and all(isinstance(t, torch.Tensor) for t in state.values())
    tensors = {k: t.float().numpy() for k, t in state.items()} if is_state else {}
    names = set(tensors)
    if names in ({"weight"}, {"weight", "bias"}):
        weight = np.atleast_2d(tensors["weight"])
        bias = tensors.get("bias", np.zeros(len(weight), np.float32))
        return made_probe(sites, weight, np.atleast_1d(bias), **more)
    if names == {"query.weight", "value.weight"}:
        weight = np.concatenate([tensors["query.weight"], tensors["value.weight"]])
        return made_probe(sites, weight, np.zeros(len(weight)), **{"pool": Attention(), **more})
    if names == {"0.weight", "0.bias", "2.weight", "2.bias"}:
        return made_probe(
            sites,
            tensors["0.weight"],
            tensors["0.bias"],
            activation=activation,
            output_weight=tensors["2.weight"],
            output_bias=tensors["2.bias"],
            **more,
        )
    found = ", ".join(sorted(names)[:8]) if is_state else type(state).__name__
    raise _unreadable(
        path,
        f"has {found}; taken are weight and bias, 0.weight, 0.bias, 2.weight and 2.bias, or "
        "query.weight and value.weight",
    )
