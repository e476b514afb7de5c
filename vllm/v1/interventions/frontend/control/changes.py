# SPDX-License-Identifier: Apache-2.0
"""Makes and checks changes of what holds for all requests, before an engine is asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.interventions.calls import GLOBAL_OPS, Change
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.plan import TIERS
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_steered_points
from vllm.v1.interventions.values import plain
from vllm.v1.interventions.vectors import parse_vectors, vector_set_of
from vllm.v1.steering.files import load, parse_safetensors
from vllm.v1.steering.modules import (
    Module,
    make_module,
    need_module_name,
    no_positions,
    parse_module,
    parse_module_ops,
)
from vllm.v1.steering.rule_files import OPERATOR_RULES, parse_operator_rules

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPS = "ops"
"""Name that stands in the place of a tier for the operations of all requests."""


class ChangeBuilder:
    """Makes and checks changes; knows nothing of how they get to the engines."""

    def __init__(self, config: "VllmConfig", catalog: ModuleCatalog) -> None:
        self._config = config
        self._catalog = catalog

    @property
    def shape(self) -> TapShape:
        """Layers, points and widths of the model; raises ValueError if steering is not enabled."""
        shape = self._config.tap_shape
        if not self._config.steering_config.enable_steering or shape is None:
            reject(
                "steering",
                "steering is not enabled; start the engine with enable_steering=True "
                "(--enable-steering)",
            )
        return shape

    def set(
        self, tiers: dict[str, Any], replace: bool, fields: Mapping[str, str] | None = None
    ) -> Change:
        """Make a change that sets vectors, or the operations of all requests.

        Args:
            tiers: tier -> `{point: {layers: vector}}`; "ops" -> a list of operations.
            replace: whether all that is not named is cleared.
            fields: tier -> what errors call it, if not its name.

        Raises:
            ValueError: an unknown tier, or vectors or operations that this engine cannot add.
        """
        sets, config, shape = {}, self._config.steering_config, self.shape
        tiers = dict(tiers)
        ops, module = tiers.pop(OPS, None), None
        if ops is not None and len(parsed := parse_module_ops(ops, OPS, shape, config)):
            module = make_module({}, parsed, OPS, shape)
            need_steered_points(module.sites, OPS, config)
        if tiers and self._config.kv_transfer_config is not None:
            reject(
                "steering",
                "vectors of all requests cannot be set with --kv-transfer-config: the connector "
                "keeps the keys of a request's blocks from when it came. Name a module, in "
                "requests or in default_steering_modules, or set ops",
            )
        for key, value in tiers.items():
            tier = _need_tier(key)
            path = (fields or {}).get(tier, tier)
            if isinstance(value, list) or (isinstance(value, Mapping) and "ops" in value):
                reject(
                    path,
                    "a tier has vectors only; operations of all requests are 'ops', in the place "
                    "of a tier",
                )
            [(vectors, _)] = parse_vectors(value, path, shape, no_positions)
            need_steered_points(vectors, path, config)
            if vectors:
                sets[tier] = vector_set_of(vectors)
        name = GLOBAL_OPS if replace or ops is not None else ""
        return Change("set", tiers=sets, replace=replace, name=name, module=module)

    def clear(self, tier: str | None) -> Change:
        """Make a change that clears one tier, "ops", or all for None."""
        assert self.shape
        if tier == OPS:
            return Change("set", name=GLOBAL_OPS)
        name = GLOBAL_OPS if tier is None else ""
        return Change("clear", tier=None if tier is None else _need_tier(tier), name=name)

    def register(self, name: Any, source: Any) -> Change:
        """Make a change that names a module: a path to load, or a mapping."""
        name = need_module_name(name, "name")
        config = self._config.steering_config
        if isinstance(source, str | Path):
            module = load(str(source), self.shape, config)
        else:
            module = parse_module(source, "source", self.shape, config)
        need_steered_points(module.sites, "source", config)
        return Change("register", name=name, module=module)

    def register_content(self, name: Any, content: Mapping[str, Any] | bytes) -> Change:
        """Make a change like `register`, of content that came over a network: no path is opened."""
        name = need_module_name(name, "name")
        config = self._config.steering_config
        if isinstance(content, bytes):
            module = parse_safetensors(content, "safetensors", self.shape, config)
        else:
            module = parse_module(content, "", self.shape, config)
        need_steered_points(module.sites, "module", config)
        return Change("register", name=name, module=module)

    def set_rules(self, rules: Any) -> Change:
        """Make a change of the rules that hold for all requests: a list, maybe of none."""
        modules = parse_operator_rules(rules, "rules", self._config, self._catalog.modules)
        return Change("register", name=OPERATOR_RULES, module=modules)

    def rules(self) -> list[dict[str, Any]]:
        """The rules that hold for all requests, without their probes."""
        return [rule.told() for rule in self._catalog.rules]

    @property
    def asks_others(self) -> bool:
        """True if each request asks first what other API servers have changed."""
        return self._catalog.asks_others

    def unregister(self, name: str) -> Change:
        """Make a change that removes a name; the engines refuse one that is unknown."""
        assert self.shape
        return Change("unregister", name=plain(name))

    def made(self, change: Change, changes: int) -> None:
        """Take over into the catalog a change that the engines have made, see
        `ModuleCatalog.made`."""
        self._catalog.made(change.name, change.module, changes)

    @property
    def enabled(self) -> bool:
        """True if the engine steers."""
        return self._config.steering_config.enable_steering

    @property
    def has_shared(self) -> bool:
        """True if there is anything that several API servers share: modules or rules."""
        return self.enabled or self._config.capture_config.enabled

    def known(self) -> int:
        """Number of changes of modules that this frontend knows."""
        return self._catalog.changes

    def told(self) -> dict[str, bytes]:
        """Return the descriptions of the modules by name, see `ModuleCatalog.told`."""
        assert self.shape
        return self._catalog.told()

    def learn(self, news: dict[str, Any]) -> None:
        """Take over modules that other frontends registered, see `ModuleCatalog.learn`."""
        self._catalog.learn(news)

    def module(self, name: str) -> Module:
        """The module of a name; raises ValueError if there is none."""
        return self._catalog.get(name, "name")

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        config, shape = self._config, self._config.tap_shape
        points = config.steering_config.steering_points
        if not self.enabled and shape is not None:
            points = config.capture_config.capture_points
        shape = shape or self.shape
        return {n: tuple(p for p in shape.offers(n) if p in points) for n in shape.layers}


def _need_tier(value: Any) -> str:
    if (tier := plain(value)) not in TIERS:
        reject("tier", f"unknown tier {show(tier)}; tiers are {', '.join(TIERS)}")
    return str(tier)
