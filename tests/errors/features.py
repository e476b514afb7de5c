# SPDX-License-Identifier: Apache-2.0
"""What is refused of features of sparse autoencoders."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch

from tests.errors.case import Case, path
from tests.support.autoencoders import save_autoencoder
from tests.support.plans import HIDDEN, SHAPE, VECTOR, config_of
from vllm.config.capture import CaptureConfig
from vllm.config.intervention_refusals import refuse_unsupported
from vllm.config.steering import FAMILIES, FeatureFile, FeaturePlace, SteeringConfig
from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.frontend.control.changes import ChangeBuilder
from vllm.v1.interventions.frontend.control.features import (
    bytes_of,
    files_in_places,
    read_features,
)
from vllm.v1.interventions.frontend.control.steering import AsyncSteering, _Coroutines
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.global_state import Change, Globals
from vllm.v1.interventions.makings import Features
from vllm.v1.interventions.named_features import need_feature_files, need_feature_places
from vllm.v1.interventions.scheduler.feature_room import FeatureRoom
from vllm.v1.interventions.worker.making.held import FeatureLoads, HeldFeatures
from vllm.v1.interventions.worker.making.shards import Shards

_FOLDER = tempfile.TemporaryDirectory()
"""Folder of the autoencoders, while this module is there."""


def saved(name: str, hidden: int = HIDDEN, **config: Any) -> str:
    number = 8
    tensors = {"W_enc": torch.ones(hidden, number), "W_dec": torch.ones(number, hidden)}
    tensors |= {"b_enc": torch.zeros(number), "b_dec": torch.zeros(hidden)}
    config = {"architecture": "standard", **config}
    return str(save_autoencoder(Path(_FOLDER.name) / name, tensors, **config))


FILES = {
    "mood": FeatureFile(saved("mood"), "post_block", 1),
    "top": FeatureFile(saved("top", architecture="topk", k=2), "post_block", 1),
    "normed": FeatureFile(saved("normed", normalize_activations="layer_norm"), "post_block", 1),
    "trans": FeatureFile(saved("trans", architecture="transcoder"), "post_attn", 1),
}
WIDE = FeatureFile(saved("wide", HIDDEN + 1), "post_block", 1)
OFFERED = msgspec.structs.replace(SHAPE, features=FILES)


def asked(**fields: Any) -> dict[str, Any]:
    config = config_of(OFFERED, steering_families=list(FAMILIES), max_steering_rows=64)
    return {**fields, "config": config}


def read(value: Any, **more: Any) -> dict[str, Any]:
    return asked(capture={"inline": {"features": value, **more}})


def logged() -> dict[str, Any]:
    """A request that a consumer gets which takes no features."""
    config = config_of(OFFERED, capture_consumers=["logging"])
    return {"capture": {"logging": {"features": MOOD}}, "config": config}


def write(**more: Any) -> dict[str, Any]:
    return asked(steering=[{"op": "feature", "features": "mood", "id": 1, "value": 1.0, **more}])


def rule(**more: Any) -> dict[str, Any]:
    return asked(rules=[{"name": "a", "features": "mood", "id": 1, "threshold": 1, **more}])


def register(known: int = 0, features_root: str | None = _FOLDER.name, **said: Any) -> object:
    config = SteeringConfig(features=["mood=sae@post_block.1"], features_root=features_root)
    given = {"name": "x", "path": "mood", "point": "post_block", "layer": 1, **said}
    known_files = {str(i): FILES["mood"] for i in range(known)}
    _, file, _ = read_features(given, config, SHAPE, known_files)
    return bytes_of(file, config_of(), SHAPE)


PLACED = SteeringConfig(
    enable_steering=True,
    steering_families=["reconstruct"],
    features_root=_FOLDER.name,
    features_reconstruct=["post_block.1=8", "post_block.1=7,k=3", "post_attn.1=9"],
)


def register_to_reconstruct(name: str, point: str = "post_block", layer: int = 1) -> object:
    given = {"name": "x", "path": name, "point": point, "layer": layer, "reconstruct": True}
    asked = read_features(given, PLACED, SHAPE, {})
    return files_in_places("x", asked.file, Autoencoder.load(asked.file.path), PLACED)


def without_a_place() -> object:
    """What a frontend says that finds all places taken."""

    class Taken(_Coroutines):
        async def _call(self, call: SteeringCall) -> list[dict[str, Any]]:
            return [{}, {"busy": True}]

    taken = Taken.__new__(Taken)
    return asyncio.run(taken._claim("x", [Change(), Change()]))


def too_late() -> object:
    change = Change(Globals(features={"x": FILES["mood"]}))
    return FeatureRoom(9).call(SteeringCall("claim", change=change), (), list)


def unregister() -> object:
    config = config_of()
    return ChangeBuilder(config, ModuleCatalog(config)).unregister_features("x")


def with_several_servers() -> object:
    config, core = config_of(), cast("Any", SimpleNamespace(client_count=2))
    steering = AsyncSteering(config, ModuleCatalog(config), core, cast("Any", None))
    return asyncio.run(steering.unregister_features("x"))


LATE = config_of(
    msgspec.structs.replace(SHAPE, features={"late": FILES["mood"]._replace(stamp="1")}),
    steering_families=list(FAMILIES),
    max_steering_rows=64,
)
READS_LATE = cast(
    "Any",
    SimpleNamespace(
        capture=SimpleNamespace(
            streams=[SimpleNamespace(making=Features("late", 8, 2, (), 0.0, False, "1"))]
        )
    ),
)


def too_large() -> object:
    change = Change(Globals(features={"x": FILES["mood"]}))
    return FeatureRoom(9).call(SteeringCall("load", change=change, num_bytes=96), (), list)


def without_memory() -> None:
    """What a worker says whose device is full."""
    file, full = FILES["mood"]._replace(path="sae", stamp="1"), Future[Autoencoder]()
    full.set_exception(torch.OutOfMemoryError())
    held = HeldFeatures({}, [1], torch.device("cpu"), torch.float32, 0, Shards())
    loads = FeatureLoads([held])
    loads._reading["1"] = full
    raise ValueError(loads.answer("loaded", "x", file))


AT, OP = "capture.inline.features", "steering[0]"
MOOD = {"name": "mood", "top": 2}
REBUILT = {"op": "reconstruct", "features": "mood"}
NOTHING_ON = SimpleNamespace(
    steering_config=SteeringConfig(features=["mood=sae@post_block.1"]),
    capture_config=CaptureConfig(),
)
FEATURES = [
    Case({}, do=lambda: refuse_unsupported(cast("Any", NOTHING_ON))),
    Case({"source": "/no/such.npz"}, do=lambda: Autoencoder.load("/no/such.npz")),
    Case(path(f"{AT}.name"), {**read(MOOD), "config": config_of()}),
    Case(
        path(f"{AT}.name", "'moods'", "mood, top, normed, trans"), read({**MOOD, "name": "moods"})
    ),
    Case(path(AT, "['k']", "name, top, ids, above, error"), read({**MOOD, "k": 1})),
    Case(path(AT), read({"name": "mood"})),
    Case(path(f"{AT}.top", "9", "0 to 8"), read({**MOOD, "top": 9})),
    Case(path(f"{AT}.ids", allowed="64"), read({"name": "mood", "ids": [0] * 65})),
    Case(path(f"{AT}.ids[1]", "8", "0-7"), read({"name": "mood", "ids": [0, 8]})),
    Case(path(f"{AT}.above", "-1"), read({**MOOD, "above": -1})),
    Case(
        path(f"{AT}.name", "'mood'", point="post_block", layer="1"),
        read(MOOD, hooks={"post_block": [0]}),
    ),
    Case(path(AT), read(MOOD, norms=True)),
    Case(path(f"{OP}.id", "8", "0-7"), write(id=8)),
    Case(path(f"{OP}.encoder"), write(encoder=VECTOR)),
    Case({"path": f"{OP}.features"}, write(features="top")),
    Case(
        path(f"{OP}.gate.cosine"),
        write(gate={"features": "mood", "id": 1, "threshold": 1, "sharpness": 1, "cosine": True}),
    ),
    Case({"path": f"{OP}.features", "given": "layer_norm"}, write(features="normed")),
    Case({"path": "rules[0].features", "given": "layer_norm"}, rule(features="normed")),
    Case({"path": f"{OP}.features"}, write(features="trans")),
    Case(path(f"{OP}.features", "'trans'"), asked(steering=[{**REBUILT, "features": "trans"}])),
    Case(
        path("steering[1]", place="post_block 1"),
        asked(steering=[{**REBUILT, "features": "normed"}, REBUILT]),
    ),
    Case(path(f"{AT}.error", "trans"), read({"name": "trans", "error": True})),
    Case(path("capture.logging.features"), logged()),
    Case(path("rules[0].threshold", "'x'"), rule(threshold="x")),
    Case(
        path("rules[0].threshold"),
        asked(rules=[{"name": "a", "features": "mood", "id": 1}]),
    ),
    Case(path("features"), do=lambda: register(features_root=None)),
    Case(path("name", "'a b'"), do=lambda: register(name="a b")),
    Case(path("name", "'mood'"), do=lambda: register(name="mood")),
    Case(path("name", allowed="64"), do=lambda: register(known=64)),
    Case(path("path", "3"), do=lambda: register(path=3)),
    Case(path("path", "'/etc/passwd'"), do=lambda: register(path="/etc/passwd")),
    Case({"source": f"{Path(_FOLDER.name).resolve()}/none"}, do=lambda: register(path="none")),
    Case(path("layer", "'x'"), do=lambda: register(layer="x")),
    Case(path("name", "'x'", "none"), do=unregister),
    Case(path("features"), do=with_several_servers),
    Case(
        path(f"{OP}.features", "'late'"),
        {**asked(steering=[{**REBUILT, "features": "late"}]), "config": LATE},
    ),
    Case(path("path", given="x", needed="96", left="9", allowed="9"), do=too_large),
    Case(
        path("reconstruct", place="pre_attn 1", site="pre_attn.1"),
        do=lambda: register_to_reconstruct("mood", "pre_attn"),
    ),
    Case(path("reconstruct", given="x"), do=lambda: register_to_reconstruct("trans", "post_attn")),
    Case(
        {"path": "reconstruct", "given": "x", "needed": "post_block.1=8,k=2"},
        do=lambda: register_to_reconstruct("top"),
    ),
    Case(path("reconstruct", "x"), do=without_a_place),
    Case(path("reconstruct", "3"), do=lambda: register(reconstruct=3)),
    Case(path("path", "x"), do=too_late),
    Case({}, do=lambda: SteeringConfig(features_reconstruct=["post_block.1=8"])),
    Case(
        {"given": "'post_block.1=8,k=9'"},
        do=lambda: SteeringConfig(features_reconstruct=["post_block.1=8,k=9"]),
    ),
    Case(
        {"path": "features_reconstruct", "point": "post_block", "layer": "99"},
        do=lambda: need_feature_places([FeaturePlace("post_block", 99, 8, 0)], SHAPE),
    ),
    Case({"given": "late"}, do=lambda: FeatureRoom(9).use(READS_LATE)),
    Case({"source": "sae"}, do=without_memory),
    Case({"given": "'mood=x'"}, do=lambda: SteeringConfig(features=["mood=x"])),
    Case(
        path("features.far", point="post_block", layer="99"),
        do=lambda: need_feature_files({"far": FILES["mood"]._replace(layer=99)}, SHAPE),
    ),
    Case(
        {"path": "features.wide", "given": "5", "allowed": "4"},
        do=lambda: need_feature_files({"wide": WIDE}, SHAPE),
    ),
]
