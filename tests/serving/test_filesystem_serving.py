# SPDX-License-Identifier: Apache-2.0
"""The filesystem consumer behind a real engine: what is read back is what inline returned."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance.engine import make_llm, shut_down
from tests.support.disks import small_disk
from tests.support.serving import by_threads, prompt_of
from tests.support.stored import LAYOUTS, same
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture import reader
from vllm.v1.capture.consumers.filesystem import FilesystemCaptureRequest

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

HOOKS = {"pre_attn": [0], "post_block": "all"}
PROMPT = prompt_of(17, 70)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("acts"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 1 MiB, if this may be mounted; else a folder."""
    disk = tmp_path_factory.mktemp("disk")
    with small_disk(disk, "1m"):
        yield disk


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels, root: str, disk: Path) -> Iterator[LLM]:
    small = {"name": "filesystem", "instance_name": "small", "root": str(disk / "acts")}
    llm = make_llm(
        tiny_models.path("llama"),
        dtype="bfloat16",
        capture_consumers=["inline", f"filesystem:root={root},flush_seconds=0.02", small],
    )
    with by_threads():
        yield llm
    shut_down(llm)


def params(positions: Any = "all", settings: Any = (), **fields: Any) -> SamplingParams:
    base: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "detokenize": False}
    return SamplingParams(
        capture={
            "inline": {"hooks": HOOKS, "positions": positions},
            "filesystem": FilesystemCaptureRequest(hooks=HOOKS, positions=positions, **fields),
        },
        output_kind=RequestOutputKind.FINAL_ONLY,
        **(base | dict(settings)),
    )


def generate(llm: LLM, prompts: list[list[int]], given: Any) -> list[Any]:
    return llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], given, use_tqdm=False)


def assert_stored(root: str, results: Any, model: str = "") -> reader.StoredRequest:
    """What is below the root is what inline returned, bit by bit."""
    inline, result = results["inline"], results["filesystem"]
    assert (result.status, result.error) == (inline.status, inline.error)
    payload = result.payload
    for path in payload["paths"]:
        assert Path(root, path).is_file() and not Path(path).is_absolute()
    stored = reader.open(root).find(payload["request_id"], payload["tag"])
    assert stored.layout == payload["layout"]
    assert list(stored.sites) == list(inline.payload)
    assert stored.complete == (inline.error is None)
    for site, rows in inline.payload.items():
        assert rows.values.dtype == torch.bfloat16
        assert same(stored.rows(*site), rows)
    assert payload["rows"] == sum(map(len, inline.payload.values()))
    return stored


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("positions", ["all", "last_prompt", "last_generated"])
def test_every_layout(llm: LLM, root: str, layout: str, positions: str) -> None:
    tag = f"{layout}-{positions.replace('_', '.')}"
    given = [params(positions, request_id=f"probe_{i}", tag=tag, layout=layout) for i in range(3)]
    outputs = generate(llm, [PROMPT, PROMPT[1:], PROMPT[:5]], given)
    stored = [assert_stored(root, output.capture_results) for output in outputs]
    assert sorted(r.name for r in reader.open(root).requests(tag)) == [
        "probe_0",
        "probe_1",
        "probe_2",
    ]
    assert stored[0].external_id == outputs[0].request_id
    assert stored[0].record.num_tokens == len(PROMPT) + 6
    assert stored[0].model == llm.llm_engine.model_config.model
    one, other = (r.rows("post_block", 1).values[-1].float() for r in stored[:2])
    assert (one - other).norm() > 0.1 * one.norm(), "another prompt's rows differ"


def test_without_a_name(llm: LLM, root: str) -> None:
    [output] = generate(llm, [PROMPT], params())
    stored = assert_stored(root, output.capture_results)
    assert (stored.tag, stored.layout) == ("default", "packed")
    assert stored.external_id == output.request_id and stored.name.startswith(output.request_id)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_and_samples_of_one_request(llm: LLM, root: str, layout: str) -> None:
    settings = {"n": 2, "temperature": 1.0, "seed": 1}
    given = params("all_generated", settings, request_id="many", tag=f"n2-{layout}", layout=layout)
    outputs = generate(llm, [PROMPT, PROMPT[3:]], given)
    for prompt, output in enumerate(outputs):
        assert len({tuple(c.token_ids) for c in output.outputs}) == 2
        for completion in output.outputs:
            stored = assert_stored(root, completion.capture_results)
            assert stored.name == f"many-{prompt}-{completion.index}"
            assert (stored.sample, stored.record.prompt) == (completion.index, prompt)


def test_a_name_that_is_taken(llm: LLM, root: str) -> None:
    [first] = generate(llm, [PROMPT], params(request_id="taken", tag="c"))
    [second] = generate(llm, [PROMPT[2:]], params(request_id="taken", tag="c"))
    result = second.capture_results["filesystem"]
    assert (result.status, result.payload) == ("error", None)
    assert "c/taken exists already" in result.error
    assert second.capture_results["inline"].status == "ok"
    assert_stored(root, first.capture_results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_abort_publishes_what_there_is(llm: LLM, root: str, layout: str) -> None:
    engine = llm.llm_engine
    long = params(settings={"max_tokens": 90}, request_id=f"cut.{layout}", layout=layout)
    internal = engine.add_request(f"cut {layout}", TokensPrompt(prompt_token_ids=PROMPT), long)
    for _ in range(4):
        engine.step()
    engine.abort_request([internal], internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    stored = eventually(root, f"cut.{layout}")
    assert not stored.complete and stored.error
    rows = stored.rows("post_block", 0)
    assert rows.positions.tolist() == list(range(len(rows)))
    assert len(PROMPT) <= len(rows) < len(PROMPT) + 90
    assert rows.token_ids[: len(PROMPT)].tolist() == PROMPT


def eventually(root: str, name: str) -> reader.StoredRequest:
    deadline = time.monotonic() + 60
    while True:
        try:
            return reader.open(root).find(name, "default")
        except (KeyError, FileNotFoundError):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, r"capture.filesystem.request_id: '' is not an id"),
        ({"tag": "a/b"}, r"capture.filesystem.tag: 'a/b' is not a name"),
        ({"layout": "zip"}, r"capture.filesystem.layout: unknown layout 'zip'"),
    ],
)
def test_wrong_names_are_refused_before_the_start(
    llm: LLM, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(llm, [PROMPT], params(**fields))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_is_full_or_read_only_while_it_serves(
    llm: LLM, root: str, disk: Path, layout: str
) -> None:
    """Errors of that consumer's results alone; all is well again when the disk is."""
    if not disk.is_mount():
        pytest.skip("only root may mount a tmpfs")

    def ask(name: str) -> tuple[str, str]:
        given = params(request_id=name, tag=f"disk-{layout}", layout=layout)
        given.capture["small"] = given.capture["filesystem"]
        [output] = generate(llm, [PROMPT], given)
        assert len(output.outputs[0].token_ids) == 6
        assert_stored(root, output.capture_results)
        result = output.capture_results["small"]
        return result.status, str(result.error)

    assert ask("before")[0] == "ok"
    with pytest.raises(OSError, match="No space"), open(disk / "ballast", "wb", 0) as ballast:
        while True:
            ballast.write(bytes(4096))
    status, error = ask("full")
    assert status == "error" and "No space left on device" in error
    (disk / "ballast").unlink()
    assert ask("emptied")[0] == "ok"
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        status, error = ask("read-only")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert status == "error" and "Read-only file system" in error
    assert ask("after")[0] == "ok"
    found = {r.name for r in reader.open(str(disk / "acts")).requests(f"disk-{layout}")}
    assert found == {"before", "emptied", "after"}
    assert not list(disk.rglob("*.tmp"))


def test_means_are_stored_like_rows(llm: LLM, root: str) -> None:
    """The file of a mean is what inline returns, and says what it is."""
    given = params(request_id="mean", tag="p", positions="all_prompt", reduce="mean")
    given.capture["inline"].update(positions="all_prompt", reduce="mean")
    [output] = generate(llm, [PROMPT], given)
    inline, stored = output.capture_results["inline"], reader.open(root).find("mean", "p")
    assert (stored.record.reduce, stored.record.rows, stored.record.dtype) == ("mean", 1, "float32")
    [plain] = generate(llm, [PROMPT], params(request_id="rows", tag="p", positions="all_prompt"))
    rows = reader.open(root).find("rows", "p")
    assert rows.record.reduce == "" and inline.payload and plain.finished
    for site, mean in inline.payload.items():
        assert same(stored.rows(*site), mean)
        assert mean.positions.tolist() == [len(PROMPT) - 1]
        values = rows.rows(*site).values.float()
        torch.testing.assert_close(mean.values, values.mean(0)[None], atol=1e-5, rtol=1e-4)
        assert not torch.allclose(mean.values, values[1:].mean(0)[None], atol=1e-3)


def test_projections_are_stored_like_rows(llm: LLM, root: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = llm.llm_engine.model_config.get_hidden_size()
    project = torch.randn(2, hidden, generator=generator)
    given = params(request_id="scores", tag="p", project=project)
    given.capture["inline"]["project"] = project
    [output] = generate(llm, [PROMPT], given)
    inline, stored = output.capture_results["inline"], reader.open(root).find("scores", "p")
    assert stored.record.projected and stored.record.width == 2
    for site, rows in inline.payload.items():
        assert rows.values.dtype == torch.float32
        assert same(stored.rows(*site), rows)
