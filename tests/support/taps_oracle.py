# SPDX-License-Identifier: Apache-2.0
"""Runs a wired forward() for real, on stub modules, and checks the hook contract by numbers.

Independent of patches/taps/proof.py: nothing is known about streams here. The function is taken out
of the edited module and executed in float64 with random branches and norms (the fused norm writes
in place, as upstream's kernel may). What is checked, per point:

* the edit is inert: with no vector, the outputs equal those of upstream's own forward();
* capture and steering meet: adding d moves the captured value by d;
* the point is a cut: two different inputs whose captured values are made equal by steering give
  equal outputs, so everything later depends on the captured value alone, also when the tap of a
  deferred stream moves all of it into one half and leaves zeros in the other;
* mixers run after pre_attn and before post_attn, MLPs after post_attn and before post_block, and
  what they read moves when the point before them is steered;
* pre_attn is the block's input and post_block its output.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from patches.taps.rows import DEFERRED, MLP_IN, Idiom, NormCall, Row, Second
from patches.taps.source import Source, method
from tests.support.taps_lanes import KERNELS, LANES, TOKENS, WIDTH, sconv, weight

SUBLAYERS = {
    "mamba_decoder": "Zamba2MambaDecoderLayer",
    "norm_attn_norm": "DbrxFusedNormAttention",
}


def _carries_pair(row: Row) -> bool:
    """Whether the stream is two tensors: no class of several lanes has them so."""
    return row.idiom in DEFERRED or (row.idiom is Idiom.HAND and not row.lanes)


@dataclass
class Log:
    """What one run did: captures by point, inputs of branches, and the order of both."""

    captured: dict[str, torch.Tensor] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)
    read_by: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Tap:
    """A bound tap as the contract describes it: adds `delta`, records what it reads.

    `whole`: as for an operation that needs all of a deferred stream, it hands on (zeros, sum).
    """

    def __init__(self, point: str, delta: torch.Tensor | None, whole: bool, log: Log) -> None:
        self.point, self.delta, self.whole, self.log = point, delta, whole, log

    def steer(self, h: torch.Tensor) -> torch.Tensor:
        return h if self.delta is None else h + self.delta

    def read(self, h: torch.Tensor) -> None:
        assert self.point not in self.log.captured, f"{self.point} read twice"
        self.log.captured[self.point] = h.clone()
        self.log.order.append(("tap", self.point))

    def steer_pair(
        self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if r is None:
            return self.steer(h), None
        if self.whole:
            return torch.zeros_like(h), self.steer(h + r)
        return h, self.steer(r)

    def steer_and_capture_pair(
        self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        h, r = self.steer_pair(h, r)
        self.read(h if r is None else h + r)
        return h, r

    def norm_if_unsteered(self, n: torch.Tensor | None) -> torch.Tensor | None:
        return None

    def renorm(
        self, n: torch.Tensor, s: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.by_token(s)
        return norm(s), s

    def settle(self, parts: Any, write: Callable[..., torch.Tensor], parts_of: Any) -> Any:
        return parts_of(self.by_token(write(*parts)))

    def by_token(self, s: torch.Tensor) -> torch.Tensor:
        """As `self(s)`, of lanes that lie behind the tokens."""
        return self(s) if s.dim() == 2 else self(s.transpose(0, 1)).transpose(0, 1)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        h = self.steer(h)
        self.read(h)
        return h


def _sconv_add_norm(
    delta: torch.Tensor, hidden: torch.Tensor, sconv: Any, norm: Any, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden + sconv(delta)
    return norm(hidden), hidden


class Norm:
    """An RMS norm with random weights; with two arguments it adds in place, or passes."""

    variance_epsilon = 1e-6

    def __init__(self, name: str, call: NormCall) -> None:
        self.weight, self.call = 1 + weight(name)[0], call

    def __call__(self, x: torch.Tensor, r: torch.Tensor | None = None) -> Any:
        if r is None:
            return self.normed(x)
        if self.call is NormCall.PASSES:
            return self.normed(x), r
        r.add_(x)
        x.copy_(self.normed(r))
        return x, r

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * self.weight


class Branch:
    """A mixer or MLP: tanh(x W), written into a NaN buffer when it is given one."""

    def __init__(self, kind: str, name: str, pair: bool, log: Log) -> None:
        self.kind, self.name, self.pair, self.log = kind, name, pair, log
        self.weight = weight(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("residual", None)
        values = [*args, *kwargs.values()]
        rows = [v for v in values if isinstance(v, torch.Tensor) and v.shape == (TOKENS, WIDTH)]
        buffers = [v for v in rows if v.isnan().all()]
        inputs = [v for v in rows if not v.isnan().all()]
        assert inputs, f"{self.name} got no rows"
        self.log.order.append((self.kind, self.name))
        self.log.read_by.setdefault(self.kind, []).append(inputs[0].clone())
        out = torch.tanh(torch.stack(inputs).sum(0) @ self.weight)
        for buffer in buffers:
            buffer.copy_(out)
        return (out, None) if self.pair else out


class _Holder:
    """Attributes by dotted name: `self.mixer.forward_with_positions`, `self.mlps[0]`."""

    forward: Callable[..., Any]
    taps: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(self, *args, **kwargs)

    def put(self, dotted: str, value: Any) -> None:
        head, _, rest = dotted.partition(".")
        if head.endswith("]"):
            name, _, index = head.removesuffix("]").partition("[")
            vars(self).setdefault(name, {})[int(index)] = value
        elif rest:
            if not isinstance(getattr(self, head, None), _Holder):
                setattr(self, head, _Holder())
            getattr(self, head).put(rest, value)
        else:
            setattr(self, head, value)


class _Looped:
    """Taps of a layer that runs several times: each time has its own."""

    def __init__(self, times: dict[int, Any]) -> None:
        self._times = times

    def at(self, time: int) -> Any:
        assert time in self._times, f"taps of time {time}"
        return self._times[time]


class Subject:
    """One class of the tree, ready to run: `wired` or as upstream has it."""

    def __init__(self, row: Row, source: Source, settings: Mapping[str, Any]) -> None:
        self.row, self.settings = row, dict(settings)
        self.later_only = self.settings.pop("later_only", False)
        self.given = self.settings.pop("given", None)
        self.whole = self.settings.pop("whole", None)
        cls = source.cls(row.cls)
        self.function, forward = self.compiled(source, cls, row.method)
        self.pairs = {
            ast.unparse(n.value.func).removeprefix("self.")
            for n in ast.walk(forward)
            if isinstance(n, ast.Assign)
            and isinstance(n.targets[0], ast.Tuple)
            and isinstance(n.value, ast.Call)
        }
        self.parameters = [a.arg for a in forward.args.args[1:]]
        self.sublayers, self.methods = {}, {}
        for name in row.inline:
            if name in SUBLAYERS:
                sub = source.cls(SUBLAYERS[name])
                self.sublayers[name], _ = self.compiled(source, sub, "forward")
            else:
                self.methods[name], _ = self.compiled(source, cls, name)

    def compiled(
        self, source: Source, cls: ast.ClassDef, name: str
    ) -> tuple[Callable[..., Any], ast.FunctionDef]:
        """A function of a class, to be called with its `self`, and its code."""
        forward = method(cls, name)
        assert forward is not None
        forward = copy.deepcopy(forward)
        for node in ast.walk(forward):
            if isinstance(node, ast.arg):
                node.annotation = None
        forward.returns = None
        module = ast.Module([forward], [])
        space: dict[str, Any] = {
            n.id: type(n.id, (), {})
            for n in ast.walk(forward)
            if isinstance(n, ast.Name) and not hasattr(builtins, n.id)
        }
        space |= {"torch": _torch(), "math": math}
        space["tensor_model_parallel_all_reduce"] = lambda x: x.clone()
        space["fused_allreduce_rms_norm"] = lambda h, r, norm: norm(h, r)
        space["fused_allreduce_gemma_rms_norm"] = lambda h, r, norm: norm(h, r)
        space["_sconv_add_norm"] = _sconv_add_norm
        space["_QSA_LAYER_TYPES"] = ("indexed_attention",)
        space |= KERNELS
        exec(compile(ast.fix_missing_locations(module), source.file, "exec"), space)
        return space[name], forward

    def run(
        self,
        x: torch.Tensor,
        r: torch.Tensor | None,
        deltas: Mapping[str, torch.Tensor] | None = None,
        whole: bool = False,
    ) -> tuple[torch.Tensor, Log]:
        """(the stream after the block, the log); `deltas` are vectors added at points."""
        row, log = self.row, Log()
        block = _Holder()
        params: dict[str, Any] = dict.fromkeys(self.parameters)
        params |= {p: torch.arange(TOKENS) for p in ("positions", "position_ids") if p in params}
        for name, function in self.methods.items():
            block.put(name, partial(function, block))
        for name, function in self.sublayers.items():
            block.put(f"{name}.forward", function)
            for point in row.taps:  # a sublayer that is a wired class keeps taps that do nothing
                block.put(f"{name}.taps.{point}", Tap(point, None, False, Log()))
        for kind, names in (("mixer", row.mixers), ("mlp", row.mlps)):
            for name in names:
                stub = Branch(kind, name, name in self.pairs, log)
                if name.partition("[")[0] in params:
                    params[name.partition("[")[0]] = [stub] * 4
                else:
                    block.put(name, stub)
        for name in (*row.norms, *row.branch_norms):
            block.put(name, Norm(name, row.norm_call))
        for name, value in self.settings.items():
            if name in params:
                params[name] = value
            else:
                block.put(name, value)
        found = deltas or {}
        for point in row.taps:
            block.put(f"taps.{point}", Tap(point, found.get(point), whole, log))
        if row.loops[0]:  # the taps of the second time, and no others
            params[row.loops[0]] = 1
            block.put("taps", _Looped({1: block.taps}))
        turned = row.lanes and row.idiom is Idiom.HAND
        params[row.stream] = x.transpose(0, 1).clone() if turned else x.clone()
        if "attn_in" in params and r is None:  # the model may norm the first block's input itself
            params["attn_in"] = Norm(row.norms[0], row.norm_call).normed(x)
        if row.residual == "pending":
            params |= {"defer_mlp_add": True, "pending": None if r is None else (r, sconv)}
        elif row.residual in params:
            junk = torch.full_like(x, torch.nan)  # a stale argument that nobody may read
            pair = _carries_pair(row)
            params[row.residual] = (None if r is None else r.clone()) if pair else junk
        if self.given is not None:
            params |= self.given(x.transpose(0, 1).clone())
        out = self.function(block, **params)
        if self.whole is not None:
            return self.whole(*out).transpose(0, 1), log
        if row.residual == "pending":
            return out[0] + sconv(out[1][0]), log
        if _carries_pair(row):
            return out[0] + out[-1], log
        if row.idiom is Idiom.HAND:  # lanes, which its taps have first
            return out[0].transpose(0, 1), log
        return out if row.second is Second.ABSENT else out[0], log


def _torch() -> SimpleNamespace:
    """The few functions of torch that forwards use, with buffers that start as NaN."""

    def buffer(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, torch.nan)

    same = ("nn", "float16", "mul", "sqrt", "tensor", "eye")
    return SimpleNamespace(
        empty_like=buffer, zeros_like=buffer, **{name: getattr(torch, name) for name in same}
    )


def check(row: Row, before: Source, after: Source, settings: Mapping[str, Any]) -> None:
    """AssertionError when the wired class breaks the contract under these settings."""
    upstream, wired = Subject(row, before, settings), Subject(row, after, settings)
    generator = torch.Generator().manual_seed(0)

    size = (LANES, TOKENS, WIDTH) if row.lanes else (TOKENS, WIDTH)

    def rows() -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    later = _carries_pair(row)
    starts = [(rows(), rows())] if later else []
    for r1, r2 in starts if wired.later_only else [(None, None), *starts]:
        x1, x2 = rows(), rows()
        out1, log1 = wired.run(x1, r1)
        out2, log2 = wired.run(x2, r2)
        plain, _ = upstream.run(x1, r1)
        assert torch.equal(out1, plain), "the edit changes the outputs"
        assert tuple(log1.captured) == row.taps, f"captured {tuple(log1.captured)}"
        half = 0 if r1 is None else sconv(r1) if row.residual == "pending" else r1
        _close(log1.captured["pre_attn"], x1 + half, "pre_attn is the input")
        if "post_block" in row.points:
            _close(log1.captured["post_block"], out1, "post_block is the output")
        _order(row, log1)
        if row.mlp_in:
            delta = log1.captured[MLP_IN] - log2.captured[MLP_IN]
            out, log = wired.run(x2, r2, {MLP_IN: delta})
            for read in (log1, log):
                for rows_read in read.read_by["mlp"]:
                    _close(rows_read, log1.captured[MLP_IN], "the MLP reads mlp_in")
            assert not torch.allclose(out, out2), "mlp_in: the vector moved nothing"
            moved = [p for p in row.taps if not torch.equal(log.captured[p], log2.captured[p])]
            assert moved == [p for p in (MLP_IN, "post_block") if p in row.taps], moved
            _readers(row, MLP_IN, log2, log)
        for point in row.points:
            delta = log1.captured[point] - log2.captured[point]
            for whole in (False, True) if later else (False,):
                out, log = wired.run(x2, r2, {point: delta}, whole)
                _close(log.captured[point], log1.captured[point], f"{point}: capture moves by d")
                _close(out, out1, f"{point}: outputs depend on the captured value alone")
                assert not torch.allclose(out, out2), f"{point}: the vector moved nothing"
                _readers(row, point, log2, log)


def _close(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), what


def _order(row: Row, log: Log) -> None:
    at = {name: i for i, (kind, name) in enumerate(log.order) if kind == "tap"}
    end = at.get("post_block", len(log.order))
    middle = at.get("post_attn", end)
    for i, (kind, name) in enumerate(log.order):
        if kind == "mixer":
            assert at["pre_attn"] < i < middle, f"{name} outside pre_attn..post_attn"
        if kind == "mlp":
            start = at.get(MLP_IN, at.get("post_attn", at["pre_attn"]))
            assert start < i < end, f"{name} outside post_attn..post_block"


def _readers(row: Row, point: str, without: Log, steered: Log) -> None:
    """Whose inputs moved: mixers and MLPs for pre_attn, MLPs for post_attn and mlp_in, none at the
    end."""
    for kind in ("mixer", "mlp"):
        pairs = zip(without.read_by.get(kind, []), steered.read_by.get(kind, []), strict=True)
        moved = [not torch.allclose(a, b) for a, b in pairs]
        wanted = point == "pre_attn" or (point in ("post_attn", MLP_IN) and kind == "mlp")
        assert all(m is wanted for m in moved), f"{point}: {kind} inputs moved: {moved}"
