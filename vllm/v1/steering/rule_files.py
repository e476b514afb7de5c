# SPDX-License-Identifier: Apache-2.0
"""The rules of the operator, which hold for all requests, as a file or a call gives them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vllm.v1.interventions.errors import describe, reject
from vllm.v1.interventions.given_rules import GivenRule, rules_for_all
from vllm.v1.interventions.sites import need_captured_points
from vllm.v1.probes.files import load_probe
from vllm.v1.steering.json_modules import without_repeats
from vllm.v1.steering.modules import Module, need_module

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_FILE_BYTES = 64 << 20
"""The largest file: 32 probes of a model 16,384 wide, written out, are a fifth of it."""


class WebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address that is told when a rule of the operator fires: `webhook` in the file."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://")]
    secret_file: str = ""
    """File with the secret by which requests are signed; "" to sign none."""
    text: bool = False
    """True to send the texts of prompt and answer too; else they stay here."""
    queue: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1024
    """Number of events that may wait."""
    tries: Annotated[int, msgspec.Meta(ge=1, le=20)] = 5
    timeout: Annotated[float, msgspec.Meta(gt=0, le=60)] = 10.0
    """Seconds that the receiver has to connect, and to answer."""
    dead_letters: str = ""
    """Folder for events that the receiver did not take; "" to drop them."""


def parse_operator_rules(
    value: Any, path: str, config: "VllmConfig", modules: Mapping[str, Module]
) -> list[GivenRule]:
    """Parse the rules that hold for all requests.

    Args:
        value: the list.
        path: where it stands, for errors.
        modules: the registered ones; a rule takes a direction of theirs as it is now.

    Raises:
        ValueError: capture is not enabled, a rule is wrong, or reads what is not captured here.
    """
    shape = config.tap_shape
    if not config.capture_config.enabled or shape is None:
        reject(
            path,
            "capture is not enabled; start the engine with capture_consumers=['inline'] "
            "(--capture-consumers inline)",
        )
    rules = rules_for_all(
        value,
        path,
        shape,
        lambda name, at, site: need_module(modules, name, at).direction(name, site, at),
    )
    for i, rule in enumerate(rules):
        need_captured_points(rule.sites, f"{path}[{i}]", config.capture_config)
    return rules


def read_rules_file(path: str) -> Any:
    """Read the file of `--rules`: JSON, `{"rules": [...]}`, with the files of probes that it names.

    Returns:
        What the list is said to be, still to be parsed.

    Raises:
        ValueError: a file cannot be read, is too large, or is of another form; the message names
            it.
    """
    rules = _read(path)["rules"]
    listed = isinstance(rules, list)
    return [_with_probe(rule, Path(path).parent) for rule in rules] if listed else rules


def read_webhook(path: str) -> WebhookSettings | None:
    """Read `webhook` in the file of `--rules`; None if it has none.

    Raises:
        ValueError: as `read_rules_file`; or the settings are wrong, or their secret is no file.
    """
    if "webhook" not in (given := _read(path)):
        return None
    try:
        settings = msgspec.convert(given["webhook"], WebhookSettings)
        if settings.secret_file and not Path(settings.secret_file).read_bytes().strip():
            raise ValueError(f"{settings.secret_file} is empty")
    except (msgspec.ValidationError, OSError, ValueError) as error:
        reject(f"rules ({path}).webhook", f"is wrong: {describe(error)}")
    return settings


def _read(path: str) -> dict[str, Any]:
    """Return what the file says: rules, and perhaps a webhook."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        given = None
        if len(data) <= MAX_FILE_BYTES:
            given = json.loads(data, object_pairs_hook=without_repeats)
    except (OSError, RecursionError, ValueError) as error:
        reject(f"rules ({path})", f"cannot be read: {describe(error)}")
    if len(data) > MAX_FILE_BYTES:
        reject(f"rules ({path})", f"has more than {MAX_FILE_BYTES} bytes")
    if not isinstance(given, dict) or not {"rules"} <= given.keys() <= {"rules", "webhook"}:
        reject(f"rules ({path})", 'must be JSON of the form {"rules": [...]}')
    return given


def _with_probe(rule: Any, folder: Path) -> Any:
    """Return a rule with the probe in place of `{"file": PATH}`, a path from the folder on."""
    probe = rule.get("probe") if isinstance(rule, dict) else None
    if (
        not isinstance(probe, dict)
        or probe.keys() != {"file"}
        or not isinstance(probe["file"], str)
    ):
        return rule
    try:
        return {**rule, "probe": load_probe(folder / probe["file"])}
    except (OSError, ValueError) as error:
        reject(f"rules ({folder / probe['file']})", f"cannot be read: {describe(error)}")
