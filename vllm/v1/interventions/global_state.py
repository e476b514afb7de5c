# SPDX-License-Identifier: Apache-2.0
"""Contents of the global state of an engine, which holds for all requests, and changes of it."""

from typing import TYPE_CHECKING, Any

import msgspec

from vllm.config.steering import FeatureFile
from vllm.v1.interventions.given_rules import GivenRule
from vllm.v1.interventions.plan import VectorSet
from vllm.v1.steering.modules import Module
from vllm.v1.steering.rule_files import parse_operator_rules, read_rules_file
from vllm.v1.steering.startup_files import startup_modules

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Key = tuple[str, str]
"""Kind of a content of the global state, and its name; "" where a kind has one content."""


class Globals(msgspec.Struct, frozen=True):
    """Contents of the global state, or some of them: a field is a kind, name -> content.

    A new kind is a field here, and its place in `SET_KINDS` or `LEARNED_KINDS`.
    """

    tiers: dict[str, VectorSet] = {}
    """Vectors of each tier, which act on requests that are under way, too."""
    ops: dict[str, Module] = {}
    """Operations of all requests that come later, in a module."""
    rules: dict[str, list[GivenRule]] = {}
    """Rules of the operator, for all requests that come later."""
    modules: dict[str, Module] = {}
    """Modules that requests may name."""
    features: dict[str, FeatureFile] = {}
    """Autoencoders that requests may name, beside those of the start."""

    def of(self, kind: str) -> dict[str, Any]:
        """The contents of a kind, by name."""
        contents: dict[str, Any] = getattr(self, kind)
        return contents

    @property
    def keys(self) -> list[Key]:
        """Kind and name of each content."""
        return [(kind, name) for kind in self.__struct_fields__ for name in self.of(kind)]


SET_KINDS = ("tiers", "ops")
"""Kinds that `llm.steering.set` sets and `clear` clears. A change of these has a new version."""

LEARNED_KINDS = ("ops", "rules", "modules", "features")
"""Kinds that frontends know, which make plans of them. A new content stands for the old one."""


class Change(msgspec.Struct, frozen=True):
    """A change of the global state, checked by the frontend that asks for it."""

    put: Globals = msgspec.field(default_factory=Globals)
    """New contents; vectors of a tier overwrite those at their sites."""
    drop: list[Key] = []
    """Contents that go first; only a module must be there."""

    @property
    def keys(self) -> list[Key]:
        """Kind and name of each content that goes or comes."""
        return [*self.drop, *self.put.keys]

    @property
    def versioned(self) -> bool:
        """True if the state has a new version with it, which captured rows report."""
        return all(kind in SET_KINDS for kind, _ in self.keys)

    @property
    def learned(self) -> bool:
        """True if frontends make plans of what it changes."""
        return any(kind in LEARNED_KINDS for kind, _ in self.keys)

    def applied(self, state: Globals) -> Globals:
        """Return what becomes of `state`, but for the new vectors of tiers."""
        changed = Globals(**{kind: dict(state.of(kind)) for kind in state.__struct_fields__})
        for kind, name in self.drop:
            changed.of(kind).pop(name, None)
        for kind in LEARNED_KINDS:
            changed.of(kind).update(self.put.of(kind))
        return changed


def startup_state(config: "VllmConfig") -> Globals:
    """Read the modules of `--steering-modules` from their files, and the rules of `--rules`.

    Raises:
        ValueError: a file is no module of this model, has a site that this engine cannot steer, or
            has a rule that is none; the message names the file and the tensor or entry.
        OSError: a file cannot be read.
    """
    state = Globals(modules=startup_modules(config))
    if (file := config.capture_config.rules) is not None:
        given, where = read_rules_file(file), f"rules ({file})"
        state.rules[""] = parse_operator_rules(given, where, config, state.modules)
    return state
