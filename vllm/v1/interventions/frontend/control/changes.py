# SPDX-License-Identifier: Apache-2.0
"""Makes and checks changes of the global state, before an engine is asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.control.features import (
    bytes_of,
    files_in_places,
    open_file,
    read_features,
)
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.resolve import need_steering
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.global_state import Change, Globals
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
from vllm.v1.steering.rule_files import parse_operator_rules

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPS = "ops"
"""Name that stands in the place of a tier for the operations of all requests."""

ALL_SET = [*(("tiers", tier) for tier in TIERS), (OPS, "")]
"""Keys of the global state that `set` sets."""


class FeaturesChange(NamedTuple):
    """A change that names an autoencoder."""

    change: Change
    num_bytes: int
    """Bytes that the autoencoder takes."""
    reconstruct: bool
    """True if it needs a place for reconstructions."""


class ChangeBuilder:
    """Makes and checks changes; knows nothing of how they get to the engines."""

    def __init__(self, config: "VllmConfig", catalog: ModuleCatalog) -> None:
        self._config = config
        self._catalog = catalog

    @property
    def shape(self) -> TapShape:
        """Layers, points and widths of the model; raises ValueError if steering is not enabled."""
        return need_steering(self._config, "steering")

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
        put, config, shape = Globals(), self._config.steering_config, self.shape
        drop = list(ALL_SET) if replace else []
        tiers = dict(tiers)
        if (ops := tiers.pop(OPS, None)) is not None:
            drop.append((OPS, ""))
            if parsed := parse_module_ops(ops, OPS, shape, config):
                put.ops[""] = make_module({}, parsed, OPS, shape)
                need_steered_points(put.ops[""].sites, OPS, config)
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
                put.tiers[tier] = vector_set_of(vectors)
        return Change(put, drop)

    def clear(self, tier: str | None) -> Change:
        """Make a change that clears one tier, "ops", or all for None."""
        assert self.shape
        if tier is None:
            return Change(drop=list(ALL_SET))
        return Change(drop=[(OPS, "") if tier == OPS else ("tiers", _need_tier(tier))])

    def register(self, name: Any, source: Any) -> Change:
        """Make a change that names a module: a path to load, or a mapping."""
        name, config = need_module_name(name, "name"), self._config.steering_config
        if isinstance(source, str | Path):
            return self._named(name, load(str(source), self.shape, config), "source")
        return self._named(name, parse_module(source, "source", self.shape, config), "source")

    def register_content(self, name: Any, content: Mapping[str, Any] | bytes) -> Change:
        """Make a change like `register`, of content that came over a network: no path is opened."""
        name, config = need_module_name(name, "name"), self._config.steering_config
        if isinstance(content, bytes):
            module = parse_safetensors(content, "safetensors", self.shape, config)
        else:
            module = parse_module(content, "", self.shape, config)
        return self._named(name, module, "module")

    def _named(self, name: str, module: Module, path: str) -> Change:
        need_steered_points(module.sites, path, self._config.steering_config)
        return Change(Globals(modules={name: module}))

    def unregister(self, name: str) -> Change:
        """Make a change that removes a name; the engines refuse one that is unknown."""
        assert self.shape
        return Change(drop=[("modules", plain(name))])

    def register_features(self, given: Mapping[str, Any]) -> FeaturesChange:
        """Make a change that names an autoencoder, as `read_features` reads it, and count the bytes
        that it takes."""
        known, config = self._catalog.state.features, self._config
        name, file, wanted = read_features(given, config.steering_config, self.shape, known)
        change = Change(Globals(features={name: file}))
        return FeaturesChange(change, bytes_of(file, config, self.shape), wanted)

    def open_features(self, asked: FeaturesChange) -> list[Change]:
        """Open the file of `register_features`, and check it.

        Returns:
            The change as it may be made: for `reconstruct` there is one for each place.
        """
        [(name, file)] = asked.change.put.features.items()
        autoencoder = open_file(name, file, self.shape)
        if not asked.reconstruct:
            return [asked.change]
        placed = files_in_places(name, file, autoencoder, self._config.steering_config)
        return [Change(Globals(features={name: each})) for each in placed]

    def unregister_features(self, name: Any) -> Change:
        """Make a change that removes the name of an autoencoder, which must have one."""
        assert self.shape
        known = self._catalog.state.features
        message = f"unknown name {{given}}; registered are {', '.join(known) or 'none'}"
        return Change(drop=[("features", Given(name, "name").choice(known, message))])

    def set_rules(self, rules: Any) -> Change:
        """Make a change of the rules that hold for all requests: a list, maybe of none."""
        modules = self._catalog.state.modules
        parsed = parse_operator_rules(rules, "rules", self._config, modules)
        return Change(Globals(rules={"": parsed}))

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        config, shape = self._config, self._config.tap_shape
        points = config.steering_config.steering_points
        if not config.steering_config.enable_steering and shape is not None:
            points = config.capture_config.capture_points
        shape = shape or self.shape
        return {n: tuple(p for p in shape.offers(n) if p in points) for n in shape.layers}

    def heads(self) -> dict[int, dict[str, tuple[int, int]]]:
        """Layer -> point of attention -> number of heads and width of each."""
        shape = self._config.tap_shape or self.shape
        return {n: dict(layer.heads) for n, layer in shape.layers.items() if layer.heads}


def _need_tier(value: Any) -> str:
    if (tier := plain(value)) not in TIERS:
        reject("tier", f"unknown tier {show(tier)}; tiers are {', '.join(TIERS)}")
    return str(tier)
