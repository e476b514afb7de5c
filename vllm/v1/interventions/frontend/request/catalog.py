# SPDX-License-Identifier: Apache-2.0
"""Frontend: what the names in `steering_modules` mean at this moment, and vectors without one."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.v1.interventions.calls import GLOBAL_OPS
from vllm.v1.interventions.frontend.request.memo import CaptureMemo, VectorMemo
from vllm.v1.interventions.given_rules import GivenRule
from vllm.v1.steering.files import startup_modules
from vllm.v1.steering.modules import Module, need_module
from vllm.v1.steering.rule_files import OPERATOR_RULES

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def origin(name: str) -> str:
    """Return what errors name as the reason why a module acts on a request without being named."""
    return "llm.steering.set" if name == GLOBAL_OPS else "default_steering_modules"


class ModuleCatalog:
    """Named modules as this frontend knows them; the engine core has the same, by digest."""

    refresh: Callable[[], Awaitable[None]]
    """Asks what other API servers of the engines have registered; set where there may be some."""

    def __init__(self, config: "VllmConfig") -> None:
        self.vectors = VectorMemo()
        """Memo of the vectors that requests brought along, in place of a module's name."""
        self.captures = CaptureMemo()
        self._config = config
        self._modules: dict[str, Module] | None = None
        self.changes = 0
        """Number of changes of the engine core's modules that are known here."""

    @property
    def modules(self) -> dict[str, Module]:
        """Registered modules by name, and the operator's rules under theirs; those of start-up are
        loaded at the first look."""
        if self._modules is None:
            # Not before: the model's shape comes with the engine's ready message.
            self._modules = startup_modules(self._config)
        return self._modules

    @property
    def defaults(self) -> dict[str, Module]:
        """Modules of `default_steering_modules` that are registered, in the option's order, and the
        operations of `llm.steering.set`."""
        names = self._config.steering_config.default_steering_modules
        modules = self.modules if names else self._modules or {}
        return {name: modules[name] for name in (*names, GLOBAL_OPS) if name in modules}

    @property
    def rules(self) -> list[GivenRule]:
        """Rules of the operator, which hold for all requests."""
        at_start = self._config.capture_config.rules is not None
        modules = self.modules if at_start else self._modules or {}
        return modules[OPERATOR_RULES].rules if OPERATOR_RULES in modules else []

    @property
    def asks_others(self) -> bool:
        """True if each request asks first what other API servers have changed."""
        config = self._config
        defaults = config.steering_config.default_steering_modules
        return bool(defaults) or config.capture_config.rules is not None

    def get(self, name: Any, path: str) -> Module:
        """The module of a name. Raises ValueError if there is none, naming `path`."""
        return need_module(self.modules, name, path)

    def told(self) -> dict[str, bytes]:
        """Return `Module.told` of each module that requests may name, by name, sorted."""
        modules = sorted(self.modules.items())
        return {name: module.told for name, module in modules if not name.startswith("_")}

    def learn(self, news: dict[str, Any]) -> None:
        """Take over what the engine core has and this frontend lacks.

        Args:
            news: the reply of `Changes.call` to "modules".
        """
        for name, data in news["new"].items():
            self.put(name, msgspec.msgpack.decode(data, type=Module))
        if news["names"] is not None:
            for name in self.modules.keys() - news["names"]:
                self.put(name, None)
        self.changes = news["changes"]

    def made(self, name: str, module: Module | None, changes: int) -> None:
        """Take over a change that this frontend had the engines make; "" is no name.

        Args:
            changes: how many there were with this one.
        """
        if name:
            self.put(name, module)
        if changes == self.changes + 1:  # else there is one of another frontend to ask for
            self.changes = changes

    def put(self, name: str, module: Module | None) -> None:
        """Make a name mean a module, or nothing."""
        if module is not None:
            self.modules[name] = module
        else:
            self.modules.pop(name, None)
