# SPDX-License-Identifier: Apache-2.0
"""Features that operations, gates and rules name in place of vectors, written out.

{"op": "feature", "features": "mood", "id": 7, "value": 8}
{"op": "add", "features": "mood", "id": 7, "scale": 4, "positions": "generated"}
"gate": {"features": "mood", "id": 7, "threshold": 0.5, "sharpness": 1000}
{"name": "angry", "features": "mood", "id": 7, "threshold": 2, "then": "stop"}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config.operations import OPERATIONS
from vllm.config.steering import FeatureFile, FeaturePlace
from vllm.v1.features.autoencoder import Autoencoder, opened
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_one_lane
from vllm.v1.interventions.values import plain

_NAMED = ("features", "id")


def need_features(given: Given, shape: TapShape) -> FeatureFile:
    """Return the autoencoder of a name. Raises ValueError if there is none."""
    if not shape.features:
        given.refuse("needs an engine started with features (--features NAME=PATH@POINT.LAYER)")
    message = f"unknown features {{given}}; known are {', '.join(shape.features)}"
    return shape.features[given.choice(shape.features, message)]


def need_feature_files(files: Mapping[str, FeatureFile], shape: TapShape) -> None:
    """Check the autoencoders of `--features`, and have their files open.

    Raises:
        ValueError: a file cannot be read, reads rows of another width, or the model has no such
            site; the message names it.
    """
    for name, file in files.items():
        path = f"features.{name}"
        if file.point not in shape.offers(file.layer):
            reject(path, f"the model has no {file.point} of layer {file.layer}")
        width = opened(file).hidden_size
        if width != shape.hidden_size:
            reject(path, f"{file.path} reads rows of {width}, the model's have {shape.hidden_size}")


def need_feature_places(places: Sequence[FeaturePlace], shape: TapShape) -> None:
    """Raise ValueError if the model has not the site of a place for reconstructions."""
    for place in places:
        need_one_lane("features_reconstruct", shape)
        if place.point not in shape.offers(place.layer):
            reject("features_reconstruct", f"the model has no {place.point} of layer {place.layer}")


def written_out(entry: Given, shape: TapShape) -> Given:
    """Return an operation with the vectors and numbers of the feature that it names, at the site of
    the autoencoder unless it says another one; an entry that names none as it is.

    What a transcoder decodes is a part of the layer's `post_block`.

    Raises:
        ValueError: there is no such feature, or the operation reads activations, which those of
            this file cannot be by themselves; or the entry has a vector, too.
    """
    operation = OPERATIONS.get(str(plain(entry.mapping().get("op"))))
    if "features" not in entry or operation is None:
        return entry
    file, autoencoder, number = _found(entry, shape)
    point = "post_block" if autoencoder.transcodes else file.point
    made: dict[str, Any] = {"point": point, "layers": file.layer}
    if operation.reads:
        found = _found_by(autoencoder.feature, number, entry)
        names = {"encoder": operation.reads, "decoder": operation.vector}
        own = {names.get(key, key): value for key, value in found.items()}
    else:
        own = {operation.vector: autoencoder.direction(number)} if operation.vector else {}
    return _with(entry, made, own)


def probe_written_out(gate: Given, shape: TapShape) -> Given:
    """Return a gate with the probe of the feature that it names: it opens where the activation is
    above the threshold. Raises ValueError as `written_out`."""
    if "features" not in gate.mapping():
        return gate
    if "cosine" in gate:
        gate["cosine"].refuse("is of a probe; an activation is no cosine: leave it out")
    _, autoencoder, number = _found(gate, shape)
    return _with(gate, {}, _probe(autoencoder, number, gate))


def rule_written_out(rule: Given, shape: TapShape) -> Given:
    """Return a rule with the site and the probe of the feature that it names: its score is the
    activation before the bias. Raises ValueError as `written_out`."""
    if "features" not in rule.mapping():
        return rule
    file, autoencoder, number = _found(rule, shape)
    site = {"point": file.point, "layer": file.layer}
    return _with(rule, {}, site | _probe(autoencoder, number, rule))


def _found(entry: Given, shape: TapShape) -> tuple[FeatureFile, Autoencoder, int]:
    file = need_features(entry["features"], shape)
    autoencoder = opened(file)
    most = autoencoder.num_features - 1
    unknown = f"must be a feature, 0-{most}, got {{given}}"
    return file, autoencoder, entry["id"].int(0, most, unknown)


def _found_by(
    look_up: Callable[[int], dict[str, Any]], number: int, entry: Given
) -> dict[str, Any]:
    try:
        return look_up(number)
    except ValueError as error:
        entry["features"].refuse(str(error))


def _probe(autoencoder: Autoencoder, number: int, entry: Given) -> dict[str, Any]:
    """Return the probe, and the threshold of its product with the row: an activation is greater
    than a number where the product, with the bias, is greater than it and than the autoencoder's
    threshold."""
    found = _found_by(autoencoder.probe, number, entry)
    if "threshold" not in entry:
        entry["threshold"].refuse("is missing: the activation to compare with")
    least = max(entry["threshold"].number(), found["threshold"])
    return {"probe": found["encoder"], "threshold": least - found["bias"]}


def _with(entry: Given, default: Mapping[str, Any], own: Mapping[str, Any]) -> Given:
    """Return an entry without the feature's name, with more keys.

    Args:
        default: those that the entry may give itself.
        own: those that it may not, but for a threshold, which is read already.
    """
    rest = {key: value for key, value in entry.value.items() if plain(key) not in _NAMED}
    for key in own:
        if key in rest and key != "threshold":
            entry[key].refuse("is the feature's own: leave it out, or name no features")
    return Given({**default, **rest, **own}, entry.path)
