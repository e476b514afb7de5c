# SPDX-License-Identifier: Apache-2.0
"""Autoencoders that get a name while the engine serves, of files in the operator's folder.

Operations, gates and rules name their features: these become vectors where a request is planned,
so that requests keep what a name meant, blocks of the prefix cache are told apart by the vectors,
and no worker has to know. Activations of rows are made by workers, of files of the start alone.
"""

import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config.points import RESIDUAL_POINTS
from vllm.config.steering import FEATURES_NAME, FeatureFile, SteeringConfig
from vllm.v1.interventions.errors import InterventionError, reject
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.named_features import need_feature_files
from vllm.v1.interventions.shape import TapShape

MAX_REGISTERED = 64
"""The most that may have a name at once. Each takes some numbers a feature in each API server; its
matrices stay in the file."""


def read_features(
    given: Mapping[str, Any],
    config: SteeringConfig,
    shape: TapShape,
    known: Mapping[str, FeatureFile],
) -> tuple[str, FeatureFile]:
    """Check an autoencoder that is to get a name, and have its file open.

    Args:
        given: `name`, `path` in the folder of `features_root`, and the `point` and `layer` of its
            rows.
        known: those that have a name since the start.

    Returns:
        The name, and the file.

    Raises:
        ValueError: there is no such folder, the path leads out of it, the name is one of the start
            or there are too many, the model has no such site, or the file cannot be read; the
            message names the field, and file and tensor.
    """
    if config.features_root is None:
        reject("features", "needs an engine started with features_root (--features-root FOLDER)")
    asked = Given(given, "").fields(("name", "path", "point", "layer"))
    unnamed = "must be 1-64 letters, digits, '_', '.' or '-', got {given}"
    name = asked["name"].text(unnamed, re.compile(FEATURES_NAME))
    if name in config.feature_files:
        asked["name"].refuse("{given} is a name of --features, which keeps its meaning")
    if name not in known and len(known) >= MAX_REGISTERED:
        asked["name"].refuse(f"is one too many: {MAX_REGISTERED} have names; unregister one")
    root = Path(config.features_root).resolve()
    text = asked["path"].text("must be a path in the folder of features_root, got {given}")
    if "\0" in text or not (path := (root / text).resolve()).is_relative_to(root):
        asked["path"].refuse("{given} is not in the folder of features_root")
    point = asked["point"].point(shape, RESIDUAL_POINTS)
    layer = asked["layer"].int(0, message="must be a layer, got {given}")
    # Another stamp each time: the same path may have other numbers by now.
    file = FeatureFile(str(path), point, layer, uuid.uuid4().hex)
    try:
        need_feature_files({name: file}, shape)
    except InterventionError:
        raise
    except ValueError as error:
        raise InterventionError(str(error), parameter="path") from error
    return name, file
