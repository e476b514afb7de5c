# SPDX-License-Identifier: Apache-2.0
"""One architecture against transformers: what was measured, as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cases import SteeringCase

if TYPE_CHECKING:
    from .tiny import TinyModel

PLAIN_TOLERANCE = 1e-4
HALF_TOLERANCES = {"float16": 0.02, "bfloat16": 0.05}
"""Of all three, for kernels that have nothing else: these keep 11 and 8 bits of a number."""
RESULTS = Path(__file__).with_name("results.jsonl")


@dataclass(frozen=True)
class PointErrors:
    """The worst of one point; errors are relative L2 of the worst row."""

    read: float
    """Captured rows, of all layers and positions, unsteered and while every case steers."""
    write: float
    """Log-probabilities while steered at this point."""
    moved: float
    """The least that a vector of the stream's own length moved the log-probabilities."""


@dataclass(frozen=True)
class HeadErrors:
    """The worst of q, k, v or z over all layers; relative L2 of one head's row. Or of embed, final,
    a branch, what the MLP reads or a point within a branch, of a position's row."""

    read: float
    """Captured rows against those of the reference."""
    apart: float
    """The same with each head (of a single one, and without heads: each position) in place of its
    neighbour."""
    write: float | None = None
    """Of z: log-probabilities while vectors are added to heads and heads are scaled. Of mlp_in:
    while vectors are added."""
    moved: float | None = None
    """Of z and mlp_in: the least that these moved them."""


@dataclass(frozen=True)
class FocusErrors:
    """Requests with factors at keys of all layers, at all heads and at some."""

    write: float
    """Log-probabilities, as in `PointErrors`."""
    moved: float
    """The least that they moved."""


@dataclass(frozen=True)
class Result:
    """What one run of one tiny model said."""

    name: str
    architecture: str
    where: str
    """Device, model runner and dtype, e.g. `cpu v1 float32`."""
    classes: tuple[str, ...] = ()
    """The decoder layer classes of the loaded model, `file:Class` as in patches/taps."""
    plain: float = 0.0
    """Log-probabilities with nothing steered or captured: upstream's own distance."""
    points: dict[str, PointErrors] = field(default_factory=dict)
    heads: dict[str, HeadErrors] = field(default_factory=dict)
    """Of q, k, v, z and the weights of attention, attn; of embed, final, branches, mlp_in and
    points within a branch where the engine offers them."""
    focus: FocusErrors | None = None
    without: dict[str, str] = field(default_factory=dict)
    """Why there are no numbers of q, k, v, z, attn, focus, mlp_in or a point within a branch. What
    is in none of these three was not run."""
    problem: str = ""
    """Why there are no numbers: what was raised."""
    seconds: float = 0.0
    sources: str = ""
    """What the sources were that made it: `selection.sources_digest`. Older results have none."""

    def failures(self) -> list[str]:
        """What is out of the tolerances of the hook contract, in words; empty when verified."""
        from .runner import LEAST_BRANCH_MOVE, LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE

        if self.problem:
            return [self.problem]
        limits = PLAIN_TOLERANCE, READ_TOLERANCE, WRITE_TOLERANCE
        for dtype in HALF_TOLERANCES.keys() & self.where.split():
            limits = (HALF_TOLERANCES[dtype],) * 3
        most_plain, most_read, most_written = limits
        found = []
        if not self.plain <= most_plain:
            found.append(f"upstream without us differs from transformers by {self.plain:.1e}")
        for point, e in self.points.items():
            if not e.read <= most_read:
                found.append(f"{point}: read error {e.read:.1e}")
            if not e.write <= most_written:
                found.append(f"{point}: write error {e.write:.1e}")
            if not e.moved >= LEAST_MOVE:
                found.append(f"{point}: the twin moved only {e.moved:.3f}")
        for point, heads in self.heads.items():
            if not heads.read <= most_read:
                found.append(f"{point}: read error {heads.read:.1e}")
            if not heads.apart >= LEAST_MOVE:
                found.append(f"{point}: heads are only {heads.apart:.3f} apart")
            if heads.write is not None and not heads.write <= most_written:
                found.append(f"{point}: write error {heads.write:.1e}")
            if heads.moved is not None and not heads.moved >= LEAST_BRANCH_MOVE:
                found.append(f"{point}: the twin moved only {heads.moved:.3f}")
        if self.focus is not None and not self.focus.write <= most_written:
            found.append(f"focus: write error {self.focus.write:.1e}")
        if self.focus is not None and not self.focus.moved >= LEAST_BRANCH_MOVE:
            found.append(f"focus: the twin moved only {self.focus.moved:.3f}")
        return found

    def to_json(self) -> str:
        fields = asdict(self)
        for name in ("heads", "focus", "without", "sources"):
            if not fields[name]:
                del fields[name]
        for heads in fields.get("heads", {}).values():
            for name in [name for name, value in heads.items() if value is None]:
                del heads[name]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Result:
        fields = json.loads(text)
        points = {point: PointErrors(**e) for point, e in fields.pop("points").items()}
        heads = {point: HeadErrors(**e) for point, e in fields.pop("heads", {}).items()}
        if "focus" in fields:
            fields["focus"] = FocusErrors(**fields["focus"])
        classes = tuple(fields["classes"])
        return cls(**{**fields, "classes": classes, "points": points, "heads": heads})

    def line(self) -> str:
        """For a terminal."""
        failures = self.failures()
        verdict = "ok" if not failures else "FAILS " + "; ".join(failures)
        if self.problem:
            numbers = ""
        else:
            worst = [max(getattr(e, k) for e in self.points.values()) for k in ("read", "write")]
            least = min(e.moved for e in self.points.values())
            errors = f"plain {self.plain:.0e} read {worst[0]:.0e} write {worst[1]:.0e}"
            read = max((h.read for h in self.heads.values()), default=0.0)
            focus = f"focus {self.focus.write:.0e} " if self.focus is not None else ""
            numbers = f"{errors} moved {least:.2f} heads {read:.0e} {focus}"
        return f"{self.name:18} {self.where} {numbers}{self.seconds:.0f}s {verdict}"


def load_results() -> list[Result]:
    """What was measured, as kept in the repository: a line a result."""
    return [Result.from_json(line) for line in RESULTS.read_text().splitlines()]


def prove(row: TinyModel, cache: Path, **options: Any) -> Result:
    """Start an engine on one tiny model and compare it with transformers at each point.

    Args:
        cache: directory for the tiny models; made when missing.
        options: engine options.
    """
    from vllm.config.points import CAPTURE_POINTS, HEAD_POINTS, STEERING_POINTS

    from . import models, pictures
    from .added import inner_errors
    from .engine import engine
    from .focus import focus_errors
    from .runner import (
        Measurement,
        Reference,
        TwoWay,
        head_errors,
        head_write_errors,
        input_write_errors,
        offered_others,
        other_errors,
        plain_errors,
        prompts,
        read_errors,
        steered_read_errors,
        unread,
        with_heads,
        write_errors,
    )

    path = models.save(row, cache)
    shown: list[Any] = pictures.prompts(row.pictures) if row.pictures else []
    if row.two_way:
        shown = [TwoWay(prompt) for prompt in prompts()]
    reference, token_prompts = Reference(row, models.load(row, path), shown), shown or prompts()
    # Every token's log-probabilities of every case: most of the time goes there.
    logit_prompts = shown[1:] or prompts(lengths=(17, 5))
    settings = {**row.engine, **options}
    settings |= {"enable_steering": True, "capture_consumers": ["inline"]}
    settings |= {
        "steering_points": list(STEERING_POINTS),
        "steering_families": ["add", "scale", "focus"],
    }
    with row.upstream(), engine(path, capture_points=list(CAPTURE_POINTS), **settings) as llm:
        classes = sorted(set(llm.apply_model(tapped_classes)[0]))
        plain = plain_errors(llm, reference, token_prompts)
        reads = read_errors(llm, reference, token_prompts)
        reads += steered_read_errors(llm, reference, token_prompts)
        writes = write_errors(llm, reference, logit_prompts)
        shape = llm.llm_engine.vllm_config.tap_shape
        assert shape is not None
        layers = with_heads(shape)
        points = {n: tuple(layer.heads) for n, layer in layers.items()}
        heads = head_errors(llm, reference, token_prompts, points, unread(shape))
        if "z" in heads:
            written = head_write_errors(llm, reference, logit_prompts[1], sorted(points))
            heads["z"] = replace(heads["z"], write=written[0], moved=written[1])
        heads |= other_errors(llm, reference, token_prompts, offered_others(shape))
        inner = {point for layer in shape.layers.values() for point in layer.widths}
        of_inner, without_inner = inner_errors(llm, reference, token_prompts, inner)
        heads |= of_inner
        reading = [n for n, layer in shape.layers.items() if layer.inputs]
        if reading:
            written = input_write_errors(llm, reference, logit_prompts[1], reading)
            heads["mlp_in"] = replace(heads["mlp_in"], write=written[0], moved=written[1])
        readable = {n: of.heads["z"][0] for n, of in layers.items() if not of.unread}
        focusable = {n: number for n, number in readable.items() if not layers[n].latent}
        focus = focus_errors(llm, reference, logit_prompts, focusable)
    offered = {point for of in points.values() for point in of}
    without = {p: "unseen" if p in offered else "none" for p in HEAD_POINTS if p not in heads}
    if not reading:
        without["mlp_in"] = "none"
    without |= without_inner
    for name, found, here in (
        ("attn", heads.get("attn"), readable),
        ("focus", focus, focusable),
    ):
        if found is None:
            whys = {f"refused: {why}" for why in unread(shape).values()}
            if any(of.latent for of in layers.values()) and name == "focus":
                whys.add("refused: attention over a latent cache (MLA)")
            without[name] = "unseen" if here else "; ".join(sorted(whys)) or "none"

    def at(point: str, results: list[Measurement]) -> list[Measurement]:
        # A case that steers every site counts against each point.
        return [r for r in results if r.point in (point, SteeringCase.EVERY)]

    return Result(
        row.name,
        row.architecture,
        "",
        tuple(classes),
        max(r.error for r in plain),
        {
            point: PointErrors(
                read=max(r.error for r in at(point, reads)),
                write=max(r.error for r in at(point, writes)),
                moved=min(r.moved for r in at(point, writes) if r.moved is not None),
            )
            for point in row.points
        },
        heads,
        focus,
        without,
    )


def tapped_classes(model: Any) -> list[str]:
    """`file:Class` of every module whose taps are bound. Runs in a worker."""
    from vllm.model_executor.layers.residual_taps import BoundTaps, LoopedTaps

    bound = BoundTaps | LoopedTaps
    layers = [type(m) for m in model.modules() if isinstance(vars(m).get("taps"), bound)]
    # On the Transformers backend a layer is an instance of a subclass made for its taps.
    classes = [c.__mro__[1] if c.__name__.startswith("Tapped") else c for c in layers]
    return [f"{c.__module__.replace('.', '/')}.py:{c.__name__}" for c in classes]
