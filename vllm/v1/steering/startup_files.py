# SPDX-License-Identifier: Apache-2.0
"""Reads the modules that options name, with which an engine starts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.sites import need_steered_points
from vllm.v1.steering.files import load, need_file
from vllm.v1.steering.modules import Module, need_module_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def parse_module_args(values: list[str]) -> dict[str, str]:
    """Parse the values of `--steering-modules`.

    Args:
        values: each `name=path` or `{"name": ..., "path": ...}`.

    Returns:
        The paths by name.

    Raises:
        ValueError: a value is of another form, a name is not one, or is there twice.
    """
    paths: dict[str, str] = {}
    for i, value in enumerate(values):
        field = f"steering_modules[{i}]"
        name, _, path = value.partition("=")
        if value.lstrip().startswith("{"):
            name, path = _from_json(value, field)
        if not path:
            reject(field, f"has no path: give name=path, got {show(value)}")
        need_module_name(name, field)
        if name in paths:
            reject(field, f"names {name} twice")
        paths[name] = path
    return paths


def _from_json(value: str, field: str) -> tuple[str, str]:
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or given.keys() != {"name", "path"}:
        reject(field, f'must be name=path or {{"name": ..., "path": ...}}, got {show(value)}')
    if not isinstance(given["path"], str):
        reject(f"{field}.path", f"must be a string, got {show(given['path'])}")
    return given["name"], given["path"]


def _startup_files(steering: SteeringConfig) -> dict[str, Path]:
    """The files of `--steering-modules` by name. Of a folder, as `vllm steering train` leaves it,
    it is `NAME.safetensors`."""
    paths = {n: Path(path) for n, path in parse_module_args(steering.steering_modules).items()}
    return {n: path / f"{n}.safetensors" if path.is_dir() else path for n, path in paths.items()}


def need_startup_files(steering: SteeringConfig) -> None:
    """Check that the files of `--steering-modules` are there; the model's shape is not known yet.

    Raises:
        ValueError: one is missing, cannot be opened, or is of a kind that is not read; or what is
            no name is among `--default-steering-modules`.
    """
    for i, name in enumerate(steering.default_steering_modules):
        need_module_name(name, f"default_steering_modules[{i}]")
    for name, path in _startup_files(steering).items():
        try:
            need_file(path)
            with open(path, "rb"):
                pass
        except OSError as error:
            reject(f"steering_modules.{name}", f"cannot be opened: {error}")


def startup_modules(config: "VllmConfig") -> dict[str, Module]:
    """Read the modules of `--steering-modules` from their files, by name.

    Raises:
        ValueError: a file is no module of this model, or has a site that this engine cannot steer;
            the message names the file and the tensor.
        OSError: a file cannot be read.
    """
    steering, modules = config.steering_config, {}
    for name, path in _startup_files(steering).items():
        assert config.tap_shape is not None
        modules[name] = load(path, config.tap_shape, steering)
        need_steered_points(modules[name].sites, f"steering_modules.{name}", steering)
    return modules
