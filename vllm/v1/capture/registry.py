# SPDX-License-Identifier: Apache-2.0
"""The registry turns the option `capture_consumers` into the `ConsumerSpec`s of an engine."""

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, NoReturn, get_args

from vllm.v1.capture.consumer import CaptureConsumer, Location
from vllm.v1.interventions.errors import describe, show

INLINE = "inline"
"""The name of the consumer that returns rows with the request's output. It has no class, as it
needs no session."""


def is_inline(capture: str) -> bool:
    """Tell whether a capture is for `inline`: its only one, or `inline[0]` of a list."""
    return capture.partition("[")[0] == INLINE


GROUP = "vllm.capture_consumers"
"""The group of plug-ins' entry points: name -> a subclass of `CaptureConsumer`."""

BUILT_IN = {
    "callback": "vllm.v1.capture.consumers.callback:CallbackConsumer",
    "filesystem": "vllm.v1.capture.consumers.filesystem:FilesystemConsumer",
    "logging": "vllm.v1.capture.consumers.logging:LoggingConsumer",
}
"""The consumers of our own, by name. They are entry points of our distribution too, but this also
works without one installed."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_LIMITS = {"pending_bytes": int, "max_request_bytes": int, "timeout": float, "threads": int}


@dataclass(frozen=True)
class HostLimits:
    """The options that every consumer has; its host keeps to them."""

    pending_bytes: int = 2 << 30
    """The most bytes of rows that may wait for the consumer, over all requests. A request reserves
    the most it can have when it starts, and gives that back with its result."""
    max_request_bytes: int = 1 << 30
    """The most bytes of rows of one completion."""
    timeout: float = 60.0
    """Seconds that a result may take after its completion's end, or one call of the consumer,
    before that is an error."""
    threads: int = 4
    """Number of threads that call the consumer."""


@dataclass(frozen=True)
class ConsumerSpec:
    """One consumer of an engine."""

    name: str
    """The name by which requests know it."""
    cls: type[CaptureConsumer] | None = None
    """The consumer's class; None for `inline`, and for a consumer that runs in another process."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The keywords of the constructor; they may have secrets, and no log has them."""
    instance: CaptureConsumer | None = None
    """The consumer itself where the user made it; it always runs in the frontend."""
    capture: Mapping[str, Any] | None = None
    """The capture request of every request that does not name the consumer."""
    limits: HostLimits = HostLimits()

    @property
    def in_frontend(self) -> bool:
        """True if it runs in the process that holds the `LLM` or serves HTTP."""
        return self.cls is None or self.instance is not None or self.cls.location == "frontend"

    def check(self) -> None:
        """Check the options before the model is loaded.

        Raises:
            ValueError: the consumer's class refuses them.
        """
        if self.cls is not None and self.instance is None:
            with self._making():
                self.cls.check_options(self.options)

    def make(self) -> CaptureConsumer:
        """Make the consumer, or return the user's instance.

        Raises:
            ValueError: its constructor refuses the options, or fails.
        """
        if self.instance is not None:
            return self.instance
        assert self.cls is not None
        with self._making():
            return self.cls(**self.options)

    @contextmanager
    def _making(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"capture_consumers: {self.name!r} cannot be made: {describe(error)}"
            ) from error

    def portable(self) -> "ConsumerSpec":
        """Return the spec as it is sent to the engine core.

        A consumer of the frontend is sent without class, options and instance: they stay there, and
        may be of a script, which another process cannot import.
        """
        if not self.in_frontend:
            return self
        return replace(self, cls=None, options={}, instance=None)


class ConsumerText(str):
    """A value of the option `capture_consumers` as it stands on a command line. What a log has of
    it says which keys it gives, and not their values, which may be secrets."""

    def __repr__(self) -> str:
        return repr(shown(self))


def shown(value: Any) -> str:
    """Say which consumer a value of the option `capture_consumers` means, and the keys it gives."""
    try:
        fields = _given(value)
        name = fields.pop("name", None) or _own_name(fields.pop("consumer", value))
    except ValueError:
        return "a consumer that cannot be read"
    return f"{name}({', '.join(map(str, fields))})" if fields else str(name)


def parse_consumers(values: Sequence[Any]) -> dict[str, ConsumerSpec]:
    """Parse the option `capture_consumers`.

    Args:
        values: for each consumer one of
            "name" or "name:key=value,key=value": options of the consumer, and of `HostLimits`; a
                value with a comma in it is put in quotes;
            {"name": ..., "instance_name"?: ..., "capture"?: {...}, options}, or as JSON text;
            an instance of `CaptureConsumer`, or a subclass;
            a function, called with `(request, rows)` as `CallbackConsumer` says.
            In a dict the last two go under "consumer" in place of "name".

    Returns:
        The specs by name, in the order given.

    Raises:
        ValueError: a value cannot be used; the message names the consumer and what to do.
    """
    specs: dict[str, ConsumerSpec] = {}
    for value in values:
        spec = _parse(value)
        if spec.name in specs:
            _refuse(f"two are named {spec.name!r}; give one of them an instance_name")
        specs[spec.name] = spec
    return specs


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"capture_consumers: {message}")


def _parse(value: Any) -> ConsumerSpec:
    fields = _given(value)
    if ("name" in fields) == ("consumer" in fields):
        _refuse(f"{show(value)} needs a 'name', or in its place a 'consumer' made in Python")
    if not all(isinstance(key, str) for key in fields):
        _refuse(f"the keys of {fields.get('name')!r} must be strings")
    given = fields.pop("name", None)
    found = _lookup(given) if given is not None else fields.pop("consumer")
    name = fields.pop("instance_name", given if given is not None else _own_name(found))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(
            f"{show(name)} cannot be a consumer's name: letters, digits, '_', '.' and '-', at most "
            "64; give an instance_name"
        )
    if name == INLINE and found is not None:
        _refuse(f"the name {INLINE!r} is taken; give another instance_name")
    capture = fields.pop("capture", None)
    if capture is not None and not isinstance(capture, Mapping):
        _refuse(f"{name!r}: capture must be a capture request, {{'hooks': ...}}")
    limits = _limits(name, fields)
    if found is None or isinstance(found, CaptureConsumer):
        if fields:
            what = ": an instance is made already, got options"
            if found is None:
                what = " takes no options, got"
            _refuse(f"{name!r}{what} {sorted(fields)}")
        if found is None:
            return ConsumerSpec(name, capture=capture, limits=limits)
        own = capture if capture is not None else found.capture
        return ConsumerSpec(name, cls=type(found), instance=found, capture=own, limits=limits)
    if not isinstance(found, type) and callable(found):
        fields, found = {"function": found, **fields}, _load("callback", BUILT_IN["callback"])
    cls = _need_class(name, found)
    _need_options(name, cls, fields)
    own = capture if capture is not None else cls.capture
    return ConsumerSpec(name, cls=cls, options=fields, capture=own, limits=limits)


def _given(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return _fields_of(value)
    return dict(value) if isinstance(value, Mapping) else {"consumer": value}


def _fields_of(text: str) -> dict[str, Any]:
    """Parse the fields of "name:key=value,key=value", or of JSON."""
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as error:
            _refuse(f"a text of {len(text)} characters is not JSON: {error}")
        assert isinstance(fields, dict)
        return fields
    name, _, options = text.partition(":")
    lexer = shlex.shlex(options, posix=True)
    lexer.whitespace, lexer.whitespace_split = ",", True
    lexer.escape = lexer.commenters = ""
    try:
        items = list(lexer)
    except ValueError:
        _refuse(f"{show(name)} has a quote that is not closed")
    fields = {"name": name}
    for number, item in enumerate(items, 1):  # no error has values
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            _refuse(
                f"entry {number} of {show(name)} is not key=value; a value with a comma in it is "
                "put in quotes"
            )
        if key == "consumer" or key == "capture":
            _refuse(f"{show(name)}: {key!r} cannot be given in this form; use a dict or JSON")
        if key in fields:
            _refuse(f"{show(name)} gives {key!r} twice")
        fields[key] = value
    return fields


def _own_name(found: Any) -> str:
    """Return the name of a consumer made in Python that was given none."""
    if isinstance(found, CaptureConsumer):
        return type(found).__name__
    return str(getattr(found, "__name__", type(found).__name__))


def _lookup(name: Any) -> Any:
    """Find the class that is registered under `name`; None for `inline`."""
    if not isinstance(name, str):
        _refuse(f"the name {show(name)} must be a string")
    if name == INLINE:
        return None
    if name in BUILT_IN:
        return _load(name, BUILT_IN[name])
    targets = sorted({point.value for point in entry_points(group=GROUP, name=name)})
    if len(targets) > 1:
        _refuse(f"{name!r} is in several distributions: {targets}; uninstall all but one")
    if targets:
        return _load(name, targets[0])
    known = {INLINE, *BUILT_IN, *(point.name for point in entry_points(group=GROUP))}
    _refuse(
        f"unknown {show(name)}, known are {sorted(known)}; a plug-in must be installed and have an "
        f"entry point in the group {GROUP!r}"
    )


def _load(name: str, target: str) -> Any:
    """Import the object of an entry point, "module:Class"."""
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module.strip())
        for part in attribute.strip().split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(
            f"capture_consumers: {name!r} ({target}) cannot be imported: {describe(error)}"
        ) from error
    return found


def _need_class(name: str, found: Any) -> type[CaptureConsumer]:
    """Return `found` if it is a class of consumers that can be made; raise ValueError if not."""
    if not isinstance(found, type) or not issubclass(found, CaptureConsumer):
        _refuse(
            f"{name!r} is {show(found)}, not a subclass of vllm.v1.capture.consumer.CaptureConsumer"
        )
    if inspect.isabstract(found):
        _refuse(f"{name!r}: {found.__name__} lacks {sorted(found.__abstractmethods__)}")
    if found.location not in get_args(Location):
        _refuse(f"{name!r}: location {show(found.location)} is not one of {get_args(Location)}")
    return found


def _need_options(name: str, cls: type[CaptureConsumer], options: Mapping[str, Any]) -> None:
    """Check the options' names now: the constructor runs later, maybe in another process."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**options)
    except TypeError as error:
        _refuse(f"{name!r}: {error}; options are {[*signature.parameters, *_LIMITS]}")


def _limits(name: str, fields: dict[str, Any]) -> HostLimits:
    """Take the options of `HostLimits` out of `fields`."""
    given: dict[str, Any] = {}
    for key, number in _LIMITS.items():
        if key not in fields:
            continue
        value = fields.pop(key)
        try:
            given[key] = number(value)
            wrong = given[key] <= 0 or given[key] == float("inf") or isinstance(value, bool)
        except (TypeError, ValueError, OverflowError):
            wrong = True
        if wrong or given[key] != given[key]:
            _refuse(f"{name!r}: {key} must be a number above 0, got {show(value)}")
    pending = given.get("pending_bytes", HostLimits.pending_bytes)
    if given.setdefault("max_request_bytes", min(pending, HostLimits.max_request_bytes)) > pending:
        _refuse(f"{name!r}: max_request_bytes is more than pending_bytes={pending}")
    return HostLimits(**given)
