# SPDX-License-Identifier: Apache-2.0
"""The cookbook's first program, on the first layers of its model: what must hold for any model. On
the whole model (tier long) the pictures show what the page says. The block over HTTP is run in
tests/http/test_http_docs.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot as plt
from transformers import AutoModelForCausalLM

from examples.cookbook import PAGE, run
from tests.conformance.engine import shut_down
from tests.support.real import first_layers, model_folder
from vllm.pilot import head_sweep
from vllm.v1.capture import stack

pytestmark = pytest.mark.full

LAYERS = 6
PAIR: dict[str, Any] = {"answer": " cat", "other": " dog"}
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The program's variables when it is over."""
    folder = tmp_path_factory.mktemp("cookbook")
    model = first_layers(model_folder(), LAYERS, folder / "model")
    variables = run(model, folder / "out")
    yield {**variables, "out": folder / "out"}
    shut_down(variables["llm"])


def test_every_picture_is_drawn_and_shown(made: dict[str, Any]) -> None:
    shown = re.findall(r"^!\[.+\]\(drawings/(cookbook-\w+\.png)\)$", PAGE.read_text(), re.M)
    assert len(shown) == len(re.findall(r"^## \d+\. ", PAGE.read_text(), re.M)) == 15
    drawn = {file.name for file in Path(made["out"]).glob("*.png")}
    assert drawn | {"cookbook-http.png"} == set(shown)


def test_vectors_and_files(made: dict[str, Any]) -> None:
    """A scale of 0 changes nothing, another does, and a file means what was put into it."""
    plain = made["odds"]([made["start"]], [{}])
    dose = torch.stack([*made["dose"].values()])  # [steered layers, scales]
    still = dose[:, made["scales"].index(0.0)]
    torch.testing.assert_close(still, plain.expand_as(still), **CLOSE)
    assert (dose[:, 0] - plain).abs().min() > 1e-3
    assert made["by_gguf"][2] == pytest.approx(float(plain), abs=1e-4)
    at = {n: {"vector": v, "scale": 4.0} for n, v in made["control"].items()}
    by_hand = made["odds"]([made["start"]], [{"steering_vectors": {"post_block": at}}])
    assert made["by_gguf"][4] == pytest.approx(float(by_hand), abs=1e-3)
    assert made["by_gguf"][4] != pytest.approx(float(plain), abs=1e-3)


def stream_of(made: dict[str, Any]) -> torch.Tensor:
    """The rows of the text that most blocks take, float32 [layers, tokens, hidden]."""
    asked = {"inline": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}
    params = made["SamplingParams"](max_tokens=1, capture=asked)
    output = made["llm"].generate([made["start"]], params, use_tqdm=False)
    return stack(output, "post_block", position=None)[0].float()


def test_the_lens_is_transformers_norm_and_head(made: dict[str, Any]) -> None:
    """At every layer and token; without the norm it is not."""
    hf = AutoModelForCausalLM.from_pretrained(made["MODEL"], dtype=torch.float32)
    stream = stream_of(made)
    with torch.no_grad():
        want, bare = (
            hf.lm_head(rows).softmax(-1).max(-1) for rows in (hf.model.norm(stream), stream)
        )
    torch.testing.assert_close(made["best"], want.values, **CLOSE)
    assert (made["token_ids"] == want.indices).all()
    assert (made["best"] - bare.values).abs().max() > 0.1


def test_the_lens_ends_in_the_models_own_word(made: dict[str, Any]) -> None:
    params = made["SamplingParams"](max_tokens=1, temperature=0)
    (output,) = made["llm"].generate([made["start"]], params, use_tqdm=False)
    assert int(made["token_ids"][-1, -1]) == output.outputs[0].token_ids[0]


def test_patching_all_that_is_read_gives_the_other_answer(made: dict[str, Any]) -> None:
    """The last token's row behind the last block decides; an earlier token's there does nothing."""
    found = made["found"]
    words = tuple(made["cities"].values())
    both = made["odds"]([made["clean"], made["other"]], [{}, {}], words)
    torch.testing.assert_close(both, torch.tensor([found.clean, found.corrupt]), **CLOSE)
    share = found.values[0]
    assert share[-1, -1] == pytest.approx(1.0, abs=1e-3) and abs(share[-1, :-1]).max() < 1e-3
    assert found.noise_floor < 1e-4 < abs(both[0] - both[1])


def test_nothing_is_left_of_what_was_ablated(made: dict[str, Any]) -> None:
    size = made["plain"].abs().max()
    assert made["without"].abs().max() < 1e-3 * size
    torch.testing.assert_close(made["by_default"], made["without"], atol=1e-3 * size, rtol=0)
    again = made["rows"](made["happy"][16:]) @ made["unit"]
    torch.testing.assert_close(again, made["plain"], **CLOSE)


def test_scores_and_stored_rows_are_the_rows(made: dict[str, Any]) -> None:
    stream = stream_of(made)
    read = stream.shape[1]
    want = torch.einsum("lth,lh->lt", stream, made["units"])
    torch.testing.assert_close(made["scores"][:, :read], want, **CLOSE)
    table, middle = made["table"], made["middle"]
    by_id = dict(zip(map(int, table.ids), table.values.float(), strict=True))
    stored = torch.stack([by_id[i] for i in range(len(made["labelled"]))])
    torch.testing.assert_close(stored[:16], made["kinds"][0][:, middle], **CLOSE)
    torch.testing.assert_close(stored[24:40], made["kinds"][1][:, middle], **CLOSE)
    assert sorted(table.labels("label").tolist()) == ["happy"] * 24 + ["sad"] * 24


def test_a_gate_is_open_on_one_side_only(made: dict[str, Any]) -> None:
    """Of texts that are far from the threshold: each is moved, or it is not."""
    last = made["rows"](made["texts"])[:, made["middle"]] @ made["unit"]
    far = made["gate"]["sharpness"] * (last - made["gate"]["threshold"])
    moved = (made["after"] - made["before"]).abs()
    assert moved[far < -20].numel() == 0 or moved[far < -20].max() < 1e-3
    assert moved[far > 20].numel() == 0 or moved[far > 20].min() > 1e-3
    assert (far.abs() > 20).any()


class Hooked:
    """transformers, with a head changed: its rows at `z`, before they are joined."""

    def __init__(self, made: dict[str, Any]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            made["MODEL"], dtype=torch.float32, attn_implementation="eager"
        )
        self.tokenizer = made["tokenizer"]
        self.ids = [self.tokenizer.encode(word)[0] for word in PAIR.values()]
        self.layer = made["layer"]

    def run(
        self, text: str, head: int | None = None, row: torch.Tensor | float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Weights [heads, t, t], rows [t, heads, width] and log-odds, with the rows of a head
        replaced by others."""
        seen: list[torch.Tensor] = []

        def cut(_: Any, rows: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            parts = rows[0].unflatten(-1, (self.model.config.num_attention_heads, -1)).clone()
            seen.append(parts[0].clone())
            if head is not None:
                parts[:, :, head] = row
            return (parts.flatten(-2),)

        joins = self.model.model.layers[self.layer].self_attn.o_proj
        handle = joins.register_forward_pre_hook(cut)
        with torch.no_grad():
            out = self.model(**self.tokenizer(text, return_tensors="pt"), output_attentions=True)
        handle.remove()
        last = out.logits[0, -1]
        return out.attentions[self.layer][0], seen[0], float(last[self.ids[0]] - last[self.ids[1]])


def test_heads_are_those_of_eager_attention(made: dict[str, Any]) -> None:
    """The strongest head's weights, and the odds without it; another head's are others."""
    hooked, effect = Hooked(made), made["effect"]
    layer, head = effect.strongest
    weights, _, plain = hooked.run(made["sentence"])
    for query, seen in enumerate(made["looked"].weights):
        torch.testing.assert_close(seen, weights[:, query, : query + 1], atol=1e-5, rtol=0)
    assert (weights[0] - weights[1]).abs().max() > 1e-4
    assert effect.plain == pytest.approx(plain, abs=1e-4)
    changes = effect.change[effect.layers.index(layer)]
    for number in range(2):
        lost = hooked.run(made["sentence"], number)[2] - plain
        assert changes[number] == pytest.approx(lost, abs=1e-4)
    assert abs(effect.change).max() == abs(changes[head]) > 1e-3


def test_a_head_gets_what_it_gives_in_another_prompt(made: dict[str, Any], tmp_path: Path) -> None:
    hooked, text = Hooked(made), made["sentence"]
    clean = text.replace(PAIR["answer"], " bird")
    found = head_sweep(made["llm"], text, clean, **PAIR, layers=[hooked.layer])
    plain, (_, rows, of_clean) = hooked.run(text)[2], hooked.run(clean)
    assert found.clean == pytest.approx(of_clean, abs=1e-4)
    for head in range(2):
        patched = hooked.run(text, head, rows[:, head])[2]
        assert found.values[0, head] == pytest.approx(patched, abs=1e-4)
    assert abs(found.values[0] - plain).max() > 1e-3
    still = head_sweep(made["llm"], text, text, **PAIR, layers=[hooked.layer])
    assert still.values == pytest.approx(still.plain, abs=1e-4)
    found.draw(tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert f"layer {found.strongest[0]} head {found.strongest[1]}" in repr(found)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"answer": "a b c"}, "answer: .* tokens; one"),
        ({"clean": "He"}, r"clean: has \d tokens and prompt \d+"),
        ({"layers": [99]}, r"layers\[0\]: layer 99 is out of range"),
    ],
)
def test_a_sweep_of_heads_that_is_refused(
    made: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        head_sweep(made["llm"], made["sentence"], **{"answer": PAIR["answer"], **asked})


def test_attention_is_drawn(made: dict[str, Any], tmp_path: Path) -> None:
    """A grid of all heads, and one head; each scaled to its largest weight, with names."""
    looked = made["looked"]
    looked.draw(tmp_path / "grid.png")
    looked.draw(tmp_path / "one.svg", 1, title="one")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    figure, axes = plt.subplots()
    tokens = [f"<{t}>" for t in range(len(looked))]
    looked.draw(axes, 1, tokens)
    (image,) = axes.images
    want = looked.weights[-1][1].numpy()
    drawn = image.get_array()
    assert drawn is not None and drawn[-1].tolist() == pytest.approx(want.tolist())
    largest = max(float(row[1].max()) for row in looked.weights)
    assert list(image.get_clim()) == pytest.approx([0.0, largest])
    assert [label.get_text() for label in axes.get_xticklabels()] == tokens
    assert [label.get_text() for label in axes.get_yticklabels()] == tokens
    looked.draw(axes, 1)
    assert [label.get_text() for label in axes.get_xticklabels()] == [*map(str, looked.positions)]
    looked.draw(axes, 1, decode=made["tokenizer"].decode)
    words = [repr(made["tokenizer"].decode(token))[1:-1] for token in looked.token_ids.tolist()]
    assert [label.get_text() for label in axes.get_xticklabels()] == words
    plt.close(figure)
    with pytest.raises(ValueError, match="axes have room for one head, not for 9"):
        looked.draw(axes)
    with pytest.raises(ValueError, match=r"head: 99 was not captured, these were: \[0, 1, "):
        looked.draw(axes, 99)


def test_samples_of_a_request_are_steered_alike(made: dict[str, Any]) -> None:
    """All begin from one row, which is another where the request is steered."""
    firsts = []
    for output, tracks in zip(made["drawn"], made["tracks"], strict=True):
        assert [len(track) for track in tracks] == [len(s.token_ids) for s in output.outputs]
        assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
        for track in tracks:
            torch.testing.assert_close(track[0], tracks[0][0], **CLOSE)
        firsts.append(tracks[0][0])
    assert (firsts[0] - firsts[1]).norm() > 1e-2 * firsts[0].norm()


def test_an_imported_vector_acts_in_its_layer(made: dict[str, Any]) -> None:
    middle = made["middle"]
    torch.testing.assert_close(made["imported"], made["dose"][middle], **CLOSE)
    other = made["dose"][made["some"][-1]]
    assert middle != made["some"][-1] and (made["imported"] - other).abs().max() > 1e-2


def test_a_feature_is_set(made: dict[str, Any]) -> None:
    """The row moves along the feature's decoder by what its activation lacks; one that is not named
    has another decoder."""
    named, middle, sae = made["named"], made["middle"], made["sae"]
    plain = made["rows"]([made["start"]])[0, middle]
    moved = made["rows"]([made["start"]], steering=[made["clamp"]])[0, middle]
    lacks = 3 * named.most - sae.encode(plain)[named.feature]
    want = plain + lacks * sae.decoder[named.feature]
    torch.testing.assert_close(moved, want, atol=1e-3 * float(want.abs().max()), rtol=0)
    assert (moved - plain).norm() > 1e-2 * plain.norm()
    assert 0 < named.share <= 1 and 0 < named.reach <= 1 and named.topic in named.by_topic
    assert all(before != after for before, after in made["told"].values())


@pytest.mark.long
def test_whole_model_shows_what_the_pictures_say(tmp_path: Path) -> None:
    """Steering moves the words' odds the right way, more in late layers; probes read the mood;
    patching moves the answer; only happy texts are pushed; the vector acts in samples."""
    whole = run(model_folder(), tmp_path / "out")
    dose, middle = whole["dose"], whole["middle"]
    assert middle == 14 and dose[26][-1] - dose[26][0] > 10 > dose[2][-1] - dose[2][0]
    assert min(whole["accuracy"][5:]) > 0.9
    share = whole["found"].values[0]  # [layers, tokens]: ' Italy' is the last but one
    assert share[9, -2] > 0.9 > 0.1 > abs(share[9, -1]) and share[29, -1] > 0.9
    moved = whole["after"] - whole["before"]
    assert moved[:8].max() < -0.1 and moved[8:].abs().max() < 0.05
    gguf = whole["by_gguf"]
    assert gguf[-1] - gguf[0] > 10
    plain, steered = (torch.stack([t[0] for t in kind]) for kind in made_tracks(whole))
    assert (plain - steered).min() > 10
    assert whole["named"].share * whole["named"].reach > 0.7
    shut_down(whole["llm"])


def made_tracks(whole: dict[str, Any]) -> list[list[torch.Tensor]]:
    """[plain, steered]: the projection of each sample's rows on the last layer's direction."""
    return [[track.float() @ whole["units"][-1] for track in kind] for kind in whole["tracks"]]
