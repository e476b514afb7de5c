# SPDX-License-Identifier: Apache-2.0
"""Frontend: the steering fields of one request, made into segments."""

from collections.abc import Mapping
from typing import Any

from vllm.config.steering import MAX_MODULES, SteeringConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.request.budget import Unit
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.focus import FocusParser, is_focus
from vllm.v1.interventions.frontend.request.memo import VectorMemo
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.reconstruct import (
    is_reconstruct,
    need_first,
    parse_reconstruct,
)
from vllm.v1.interventions.frontend.request.segments import SegmentBuilder
from vllm.v1.interventions.frontend.request.selectors import Selector
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.operations import Op, parse_ops
from vllm.v1.interventions.plan import STEERING_FIELDS, TIERS, VECTOR_FIELDS, SteeringPlan
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_steered_points
from vllm.v1.interventions.terms import rows_needed
from vllm.v1.steering.modules import Module


def steering_plan(
    params: SamplingParams,
    prompt: Prompt,
    config: SteeringConfig,
    shape: TapShape,
    catalog: ModuleCatalog,
    begun: int = 0,
) -> SteeringPlan:
    """Make a plan of a request's steering fields.

    Args:
        begun: the position before which all is computed, by another plan.

    Raises:
        ValueError: with the path of the field, see docs/errors.md.
    """
    request = _Request(params, prompt, config, shape, begun)
    for tier, field in zip(TIERS, VECTOR_FIELDS, strict=True):
        if getattr(params, field) is not None:
            request.add_vectors(tier, field, catalog.vectors)
    request.add_modules(catalog)
    if params.steering is not None:
        request.add_ops(params.steering)
    return request.plan()


class _Request:
    """Adds one steering field after the other to the segments of a request."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Prompt,
        config: SteeringConfig,
        shape: TapShape,
        begun: int,
    ) -> None:
        self._params, self._begun = params, begun
        self._prompt = prompt
        self._config = config
        self._shape = shape
        self._segments = SegmentBuilder(shape, len(prompt.token_ids), prompt.work)
        self._given = [field for field in STEERING_FIELDS if getattr(params, field) is not None]
        self._defaults: list[tuple[str, Module]] = []

    def _select(self, value: Any, path: str) -> Positions:
        selector = Selector(self._prompt)
        positions = selector.resolve(value, path)
        if selector.wants_last_generated:
            reject(path, "which position is the last generated one is known only when it is over")
        if not len(positions):
            reject(
                path,
                f"selects nothing: the prompt has {len(self._prompt.token_ids)} tokens and "
                f"max_tokens={self._prompt.max_tokens} gives "
                f"{max(self._prompt.max_tokens - 1, 0)} generated positions",
            )
        return positions

    def add_vectors(self, tier: str, field: str, memo: VectorMemo) -> None:
        phase = self._segments.phases[tier]
        if self._begun and phase.stop <= self._begun:
            reject(field, "act on the prompt, which is computed already")
        parsed = memo.parse(getattr(self._params, field), field, self._shape, self._select)
        for vectors, positions, vector_set in parsed:
            need_steered_points(vectors, field, self._config)
            outside = None if positions is None else _first_outside(positions, phase)
            if outside is not None:
                point, layer = next(iter(vectors))
                reject(
                    f"{field}.{point}.{layer}.positions",
                    f"position {outside} is not among the {tier} positions, where {field} act",
                )
            self._segments.add(vectors, phase if positions is None else positions, vector_set)

    def add_modules(self, catalog: ModuleCatalog) -> None:
        """Add the modules that act by default, then those that the request names."""
        named = self._named_modules(catalog) if "steering_modules" in self._given else []
        if self._inherit():
            self._defaults = catalog.defaults(besides=[name for _, name, _, _ in named])
        by_default = [(origin, module, 1.0) for origin, module in self._defaults]
        for path, module, scale in by_default + [(p, m, scale) for p, _, m, scale in named]:
            for phase, vector_set in module.phases.items():
                self._segments.add_shared(vector_set, scale, self._segments.phases[phase])
            num_terms = sum(len(op.terms) for op in module.ops)
            self._prompt.work.charge(num_terms, Unit.SEGMENT, path)
            prompt = len(self._prompt.token_ids)
            ops = [op.for_request(scale, path, prompt, self._shape) for op in module.ops]
            self._segments.operate(ops, self._config)

    def _named_modules(self, catalog: ModuleCatalog) -> list[tuple[str, str, Module, float]]:
        """Return the modules that the request names: (path, name, module, scale)."""
        value, named = self._params.steering_modules, []
        if not isinstance(value, list | tuple):
            given = Given(value, "steering_modules")
            pairs = " (a name with a scale is a pair in it)" if isinstance(value, Mapping) else ""
            given.refuse("must be a list of names, got {given}", show(value) + pairs)
        if len(value) > MAX_MODULES:
            reject("steering_modules", f"has {len(value)} names, at most {MAX_MODULES} are read")
        for i, entry in enumerate(value):
            path = f"steering_modules[{i}]"
            name, scale = entry, 1.0
            if isinstance(entry, list | tuple):
                if len(entry) != 2:
                    reject(path, f"must be a name or (name, scale), has {len(entry)} entries")
                name, scale = entry[0], Given(entry[1], f"{path}[1]").number()
            named.append((path, name, catalog.get(name, path), scale))
        return named

    def add_ops(self, value: Any) -> None:
        families, paths = frozenset(self._config.steering_families), list[str]()
        first: list[tuple[str, Op, int]] = []
        focus = FocusParser(self._shape, families, self._select, self._prompt)

        def focused(entry: Any, path: str) -> bool:
            # Reading an entry looks at each layer, where it names all, more than once.
            self._prompt.work.charge(1, Unit.SEGMENT, path)
            self._prompt.work.charge(2 * len(self._shape.layers), Unit.CELL, path)
            if is_focus(entry):
                self._segments.focused.append(focus.parse(entry, path))
            elif is_reconstruct(entry):
                made = parse_reconstruct(entry, path, self._shape, families, self._select)
                first.append((path, made, len(paths)))
            else:
                paths.append(path)
                return False
            return True

        most = self._config.max_steering_ops
        ops = parse_ops(value, "steering", self._shape, families, self._select, most, focused)
        self._segments.key_weights = focus.charge("steering")
        ahead = self._segments.ops
        for path, op, number in first:
            need_first(op, [*ahead, *ops[:number]], path)
            ahead = [*ahead, op]
        paths = [path for path, _, _ in first] + paths
        ops = [op for _, op, _ in first] + ops
        for path, op in zip(paths, ops, strict=True):
            need_steered_points(op.sites, path, self._config)
        self._segments.operate(ops, self._config)

    def plan(self) -> SteeringPlan:
        config = self._config
        given = self._given + list(dict.fromkeys(origin for origin, _ in self._defaults))
        path = " + ".join(given) or "steering_inherit_global"
        if self._segments.most_ops() > config.max_steering_ops:
            reject(
                path,
                f"come to {self._segments.most_ops()} ops at one point of one layer, "
                f"the engine has max_steering_ops={config.max_steering_ops}",
            )
        plan = self._segments.plan(path, self._inherit(), config)
        rows = rows_needed(plan.terms)
        if rows > config.max_steering_rows:
            reject(
                path,
                f"the request needs {rows} rows for its ops, the engine has "
                f"max_steering_rows={config.max_steering_rows}",
            )
        end = len(self._prompt.token_ids) + self._prompt.max_tokens - 1
        acting = [s.first for s in plan.segments if s.vector_sum or s.program or s.focus]
        if self._given and acting and acting[0] >= end:
            reject(path, "can act on no position: with max_tokens=1 no generated token is fed back")
        return plan

    def _inherit(self) -> bool:
        inherit = self._params.steering_inherit_global
        return inherit is None or Given(inherit, "steering_inherit_global").flag()


def _first_outside(positions: Positions, phase: Positions) -> int | None:
    """The first of `positions` that is not in `phase`, which is one run."""
    start, stop = phase.flat()
    first = positions.first_from(0)
    return first if first is not None and first < start else positions.first_from(stop)
