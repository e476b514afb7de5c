# SPDX-License-Identifier: Apache-2.0
"""Features of sparse autoencoders: read from transformers' own rows in float64, and written as the
operation with the file's own vectors, from engines that chunk, steer and share steps."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance import models
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.conformance.models import LAYERS
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.autoencoders import FEATURES, made_up, save_autoencoder
from tests.support.serving import Ask, Judge, prompt_of, serve, vector
from vllm import LLM, RequestOutput
from vllm.config.points import STREAM_POINTS
from vllm.pilot import Autoencoder
from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.reader import open as open_captures
from vllm.v1.features.autoencoder import opened
from vllm.v1.interventions.scheduler import feature_room
from vllm.v1.interventions.worker.making import features as maker
from vllm.v1.interventions.worker.making import held as held_module

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

K = 12
SITE = "post_block", 1
TOLERANCE = 2e-4
"""Of an activation; rows have norms near 10."""
APART = 0.2
STEERED = {"steering_vectors": {"pre_attn": {1: vector(70)}}}


JUMP, TOP = made_up(1), made_up(2)
del TOP["threshold"]
ENTRIES = {
    "jump": "post_block.1",
    "top": f"pre_attn.{LAYERS - 1}",
    "branch": "mlp_out.2",
    "normed": "post_attn.1",
    "trans": "mlp_in.1",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of SAELens: JumpReLU of the stream and of a branch, TopK of the stream."""
    root = tmp_path_factory.mktemp("saes")
    return {
        "jump": save_autoencoder(root / "jump", JUMP),
        "top": save_autoencoder(
            root / "top", TOP, architecture="topk", k=K, apply_b_dec_to_input=True
        ),
        "branch": save_autoencoder(root / "branch", JUMP, apply_b_dec_to_input=True),
        "normed": save_autoencoder(root / "normed", JUMP, normalize_activations="layer_norm"),
        "trans": save_autoencoder(root / "trans", JUMP, architecture="jumprelu_transcoder"),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the consumer that writes files."""
    return tmp_path_factory.mktemp("acts")


@pytest.fixture(scope="module")
def pair(
    tiny_models: TinyModels, files: dict[str, Path], root: Path
) -> Iterator[tuple[LLM, Judge]]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maker, "ACTIVATION_BYTES", 7 * 4 * FEATURES)  # seven rows at a time
        llm = make_llm(
            path,
            enable_steering=True,
            steering_families=["add", "feature", "gate", "ablate", "reconstruct"],
            capture_consumers=["inline", f"filesystem:root={root}"],
            capture_points=[*STREAM_POINTS, "mlp_in"],
            features=[f"{name}={files[name]}@{site}" for name, site in ENTRIES.items()],
            features_root=str(files["jump"].parent),
            features_reconstruct=[
                f"post_block.2={FEATURES}",
                f"post_block.2={FEATURES + 9},k={K + 3}",
                f"post_block.1={FEATURES}",
            ],
            max_num_batched_tokens=16,
            **row.engine,
        )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def inline(*captures: dict[str, Any]) -> dict[str, Any]:
    return {"capture": {"inline": captures[0] if len(captures) == 1 else list(captures)}}


def read(**features: Any) -> dict[str, Any]:
    return {"features": features, "positions": "all"}


def before(
    given: dict[str, torch.Tensor], x: torch.Tensor, subtracts: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the encoder makes of rows, float64, and the rows."""
    t = {name: tensor.double() for name, tensor in given.items()}
    x = x.double()
    return (x - t["b_dec"] * subtracts) @ t["W_enc"] + t["b_enc"], x


def jumped(z: torch.Tensor) -> torch.Tensor:
    return torch.where(z > JUMP["threshold"].double(), z.clamp(min=0), 0.0)


def near(z: torch.Tensor) -> torch.Tensor:
    """Rows in which a feature is so near its threshold that rounding decides."""
    return ((z - JUMP["threshold"].double()).abs() < 1e-4).any(1)


def test_features_are_what_the_file_says_of_transformers_rows(pair: tuple[LLM, Judge]) -> None:
    """Steered and plain, in prompts that are cut and in generated tokens."""
    llm, judge = pair
    asked = [
        read(name="jump", top=7, ids=[5, 0, 159], error=True),
        read(name="top", top=20, ids=[3]),
        read(name="jump", ids=[9], above=1.5),
        read(name="branch", top=4, error=True),
    ]
    asks = [
        Ask(prompt_of(20, 70), inline(*asked)),
        Ask(prompt_of(20, 70), {**STEERED, **inline(*asked)}),
        Ask(prompt_of(9, 72), inline({**asked[0], "positions": [0, -1]})),
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks, log_probs=False)
    assert len(steps.chunks(0)) > serving.GENERATED, "the prompt was not cut"
    moved = []
    for ask, output in zip(asks[:2], outputs[:2], strict=True):
        completion = output.outputs[0]
        results = completion.capture_results
        assert {result.status for result in results.values()} == {"ok"}
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        streams = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
        jump, top, high, branch = (
            next(iter(results[f"inline[{i}]"].payload.values())) for i in range(4)
        )
        z, x = before(JUMP, streams[SITE], subtracts=False)
        f, sure = jumped(z), ~near(z)
        assert sure.float().mean() > 0.5
        assert (jump.features, jump.asked) == ("jump", (5, 0, 159))
        assert jump.token_ids.tolist() == sequence and jump.give == (
            "top",
            "ids",
            "active",
            "error",
        )
        best = f.topk(7)
        assert (jump.top_values - best.values)[sure].abs().max() < TOLERANCE
        assert (f.gather(1, jump.top_ids.long()) - best.values)[sure].abs().max() < TOLERANCE
        assert (jump.values - f[:, [5, 0, 159]])[sure].abs().max() < TOLERANCE
        assert (jump.values - f[:, [6, 1, 158]])[sure].abs().max() > APART
        assert torch.equal(jump.active[sure].long(), (f > 0).sum(1)[sure])
        left = x - f @ JUMP["W_dec"].double() - JUMP["b_dec"].double()
        assert (jump.error - left.norm(dim=1))[sure].abs().max() < 1e-3
        assert (jump.error - (left + JUMP["b_dec"]).norm(dim=1)).abs().min() > 1e-3
        assert torch.equal(high.active[sure].long(), (f > 1.5).sum(1)[sure])
        assert (high.values[:, 0] - f[:, 9])[sure].abs().max() < TOLERANCE
        z, _ = before(TOP, streams["pre_attn", LAYERS - 1], subtracts=True)
        best = z.clamp(min=0).topk(K)
        assert (top.top_values[:, :K] - best.values).abs().max() < TOLERANCE
        assert (top.top_ids[:, K:] == -1).all() and not top.top_values[:, K:].any()
        assert (top.active == K).all(), "as many as TopK leaves"
        z, x = before(JUMP, streams["post_block", 2] - streams["post_attn", 2], subtracts=True)
        f, sure = jumped(z), ~near(z)
        assert (branch.top_values - f.topk(4).values)[sure].abs().max() < TOLERANCE
        moved.append(jump)
    assert (moved[0].top_values - moved[1].top_values)[:20].abs().max() > APART
    few = next(iter(outputs[2].outputs[0].capture_results["inline"].payload.values()))
    assert few.positions.tolist() == [0, 8] and few.at(8).top_ids.shape == (1, 7)
    with pytest.raises(ValueError, match="'ids' was not asked for"):
        _ = top.values if not top.asked else branch.values


def test_rows_that_are_scaled_and_what_an_mlp_reads(pair: tuple[LLM, Judge]) -> None:
    """Each row by its own mean and deviation; and a transcoder at the MLP's input, whose decoder's
    row is added to the stream after the block."""
    llm, judge = pair
    asked = [
        read(name="normed", top=7, ids=[5], error=True),
        read(name="trans", top=5, ids=[9]),
        {"hooks": {"mlp_in": [1], "post_attn": [1], "post_block": [1]}, "positions": "all"},
    ]
    ask = Ask(prompt_of(20, 70), inline(*asked))
    named = {"op": "add", "features": "trans", "id": 7, "scale": 3.0}
    written = [
        Ask(ask.prompt, {"steering": [op], **inline(asked[2])})
        for op in (named, {**named, "point": "post_block"}, {**named, "point": "pre_attn"})
    ]
    outputs = serve(llm, [ask, *written], log_probs=False)
    results = outputs[0].outputs[0].capture_results
    normed, trans = (next(iter(results[f"inline[{i}]"].payload.values())) for i in range(2))
    rows = {site[0]: at.values for site, at in results["inline[2]"].payload.items()}
    sequence = [*ask.prompt, *outputs[0].outputs[0].token_ids][:-1]
    streams = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
    x = streams["post_attn", 1].double()
    centre, size = x.mean(1, keepdim=True), x.std(1, keepdim=True)
    z, _ = before(JUMP, (x - centre) / (size + 1e-5), subtracts=False)
    f, sure = jumped(z), ~near(z)
    assert (normed.top_values - f.topk(7).values)[sure].abs().max() < TOLERANCE
    assert (normed.values[:, 0] - f[:, 5])[sure].abs().max() < TOLERANCE
    assert (normed.values[:, 0] - jumped(before(JUMP, x, False)[0])[:, 5]).abs().max() > APART
    decoded = f @ JUMP["W_dec"].double() + JUMP["b_dec"].double()
    left = x - decoded * size - centre
    assert (normed.error - left.norm(dim=1))[sure].abs().max() < 1e-3
    assert (normed.error - (x - decoded).norm(dim=1)).abs().max() > APART
    z, _ = before(JUMP, rows["mlp_in"], subtracts=False)
    f, sure = jumped(z), ~near(z)
    assert (trans.top_values - f.topk(5).values)[sure].abs().max() < TOLERANCE
    assert (trans.values[:, 0] - jumped(before(JUMP, x, False)[0])[:, 9]).abs().max() > APART
    by_default, at_block, elsewhere = (
        {site[0]: at.values for site, at in o.outputs[0].capture_results["inline"].payload.items()}
        for o in outputs[1:]
    )
    assert torch.equal(by_default["post_block"], at_block["post_block"])
    moved = by_default["post_block"][:20] - rows["post_block"][:20]
    assert (moved - 3.0 * JUMP["W_dec"][7])[0].abs().max() < TOLERANCE
    assert (by_default["post_block"] - elsewhere["post_block"]).abs().max() > APART


def test_files_are_open_before_the_first_request(pair: tuple[LLM, Judge]) -> None:
    """Which is planned on the event loop of a server, where all others wait."""
    llm, _ = pair
    files = llm.llm_engine.vllm_config.steering_config.feature_files.values()
    assert len(files) == len(ENTRIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autoencoder, "load", None)
        assert all(opened(file).num_features == FEATURES for file in files)


def test_an_operation_names_what_a_file_has(
    pair: tuple[LLM, Judge], files: dict[str, Path]
) -> None:
    """Bit for bit what the file's vectors do, at the file's site; another feature does another
    thing. So with a gate, and with operations that write the decoder's row alone."""
    llm, _ = pair
    sae, prompt = Autoencoder.load(files["jump"]), prompt_of(20, 75)
    named = {"features": "jump", "id": 7}
    site = {"point": "post_block", "layers": 1}
    of_file: dict[str, Any] = sae.op(7, "post_block", 1)
    probe = {"probe": of_file["encoder"], "threshold": 1.0 - of_file["bias"], "sharpness": 1e3}
    assert of_file["threshold"] < 1.0
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "feature": (
            {"op": "feature", **named, "value": 8.0},
            sae.op(7, "post_block", 1, value=8.0),
        ),
        "add": (
            {"op": "add", **named, "scale": 9.0, "positions": "all_generated"},
            {"op": "add", **site, "vector": sae.decoder[7], "scale": 9.0}
            | {"positions": "all_generated"},
        ),
        "ablate": (
            {"op": "ablate", **named, "layers": [0, 2]},
            {"op": "ablate", **site, "layers": [0, 2], "direction": sae.decoder[7]},
        ),
        "gate": (
            {"op": "add", **site, "vector": vector(3)}
            | {"gate": {**named, "threshold": 1.0, "sharpness": 1e3}},
            {"op": "add", **site, "vector": vector(3), "gate": probe},
        ),
    }
    rows = {"hooks": {"post_block": [1, 3]}, "positions": "all"}
    asks = [Ask(prompt, inline(rows))]
    for by_name, by_vector in cases.values():
        asks += [Ask(prompt, {"steering": [op], **inline(rows)}) for op in (by_name, by_vector)]
        other = json.loads(json.dumps(by_name, default=lambda tensor: tensor.tolist()))
        other.get("gate", other)["id"] = 8
        asks.append(Ask(prompt, {"steering": [other], **inline(rows)}))
    outputs = serve(llm, asks, log_probs=False)
    made = [
        torch.stack([r.values for r in o.outputs[0].capture_results["inline"].payload.values()])
        for o in outputs
    ]
    for i, case in enumerate(cases):
        named_rows, vector_rows, other_rows = made[1 + 3 * i : 4 + 3 * i]
        assert torch.equal(named_rows, vector_rows), case
        assert (named_rows - other_rows).abs().max() > APART, case
        assert (named_rows - made[0]).abs().max() > APART, case


def test_a_rule_watches_a_feature(pair: tuple[LLM, Judge]) -> None:
    """It fires at the first generated token whose activation is above the threshold, which is a
    number between the activations that come."""
    llm, _ = pair
    prompt = prompt_of(12, 76)
    [plain] = serve(llm, [Ask(prompt, inline(read(name="jump", ids=[*range(40)])))], False)
    rows = next(iter(plain.outputs[0].capture_results["inline"].payload.values()))
    f = rows.values[len(prompt) :]
    feature = int((f.max(0).values - f.min(0).values).argmax())
    middle = float(f[:, feature].max() + f[:, feature].min()) / 2
    want = int((f[:, feature] > middle).nonzero()[0, 0]) + len(prompt)
    rule = {"name": "seen", "features": "jump", "id": feature, "threshold": middle}
    low = {**rule, "name": "ever", "threshold": 1e4}
    [output] = serve(llm, [Ask(prompt, {"rules": [rule, low]})], log_probs=False)
    fired = output.outputs[0].rules
    assert fired["seen"].fired_at == want
    assert fired["ever"].fired_at is None


@pytest.mark.parametrize("layout", ["packed", "per_file", "sharded", "ehs"])
def test_features_in_files(pair: tuple[LLM, Judge], root: Path, layout: str) -> None:
    """Files give back what inline does, bit for bit, and rows under their names alone."""
    asked = read(name="jump", top=7, ids=[5, 0, 159], above=0.5, error=True)
    named = {**asked, "request_id": "seen", "tag": layout, "layout": layout}
    ask = Ask(prompt_of(20, 70), {"capture": {"inline": asked, "filesystem": named}})
    [output] = serve(pair[0], [ask], log_probs=False)
    results = output.outputs[0].capture_results
    assert {result.status for result in results.values()} == {"ok"}
    stored = open_captures(str(root)).find("seen", layout)
    assert stored.sites == (SITE,)
    rows, kept = results["inline"].payload[SITE], stored.features(*SITE)
    assert (kept.features, kept.asked, kept.give) == (rows.features, rows.asked, rows.give)
    assert kept.positions.tolist() == rows.positions.tolist() == list(range(len(rows)))
    assert kept.token_ids.tolist() == rows.token_ids.tolist()
    parts, others = rows.parts(), kept.at(3).parts()
    assert parts.keys() == {"top_ids", "top_values", "values", "active", "error"}
    for name, part in kept.parts().items():
        assert part.dtype == parts[name].dtype and torch.equal(part, parts[name])
        assert torch.equal(others[name], parts[name][3:4])
    assert not torch.equal(rows.at(3).error, rows.at(4).error)
    for wrong in (lambda: stored.rows(*SITE), lambda: stored.attention(1)):
        with pytest.raises(KeyError, match=r"read features|has no attention"):
            wrong()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            inline(read(name="none", top=1)),
            "unknown features 'none'; known are jump, top, branch, normed, trans",
        ),
        (inline(read(name="jump")), "asks for nothing: give top, ids or error"),
        (inline(read(name="jump", top=129)), "top: must be an int from 0 to 128, got 129"),
        (inline(read(name="jump", ids=[160])), r"ids\[0\]: feature 160 is none of 0-159"),
        (inline(read(name="jump", top=1, above=-1)), "above: must be at least 0, got -1"),
        (inline(read(name="jump", top=1, k=2)), "features: unknown keys? "),
        (
            inline({**read(name="jump", top=1), "hooks": {"post_block": [2]}}),
            "'jump' reads post_block of layer 1: leave out hooks",
        ),
        (inline({**read(name="jump", top=1), "norms": True}), "cannot be combined with"),
        (
            {"steering": [{"op": "feature", "features": "jump", "value": 1}]},
            "id: must be a feature",
        ),
        (
            {"steering": [{"op": "feature", "features": "top", "id": 1, "value": 1}]},
            "is TopK: whether a feature is active depends on all others",
        ),
        (
            {"steering": [{"op": "feature", "features": "normed", "id": 1, "value": 1}]},
            "scales each row by itself .layer_norm.",
        ),
        (
            {"steering": [{"op": "feature", "features": "trans", "id": 1, "value": 1}]},
            "is a transcoder, which reads one site and writes another",
        ),
        (inline(read(name="trans", ids=[1], error=True)), "error: trans is a transcoder"),
        (
            {"steering": [{"op": "feature", "features": "jump", "id": 1, "bias": 0, "value": 1}]},
            "bias: is the feature's own: leave it out",
        ),
        (
            {"steering": [{"op": "feature", "features": "branch", "id": 1, "value": 1}]},
            "mlp_out is made of two rows|cannot be steered|post_block",
        ),
        ({"rules": [{"name": "a", "features": "jump", "id": 1}]}, "threshold: is missing"),
    ],
)
def test_what_cannot_be_is_refused(
    pair: tuple[LLM, Judge], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        serve(pair[0], [Ask(prompt_of(4, 1), fields)])


def test_deltas_are_the_whole(pair: tuple[LLM, Judge]) -> None:
    llm, _ = pair
    ask = Ask(prompt_of(20, 81), inline(read(name="jump", top=3, ids=[2], error=True)))
    (whole,) = serve(llm, [ask])
    [expected] = whole.outputs[0].capture_results["inline"].payload.values()
    params = ask.params()
    params.output_kind = RequestOutputKind.DELTA
    llm.llm_engine.add_request("deltas", {"prompt_token_ids": ask.prompt}, params)
    parts = list[Any]()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            assert isinstance(output, RequestOutput)
            assert output.outputs[0].capture_results is not None
            parts += output.outputs[0].capture_results["inline"].payload.values()
    assert len(parts) > 3
    for name in ("top_ids", "top_values", "values", "active", "error"):
        joined = torch.cat([getattr(rows, name) for rows in parts])
        assert torch.equal(joined, getattr(expected, name)), name


def rebuilt(
    judge: Judge, files: dict[str, Path], ask: Ask, output: RequestOutput, site: str = ""
) -> Ask:
    """A request that says outright what the reconstruction of every row is, of the final sequence:
    of transformers' rows, in float64."""
    [first, *rest] = ask.fields["steering"]
    name = first["features"]
    point, layer = (site or ENTRIES[name]).split(".")
    sequence = [*ask.prompt, *output.outputs[0].token_ids][:-1]
    x = judge.reference.run(sequence).rows[point, int(layer)]
    sae = Autoencoder.load(files[name])
    a = sae.encode(x)
    for op in rest:
        a[:, op["id"]] = op["value"]
    first = len(ask.prompt) if first.get("positions") == "all_generated" else 0
    at = list(range(first, len(sequence)))
    op = {"op": "replace", "point": point, "layers": int(layer), "positions": at}
    return Ask(ask.prompt, {**ask.fields, "steering": [{**op, "values": sae.decode(a, x)[at]}]})


def test_rows_become_what_is_reconstructed(pair: tuple[LLM, Judge], files: dict[str, Path]) -> None:
    """At prompts that are cut, beside others, and with features that act at once with it."""
    llm, judge = pair
    rows = serving.capture("all")
    generated = {"positions": "all_generated"}
    more = {"op": "feature", "features": "jump", "id": 7, "value": 5.0}
    again = {"op": "feature", "features": "jump", "id": 11, "value": 4.0}
    asked: list[list[dict[str, Any]]] = [
        [{"features": "jump"}],
        [{"features": "top", **generated}],
        [{"features": "normed"}],
        [{"features": "jump"}, more, again],
    ]
    asks = [
        Ask(prompt_of(20, 75 + i), {"steering": [{"op": "reconstruct", **first}, *rest], **rows})
        for i, (first, *rest) in enumerate(asked)
    ]
    outputs = serve(llm, [*asks, Ask(prompt_of(20, 75), rows)])
    for ask, output in zip(asks, outputs, strict=False):
        judge.check(rebuilt(judge, files, ask, output), output)
    judge.check(Ask(prompt_of(20, 75), rows), outputs[-1])
    with pytest.raises(AssertionError, match="off by"):
        judge.check(Ask(asks[0].prompt, rows), outputs[0])
    # The twin: features that read what was reconstructed, and not the row.
    one = Ask(asks[3].prompt, {**asks[3].fields, "steering": asks[3].fields["steering"][:1]})
    with pytest.raises(AssertionError, match="off by"):
        judge.check(rebuilt(judge, files, one, outputs[3]), outputs[3])


def test_a_name_that_came_while_the_engine_served(
    pair: tuple[LLM, Judge], files: dict[str, Path]
) -> None:
    """What has other numbers under its name is another one to the prefix cache; what is at work
    keeps its own; nothing reconstructs by it that was not asked for."""
    llm, judge = pair
    folder = files["jump"].parent / "later"
    named = [{"op": "feature", "features": "later", "id": 7, "value": 60.0}]
    prompt, answers, cached = prompt_of(70, 90), [], []

    def run(steering: list[dict[str, Any]]) -> RequestOutput:
        [output] = serve(llm, [Ask(prompt, {"steering": steering})], log_probs=False)
        cached.append(output.num_cached_tokens)
        answers.append(output.outputs[0].token_ids)
        return output

    for tensors in (made_up(4), made_up(5)):
        shutil.rmtree(folder, ignore_errors=True)
        save_autoencoder(folder, tensors)
        llm.steering.register_features("later", "later", "post_block", 2)
        own = Autoencoder.load(folder).op(7, "post_block", 2, value=60.0)
        run(named)
        run(named)
        run([own])
        check = Ask(prompt, {"steering": named, **serving.capture("all")})
        [output] = serve(llm, [check])
        judge.check(Ask(prompt, {"steering": [own], **serving.capture("all")}), output)
    assert cached[:3] == cached[3:] and cached[0] == 0 < cached[1] == cached[2]
    assert answers[0] == answers[1] == answers[2] != answers[3] == answers[4]
    with pytest.raises(ValueError, match="'later' got its name while the engine served, to be re"):
        serve(llm, [Ask(prompt, {"steering": [{"op": "reconstruct", "features": "later"}]})])
    for path in ("../later", str(folder.parent.parent), "."):
        with pytest.raises(ValueError, match=r"^path: .* is not in|has none of"):
            llm.steering.register_features("out", path, "post_block", 2)
    llm.steering.unregister_features("later")
    with pytest.raises(ValueError, match="unknown features 'later'; known are jump"):
        run(named)
    with pytest.raises(ValueError, match="unknown name 'later'; registered are none"):
        llm.steering.unregister_features("later")


def rows_of(output: RequestOutput, consumer: str = "inline") -> Any:
    results = output.outputs[0].capture_results
    assert results is not None
    return next(iter(results[consumer].payload.values()))


def held(llm: LLM) -> set[str]:
    """Keys of the autoencoders on the device."""
    capture = serving.core_of(llm).model_executor.driver_worker.worker.model_runner.interventions
    return set(capture.capture.features.by_key)


PARTS = ("top_ids", "top_values", "values", "active", "error")


def test_what_got_its_name_late_is_read_by(
    pair: tuple[LLM, Judge], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as what has its name since the start; a request that runs keeps what the name
    meant, and the memory is free a while after its end."""
    llm, _ = pair
    now = time.monotonic() + 2 * feature_room.KEPT_SECONDS
    monkeypatch.setattr(feature_room.time, "monotonic", lambda: now)
    llm.steering.state()
    first = held(llm)
    assert first == {*ENTRIES}, "what other tests named is gone"
    folder = files["jump"].parent / "other"
    save_autoencoder(folder, made_up(4))
    asked = dict(top=7, ids=[5, 0, 159], error=True)
    both = inline(read(name="jump", **asked), read(name="again", **asked))
    ask = Ask(prompt_of(20, 91), {**STEERED, **both})
    one = Ask(prompt_of(20, 91), {**STEERED, **inline(read(name="again", **asked))})

    def finished() -> RequestOutput:
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.finished:
                    assert isinstance(output, RequestOutput)
                    return output
        raise AssertionError("it did not end")

    llm.steering.register_features("again", "jump", "post_block", 1)
    [output] = serve(llm, [ask], log_probs=False)
    of_start, late = (rows_of(output, f"inline[{i}]") for i in range(2))
    assert late.features == "again"
    for part in PARTS:
        assert torch.equal(getattr(of_start, part), getattr(late, part)), part
    llm.llm_engine.add_request("runs", {"prompt_token_ids": one.prompt}, one.params())
    for _ in range(3):
        llm.llm_engine.step()
    llm.steering.register_features("again", "other", "post_block", 1)
    assert len(held(llm) - first) == 2
    now += 3 * feature_room.KEPT_SECONDS
    llm.steering.state()
    assert len(held(llm) - first) == 2, "a request reads by it"
    now += 2 * feature_room.KEPT_SECONDS  # in which nobody looks
    running = rows_of(finished())
    [output] = serve(llm, [one], log_probs=False)
    other = rows_of(output)
    for part in PARTS:
        assert torch.equal(getattr(of_start, part), getattr(running, part)), part
    assert (other.values - of_start.values).abs().max() > APART
    llm.steering.state()
    assert len(held(llm) - first) == 2, "what was on its way may come"
    now += feature_room.KEPT_SECONDS + 1
    llm.steering.state()
    assert len(held(llm) - first) == 1
    llm.steering.unregister_features("again")
    now += feature_room.KEPT_SECONDS + 1
    llm.steering.state()
    assert held(llm) == first
    with pytest.raises(ValueError, match="unknown features 'again'"):
        serve(llm, [one])


def test_a_name_that_cannot_be_had_leaves_nothing(
    pair: tuple[LLM, Judge], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is too large, counted before its file is read, or what the workers find is not
    what the frontend found."""
    llm, _ = pair
    first, later = held(llm), len(feature_files(llm))
    folder = files["jump"].parent / "broken"
    save_autoencoder(folder, JUMP)

    def register(path: str = "broken") -> None:
        llm.steering.register_features("broken", path, "post_block", 1)

    room = serving.core_of(llm).scheduler.interventions._room
    size = 2 * 4 * JUMP["W_enc"].numel() + 4 * (4 * FEATURES + len(JUMP["b_dec"]))
    with monkeypatch.context() as patch:
        patch.setattr(room, "_size", size - 1)
        patch.setattr(Autoencoder, "load", None)
        message = f"^path: broken takes {size} bytes, and {size - 1} of {size - 1} are left: unreg"
        with pytest.raises(ValueError, match=message):
            register()
    with monkeypatch.context() as patch:
        read_there = Autoencoder.load

        def torn(path: str) -> Autoencoder:
            save_file({**JUMP, "W_dec": JUMP["W_dec"][1:]}, folder / "sae_weights.safetensors")
            return read_there(path)

        patch.setattr(held_module, "_read", lambda file: torn(file.path))
        with pytest.raises(
            ValueError, match=r"broken/sae_weights\.safetensors: W_dec is .* needed"
        ):
            register()
    assert held(llm) == first and len(feature_files(llm)) == later
    assert not [s for s in room._held.values() if s.name == "broken"]
    with pytest.raises(ValueError, match="W_dec"):
        register()
    save_file(JUMP, folder / "sae_weights.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(room, "_size", room._taken + size)
        register()
        with pytest.raises(ValueError, match=f"takes {size} bytes, and 0 of"):
            register("jump")
    assert len(held(llm) - first) == 1
    llm.steering.unregister_features("broken")


LATE = "post_block.2"


def test_what_got_its_name_late_reconstructs(
    pair: tuple[LLM, Judge], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, one file after the other in a place; what runs keeps its own, and blocks of
    one file are not another's."""
    llm, judge = pair
    now = time.monotonic() + 9 * feature_room.KEPT_SECONDS
    monkeypatch.setattr(feature_room.time, "monotonic", lambda: now)
    llm.steering.state()
    first, rows = held(llm), serving.capture("all")
    small = save_autoencoder(files["jump"].parent / "small", made_up(8, features=FEATURES - 31))
    own = {**files, "small": small}

    def register(name: str, path: str, site: str = LATE) -> None:
        point, layer = site.split(".")
        llm.steering.register_features(name, path, point, int(layer), reconstruct=True)

    def ask(name: str, seed: int, *rest: dict[str, Any], **more: Any) -> Ask:
        op = {"op": "reconstruct", "features": name, **more}
        return Ask(prompt_of(20, seed), {"steering": [op, *rest], **rows})

    def check(asked: Ask, output: RequestOutput, path: str, site: str = LATE) -> None:
        by = {**own, asked.fields["steering"][0]["features"]: own[path]}
        judge.check(rebuilt(judge, by, asked, output, site), output)

    register("late", "jump")
    register("tops", "top")
    register("beside", "small", "post_block.1")
    feature = {"op": "feature", "features": "late", "id": 7, "value": 5.0}
    asks = [
        (ask("late", 81), "jump", LATE),
        (ask("tops", 82, positions="all_generated"), "top", LATE),
        (ask("late", 83, feature), "jump", LATE),
        (ask("beside", 84), "small", "post_block.1"),
        (ask("jump", 84), "jump", "post_block.1"),
    ]
    outputs = serve(llm, [asked for asked, _, _ in asks])
    for (asked, path, site), output in zip(asks, outputs, strict=True):
        check(asked, output, path, site)
        with pytest.raises(AssertionError, match="off by"):
            check(asked, output, "small" if path == "jump" else "jump", site)
    for name, path in (("third", "jump"), ("late", "small")):
        with pytest.raises(ValueError, match=rf"^reconstruct: {name} finds no place: those of f"):
            register(name, path)
    with pytest.raises(ValueError, match=r"^reconstruct: more fits in no place of features_rec"):
        register("more", "top", "post_block.1")
    assert len(held(llm) - first) == 3, "a name that cannot be had leaves nothing"

    running, fresh = ask("late", 85), ask("late", 86)
    llm.llm_engine.add_request("runs", {"prompt_token_ids": running.prompt}, running.params())
    for _ in range(3):
        llm.llm_engine.step()
    for name in ("late", "tops"):
        llm.steering.unregister_features(name)
    now += feature_room.KEPT_SECONDS + 1
    register("late", "normed")  # in the place of "tops": the other one is in use
    llm.llm_engine.add_request("fresh", {"prompt_token_ids": fresh.prompt}, fresh.params())
    ended = dict[str, RequestOutput]()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                ended[output.request_id] = output
    check(running, ended["runs"], "jump")
    check(fresh, ended["fresh"], "normed")
    long = Ask(prompt_of(70, 87), {"steering": ask("late", 0).fields["steering"]})
    cached, answers = [], []
    llm.steering.unregister_features("late")
    now += 2 * feature_room.KEPT_SECONDS + 1
    # What a digest of some of the numbers would not tell apart.
    turned = made_up(8, features=FEATURES - 31)
    turned["W_dec"][1:] *= -1
    own["turned"] = save_autoencoder(files["jump"].parent / "turned", turned)
    assert Autoencoder.load(own["turned"]).digest == Autoencoder.load(small).digest
    for path in ("turned", "small"):
        register("late", path)
        for _ in range(2):
            [output] = serve(llm, [long], log_probs=False)
            cached.append(output.num_cached_tokens)
            answers.append(output.outputs[0].token_ids)
        [output] = serve(llm, [ask("late", 88)])
        check(ask("late", 88), output, path)
        llm.steering.unregister_features("late")
        now += 2 * feature_room.KEPT_SECONDS + 1
    assert cached[0] == cached[2] == 0 < cached[1] == cached[3]
    assert answers[0] == answers[1] != answers[2] == answers[3]
    llm.steering.unregister_features("beside")
    now += feature_room.KEPT_SECONDS + 1
    llm.steering.state()
    assert held(llm) == first


def feature_files(llm: LLM) -> dict[str, Any]:
    shape = llm.llm_engine.vllm_config.tap_shape
    assert shape is not None
    return shape.features


def test_two_workers_reconstruct(
    tiny_models: TinyModels, files: dict[str, Path], runner: Runner
) -> None:
    """Tensor-parallel ranks all reconstruct, and each reads a shard; of pipeline stages the one
    that has the layer does."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    split = "tensor_parallel_size" if runner == "v1" else "pipeline_parallel_size"
    options: dict[str, Any] = {split: 2, "steering_families": ["feature", "reconstruct"]}
    options["features"] = [f"{name}={files[name]}@{ENTRIES[name]}" for name in ("jump", "top")]
    odd = made_up(6, features=FEATURES - 1)
    path_of_odd = save_autoencoder(files["jump"].parent / "odd", odd)
    options["features"].append(f"odd={path_of_odd}@post_block.1")
    options["features_root"] = str(files["jump"].parent)
    options["features_reconstruct"] = [f"{LATE}={FEATURES}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        llm = make_llm(path, enable_steering=True, capture_consumers=["inline"], **options)
        try:
            judge = Judge(Reference(row, models.load(row, path)))
            for name in ("jump", "top"):
                ops = [{"op": "reconstruct", "features": name}]
                ask = Ask(prompt_of(20, 79), {"steering": ops, **serving.capture("all")})
                [output] = serve(llm, [ask])
                judge.check(rebuilt(judge, files, ask, output), output)
            llm.steering.register_features("late", "jump", "post_block", 2, reconstruct=True)
            ask = Ask(ask.prompt, {**ask.fields, "steering": [{**ops[0], "features": "late"}]})
            [output] = serve(llm, [ask])
            by_late = {"late": files["jump"]}
            judge.check(rebuilt(judge, by_late, ask, output, LATE), output)
            with pytest.raises(AssertionError, match="off by"):
                judge.check(rebuilt(judge, by_late, ask, output, "post_block.1"), output)
            llm.steering.unregister_features("late")
            read_by_two(llm, judge, odd)
        finally:
            shut_down(llm)


def read_by_two(llm: LLM, judge: Judge, odd: dict[str, torch.Tensor]) -> None:
    """What the formula says of transformers' rows, of numbers of features that two ranks share
    evenly, and do not; by a name that came while the engine served as by one of the start. Another
    file's differ, and a name that no worker can have is none."""
    last = FEATURES - 2
    for name, site, ids in (
        ("jump", SITE, [79, 80, 159]),
        ("odd", SITE, [79, 80, last]),
        ("top", ("pre_attn", LAYERS - 1), [79, 80, 159]),
    ):
        llm.steering.register_features("late", name, *site)
        asked = [
            read(name=of, top=20, ids=ids, error=True, above=above)
            for of, above in ((name, 0.0), ("late", 0.0), (name, 0.5))
        ]
        ask = Ask(prompt_of(20, 79), inline(*asked))
        [output] = serve(llm, [ask], log_probs=False)
        of_start, late, high = (rows_of(output, f"inline[{i}]") for i in range(3))
        for part in PARTS:
            assert torch.equal(getattr(of_start, part), getattr(late, part)), (name, part)
        sequence = [*ask.prompt, *output.outputs[0].token_ids][:-1]
        tensors = {"jump": JUMP, "odd": odd, "top": TOP}[name]
        z, x = before(tensors, judge.reference.run(sequence).rows[site], subtracts=name == "top")
        threshold = tensors.get("threshold", torch.zeros(len(tensors["b_enc"]))).double()
        f = torch.where(z > threshold, z.clamp(min=0), 0.0)
        if name == "top":
            best = f.topk(K)
            f = torch.zeros_like(f).scatter_(1, best.indices, best.values)
        sure = ~((z - threshold).abs() < 1e-4).any(1)
        assert sure.float().mean() > 0.5
        best = f.topk(20)
        assert (of_start.top_values - best.values)[sure].abs().max() < TOLERANCE, name
        is_active = best.values[sure] > 1e-3
        assert torch.equal(of_start.top_ids[sure][is_active].long(), best.indices[sure][is_active])
        assert (of_start.values - f[:, ids])[sure].abs().max() < TOLERANCE, name
        assert (of_start.values - f[:, [78, 81, 0]])[sure].abs().max() > APART
        for rows, above in ((of_start, 0.0), (high, 0.5)):
            clear = sure & ~((f - above).abs() < 1e-4).logical_and(f > 0).any(1)
            assert torch.equal(rows.active[clear].long(), (f > above).sum(1)[clear])
        assert name == "top" or not torch.equal(of_start.active, high.active)
        left = x - f @ tensors["W_dec"].double() - tensors["b_dec"].double()
        assert (of_start.error - left.norm(dim=1))[sure].abs().max() < 1e-3, name
        half = x - f[:, :80] @ tensors["W_dec"][:80].double() - tensors["b_dec"].double()
        assert (of_start.error - half.norm(dim=1))[sure].abs().max() > APART
        llm.steering.register_features("late", "branch", *site)
        [output] = serve(llm, [Ask(ask.prompt, inline(asked[1]))], log_probs=False)
        assert (rows_of(output).values - of_start.values).abs().max() > APART or name == "jump"
    with pytest.raises(ValueError, match="none cannot be read as an autoencoder"):
        llm.steering.register_features("none", "none", "post_block", 1)
