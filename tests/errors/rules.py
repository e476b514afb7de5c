# SPDX-License-Identifier: Apache-2.0
"""What is refused of `rules`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.errors.case import Case, path
from tests.support.plans import HIDDEN, NOBODY, SHAPE, VECTOR, config_of
from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.capture import CaptureConfig
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from vllm.v1.interventions.frontend.control.steering import AsyncSteering
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.resolve import refuse_beam_search
from vllm.v1.interventions.global_state import startup_state
from vllm.v1.probes.files import load_probe, made_probe, probe_from_torch
from vllm.v1.steering import rule_files
from vllm.v1.steering.modules import parse_module
from vllm.v1.steering.rule_files import parse_operator_rules, read_rules_file, read_webhook

SELECTORS = (
    "last_prompt, all_prompt, all_generated, last_generated, predicting, all, "
    "a list of positions, {'start', 'stop', 'step', 'of'}, {'at', 'of'}, {'text', 'which'}, "
    "{'token_ids', 'which'}, {'role', 'turn'}, {'images'}, {'modality'} or a list of these, "
    "with {'except'}"
)
RULE: dict[str, Any] = {
    "name": "toxic",
    "point": "post_block",
    "layer": 1,
    "probe": VECTOR,
    "threshold": 0.5,
}


ABLATE: dict[str, Any] = {"op": "ablate", "point": "post_block", "layers": [1], "direction": VECTOR}


def rule(**fields: Any) -> dict[str, Any]:
    """A request for one rule; a field given as None is left out."""
    return {"rules": [{k: v for k, v in {**RULE, **fields}.items() if v is not None}]}


def forces(ids: Any) -> dict[str, Any]:
    return rule(then={"force": ids})


def all_forced() -> dict[str, Any]:
    """A request that the operator's rule judges."""
    catalog = ModuleCatalog(config_of())
    given = forces([1])["rules"]
    catalog.state.rules[""] = parse_operator_rules(given, "rules", config_of(), {})
    return {"catalog": catalog}


def connected() -> VllmConfig:
    config = config_of()
    config.kv_transfer_config = KVTransferConfig()
    return config


def by_module(name: Any) -> dict[str, Any]:
    config = config_of()
    vectors = {"one": {0: VECTOR}, "zero": {1: [0.0] * HIDDEN}}
    modules = {
        each: parse_module({"post_block": layers}, each, SHAPE, config.steering_config)
        for each, layers in vectors.items()
    }
    return {**rule(probe=None, module=name), "modules": modules}


def judged(ours: Any = (), **fields: Any) -> dict[str, Any]:
    """A request beside rules of the operator."""
    catalog = ModuleCatalog(config_of())
    catalog.state.rules[""] = parse_operator_rules([RULE, *ours], "rules", config_of(), {})
    return {"catalog": catalog, **fields}


def set_rules(value: Any, config: VllmConfig | None = None) -> object:
    return parse_operator_rules(value, "rules", config or config_of(), {})


def of_file(content: str) -> object:
    """An engine that starts with such a file."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(content)
        file.flush()
        return startup_state(config_of(rules=file.name))


def large() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule_files, "MAX_FILE_BYTES", 20)
        return of_file(json.dumps({"rules": [RULE]}))


def several_servers() -> object:
    """Rules for all, where two API servers share the engines and were started without some."""
    core = cast("Any", SimpleNamespace(client_count=2))
    config = config_of()
    return asyncio.run(AsyncSteering(config, ModuleCatalog(config), core, NOBODY).set_rules([]))


def beams() -> object:
    config = config_of(steering=False)
    refuse_beam_search(BeamSearchParams(2, 4), config, judged()["catalog"])
    return None


OPERATORS = [
    Case(path("rules", "'toxic'", "0-32"), do=lambda: set_rules("toxic")),
    Case(path("rules", "33"), do=lambda: set_rules([{**RULE, "name": f"r{i}"} for i in range(33)])),
    Case(path("rules[1].name"), do=lambda: set_rules([RULE, RULE])),
    Case(path("rules[0].threshold"), do=lambda: set_rules([{**RULE, "threshold": "x"}])),
    Case(path("rules[0].over"), do=lambda: set_rules([{**RULE, "over": [0, 1]}])),
    Case(path("rules[0].over"), do=lambda: set_rules([{**RULE, "over": {"text": "a"}}])),
    Case(path("rules[0].over"), do=lambda: set_rules([{**RULE, "over": "last_generated"}])),
    Case(path("rules[0].over"), do=lambda: set_rules([{**RULE, "over": []}])),
    Case(path("rules"), do=lambda: set_rules([RULE], config_of(capture=False))),
    Case(
        path("rules[0].post_block", allowed="['pre_attn']"),
        do=lambda: set_rules([RULE], config_of(capture_points=["pre_attn"])),
    ),
    Case(
        path("rules[0].module", "'none'", "none"),
        do=lambda: set_rules([{**rule(probe=None)["rules"][0], "module": "none"}]),
    ),
    Case({}, do=lambda: of_file(json.dumps({"rules": [{**RULE, "layer": 9}]}))),
    Case({}, do=lambda: of_file("[")),
    Case({}, do=lambda: of_file('{"rules": [], "rules": []}')),
    Case({}, do=lambda: of_file("[]")),
    Case({}, do=lambda: read_rules_file("/nowhere/rules.json")),
    Case({}, do=large),
    Case({}, do=lambda: CaptureConfig(rules="rules.json")),
    Case(path("rules"), do=several_servers),
    Case(path("beam_search"), do=beams),
    Case(path("rules[0].name", "'toxic'"), judged(**rule())),
    Case(
        path("rules", "31", "30"),
        judged([{**RULE, "name": "b"}], rules=[{**RULE, "name": f"r{i}"} for i in range(31)]),
    ),
    Case(path("rules"), judged(resumable=True, config=config_of(steering=False))),
    Case(path("steering_modules[0]", "'_rules'", "none"), judged(steering_modules=["_rules"])),
]

R = "rules[0]"
P = f"{R}.probe"
SITES = [["post_block", 1], ["pre_attn", 3]]
FIELDS: dict[str, Any] = {"sites": SITES, "weight": [VECTOR, VECTOR], "bias": [0.5]}
MLP: dict[str, Any] = {
    **FIELDS,
    "activation": "relu",
    "output_weight": [[1.0]],
    "output_bias": [0.0],
}

WIDE = {**MLP, "weight": np.ones((8, 2, HIDDEN)), "bias": [0.0] * 8, "output_weight": [[1.0] * 8]}


def probe(of: dict[str, Any] = FIELDS, **fields: Any) -> dict[str, Any]:
    """A request for a rule of a probe with its own sites; a field given as None is left out."""
    kept = {k: v for k, v in {**of, **fields}.items() if v is not None}
    return rule(point=None, layer=None, probe=kept)


def pooled_prompt() -> dict[str, Any]:
    """A request for a rule whose pool goes through all of the prompt."""
    [one] = probe(pool={"kind": "mean"})["rules"]
    return {"rules": [{**one, "over": "prompt"}]}


def served(sites: int, hidden: int = HIDDEN) -> dict[str, Any]:
    at = [("pre_attn", i) for i in range(sites)]
    made = made_probe(at, np.ones((1, sites, hidden)), np.zeros(1))
    return rule(point=None, layer=None, probe=made)


def probe_file(about: Any = None, **tensors: np.ndarray) -> object:
    """A file with the tensors and what its metadata say."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        metadata = None if about is None else {"vllm_probe": json.dumps(about)}
        save_file(tensors, file.name, metadata)
        return load_probe(file.name)


def not_rules(probe: Any) -> object:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"rules": [{"name": "a", "probe": probe, "threshold": 0}]}, file)
        file.flush()
        return read_rules_file(file.name)


def hooked(webhook: Any) -> object:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"rules": [], "webhook": webhook}, file)
        file.flush()
        return read_webhook(file.name)


def state_dict(state: Any) -> object:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(state, file.name)
        return probe_from_torch(file.name, [("post_block", 1)])


ABOUT = {"version": 1, "sites": [["post_block", 1]]}
WEIGHT = np.ones((1, 1, HIDDEN), np.float32)
BIAS = np.zeros(1, np.float32)

PROBES = [
    Case(path(f"{R}.point"), rule(probe=FIELDS)),
    Case(path(f"{R}.layer"), rule(point=None, probe=FIELDS)),
    Case(
        path(f"{R}.threshold"), probe() | {"rules": [{**probe()["rules"][0]} | {"threshold": "x"}]}
    ),
    Case(path(P, "['weights']"), probe(weights=1)),
    Case(path(f"{P}.weight"), probe(weight=None)),
    Case(path(f"{P}.sites", "int", "1-64") | {"given": "3"}, probe(sites=3)),
    Case(path(f"{P}.sites", "65", "1-64"), probe(sites=[SITES[0]] * 65)),
    Case(path(f"{P}.sites", "65", "64"), served(65)),
    Case(path(f"{P}.sites[0]", "1"), probe(sites=[["post_block"], SITES[0]])),
    Case(path(f"{P}.sites[0]", "3"), probe(sites=[3, SITES[0]])),
    Case(path(f"{P}.sites[1]", "'x'"), probe(sites=[SITES[0], "x"])),
    Case(
        path(f"{P}.sites[0]", "7") | {"path": f"{P}.sites[0][0]"}, probe(sites=[[7, 1], SITES[0]])
    ),
    Case(path(f"{P}.sites[0][1]", "'1'"), probe(sites=[["post_block", "1"], SITES[0]])),
    Case(path(f"{P}.sites[0][0]", "'mlp'"), probe(sites=[["mlp", 1], SITES[0]])),
    Case(path(f"{P}.sites[1][1]", "9"), probe(sites=[SITES[0], ["post_block", 9]])),
    Case(path(f"{P}.weight", "3", "2"), probe(weight=[VECTOR] * 3)),
    Case(path(f"{P}.weight", "513", "512"), probe(weight=[VECTOR] * 513)),
    Case(path(f"{P}.weight[0]", "3"), probe(weight=[VECTOR[:3], VECTOR])),
    Case(path(f"{P}.weight", "int64"), probe(weight=np.ones((2, HIDDEN), int))),
    Case(path(f"{P}.weight", "3", "4"), served(1, 3)),
    Case(path(f"{P}.weight", "8", "4"), probe(WIDE)),
    Case(path(f"{P}.weight[1]"), probe(weight=np.array([[1.0] * 4, [1.0, np.nan, 0, 0]]))),
    Case(path(f"{P}.bias", "2"), probe(bias=[0.0, 1.0])),
    Case(path(f"{P}.bias"), probe(bias=[float("inf")])),
    Case(path(f"{P}.activation", "3"), probe(activation=3)),
    Case(path(P), probe(MLP, activation="swish")),
    Case(path(P), probe(MLP, output_bias=None)),
    Case(path(P), probe(output_bias=[0.0])),
    Case(path(f"{P}.output_weight", "33", "32"), probe(MLP, output_weight=[[1.0]] * 33)),
    Case(path(P), probe(MLP, output_bias=[0.0, 1.0])),
    Case(path(P), probe(sites=[SITES[0]] * 2)),
    Case(path(f"{P}.pool"), probe(pool={"kind": "median"})),
    Case(path(f"{P}.pool"), probe(pool={"kind": "exponential", "a": 1.5})),
    Case(path(f"{P}.pool"), probe(pool={"kind": "rolling_max", "window": 0})),
    Case(path(f"{P}.pool", "['width']"), probe(pool={"kind": "mean", "width": 2})),
    Case(path(f"{P}.pool", "'mean'"), probe(pool="mean")),
    Case(
        path(R, allowed="16384"),
        {
            **pooled_prompt(),
            "prompt": 5000,
            "config": config_of(max_request_work=1 << 14),
        },
    ),
    Case(path(P), probe(pool={"kind": "attention"})),
    Case({}, do=lambda: probe_file(weight=WEIGHT, bias=BIAS)),
    Case({}, do=lambda: probe_file({**ABOUT, "version": 2}, weight=WEIGHT, bias=BIAS)),
    Case({}, do=lambda: probe_file({**ABOUT, "sites": 3}, weight=WEIGHT, bias=BIAS)),
    Case({}, do=lambda: probe_file(ABOUT, weight=WEIGHT)),
    Case({}, do=lambda: probe_file(ABOUT, weight=WEIGHT, bias=BIAS, more=BIAS)),
    Case({}, do=lambda: probe_file(ABOUT, weight=WEIGHT, bias=BIAS + np.float32(np.nan))),
    Case({}, do=lambda: not_rules({"file": "nowhere.safetensors"})),
    Case({}, do=lambda: hooked("nowhere")),
    Case({}, do=lambda: hooked({"url": "ftp://a"})),
    Case({}, do=lambda: hooked({"url": "http://a", "queue": 0})),
    Case({}, do=lambda: hooked({"url": "http://a", "secret": "x"})),
    Case({}, do=lambda: hooked({"url": "http://a", "secret_file": "/nowhere/secret"})),
    Case({}, do=lambda: state_dict([1])),
    Case({}, do=lambda: state_dict({"head": torch.ones(2)})),
]
RULES = [
    *OPERATORS,
    Case(path("rules", "'toxic'", "1-32"), {"rules": "toxic"}),
    Case(path("rules", "dict", "1-32"), {"rules": RULE}),
    Case(path("rules", "0", "1-32"), {"rules": []}),
    Case(path("rules", "33", "1-32"), {"rules": [{**RULE, "name": f"r{i}"} for i in range(33)]}),
    Case(path(R, "3"), {"rules": [3]}),
    Case(path(R, "['treshold']"), rule(treshold=1)),
    Case(path(f"{R}.threshold"), rule(threshold=None)),
    Case(path(f"{R}.name", "'a b'"), rule(name="a b")),
    Case(path(f"{R}.name"), rule(name="x" * 65)),
    Case(path(f"{R}.name", "7"), rule(name=7)),
    Case(path("rules[1].name", "'toxic'"), {"rules": [RULE, RULE]}),
    Case(path(f"{R}.point", "'z'"), rule(point="z")),
    Case(path(f"{R}.point", "list"), rule(point=[])),
    Case(path(f"{R}.layer", "4"), rule(layer=4)),
    Case(path(f"{R}.layer"), rule(layer=[0, 1])),
    Case(path(f"{R}.layer"), rule(layer="all")),
    Case(path(f"{R}.threshold", "nan"), rule(threshold=float("nan"))),
    Case(path(f"{R}.threshold", "inf"), rule(threshold=float("inf"))),
    Case(path(f"{R}.threshold", "'1'"), rule(threshold="1")),
    Case(path(f"{R}.probe", "3"), rule(probe=VECTOR[:3])),
    Case(path(f"{R}.probe[1]", "'x'"), rule(probe=[0, "x", 0, 0])),
    Case(path(f"{R}.probe", "[2, 4]"), rule(probe=np.ones((2, 4)))),
    Case(path(f"{R}.probe"), rule(probe=np.array([1.0, np.nan, 0.0, 0.0]))),
    Case(path(f"{R}.probe"), rule(probe=np.full(HIDDEN, 1e300))),
    *PROBES,
    Case(path(R), rule(probe=None)),
    Case(path(R), rule(module="one")),
    Case(path(R), rule(dose=True)),
    Case(path(f"{R}.dose"), rule(probe=None, dose=False)),
    Case(path(f"{R}.dose", "1"), rule(probe=None, dose=1)),
    Case(
        path("rules (toxic)", point="post_block", layer="1"),
        {
            **rule(probe=None, dose=True, layer="all"),
            "steering": [ABLATE],
            "config": config_of(steering_families=["add", "ablate"]),
        },
    ),
    Case(path(f"{R}.module", "'none'", "one, zero"), by_module("none")),
    Case(path(f"{R}.module", "dict"), by_module({})),
    Case(path(f"{R}.module", point="post_block", layer="1", name="one"), by_module("one")),
    Case(path(f"{R}.module", point="post_block", layer="1"), by_module("zero")),
    Case(path(f"{R}.below", "1"), rule(below=1)),
    Case(path(f"{R}.then", "'abort'"), rule(then="abort")),
    Case(path(f"{R}.then", "list"), rule(then=["stop"])),
    Case(path(f"{R}.then"), rule(then={})),
    Case(path(f"{R}.then.force", "0", "1-256"), forces([])),
    Case(path(f"{R}.then.force", "257", "1-256"), forces([1] * 257)),
    Case(path(f"{R}.then.force", "'</think>'", "1-256"), forces("</think>")),
    Case(path(f"{R}.then.force[1]", "100", "0 to 99"), forces([1, 100])),
    Case(path(f"{R}.then.force[0]", "-1", "0 to 99"), forces([-1])),
    Case(path(f"{R}.then.force[0]", "True", "0 to 99"), forces([True])),
    Case(path("logprobs", "rule 'toxic'"), {**forces([1]), "logprobs": 1}),
    Case(path("logprobs", "the operator's rule 'toxic'"), {**all_forced(), "logprobs": 1}),
    Case(
        path("logprob_token_ids", "rule 'toxic'"),
        {**forces([1]), "logprob_token_ids": [1]},
    ),
    Case(
        path("structured_outputs", "rule 'toxic'"),
        {**forces([1]), "structured_outputs": StructuredOutputsParams(regex="a")},
    ),
    Case(path("prompt", "rule 'toxic'"), {**forces([1]), "images": [(1, 3)]}),
    Case(path("prompt", "rule 'toxic'"), {**forces([1]), "embedded": [1]}),
    Case(path("kv_transfer_config", "rule 'toxic'"), {**forces([1]), "config": connected()}),
    Case(path(f"{R}.need", "0", "1048576"), rule(need=0)),
    Case(path(f"{R}.need", "True", "1048576"), rule(need=True)),
    Case(path(f"{R}.of", "2.0", "1048576"), rule(of=2.0)),
    Case(path(f"{R}.of", "1048577", "1048576"), rule(of=(1 << 20) + 1)),
    Case(path(f"{R}.need", "3", "2"), rule(need=3, of=2)),
    Case(path(f"{R}.over", "'answer'", SELECTORS), rule(over="answer")),
    Case(path(f"{R}.over"), rule(over="last_generated")),
    Case(path(f"{R}.over"), rule(over=["all_prompt", "last_generated"])),
    Case(path(f"{R}.over.at[0]", "-1"), rule(over={"at": [-1], "of": "generated"})),
    Case(path(f"{R}.over", "1", "0", prompt="5"), {**rule(), "max_tokens": 1}),
    Case(
        path(f"{R}.post_block", allowed="['pre_attn']"),
        {**rule(), "config": config_of(capture_points=["pre_attn"])},
    ),
    Case(path("rules"), {**rule(), "config": config_of(capture=False)}),
    Case(path("rules", "16", "8"), {**rule(), "config": config_of(capture_buffer_bytes=8)}),
]
