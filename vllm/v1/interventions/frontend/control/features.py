# SPDX-License-Identifier: Apache-2.0
"""Autoencoders that get a name while the engine serves, of files in the operator's folder.

Operations, gates and rules name their features: these become vectors where a request is planned,
so that requests keep what a name meant, blocks of the prefix cache are told apart by the vectors,
and no worker has to know. Activations of rows are made by workers, which hold an autoencoder by its
stamp before it has a name; for reconstructions they have it in one of the places that the operator
asked for.
"""

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config.points import RESIDUAL_POINTS
from vllm.config.steering import FEATURES_NAME, FeatureFile, FeaturePlace, SteeringConfig
from vllm.v1.features.autoencoder import Autoencoder, opened
from vllm.v1.features.sizes import size_of
from vllm.v1.interventions.errors import InterventionError, reject
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.named_features import need_feature_files
from vllm.v1.interventions.shape import TapShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_REGISTERED = 64
"""The most that may have a name at once."""


class Asked(NamedTuple):
    """An autoencoder that is to get a name."""

    name: str
    file: FeatureFile
    reconstruct: bool
    """True if rows are to be reconstructed by it."""


def read_features(
    given: Mapping[str, Any],
    config: SteeringConfig,
    shape: TapShape,
    known: Mapping[str, FeatureFile],
) -> Asked:
    """Check an autoencoder that is to get a name. Its file is not looked into.

    Args:
        given: `name`, `path` in the folder of `features_root`, and the `point` and `layer` of its
            rows; and maybe `reconstruct`.
        known: those that have a name since the start.

    Raises:
        ValueError: there is no such folder, the path leads out of it, the name is one of the start
            or there are too many, the layer is no number, or nothing is reconstructed at the site;
            the message names the field.
    """
    if config.features_root is None:
        reject("features", "needs an engine started with features_root (--features-root FOLDER)")
    asked = Given(given, "").fields(("name", "path", "point", "layer"), ("reconstruct",))
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
    wanted = asked.get("reconstruct", False).flag()
    if wanted and not _places(config, point, layer):
        asked["reconstruct"].refuse(
            f"no place is kept for autoencoders at {point} {layer}: start the engine with one "
            f"(--features-reconstruct {point}.{layer}=FEATURES), or leave this out"
        )
    # Another stamp each time: the same path may have other numbers by now.
    return Asked(name, FeatureFile(str(path), point, layer, uuid.uuid4().hex), wanted)


def _places(config: SteeringConfig, point: str, layer: int) -> dict[int, FeaturePlace]:
    """Return the places of a site by their numbers."""
    here = [p for p in config.feature_places if (p.point, p.layer) == (point, layer)]
    return dict(enumerate(here, 1))


def files_in_places(
    name: str, file: FeatureFile, autoencoder: Autoencoder, config: SteeringConfig
) -> list[FeatureFile]:
    """Return a file that rows are to be reconstructed by in each place that it fits in, the
    smallest first.

    Raises:
        ValueError: it fits in none, or is a transcoder; the message names the field.
    """
    if autoencoder.transcodes:
        reject("reconstruct", f"{name} is a transcoder: nothing stands in place of the row")
    places = _places(config, file.point, file.layer)
    size, k = autoencoder.num_features, autoencoder.k
    fit = {n: p for n, p in places.items() if size <= p.features and k <= p.k}
    if not fit:
        said = ", ".join(config.features_reconstruct)
        needed = f"{file.point}.{file.layer}={size}" + (f",k={k}" if k else "")
        reject(
            "reconstruct",
            f"{name} fits in no place of features_reconstruct, which has {said}: start the engine "
            f"with one of at least {needed}",
        )
    return [file._replace(place=n) for n in sorted(fit, key=lambda n: fit[n].features)]


def bytes_of(file: FeatureFile, config: "VllmConfig", shape: TapShape) -> int:
    """Return the bytes that an autoencoder takes, on a device that reads rows, or in a process that
    has it open, whichever is more.

    Raises:
        ValueError: the file cannot be read; the message names it.
    """
    on_gpu = config.device_config.device_type == "cuda"
    with _of_path():
        itemsize, parallel = shape.torch_dtype.itemsize if on_gpu else 4, config.parallel_config
        size = size_of(file.path, shape.hidden_size, itemsize, parallel.tensor_parallel_size)
    return max(size.host, size.device if config.capture_config.enabled else 0)


def open_file(name: str, file: FeatureFile, shape: TapShape) -> Autoencoder:
    """Open the file of an autoencoder, and check it.

    Raises:
        ValueError: it cannot be read, or the model has no such site; the message names file and
            tensor.
    """
    with _of_path():
        need_feature_files({name: file}, shape)
        return opened(file)


@contextmanager
def _of_path() -> Iterator[None]:
    """Within, what is wrong with a file is said of the field `path`."""
    try:
        yield
    except InterventionError:
        raise
    except ValueError as error:
        raise InterventionError(str(error), parameter="path") from error
