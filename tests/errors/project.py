# SPDX-License-Identifier: Apache-2.0
"""What is refused of `project`, of `reduce`, of turns of a chat, and of images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tests.errors.case import Case, path
from tests.support.plans import BF16, HIDDEN, SHAPE, VECTOR, config_of, sees_both_ways
from vllm.config.capture import PROJECTION_ROWS, CaptureConfig
from vllm.config.points import BLOCK_POINTS
from vllm.renderers.params import TokenizeParams
from vllm.v1.capture.consumers.logging import LoggingConsumer
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.capture import check_global, parse_capture
from vllm.v1.interventions.frontend.request.chat import ChatTurns, tokens_of_turn
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.selectors import Selector
from vllm.v1.interventions.frontend.request.text import PromptText
from vllm.v1.interventions.frontend.request.written_text import WrittenText
from vllm.v1.interventions.shape import TapShape
from vllm.v1.steering.modules import parse_module

if TYPE_CHECKING:
    from vllm.renderers.params import ChatParams


def project(value: Any, **more: Any) -> dict[str, Any]:
    asked = {"hooks": {"post_block": [1]}, "project": value}
    return {"capture": {"inline": asked}, **more}


def two_large_ones() -> object:
    """Two consumers whose matrices fit one by one."""
    shape = TapShape(hidden_size=PROJECTION_ROWS, dtype="float32", layers=SHAPE.layers)
    asked = {
        name: {"hooks": {"post_block": [1]}, "project": np.full((1000, PROJECTION_ROWS), size)}
        for name, size in (("one", 1.0), ("two", 2.0))
    }
    specs = {name: ConsumerSpec(name) for name in asked}
    return parse_capture(asked, "capture", shape, Prompt([1], 2, None, Work(1 << 23)), specs)


class Template:
    """Renders a chat without a model: each role and content, a turn that says "twice" two times."""

    def __init__(self, end: str = "") -> None:
        self.end = end

    def render_messages(self, messages: list[Any], params: Any) -> tuple[list[Any], dict[str, str]]:
        parts = [f"{m['role']}:{m['content']}{' ' + m['content']}" for m in messages[:1]]
        parts += [f"{m['role']}:{m['content']}" for m in messages[1:]]
        return messages, {"prompt": "\n".join(parts) + self.end}


CHAT = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]


def turn(
    value: dict[str, Any],
    chat: list[Any] | None = CHAT,
    end: str = "",
    work: int = 1 << 23,
    written: WrittenText | None = None,
) -> object:
    """Resolve the turn of a chat whose prompt, a character a token, is `user:a a, tool:b`."""
    text, params = "user:a a\ntool:b", cast("ChatParams", None)
    turns = ChatTurns(chat, params, cast("Any", Template(end))) if chat is not None else None
    tokenizer = cast("Any", SimpleNamespace(decode=bytes_of, all_special_ids=[]))
    prompt = Prompt(list(text.encode()), 2, tokenizer, Work(work), turns, written=written)
    return Selector(prompt).resolve(value, "p")


def written(text: str, limit: int | None = None) -> WrittenText:
    return WrittenText(text, TokenizeParams(64, truncate_prompt_tokens=limit))


def half_a_turn() -> None:
    """Of a chat whose second character was cut off."""
    edges, cut = np.array([0, 1]), np.array([False, True])
    text = PromptText("ab", edges, np.array([1, 1]), np.array([False, False]), cut)
    tokens_of_turn("ab", [(0, 2)], [text], True, "p")


def bytes_of(token_ids: list[int], skip_special_tokens: bool) -> str:
    return bytes(token_ids).decode()


IMAGE = {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
TOOL = {"role": "tool"}
REDUCE = {"hooks": {"post_block": [1]}, "positions": "all_prompt", "reduce": "mean"}


def reduced(**more: Any) -> dict[str, Any]:
    return {"capture": {"inline": REDUCE | more}}


HOOKS = {"post_block": [1]}


def inline(**more: Any) -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": HOOKS, **more}}}


def embed() -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": {"embed": [0]}, "dose": True}}}


ABLATE = {"op": "ablate", "point": "post_block", "layers": [1], "direction": VECTOR}
ABLATES = config_of(steering_families=["add", "ablate"])


def named(names: Any, **more: Any) -> dict[str, Any]:
    """Scores of modules: a direction at each layer, one at layer 1 alone, and one that is zero."""
    with_vectors = {
        "all": {layer: [1.0, 2.0, 0.0, 0.0] for layer in SHAPE.layers},
        "one": {0: VECTOR},
        "zero": {1: [0.0] * HIDDEN},
    }
    config = config_of()
    modules = {
        name: parse_module({"post_block": layers}, name, SHAPE, config.steering_config)
        for name, layers in with_vectors.items()
    }
    return project({"modules": names, **more}, modules=modules)


def of_every_request() -> None:
    asked = {"hooks": HOOKS, "project": {"modules": ["one"]}}
    spec = {"consumer": LoggingConsumer, "instance_name": "all", "capture": asked}
    check_global(CaptureConfig(capture_consumers=[spec]), SHAPE)


def image(positions: Any, images: Any = ((1, 3),)) -> dict[str, Any]:
    """Rows of a prompt with one image, or others."""
    asked = {"hooks": {"post_block": [1]}, "positions": positions}
    return {"capture": {"inline": asked}, "images": images}


AT_IMAGES = "capture.inline.positions"
AT = "capture.inline.project"
PROJECT = [
    Case(path("capture.inline.reduce", "'max'"), reduced(reduce="max")),
    Case(path("capture.inline.project", "'reduce'"), reduced(project=[VECTOR])),
    Case(path("capture.inline.reduce", prompt="5"), reduced(positions="all")),
    Case(path("capture.inline.norms", "'reduce'"), reduced(norms=True)),
    Case(path("capture.inline.project", "'norms'"), inline(project=[VECTOR], norms=True)),
    Case(path("capture.inline.norms", "1"), inline(norms=1)),
    Case(
        path("capture.logging.norms"),
        {
            "capture": {"logging": {"hooks": HOOKS, "norms": True}},
            "config": config_of(capture_consumers=["logging"]),
        },
    ),
    Case(path("capture.inline.dose", "'norms'"), inline(norms=True, dose=True)),
    Case(path("capture.inline.dose", "1"), inline(dose=1)),
    Case(path("capture.inline.dose", "embed", ", ".join(BLOCK_POINTS)), embed()),
    Case(
        path("capture.inline.dose", point="post_block", layer="1"),
        {**inline(dose=True), "steering": [ABLATE], "config": ABLATES},
    ),
    Case(path("p"), do=lambda: turn(TOOL, None)),
    Case(path(f"{AT_IMAGES}.images"), image({"images": 0}, images=[])),
    Case(path(f"{AT_IMAGES}.images", "'first'"), image({"images": "first"})),
    Case(path(f"{AT_IMAGES}.images", "True"), image({"images": [True]})),
    Case(path(f"{AT_IMAGES}.images"), image({"images": []})),
    Case(path(f"{AT_IMAGES}.images", "1", number="1"), image({"images": 1})),
    Case(path(f"{AT_IMAGES}.modality", "'video'", "text, image"), image({"modality": "video"})),
    Case(
        path("capture", "48", "47", positions="3 positions"),
        image("all") | {"config": sees_both_ways(config_of(capture_buffer_bytes=47))},
    ),
    Case(path("p.role", "'system'", "user, tool"), do=lambda: turn({"role": "system"})),
    Case(path("p.role", "3"), do=lambda: turn({"role": 3})),
    Case(path("p.turn", "1", role="'tool'", turns="1"), do=lambda: turn({**TOOL, "turn": 1})),
    Case(path("p.turn", "'x'"), do=lambda: turn({**TOOL, "turn": "x"})),
    Case(path("p"), do=lambda: turn({"role": "user"}, [CHAT[0], IMAGE])),
    Case(path("p"), do=lambda: turn({"role": "user"})),
    Case(path("p"), do=lambda: turn(TOOL, end="...")),
    Case(path("p"), do=lambda: turn(TOOL, end="...", written=written("user:a a\ntool:b...", 15))),
    Case(path("p"), do=half_a_turn),
    Case(
        path("p.text", "'tool:b...'", prompt="15"),
        do=lambda: turn({"text": "tool:b..."}, written=written("user:a a\ntool:b...", 15)),
    ),
    Case(
        path("p.text", "'User'", text="'user:a a\\ntool:b'"),
        do=lambda: turn({"text": "User"}, written=written("User:A a\ntool:b")),
    ),
    # Each turn is a rendering of the whole chat.
    Case(path("p", "", "1000"), do=lambda: turn(TOOL, work=1000)),
    Case(path("capture.inline.tokens", "'yes'"), reduced(tokens="yes")),
    Case(path("capture.inline.tokens"), reduced(tokens=True)),
    Case(path(AT, allowed="1-64"), named([])),
    Case(path(AT, allowed="1-64"), named(["all"], post_block={})),
    Case(path(f"{AT}.modules[1]", "'none'", "all, one, zero"), named(["all", "none"])),
    Case(path(f"{AT}.modules[0]", point="post_block", layer="1", name="one"), named(["one"])),
    Case(path(f"{AT}.modules[0]", point="post_block", layer="1"), named(["zero"])),
    Case(path("capture_consumers.all.capture.project.modules"), do=of_every_request),
    Case(path(AT, "5"), project(5)),
    Case(path(AT, point="post_block", layer="1"), project({})),
    Case(path(f"{AT}.mlp", "'mlp'"), project({"mlp": {}})),
    Case(path(f"{AT}.post_block.0", "0"), project({"post_block": {0: [VECTOR]}})),
    Case(path(f"{AT}.post_block.01", "1"), project({"post_block": {1: [VECTOR], "01": [VECTOR]}})),
    Case(
        path(f"{AT}.pre_attn.1"),
        {
            "capture": {
                "inline": {
                    "hooks": {"post_block": [1], "pre_attn": [1]},
                    "project": {
                        "post_block": {1: [VECTOR]},
                        "pre_attn": {1: [VECTOR, VECTOR]},
                    },
                }
            }
        },
    ),
    Case(path("capture.inline", "0", "1-16"), {"capture": {"inline": []}}),
    Case(path("capture.inline[1].hooks"), {"capture": {"inline": [{"hooks": HOOKS}, {}]}}),
    Case(
        path("capture.logging"),
        {
            "capture": {"logging": [{"hooks": {"post_block": [1]}}]},
            "config": config_of(capture_consumers=["logging"]),
        },
    ),
    Case(path(AT, "0", f"1-{HIDDEN}", rows=str(PROJECTION_ROWS)), project([])),
    Case(path(AT, "5", f"1-{HIDDEN}"), project([VECTOR] * 5)),
    Case(path(AT, "3", f"1-{HIDDEN // 2}"), project([VECTOR] * 3, config=config_of(BF16))),
    Case(path(AT, "[1, 1, 4]", f"[k, {HIDDEN}]"), project(np.ones((1, 1, HIDDEN)))),
    Case(path(f"{AT}[0]", "[3]", f"[{HIDDEN}]"), project(np.ones(3))),
    Case(path(f"{AT}[0]", "[3]", f"[{HIDDEN}]"), project(torch.ones(2, 3))),
    Case(path(f"{AT}[1]", "1", str(HIDDEN)), project([VECTOR, [1.0]])),
    Case(path(f"{AT}[0][2]", "'x'"), project([[1.0, 2.0, "x", 4.0]])),
    Case(path(f"{AT}[0]"), project(np.full((1, HIDDEN), np.nan))),
    Case(path(f"{AT}[0]", "int64"), project(np.ones((1, HIDDEN), np.int64))),
    Case(path(AT, allowed="float32"), project(np.full((1, HIDDEN), 1e39))),
    Case(path("capture", "2000", str(PROJECTION_ROWS)), do=two_large_ones),
]
