# SPDX-License-Identifier: Apache-2.0
"""A costly body for each field that is read, of every endpoint and every `--compat`.

Calls of functions are counted, apart for the event loop and for the threads of plans: what a body
has in the place of a field is not gone through on the event loop, and elsewhere a few times.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.datastructures import Headers

import vllm
from tests import ROOT
from tests.errors.features import FILES
from tests.errors.test_costly_bodies import Letters
from tests.support.costly_fields import (
    CHATS,
    CLEAR,
    COMPLETIONS,
    LONG,
    MODULES,
    RULES,
    SET,
    SWEEP,
    all_places,
    as_sent,
    legal,
    name_of,
    places,
)  # fmt: skip
from tests.support.plans import HEADS, LANES, NOBODY, VECTOR, config_of, with_layers
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config.points import CAPTURE_POINTS, STEERING_POINTS
from vllm.config.steering import FAMILIES
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.steering import api_router, sweep_router
from vllm.entrypoints.serve.steering.access import SteeringAccess
from vllm.entrypoints.serve.steering.serving import intervene
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.capture.consumer import SHARED_FIELDS
from vllm.v1.interventions import errors
from vllm.v1.interventions.frontend.compat import doors
from vllm.v1.interventions.frontend.control.steering import AsyncSteering
from vllm.v1.interventions.frontend.request import capture as capture_request
from vllm.v1.interventions.frontend.request import selectors
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.chat import KEY
from vllm.v1.interventions.makings import AttentionRule
from vllm.v1.interventions.plan import PLAN_FIELDS
from vllm.v1.interventions.positions import Run
from vllm.v1.steering.modules import parse_module

pytestmark = pytest.mark.full

OURS = {str(path) for path in (ROOT / "vllm").rglob("*.py")}
OURS |= {str(Path(vllm.__file__).parent.parent / Path(path).relative_to(ROOT)) for path in OURS}
"""What upstream does with a body is upstream's. The second are links to the first."""
FEW, MANY = 100, 400
"""Entries of what is long: four times as many may not cost more on the event loop."""


class Meter:
    """Counts calls while it is entered, and notes which keys parsers know.

    `asyncio.to_thread` and the threads of plans work at once, in this thread, and are counted
    apart.
    """

    def __init__(self) -> None:
        self.loop = self.threads = 0
        self.known: dict[frozenset[str], set[str]] = {}
        """All keys that a parser knows -> those of them that it was given."""
        self._away = 0
        self._ours: dict[CodeType, bool] = {}
        self._parsers = {errors.unknown_keys.__code__: "known"}

    def __enter__(self) -> Meter:
        self.loop = self.threads = 0
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call") or not self._is_ours(frame.f_code):
            return
        if self._away:
            self.threads += 1
        else:
            self.loop += 1
        if event == "call" and (known := self._parsers.get(frame.f_code)):
            keys = frozenset(frame.f_locals[known])
            self.known.setdefault(keys, set()).update(keys & frame.f_locals["given"].keys())

    def _is_ours(self, code: CodeType) -> bool:
        """Whether a function, or who calls one of C, is of our files."""
        if code not in self._ours:
            self._ours[code] = code.co_filename in OURS
        return self._ours[code]

    async def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a thread."""
        self._away += 1
        try:
            return work(*args, **kwargs)
        finally:
            self._away -= 1


class Turn:
    """The turns of a chat: one, of the first two letters that were written."""

    roles = ("user",)

    def of(self, role: str) -> list[int]:
        return [0] if role == "user" else []

    def characters(self, index: int, length: int, work: Any, path: str) -> tuple[str, list[Run]]:
        return "cd", [(0, 2)]


def configs() -> dict[bool, VllmConfig]:
    """Of an engine that can do all, by whether its stream has several lanes."""
    rule: AttentionRule = {"scale": 0.5, "group": 2}
    able = msgspec.structs.replace(
        with_layers(with_layers(HEADS, (0, 1), rule=rule), [3], heads={}),
        lenses={"logit": [("post_block", 0)]},
        features={"mood": FILES["mood"]._replace(layer=0)},
        vocab_size=200,
        lens_rows=64,
    )
    made = {}
    for shape in (able, LANES):
        made[shape is LANES] = config = config_of(
            shape,
            steering_families=[*FAMILIES],
            max_steering_rows=64,
            max_steering_ops=8,
            steering_points=[*STEERING_POINTS],
            capture_points=[*CAPTURE_POINTS],
            capture_consumers=["inline", "filesystem:root=/nowhere"],
            compat=[*doors.DOORS],
        )
        config.model_config = SimpleNamespace(  # type: ignore[assignment]
            logprobs_mode="raw_logprobs",
            get_vocab_size=lambda: 200,
            max_model_len=64,
            is_multimodal_model=False,
            return_sampling_mask=False,
            is_mm_prefix_lm=False,
        )
    return made


class Tokenizer(Letters):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [78 + ord(letter) - 97 for letter in text]


class Ran(Exception):
    """A sweep was checked, and has come to the engine."""


class Core:
    """Engines that make every change."""

    client_count = 1

    async def call_utility_all_async(self, method: str, call: Any) -> list[dict[str, Any]]:
        return [{"version": 1, "changes": 1}]


class Server:
    """What endpoints need of one; nothing is generated."""

    def __init__(self, meter: Meter, config: VllmConfig) -> None:
        catalog = ModuleCatalog(config)
        vectors = {"pre_attn": {0: VECTOR}}
        if config.tap_shape is not LANES:
            assert config.tap_shape is not None
            made = parse_module(vectors, "m", config.tap_shape, config.steering_config)
            catalog.state.modules.update({"m": made, "m.0": made})
        threads = SimpleNamespace(run=meter.run)
        processor = SimpleNamespace(
            plan_threads=threads,
            tokenizer=Tokenizer(),
            modules=catalog,
            renderer=SimpleNamespace(
                validate_token_ids=lambda ids, parameter: None, mm_processor_cache=None
            ),
        )
        self.engine_client: Any = SimpleNamespace(
            vllm_config=config,
            input_processor=processor,
            steering=AsyncSteering(config, catalog, Core(), NOBODY),  # type: ignore[arg-type]
            generate=self._generate,
        )
        self.request_logger = None
        self.meter = meter
        config.scheduler_config = SimpleNamespace(max_num_seqs=8)  # type: ignore[assignment]

    @property
    def prompt(self) -> dict[str, Any]:
        """ "cdefghij", of which "ef" is an image in the place of text."""
        places = {"image": [PlaceholderRange(4, 2)]}
        return {
            "type": "multimodal",
            "prompt_token_ids": list(range(100, 108)),
            "mm_placeholders": places,
            KEY: Turn(),
        }

    def _generate(self, *args: object, **kwargs: object) -> None:
        raise Ran

    async def render_completion_request(self, asked: object) -> list[Any]:
        return [self.prompt]

    async def render_chat_request(self, asked: object) -> tuple[None, list[Any]]:
        return None, [self.prompt]

    def _extract_prompt_components(self, prompt: Any) -> Any:
        return SimpleNamespace(token_ids=prompt["prompt_token_ids"])

    def _maybe_get_adapters(self, asked: object) -> None:
        return None

    async def ask(self, endpoint: str, fields: dict[str, Any]) -> None:
        """Send a body, as far as it is read.

        Raises:
            Exception: it is refused.
        """
        if endpoint in (COMPLETIONS, CHATS):
            chat = endpoint == CHATS
            model: Any = ChatCompletionRequest if chat else CompletionRequest
            said = {"messages": [{"role": "user", "content": "c"}]} if chat else {"prompt": "c"}
            request = model.model_validate({**said, **as_sent(fields)})
            params = SamplingParams(max_tokens=4, extra_args=request.vllm_xargs)
            # Of several prompts all is checked here.
            await intervene(self, request, "r", params, self.prompt, 0, 2)  # type: ignore[arg-type]
            return
        state = SimpleNamespace(
            engine_client=self.engine_client,
            steering_access=SteeringAccess(["k"], bearer=False),
            openai_serving_chat=self,
            openai_serving_completion=self,
            sweep_slots=None,
        )
        raw = json.dumps(fields).encode()
        request = SimpleNamespace(
            headers=Headers({"X-Steering-Key": "k"}),
            app=SimpleNamespace(state=state),
            stream=lambda: _once(raw),
        )
        if endpoint == SWEEP:
            names = (*sweep_router.FIELDS, "model", "stream")
            body = await sweep_router.read_body(cast(Any, request), names)
            await sweep_router._answer.__wrapped__(body, request)
            return
        function: Any = {
            SET: api_router.set_tiers,
            CLEAR: api_router.clear,
            RULES: api_router.set_rules,
            MODULES: api_router.register,
        }[endpoint]
        await function(request)


async def _once(raw: bytes) -> Any:
    yield raw


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, Server]]:
    meter = Meter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", meter.run)
        yield {lanes: Server(meter, config) for lanes, config in configs().items()}


def cost(server: Server, endpoint: str, fields: dict[str, Any]) -> tuple[int, int, str]:
    """Calls on the event loop, calls in threads, and what an error said."""

    async def ask() -> str:
        with server.meter:
            try:
                await server.ask(endpoint, fields)
            except Ran:
                return ""
            except Exception as error:
                return str(error) or type(error).__name__
        return ""

    said = asyncio.run(ask())
    return server.meter.loop, server.meter.threads, said


def test_each_field_stands_in_a_legal_body(servers: dict[bool, Server]) -> None:
    """A field that a parser knows, and no body has, has no cost that is looked at."""
    given = set()
    for body in legal(VECTOR):
        server = servers[body.lanes]
        *_, said = cost(server, body.endpoint, body.fields)
        assert bool(said) == body.refused, (said, body)
        given |= {(body.endpoint, name_of(path)) for path in places(body.fields)}
    for lanes, server in servers.items():
        for known, found in server.meter.known.items():
            assert found == known or lanes, f"no legal body has {sorted(known - found)}"
    names = {name.rpartition(".")[2] for _, name in given}
    assert {(COMPLETIONS, field) for field in PLAN_FIELDS} <= given
    assert {(CHATS, field) for field in PLAN_FIELDS} <= given
    assert {*SHARED_FIELDS, capture_request.TOKENS, "except"} <= names
    assert {key for kind in selectors.KINDS for key in kind.keys} <= names
    for name, door in doors.DOORS.items():
        missing = {(COMPLETIONS, field) for field in door.reads} - given
        assert not missing, (name, missing)


@pytest.mark.parametrize("kind", LONG)
def test_what_is_long_costs_nobody_else(servers: dict[bool, Server], kind: str) -> None:
    """On the event loop a body costs the same with four times as much in the place of a field; in
    the threads it costs a few calls for each entry."""
    late: dict[str, Any] = {}
    for name, place in all_places(VECTOR).items():
        server, endpoint = servers[place.legal.lanes], place.legal.endpoint
        few, many = (
            cost(server, endpoint, place.with_long(LONG[kind](number))) for number in (FEW, MANY)
        )
        if many[0] > few[0] + FEW // 2:
            late[name] = "event loop", few, many
        elif many[1] > 30 * MANY + 4 * few[1]:
            late[name] = "threads", few, many
    assert not late, "\n".join(f"{name}: {late[name]}" for name in late)
