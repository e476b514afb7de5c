# SPDX-License-Identifier: Apache-2.0
"""Consumers behind a real engine: the same rows as inline, each once, whatever ends the request,
and no output is finished before its captures are."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tqdm import tqdm

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.serving.test_capture_serving import add_tokenizer
from tests.support import plans
from tests.support.consumers import PATIENCE
from tests.support.serving import prompt_of
from vllm import LLM, SamplingParams
from vllm.config.capture import CaptureConfig
from vllm.config.points import CAPTURE_POINTS
from vllm.inputs import TokensPrompt
from vllm.pilot.bench import LateBar
from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    Location,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.transport import host
from vllm.v1.interventions.frontend.request.capture import check_global
from vllm.v1.interventions.frontend.results import progress

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.quick, pytest.mark.v2("full")]

HOOKS = {"pre_attn": [0], "post_block": "all"}
PROMPT = prompt_of(17, 60)


class Keep(CaptureConsumer):
    """Returns the rows it got, as plain data; waits before that while it is told to."""

    location: ClassVar[Location] = "engine"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[tuple[str, str]] = []
        self.shut = False

    @classmethod
    def check_request(cls, fields: Any, path: str) -> dict[str, Any]:
        return dict(fields)

    def open(self, request: RequestInfo) -> CaptureSession:
        if request.fields.get("fail") == "open":
            raise OSError("cannot open")
        return Kept(self, request)

    def shutdown(self) -> None:
        self.shut = True


class KeepHere(Keep):
    location: ClassVar[Location] = "frontend"


class Kept(CaptureSession):
    def __init__(self, consumer: Keep, request: RequestInfo) -> None:
        self.consumer, self.request = consumer, request
        self.batches: list[RowBatch] = []

    def rows(self, batch: RowBatch) -> None:
        if self.request.fields.get("fail") == "rows":
            raise OSError("disk full")
        self.batches.append(batch)

    def done(self, end: RequestEnd) -> Any:
        assert self.consumer.gate.wait(PATIENCE)
        self.consumer.seen.append(("done", self.request.external_id))
        return self._payload(end)

    def aborted(self, end: RequestEnd) -> Any:
        self.consumer.seen.append(("aborted", self.request.external_id))
        return self._payload(end)

    def failed(self, reason: str) -> None:
        self.consumer.seen.append(("failed", self.request.external_id))

    def _payload(self, end: RequestEnd) -> dict[str, Any]:
        def joined(name: str) -> list[int]:
            return [n for batch in self.batches for n in getattr(batch, name).tolist()]

        values = [batch.values for batch in self.batches]
        return {
            "positions": joined("positions"),
            "token_ids": joined("token_ids"),
            "sites": [list(site) for site in self.request.sites],
            "values": torch.cat(values, dim=1).tolist() if values else [],
            "sample": self.request.sample,
            "num_samples": self.request.num_samples,
            "external_id": self.request.external_id,
            "num_tokens": end.num_tokens,
        }


@pytest.fixture(scope="module")
def kept() -> dict[str, Keep]:
    return {"here": KeepHere()}


@pytest.fixture(scope="module")
def llm(
    tiny_models: TinyModels, kept: dict[str, Keep], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("llama") / "model"
    shutil.copytree(tiny_models.path("llama"), directory)
    add_tokenizer(directory)
    llm = make_llm(
        directory,
        capture_consumers=[
            "inline",
            {"consumer": Keep, "instance_name": "core"},
            {"consumer": kept["here"], "instance_name": "here"},
        ],
        max_num_batched_tokens=64,
        skip_tokenizer_init=False,
    )
    hosts = llm.llm_engine.engine_core.engine_core.scheduler.interventions.captures.hosted.hosts  # type: ignore[attr-defined]
    kept["core"] = hosts["core"]._consumer
    yield llm
    shut_down(llm)


def asked(positions: Any, *names: str, **fields: Any) -> dict[str, Any]:
    request = {"hooks": HOOKS, "positions": positions}
    return {n: request | (fields if n != "inline" else {}) for n in ("inline", *names)}


def params(positions: Any, *names: str, **settings: Any) -> SamplingParams:
    base: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    base["output_kind"] = RequestOutputKind.FINAL_ONLY
    return SamplingParams(capture=asked(positions, *names), **{**base, **settings})


def generate(llm: LLM, *requests: tuple[list[int], SamplingParams]) -> list[Any]:
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in requests]
    return llm.generate(prompts, [p for _, p in requests], use_tqdm=False)


def assert_same_rows(results: Any, name: str) -> None:
    """What a consumer got is what inline returned."""
    inline, other = results["inline"], results[name]
    assert (other.status, other.error) == (inline.status, inline.error)
    sites = [tuple(site) for site in other.payload["sites"]]
    assert sites == list(inline.payload)
    for i, site in enumerate(sites):
        rows = inline.payload[site]
        assert other.payload["positions"] == rows.positions.tolist()
        assert other.payload["token_ids"] == rows.token_ids.tolist()
        got = torch.tensor(other.payload["values"])[i] if len(rows) else rows.values
        assert torch.equal(got, rows.values)


@pytest.mark.parametrize("name", ["core", "here"])
@pytest.mark.parametrize(
    "positions", ["all", "last_prompt", "last_generated", [1, -1, 20], "all_generated"]
)
def test_a_consumer_gets_the_rows_that_inline_returns(llm: LLM, name: str, positions: Any) -> None:
    [output] = generate(llm, (PROMPT, params(positions, name)))
    assert output.capture_results.keys() == {"inline", name}
    assert_same_rows(output.capture_results, name)
    payload = output.capture_results[name].payload
    assert payload["num_tokens"] == len(PROMPT) + 6
    assert (payload["sample"], payload["num_samples"]) == (0, 1)
    assert payload["external_id"] == output.request_id


@pytest.mark.parametrize("name", ["core", "here"])
@pytest.mark.parametrize("positions", ["all", "last_generated"])
def test_stop_strings_trim_the_rows(llm: LLM, name: str, positions: Any) -> None:
    [free] = generate(llm, (PROMPT, params("all", max_tokens=12)))
    words = [f"t{i}" for i in free.outputs[0].token_ids]
    stop = next(w for i, w in enumerate(words[3:], 3) if w not in words[:i])
    [output] = generate(llm, (PROMPT, params(positions, name, max_tokens=12, stop=[stop])))
    assert output.outputs[0].stop_reason == stop
    assert len(output.outputs[0].token_ids) < 12
    assert_same_rows(output.capture_results, name)


def test_each_completion_has_its_results(llm: LLM) -> None:
    several = params("all", "core", "here", n=3, temperature=1.0, seed=1)
    [output] = generate(llm, (PROMPT, several))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    for completion in output.outputs:
        for name in ("core", "here"):
            assert_same_rows(completion.capture_results, name)
            payload = completion.capture_results[name].payload
            assert (payload["sample"], payload["num_samples"]) == (completion.index, 3)
            assert payload["external_id"] == output.request_id


@pytest.mark.parametrize("name", ["core", "here"])
def test_the_last_output_waits_for_the_result(llm: LLM, kept: dict[str, Keep], name: str) -> None:
    consumer, engine = kept[name], llm.llm_engine
    consumer.gate.clear()
    engine.add_request("slow", TokensPrompt(prompt_token_ids=PROMPT), params("all", name))
    engine.add_request(
        "quick", TokensPrompt(prompt_token_ids=PROMPT[:9]), params("all", max_tokens=9)
    )
    outputs: list[Any] = []
    while not any(o.request_id.startswith("quick") for o in outputs):
        outputs += engine.step()
    assert len(outputs) == 1
    assert engine.has_unfinished_requests()
    threading.Timer(0.2, consumer.gate.set).start()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 2
    assert_same_rows(outputs[1].capture_results, name)


@pytest.mark.parametrize("name", ["core", "here"])
@pytest.mark.parametrize(("when", "text"), [("open", "cannot open"), ("rows", "disk full")])
def test_a_consumer_that_raises(
    llm: LLM,
    name: str,
    when: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says so at the end of the run, which is silent where nothing is lost."""
    capture = asked("all", name, fail=when)
    failing = SamplingParams(max_tokens=3, temperature=0.0, capture=capture)
    log, errors = Mock(), Mock()
    monkeypatch.setattr(progress, "logger", log)
    monkeypatch.setattr(host, "logger", errors)
    generate(llm, (PROMPT, params("all", name)))
    assert not log.warning.called
    broken, fine = generate(llm, (PROMPT, failing), (PROMPT, params("all", name)))
    [((line, *values), _)] = log.warning.call_args_list
    said = line % tuple(values)
    assert errors.error.called
    assert not any(more.get("exc_info") for _, more in errors.error.call_args_list)
    assert said.startswith("1 of 4 captures failed, the first: ") and text in said
    result = broken.capture_results[name]
    assert result.status == "error"
    assert text in result.error
    assert result.payload is None
    assert broken.capture_results["inline"].status == "ok"
    assert_same_rows(fine.capture_results, name)


@pytest.mark.parametrize("name", ["core", "here"])
def test_an_abort_ends_the_session(llm: LLM, kept: dict[str, Keep], name: str) -> None:
    engine = llm.llm_engine
    long = params("all", name, max_tokens=90)
    internal = engine.add_request("gone", TokensPrompt(prompt_token_ids=PROMPT), long)
    for _ in range(6):
        engine.step()
    engine.abort_request([internal], internal=True)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert not outputs
    assert ("aborted", "gone") in kept[name].seen
    assert not held_bytes(llm)


def test_an_abort_before_the_start(llm: LLM) -> None:
    engine = llm.llm_engine
    internal = engine.add_request(
        "early", TokensPrompt(prompt_token_ids=PROMPT), params("all", "core", "here")
    )
    engine.abort_request([internal], internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    assert not held_bytes(llm)


def held_bytes(llm: LLM) -> dict[str, int]:
    """What requests still hold of each consumer's budget."""
    captures = llm.llm_engine.engine_core.engine_core.scheduler.interventions.captures  # type: ignore[attr-defined]
    assert not captures._captures
    specs = llm.llm_engine.vllm_config.capture_config.consumers
    return {n: f for n, f in captures._free.items() if f != specs[n].limits.pending_bytes}


def test_nothing_is_kept(llm: LLM) -> None:
    generate(llm, *[(PROMPT, params("all", "core", "here"))] * 5)
    assert not held_bytes(llm)
    assert not llm.llm_engine.output_processor.captures._open


def test_rows_are_not_the_next_steps(llm: LLM) -> None:
    """The twin: another prompt's rows differ by far, so equality above says something."""
    one, other = generate(llm, (PROMPT, params("all", "core")), (PROMPT[1:], params("all")))
    mine = np.array(one.capture_results["core"].payload["values"])[0]
    theirs = other.capture_results["inline"].payload["pre_attn", 0].numpy()
    assert np.linalg.norm(mine[: len(theirs)] - theirs) > 0.5 * np.linalg.norm(theirs)


# -- consumers that capture of every request ----------------------------------------------------


@pytest.fixture(scope="module")
def everyone(tiny_models: TinyModels) -> Iterator[LLM]:
    request = {"hooks": {"post_block": [1]}, "positions": "all_generated"}
    specs = [{"consumer": Keep, "instance_name": "every", "capture": request}, "inline"]
    llm = make_llm(tiny_models.path("llama"), capture_consumers=specs)
    yield llm
    shut_down(llm)


def test_a_consumer_may_capture_of_every_request(everyone: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
    plain = SamplingParams(max_tokens=4, **settings)
    [output] = generate(everyone, (PROMPT, plain))
    payload = output.capture_results["every"].payload
    assert payload["sites"] == [["post_block", 1]]
    assert payload["positions"] == [17, 18, 19]
    one = SamplingParams(max_tokens=1, **settings)  # generates no row: there is nothing to say
    [output] = generate(everyone, (PROMPT, one))
    assert output.capture_results is None
    own = {"every": {"hooks": {"pre_attn": [0]}, "positions": "last_prompt"}}
    [output] = generate(everyone, (PROMPT, SamplingParams(max_tokens=4, capture=own, **settings)))
    payload = output.capture_results["every"].payload
    assert (payload["sites"], payload["positions"]) == ([["pre_attn", 0]], [16])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"hooks": {"post_block": [99]}}, "layer 99"),
        ({"hooks": {"post_block": [0]}, "positions": [3]}, "positions: must be of last_prompt"),
        ({"positions": "all"}, "hooks: is missing"),
        ({"hooks": {"q": [0, 3]}}, "hooks: rows have different widths"),
        (
            {"hooks": {"q": [0]}, "project": [[0.0] * 4]},
            "project: is for rows of the residual stream",
        ),
    ],
)
def test_a_wrong_global_capture_is_an_error_at_start_up(
    request_: dict[str, Any], message: str
) -> None:
    specs = [{"consumer": Keep, "instance_name": "every", "capture": request_}]
    with pytest.raises(ValueError, match=message):
        check_global(CaptureConfig(specs, capture_points=list(CAPTURE_POINTS)), plans.HEADS)


def test_a_global_capture_keeps_to_the_points_of_the_engine() -> None:
    request = {"hooks": {"post_block": [0]}}
    of_heads = {"consumer": Keep, "instance_name": "heads", "capture": {"hooks": {"q": [0, 1]}}}
    check_global(CaptureConfig([of_heads], capture_points=["q"]), plans.HEADS)
    specs = [{"consumer": Keep, "instance_name": "every", "capture": request}]
    check_global(CaptureConfig(specs, capture_points=["post_block"]), plans.SHAPE)
    with pytest.raises(
        ValueError, match=r"^capture_consumers\.every\.capture\.hooks\.post_block: "
    ):
        check_global(CaptureConfig(specs, capture_points=["pre_attn"]), plans.SHAPE)


class Bar:
    """In place of tqdm's bar: remembers what it would have drawn."""

    def __init__(self, total: int, desc: str, dynamic_ncols: bool, postfix: str) -> None:
        self.postfix, self.n, self.drawn = postfix, 0, [postfix]
        self.format_dict = {"elapsed": 1.0}

    def refresh(self) -> None:
        self.drawn.append(self.postfix)

    def update(self, n: int) -> None:
        self.n += n
        self.refresh()

    def close(self) -> None:
        pass


def test_a_run_shows_its_captures_beside_the_prompts(llm: LLM, kept: dict[str, Keep]) -> None:
    """Rows and bytes; and while it waits for a consumer, that it does."""
    bars: list[Bar] = []

    def bar(prompts: Any = None, **settings: Any) -> Any:
        if prompts is not None:  # while they are rendered
            return prompts
        bars.append(Bar(**settings))
        return bars[-1]

    kept["core"].gate.clear()
    opener = threading.Timer(0.5, kept["core"].gate.set)
    opener.start()
    prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * 2
    llm.generate(prompts, params("all", "core"), use_tqdm=bar)
    opener.join()
    llm.generate(prompts[:1], params("last_prompt"), use_tqdm=bar)
    llm.generate(prompts[:1], SamplingParams(max_tokens=1), use_tqdm=bar)
    waited, last, plain = (one.drawn for one in bars)
    sites, rows = 1 + models.LAYERS, len(PROMPT) + 5
    assert any(text.endswith("captures pending") for text in waited), waited
    size = 2 * 2 * sites * rows * models.HIDDEN * 4 / 2**20
    assert waited[-1].endswith(f", captured: {2 * 2 * sites * rows} rows, {size:.1f} MiB")
    assert last[-1].endswith(f", captured: {sites} rows, 0.0 MiB"), "of this run alone"
    assert "captur" not in "".join(plain)
    assert all(text.count("captured") <= 1 for text in waited)


@pytest.mark.parametrize("kind", [tqdm, LateBar])
@pytest.mark.parametrize("capture", [None, "core"])
def test_a_bar_that_is_turned_off_stops_nothing(
    llm: LLM, kind: type[tqdm[Any]], capture: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `TQDM_DISABLE` makes every bar, with neither a postfix nor a time; a plain run too."""
    asked = SamplingParams(max_tokens=1) if capture is None else params("all", capture)
    prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * 2
    for disable in (True, False):
        outputs = llm.generate(prompts, asked, use_tqdm=partial(cast(Any, kind), disable=disable))
        assert len(outputs) == 2 and all(output.finished for output in outputs)
        drawn = "Processed prompts" in capfd.readouterr().err
        assert not (drawn and disable) and (drawn or disable or kind is LateBar)
