# SPDX-License-Identifier: Apache-2.0
"""Modules are named vectors and operations, which requests refer to in `steering_modules`."""

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn, TypedDict

import msgspec
import numpy as np
import torch

from vllm.config.operations import OPERATIONS
from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.errors import refuse_unknown_keys, reject, show
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.likely import likely
from vllm.v1.interventions.operations import Op, parse_ops
from vllm.v1.interventions.plan import TIERS, Site, VectorSet
from vllm.v1.interventions.positions import ALL, END, Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order
from vllm.v1.interventions.terms import Term, make_term
from vllm.v1.interventions.values import plain
from vllm.v1.interventions.vectors import (
    Vectors,
    add_up,
    norms_of,
    parse_vectors,
    vector_set_of,
    vectors_of,
)

FIELDS = ("vectors", "prefill_vectors", "decode_vectors")
"""The keys of a module given inline that hold a tier's vectors, in the order of `TIERS`."""

PHASE_TIERS = {"prefill": ("base", "prefill"), "decode": ("base", "decode")}
"""Phase -> the tiers that act in it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ModuleOp(msgspec.Struct, frozen=True):
    """An operation of a module. It acts at all positions, or from the last prompt token on."""

    name: str
    """The operation's name, such as "ablate"."""
    sites: list[Site]
    terms: list[Term]
    """Terms of the operation, which act one after the other; all have one gate and one strength."""
    frozen: bool
    """True if its gate is decided at the last prompt token."""
    heads: dict[Site, tuple[int, ...]] = {}
    """Site at a point of attention -> its heads, as in `Op`."""

    def for_request(self, scale: float, path: str, num_prompt_tokens: int, shape: TapShape) -> Op:
        """Return the operation of a request that names its module with `scale`.

        Args:
            path: where the request names the module, for errors.

        Raises:
            ValueError: the operation has no scale, or it becomes too large.
        """
        terms = self.terms
        if scale != 1:
            field = OPERATIONS[self.name].scaled
            if not field:
                scaled = ", ".join(o.name for o in OPERATIONS.values() if o.scaled)
                reject(path, f"scale {scale:g}: its {self.name} has no scale, only {scaled} have")
            terms = [self._scaled(term, field, scale, path, shape) for term in terms]
        decided = Positions([(num_prompt_tokens - 1, END)])
        return Op(
            self.name, self.sites, decided if self.frozen else None, terms, self.frozen, self.heads
        )

    @staticmethod
    def _scaled(term: Term, field: str, scale: float, path: str, shape: TapShape) -> Term:
        number = Given(term.scalars._asdict()[field] * scale, path).number()
        scalars = term.scalars._replace(**{field: number})
        largest = float(np.abs(np.frombuffer(term.vector, np.float32)).max())
        if not largest * abs(scalars.constant) <= torch.finfo(shape.torch_dtype).max:
            reject(path, f"overflows {shape.dtype}")
        return make_term(scalars, term.vector, term.probe, term.encoder)


class Told(TypedDict):
    """Description of a module for anybody who asks: no values."""

    digest: str
    tiers: dict[str, dict[str, dict[int, float]]]
    """Tier -> point -> layer -> norm of the vector."""
    ops: list[str]
    """Names of the operations."""


class Module(msgspec.Struct, frozen=True, dict=True):
    """Vectors of up to three tiers, and operations. Modules of the same digest do the same."""

    digest: str
    """The SHA-256 of the other fields, in hex."""
    tiers: dict[str, VectorSet]
    """The vectors of the tiers base, prefill and decode; those without vectors are left out."""
    ops: list[ModuleOp]

    def direction(self, name: str, site: Site, path: str) -> np.ndarray:
        """The base vector at a site, brought to length 1: float64 [hidden].

        Args:
            name: the module's, for errors.
            path: where it is named, for errors.

        Raises:
            ValueError: there is no vector at the site, or one of zeros.
        """
        (point, layer), base = site, self.tiers.get("base")
        if base is None or site not in base.sites:
            lacks = f"{name} has no vector for {point} at layer {layer}"
            reject(path, f"{lacks}, whose rows it would score")
        row = base.rows[base.sites.index(site)].astype(np.float64)
        if not row.any():
            reject(path, f"is zero for {point} at layer {layer}")
        return row / np.linalg.norm(row)

    @property
    def sites(self) -> list[Site]:
        """The sites where its vectors and operations act, in stream order."""
        of_parts = {site for vector_set in self.tiers.values() for site in vector_set.sites}
        return sorted(of_parts.union(*(op.sites for op in self.ops)), key=site_order)

    @cached_property
    def told(self) -> bytes:
        """A `Told` as JSON, made once: many may ask, of many modules."""
        tiers = {tier: norms_of(vector_set) for tier, vector_set in self.tiers.items()}
        ops = [op.name for op in self.ops]
        return msgspec.json.encode(Told(digest=self.digest, tiers=tiers, ops=ops))

    @cached_property
    def phases(self) -> dict[str, VectorSet]:
        """Phase -> the vectors that its positions get: those of its tiers, summed and rounded
        once. A phase without any is left out."""
        summed = {}
        for phase, tiers in PHASE_TIERS.items():
            sets = [self.tiers[tier] for tier in tiers if tier in self.tiers]
            if sets:
                total = sets[0] if len(sets) == 1 else vector_set_of(add_up(map(vectors_of, sets)))
                summed[phase] = total
        return summed


def make_module(
    tiers: Mapping[str, Vectors], ops: list[ModuleOp], path: str, shape: TapShape
) -> Module:
    """Make a module of vectors that are checked, rounded once to float32.

    Args:
        path: where it comes from, for errors.

    Raises:
        ValueError: there is nothing in it, or a vector or a sum of tiers overflows float32.
    """
    if not ops and not any(tiers.values()):
        reject(path, "has neither vectors nor operations")
    with np.errstate(over="ignore"):  # looked at below
        sets = {t: vector_set_of(tiers[t]) for t in TIERS if tiers.get(t)}
        listed = [f"{tier}={vector_set.digest}" for tier, vector_set in sets.items()]
        for op in ops:
            digests = ",".join(term.digest for term in op.terms)
            listed.append(f"{op.name}:{op.sites}:{digests}:{op.frozen}:{op.heads}")
        module = Module(hashlib.sha256(";".join(listed).encode()).hexdigest(), sets, ops)
        for vector_set in (*sets.values(), *module.phases.values()):
            if not np.isfinite(vector_set.largest):
                reject(path, "overflows float32")
    return module


def need_module(modules: Mapping[str, Module], name: Any, path: str) -> Module:
    """The module of a name.

    Raises:
        ValueError: there is none of that name, which `path` has.
    """
    if not isinstance(name, str):
        reject(path, f"must be a name or (name, scale), got {show(name)}")
    if name not in modules:
        # Sorted first: another thread may add one.
        named = sorted(modules)
        known = ", ".join(named[:20]) or "none"
        reject(path, f"unknown module {show(name)}{likely(name, named)}; registered are {known}")
    return modules[name]


def parse_module(value: Any, path: str, shape: TapShape, config: SteeringConfig) -> Module:
    """Parse a module given inline.

    Args:
        value: `{"vectors", "prefill_vectors", "decode_vectors", "ops"}`, each optional and as the
            fields of `SamplingParams`, or the base tier alone, `{point: {layers: vector}}`.
        path: where it stands, for errors; "" if the fields have no name above them.

    Raises:
        ValueError: as for the fields of a request; also for positions, which belong to a request.
    """
    given = Given(value, path).mapping()
    if not given.keys() & {*FIELDS, "ops"}:
        given = {FIELDS[0]: given}
    path, below = path or "module", f"{path}." if path else ""
    refuse_unknown_keys(given, (*FIELDS, "ops"), path)
    tiers = {}
    for tier, field in zip(TIERS, FIELDS, strict=True):
        if field in given:
            # Without positions there is one group of vectors.
            [(vectors, _)] = parse_vectors(given[field], f"{below}{field}", shape, no_positions)
            tiers[tier] = vectors
    ops = parse_module_ops(given["ops"], f"{below}ops", shape, config) if "ops" in given else []
    return make_module(tiers, ops, path, shape)


def parse_module_ops(
    value: Any, path: str, shape: TapShape, config: SteeringConfig
) -> list[ModuleOp]:
    """Parse the operations of a module, which may not have positions; raises ValueError."""
    for i, entry in enumerate(value if isinstance(value, list | tuple) else ()):
        if isinstance(entry, Mapping) and ("positions" in entry or entry.get("op") == "replace"):
            no_positions(None, f"{path}[{i}]")
    families = frozenset(config.steering_families)
    # Where a gate is decided is known in the request.
    ops = parse_ops(value, path, shape, families, lambda *_: ALL, config.max_steering_ops)
    return [ModuleOp(op.name, op.sites, op.terms, op.frozen, op.heads) for op in ops]


def no_positions(value: Any, path: str) -> NoReturn:
    """Refuse positions where there is no prompt; stands in for the parser of selectors.

    Raises:
        ValueError: always.
    """
    reject(path, "positions belong to a request; here all positions of a tier are meant")


def need_module_name(value: Any, path: str) -> str:
    """Return a module's name, once it is checked.

    Raises:
        ValueError: it is not a name; the message names `path`.
    """
    name = plain(value)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        reject(
            path,
            f"{show(name)} is not a name: up to 128 letters, digits, '.', '_' and '-', the first "
            "a letter or digit",
        )
    return name
