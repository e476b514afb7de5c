# SPDX-License-Identifier: Apache-2.0
"""The rules of the operator, which hold for all requests, as a file or a call gives them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    if not isinstance(given, dict) or given.keys() != {"rules"}:
        reject(f"rules ({path})", 'must be JSON of the form {"rules": [...]}')
    rules = given["rules"]
    listed = isinstance(rules, list)
    return [_with_probe(rule, Path(path).parent) for rule in rules] if listed else rules


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
