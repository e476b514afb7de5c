# SPDX-License-Identifier: Apache-2.0
"""`compat=["lens"]` offline: vLLM-Lens's keys against its formulas, and its wire form."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE
from tests.http.server import save_model
from tests.peers.call import Call, Rows, V, W, norms, streams
from tests.peers.lens_fuzz import broken, small
from tests.support.plans import HIDDEN, SHAPE
from tests.support.serving import relative
from vllm import LLM, SamplingParams
from vllm.config.compat import open_doors
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.compat import lens, wire
from vllm.v1.interventions.frontend.request.budget import Work

zstandard = pytest.importorskip("zstandard")

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = "Today I went"
LENGTH = len(PROMPT)
LAYER = 1
SAID: list[Any] = [{"role": "user", "content": "How was it? How was it?"}]
Pair = tuple[LLM, Any]


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = save_model(tiny_models, tmp_path_factory.mktemp("lens") / "model")
    llm = make_llm(folder, compat=["lens"], skip_tokenizer_init=False)
    row = tiny_models.row("llama")
    yield llm, models.load(row, tiny_models.path("llama")).double()
    shut_down(llm)


def rows_of(output: Any) -> torch.Tensor:
    """[layers, n, hidden]."""
    found: torch.Tensor = output.activations["residual_stream"]
    return found


def vector(*rows: torch.Tensor, **more: Any) -> dict[str, Any]:
    """A steering vector at LAYER: [1, hidden], or with several rows [1, positions, hidden]."""
    values = torch.stack(rows)
    return {
        "activations": values if len(rows) == 1 else values[None],
        "layer_indices": [LAYER],
        **more,
    }


def matched(rows: Rows, scale: float, direction: torch.Tensor) -> Rows:
    return scale * norms(rows) * direction.double() / direction.double().norm()


def at(rows: Rows, *places: int) -> Rows:
    """1 at the places, else 0: [n, 1]."""
    mask = torch.zeros(len(rows), 1, dtype=torch.float64)
    mask[list(places)] = 1
    return mask


STEERED: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "plain": ([vector(V, scale=0.5)], lambda r: r + 0.5 * V.double()),
    "matched": ([vector(V, scale=-1.5, norm_match=True)], lambda r: r + matched(r, -1.5, V)),
    "several matched take the norm before any": (
        [vector(V, norm_match=True), vector(W, scale=0.5, norm_match=True), vector(W)],
        lambda r: r + matched(r, 1.0, V) + matched(r, 0.5, W) + W.double(),
    ),
    "positions": (
        [vector(V, W, position_indices=[5, 2])],
        lambda r: r + at(r, 5) * V.double() + at(r, 2) * W.double(),
    ),
    "positions from 0": (
        [vector(V, W, scale=2.0, norm_match=True)],
        lambda r: r + at(r, 0) * matched(r, 2.0, V) + at(r, 1) * matched(r, 2.0, W),
    ),
    "both": (
        [vector(W, norm_match=True), vector(V, W, norm_match=True, position_indices=[3, LENGTH])],
        lambda r: (
            r
            + matched(r, 1.0, W)
            + at(r, 3) * matched(r, 1.0, V)
            + at(r, LENGTH) * matched(r, 1.0, W)
        ),
    ),
    "nothing acts": ([vector(V, scale=0.0), vector(0 * V, norm_match=True)], lambda r: r),
}


@pytest.mark.parametrize("text", [False, True], ids=["tensors", "wire"])
@pytest.mark.parametrize("name", STEERED)
def test_steered_rows(pair: Pair, name: str, text: bool) -> None:
    llm, model = pair
    vectors, edit = STEERED[name]
    given: Any = vectors
    if text:
        given = json.dumps(
            [{**each, "activations": wire.encoded(each["activations"])} for each in vectors]
        )
    args = {"output_residual_stream": [3, LAYER], "apply_steering_vectors": given}
    before = copy.deepcopy(args)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args=args)
    first, again = (llm.generate(PROMPT, params, use_tqdm=False)[0] for _ in range(2))
    token_ids = [*(first.prompt_token_ids or ()), *first.outputs[0].token_ids][:-1]
    got = rows_of(first)
    want = streams(model, token_ids, Call(does={LAYER: edit}))
    plain = streams(model, token_ids, Call())
    assert got.shape == (2, LENGTH + 2, V.numel())
    for rows, layer in zip(got, (LAYER, 3), strict=True):
        expected = want["post_block", layer].float()
        assert relative(rows, expected) <= READ_TOLERANCE + WRITE_TOLERANCE
        moved = relative(rows, plain["post_block", layer].float())
        assert (moved < READ_TOLERANCE) if name == "nothing acts" else (moved >= LEAST_MOVE)
    # The caller's object is as it was, and says the same again.
    assert torch.equal(rows_of(again), got)
    assert params.extra_args is args and args.keys() == before.keys()
    assert str(args) == str(before)


@pytest.mark.parametrize("asked", [True, 1, "true", "[0, 1, 2, 3]"])
def test_all_layers_and_none(pair: Pair, asked: Any) -> None:
    llm, _ = pair
    args = {"output_residual_stream": asked, "activations_transport": "binary"}
    params = SamplingParams(temperature=0, max_tokens=1, extra_args=args)
    (output,) = llm.chat(SAID, params, use_tqdm=False)
    assert rows_of(output).shape[0] == 4
    params = SamplingParams(max_tokens=1, extra_args={"output_residual_stream": []})
    assert llm.generate(PROMPT, params, use_tqdm=False)[0].activations is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_args": {"apply_hooks": [1]}}, "extra_args.apply_hooks: is for vLLM-Lens"),
        (
            {"extra_args": {"output_qk": [1]}},
            "extra_args.output_qk: attention weights of layer 1 cannot be made: .* capture_points",
        ),
        ({"extra_args": {"output_qk": True}}, "extra_args.output_qk: attention .* layer 0"),
        (
            {"extra_args": {"output_qk": [9]}},
            r"extra_args.output_qk\[0\]: the model has no layer 9",
        ),
        ({"extra_args": {"steer": {}}}, "extra_args.steer: is for vLLM-Hook"),
        (
            {"extra_args": {"output_residual_stream": [1], "apply_hooks": [1]}},
            "extra_args.apply_hooks: is for vLLM-Lens",
        ),
        (
            {"extra_args": {"output_residual_stream": [1]}, "steering": []},
            "steering: cannot be combined with extra_args.output_residual_stream",
        ),
        (
            {"extra_args": {"apply_steering_vectors": [vector(V, W, position_indices=[0, 90])]}},
            "position 90 is out of reach",
        ),
    ],
)
def test_refusals(pair: Pair, fields: dict[str, Any], message: str) -> None:
    params = SamplingParams(max_tokens=1, **fields)
    for ask in (
        lambda: pair[0].generate(PROMPT, params, use_tqdm=False),
        lambda: pair[0].chat(SAID, params, use_tqdm=False),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4)])
def test_the_wire_form_is_read_as_it_was_written(dtype: torch.dtype, shape: Any) -> None:
    values = torch.randn(shape).to(dtype)
    sent = json.loads(json.dumps(wire.encoded(values)))
    assert torch.equal(wire.decoded(sent, "p"), values)
    raw = values.contiguous().view(torch.uint8).numpy().tobytes()
    plain = {k: v for k, v in sent.items() if k != "compression"}
    plain["data"] = base64.b64encode(raw).decode()
    assert torch.equal(wire.decoded(plain, "p"), values)
    old = wire.encoded(values.float()) | {"original_dtype": str(dtype)}
    assert torch.equal(wire.decoded(old, "p"), values.float())
    with pytest.raises(InterventionError, match="shape"):  # the twin
        wire.decoded({**sent, "shape": [7]}, "p")


@pytest.mark.quick
def test_a_bomb_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that says it has more bytes than its shape; and one that does not say."""
    begun: list[int] = []
    make = zstandard.ZstdDecompressor

    def counted(**options: Any) -> Any:
        begun.append(1)
        return make(**options)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", counted)
    raw = bytes(1 << 20)
    bomb = zstandard.ZstdCompressor(level=1).compress(raw)
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(raw)
    honest = wire.encoded(torch.zeros(4))
    for data, started in ((bomb, 0), (silent, 1)):
        begun.clear()
        sent = {**honest, "data": base64.b64encode(data).decode()}
        with pytest.raises(InterventionError, match=r"^p\.data: "):
            wire.decoded(sent, "p")
        assert len(begun) == started
    assert torch.equal(wire.decoded(honest, "p"), torch.zeros(4))
    huge = {**honest, "shape": [1 << 20, 1 << 20]}
    with pytest.raises(InterventionError, match=r"^p\.shape: must be of 1 to 268435456 bytes"):
        wire.decoded(huge, "p")


@pytest.mark.quick
def test_malformed_vectors_are_refused_by_name() -> None:
    rng = random.Random(1)
    refused = right = 0
    path = f"extra_args.{lens.STEER}"
    for _ in range(10_000):
        given: Any = broken(rng, HIDDEN)
        given = given if rng.random() < 0.5 else json.dumps(given)
        try:
            lens.fields_of({lens.STEER: given}, "extra_args.", SHAPE, Work(1 << 23))
        except InterventionError as error:
            assert error.parameter is not None and error.parameter.startswith(path)
            assert str(error).startswith(f"{error.parameter}: ") and len(str(error)) < 400
            refused += 1
        else:  # what it became is right again, such as another finite scale
            right += 1
    assert refused > 9_000, (refused, right)
    right_again = {lens.STEER: [small(HIDDEN)]}
    assert lens.fields_of(right_again, "extra_args.", SHAPE, Work(1 << 23))["steering"]


def opening(*doors: str) -> Any:
    """Engine arguments, as far as a door looks."""
    return SimpleNamespace(compat=[*doors], steering_families=["add"], capture_consumers=[])


@pytest.mark.quick
def test_a_door_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compat: unknown \['len'\], allowed are"):
        open_doors(opening("len"))
    args = opening("lens")
    open_doors(args)
    open_doors(args)
    assert args.enable_steering and args.capture_consumers == ["inline"]
    assert args.steering_families == ["add", "norm_match"]
