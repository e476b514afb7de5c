# SPDX-License-Identifier: Apache-2.0
"""Work that alike requests cost once: digests, names, plans; none on the vectors of modules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from tests.support.plans import HIDDEN, SHAPE, config_of, plan_of
from vllm import SamplingParams
from vllm.v1.interventions import vectors
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.request import memo, module_plans, resolve
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.global_state import Globals
from vllm.v1.interventions.plan import Plan
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.scheduler.module_sets import ModuleSets
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.steering.modules import Module, parse_module

pytestmark = pytest.mark.quick

REQUESTS = 256
CONFIG = config_of(default_steering_modules=["by default"])
SITES = [(point, layer) for layer in (0, 1, 3) for point in ("pre_attn", "post_attn", "post_block")]
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float32": torch.Tensor.clone,
    "bfloat16": torch.Tensor.bfloat16,
    "numpy": lambda v: v.numpy().copy(),
    "list": torch.Tensor.tolist,
}


def tier(form: str, number: float = 1.0) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for i, (point, layer) in enumerate(SITES):
        value.setdefault(point, {})[layer] = FORMS[form](torch.full((HIDDEN,), number + i))
    return value


class Counted:
    """How often something is called, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        call = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(args)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


def digested(counted: Counted) -> int:
    """Bytes of vectors that were hashed."""
    return sum(len(args[1]) for args in counted.calls if len(args) > 1)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_one_digest_for_an_object_of_all_requests(
    form: str, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = Counted(monkeypatch, vectors, "digest_of")
    catalog, value = ModuleCatalog(CONFIG), tier(form)
    plans = []
    for i in range(REQUESTS):
        if forgets:
            catalog.vectors._kept.clear()
        plans.append(plan_of(config=CONFIG, catalog=catalog, prompt=5 + i, steering_vectors=value))
    assert digested(digests) == 4 * HIDDEN * len(SITES) * (REQUESTS if forgets else 1)
    assert len({plan.steering.sets[0].digest for plan in plans if plan and plan.steering}) == 1


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_names_are_parsed_once_and_numbers_of_each_request(
    form: str, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parses = Counted(monkeypatch, memo, "parse_vectors")
    digests = Counted(monkeypatch, vectors, "digest_of")
    catalog, seen = ModuleCatalog(CONFIG), set()
    for i in range(REQUESTS):
        if forgets:
            catalog.vectors._layouts.clear()
        plan = plan_of(config=CONFIG, catalog=catalog, steering_vectors=tier(form, i / 2))
        assert plan is not None and plan.steering is not None
        seen.add(plan.steering.sets[0].digest)
    assert len(seen) == REQUESTS
    assert len(parses.calls) == (REQUESTS if forgets else 1)
    assert digested(digests) == 4 * HIDDEN * len(SITES) * REQUESTS


class Untouchable:
    """Data of a vector set that says how long it is, and nothing else."""

    def __len__(self) -> int:
        return 4 * HIDDEN * len(SITES)


def untouchable() -> Module:
    module = parse_module({"vectors": tier("list")}, "m", SHAPE, CONFIG.steering_config)
    data: Any = Untouchable()
    sets = {t: msgspec.structs.replace(each, data=data) for t, each in module.tiers.items()}
    return Module(module.digest, sets, [])


@pytest.mark.parametrize("carried", [False, True])
def test_no_vector_is_read_on_the_way_of_a_module(carried: bool) -> None:
    """From the parameters to the message of the step: it goes to the workers as it is."""
    module, catalog = untouchable(), ModuleCatalog(CONFIG)
    core, sets = SchedulerInterventions(CONFIG, 4), ModuleSets([module])
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(Plan)
    [vector_set] = module.tiers.values()

    def send(number: int) -> None:
        asked: dict[str, Any] = {"config": CONFIG, "catalog": catalog, "modules": {"m": module}}
        plan = plan_of(prompt=4 + number % 3, steering_modules=["m", ("m", 0.5)], **asked)
        assert plan is not None and plan.steering is not None
        if carried:  # what must not be
            steering = msgspec.structs.replace(plan.steering, sets=[vector_set])
            plan = Plan(steering)
        [message] = encoder.encode(plan)
        got = sets.fill(decoder.decode(message))
        prompt = [1] * (4 + number % 3)
        request = Request(str(number), prompt, SamplingParams(max_tokens=4), None, plan=got)
        core.arrive(request)
        assert core.can_admit(request)
        core.admit(request)

    if carried:
        with pytest.raises(TypeError, match="Untouchable"):
            send(0)
        return
    for number in range(REQUESTS):
        send(number)
    step = core.message({})
    assert step is not None and step.new_sets == [vector_set]
    assert len(step.admitted) == REQUESTS


@pytest.mark.parametrize("forgets", [False, True])
def test_one_plan_for_all_prompts_of_a_length(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgets:
        monkeypatch.setattr(module_plans, "MOST_NAMES", -1)
    made = Counted(monkeypatch, resolve, "_made")
    catalog, modules = ModuleCatalog(CONFIG), {"m": untouchable()}
    asked: dict[str, Any] = {"catalog": catalog, "modules": modules, "steering_modules": ["m"]}
    plans = {id(plan_of(config=CONFIG, prompt=4 + i % 2, **asked)) for i in range(REQUESTS)}
    assert len(made.calls) == (REQUESTS if forgets else 2)
    assert forgets or len(plans) == 2


MODULES = [
    {"vectors": tier("float32", 1.0)},
    {"vectors": tier("float32", 2.0), "decode_vectors": {"post_block": {1: [3.0] * HIDDEN}}},
    {"prefill_vectors": {"post_block": {1: [1.0] * HIDDEN}}},
    {"ops": [{"op": "add", "point": "post_block", "layers": 1, "vector": [1.0] * HIDDEN}]},
]
NAMES: list[Any] = [*"aabbaabb", "c", ("a", 2.0), ("a", 2), ("b", -0.0), ("b", 0.0), ("c", True), 3]
NAMES += ["gone", ("a", float("nan")), ["b", 1.5], ("a", 1, 2), "by default"]


def made(ask: Callable[[], Plan | None]) -> Any:
    try:
        return ask()
    except InterventionError as error:
        return str(error)


def compare(seed: int) -> int:
    """Assert that plans of a frontend that remembers are those of one that was just started, while
    modules come and go. Returns how many were remembered."""
    rng = random.Random(seed)
    catalog, modules = ModuleCatalog(CONFIG), dict[str, Module]()
    seen, remembered = list[Any](), 0
    for _ in range(80):
        if rng.random() < 0.2:
            name = rng.choice(["a", "b", "c", "by default"])
            value = rng.choice(MODULES)
            modules[name] = parse_module(value, name, SHAPE, CONFIG.steering_config)
            if rng.random() < 0.3:
                del modules[name]
            catalog._state = Globals(modules=dict(modules))  # another, as each change makes
        asked: dict[str, Any] = {
            "steering_modules": rng.choice([None, rng.choices(NAMES, k=rng.randint(0, 2))]),
            "steering_inherit_global": rng.choice([None, None, True, False, 1]),
            "prompt": rng.randint(4, 6),
            "max_tokens": rng.randint(1, 3),
            "n": rng.randint(1, 2),
            "num_prompts": rng.randint(1, 2),
        }
        if rng.random() < 0.1:
            asked["steering_vectors"] = tier("float32")
        fresh = ModuleCatalog(CONFIG)
        fresh.state.modules.update(modules)
        got = made(lambda: plan_of(config=CONFIG, catalog=catalog, **asked))  # noqa: B023
        assert got == made(lambda: plan_of(config=CONFIG, catalog=fresh, **asked))  # noqa: B023
        remembered += isinstance(got, Plan) and any(got is one for one in seen)
        seen.append(got)
    return remembered


def test_what_is_remembered_is_what_is_made() -> None:
    assert sum(map(compare, range(60))) > 100


@pytest.mark.parametrize("broken", ["names", "lengths"])
def test_what_is_remembered_wrongly_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was registered anew keeps its plan; prompts of all lengths have one plan."""
    if broken == "names":
        monkeypatch.setattr(ModuleCatalog, "acting", lambda self, names: ["" for _ in names])
    else:
        monkeypatch.setattr(module_plans, "len", lambda value: 1, raising=False)
    with pytest.raises(AssertionError):
        for seed in range(60):
            compare(seed)
