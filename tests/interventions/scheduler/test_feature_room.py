# SPDX-License-Identifier: Apache-2.0
"""Autoencoders that get a name while the engine serves: two workers have each, or none has; and
bytes are counted until the memory is free."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.autoencoders import made_up, save_autoencoder
from vllm.config.steering import FeatureFile, FeaturePlace
from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.features.sizes import size_of
from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.global_state import Change, Globals
from vllm.v1.interventions.makings import Features
from vllm.v1.interventions.plan import Plan
from vllm.v1.interventions.scheduler import feature_room
from vllm.v1.interventions.scheduler.feature_room import KEPT_SECONDS, FeatureRoom
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.worker.making import held as held_module
from vllm.v1.interventions.worker.making.held import FeatureLoads, HeldFeatures
from vllm.v1.interventions.worker.making.placed import PlaceTable
from vllm.v1.interventions.worker.making.shards import Shards

pytestmark = pytest.mark.quick

HIDDEN, FEATURES, LAYER = 24, 60, 3
SIZE = 2 * 4 * HIDDEN * FEATURES + 4 * (4 * FEATURES + HIDDEN)


SHAPE = TapShape(HIDDEN, "float32", {})
PLACES = [
    FeaturePlace("post_block", LAYER, features, k) for features, k in ((FEATURES + 4, 8), (9, 0))
]


class Worker:
    """Reads features of some layers, and has the places of these."""

    def __init__(self, *layers: int) -> None:
        cpu, sites = torch.device("cpu"), {("post_block", layer) for layer in layers}
        self.held = HeldFeatures({}, layers, cpu, torch.float32, 0, Shards())
        self.places = PlaceTable(PLACES, sites, SHAPE, cpu)
        self.loads = FeatureLoads([self.held, self.places])


@dataclass
class Engine:
    """The engine core's side with three workers: two of the layer, one of another."""

    room: FeatureRoom
    workers: list[Worker]
    now: float = 1000.0
    named: set[str] = field(default_factory=set)
    requests: list[Any] = field(default_factory=list)

    def ask(self, function: Callable[..., Any], args: Any) -> list[Any]:
        def whole(worker: Worker) -> Any:
            runner = SimpleNamespace(interventions=SimpleNamespace(hold=worker.loads.answer))
            return SimpleNamespace(worker=SimpleNamespace(model_runner=runner))

        return [function(whole(worker), *args) for worker in self.workers]

    def call(self, phase: Any, name: str, file: FeatureFile) -> dict[str, Any]:
        change = Change(Globals(features={name: file}))
        call = SteeringCall(phase, change=change, num_bytes=SIZE)
        return self.room.call(call, self.named, self.ask)

    def load(self, name: str, file: FeatureFile) -> None:
        assert self.call("load", name, file) == {}
        for worker in self.workers:
            wait(worker.loads._reading.values())
        while self.call("loaded", name, file):
            pass
        self.named.add(file.stamp)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.room.tidy(self.named, self.requests, self.ask)

    @property
    def held(self) -> list[set[str]]:
        return [set(worker.held.by_key) for worker in self.workers]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(FeatureRoom(2 * SIZE), [Worker(LAYER), Worker(LAYER), Worker(LAYER + 1)])
    monkeypatch.setattr(feature_room.time, "monotonic", lambda: engine.now)
    return engine


@pytest.fixture
def file(tmp_path: Path) -> FeatureFile:
    folder = save_autoencoder(tmp_path / "sae", made_up(1, HIDDEN, FEATURES))
    return FeatureFile(str(folder), "post_block", LAYER, "one")


def plan(name: str, stamp: str) -> Plan:
    stream = SimpleNamespace(making=Features(name, FEATURES, 2, (), 0.0, False, stamp))
    return cast("Any", SimpleNamespace(capture=SimpleNamespace(streams=[stream]), steering=None))


def request(of: Plan) -> Any:
    return SimpleNamespace(interventions=SimpleNamespace(plan=of))


def test_workers_of_the_layer_have_it(engine: Engine, file: FeatureFile) -> None:
    engine.load("mood", file)
    assert engine.held == [{"one"}, {"one"}, set()]
    want = Autoencoder.load(file.path)
    for worker in engine.workers[:2]:
        assert torch.equal(worker.held.by_key["one"].encoder, want.encoder)
    assert size_of(file.path, HIDDEN, 4).device == SIZE
    kept, weights = want.encoder.clone(), Path(file.path) / "sae_weights.safetensors"
    header = len(weights.read_bytes()) - sum(4 * t.numel() for t in made_up(1, HIDDEN, 60).values())
    with weights.open("r+b") as stream:  # somebody writes other numbers in its place
        stream.seek(header)
        stream.write(bytes(weights.stat().st_size - header))
    assert not want.encoder.any()
    for worker in engine.workers[:2]:
        assert torch.equal(worker.held.by_key["one"].encoder, kept)


@pytest.mark.parametrize("error", [ValueError("sae: W_dec is short"), torch.OutOfMemoryError()])
def test_all_have_it_or_none(
    engine: Engine, file: FeatureFile, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two finds what the first does not."""
    read, count = held_module._read, iter(range(9))

    def once(given: FeatureFile) -> Autoencoder:
        if next(count) == 1:
            raise error
        return read(given)

    monkeypatch.setattr(held_module, "_read", once)
    said = r"^sae: W_dec is short$|sae finds no memory on the device$"
    with pytest.raises(InterventionError, match=said) as raised:
        engine.load("mood", file)
    assert raised.value.parameter == "path"
    assert engine.held == [set(), set(), set()]
    assert not any(worker.loads._reading for worker in engine.workers)
    engine.load("mood", file._replace(stamp="two"))
    engine.load("more", file._replace(stamp="three"))
    assert engine.held[0] == engine.held[1] == {"two", "three"}


def test_bytes_are_counted_until_they_are_free(engine: Engine, file: FeatureFile) -> None:
    engine.load("mood", file)
    engine.load("mood", file._replace(stamp="two"))
    engine.named.discard("one")
    with pytest.raises(InterventionError, match=f"path: more takes {SIZE} bytes, and 0 of"):
        engine.load("more", file._replace(stamp="three"))
    engine.requests = [request(plan("mood", "one"))]
    engine.wait(3 * KEPT_SECONDS)
    assert engine.held[0] == {"one", "two"}, "a request uses it"
    engine.now += KEPT_SECONDS
    engine.room.left(engine.requests.pop().interventions.plan)
    engine.wait(KEPT_SECONDS)
    engine.room.use(plan("mood", "one"))
    engine.wait(KEPT_SECONDS)
    assert engine.held[0] == {"one", "two"}, "one was on its way"
    engine.wait(1)
    assert engine.held == [{"two"}, {"two"}, set()]
    engine.load("more", file._replace(stamp="three"))
    with pytest.raises(ValueError, match="features: mood was unregistered or registered anew"):
        engine.room.use(plan("mood", "one"))


def test_a_load_that_is_given_up(engine: Engine, file: FeatureFile) -> None:
    """By its frontend, or because that is gone; one that has its name by then stays."""
    engine.call("load", "mood", file)
    engine.call("unload", "mood", file)
    assert engine.held == [set(), set(), set()] and not engine.workers[0].loads._reading
    engine.load("mood", file)
    engine.call("unload", "mood", file)
    assert engine.held[0] == {"one"}
    engine.call("load", "more", file._replace(stamp="two"))
    engine.wait(KEPT_SECONDS + 1)
    engine.load("more", file._replace(stamp="three"))
    assert engine.held[1] == {"one", "three"}


def put(engine: Engine, name: str, file: FeatureFile, place: int) -> FeatureFile:
    """Load, in a place."""
    placed = file._replace(place=place)
    assert engine.call("load", name, file) == {}
    assert engine.call("claim", name, placed) == {}
    for worker in engine.workers:
        wait(worker.loads._reading.values())
    assert engine.call("loaded", name, placed) == {}
    engine.named.add(file.stamp)
    return placed


def reconstructs(name: str, stamp: str) -> Plan:
    terms = [SimpleNamespace(features=None), SimpleNamespace(features=(name, stamp))]
    return cast("Any", SimpleNamespace(capture=None, steering=SimpleNamespace(terms=terms)))


def test_a_place_has_one_until_nobody_uses_it(engine: Engine, file: FeatureFile) -> None:
    put(engine, "mood", file, 1)
    want = Autoencoder.load(file.path)
    for worker in engine.workers[:2]:
        here, other = worker.places.at["post_block", LAYER]
        assert torch.equal(here.encoder[:, :FEATURES], want.encoder) and not other.encoder.any()
    assert not engine.workers[2].places.at
    later = file._replace(stamp="two")
    engine.call("load", "mood", later)
    assert engine.call("claim", "mood", later._replace(place=1)) == {"busy": True}
    assert engine.call("claim", "mood", later._replace(point="pre_attn", place=1)) == {}
    assert engine.call("claim", "mood", later._replace(place=2)) == {}
    engine.call("unload", "mood", later)
    engine.named.discard("one")
    engine.requests = [request(reconstructs("mood", "one"))]
    engine.wait(3 * KEPT_SECONDS)
    engine.call("load", "mood", later)
    assert engine.call("claim", "mood", later._replace(place=1)) == {"busy": True}, "one is at work"
    engine.room.left(engine.requests.pop().interventions.plan)
    engine.wait(KEPT_SECONDS)
    engine.room.use(reconstructs("mood", "one"))
    engine.wait(KEPT_SECONDS)
    assert "one" in engine.held[0], "one was on its way"
    engine.wait(1)
    with pytest.raises(InterventionError, match="loading mood took so long that it was given up"):
        engine.call("claim", "mood", later._replace(place=1))
    put(engine, "mood", later, 1)
    with pytest.raises(ValueError, match="features: mood was unregistered or registered anew"):
        engine.room.use(reconstructs("mood", "one"))
