# SPDX-License-Identifier: Apache-2.0
"""Capture of requests that end in every way a request can end, and the results they get."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import READ_TOLERANCE, Reference
from tests.support import serving
from tests.support.serving import GENERATED, Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.v1.capture import stack

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.quick, pytest.mark.v2]

PROMPT, SHORT = prompt_of(17, 30), prompt_of(5, 31)
STEERED = {"steering_vectors": {"post_attn": {1: vector(30)}}}


def add_tokenizer(directory: Path) -> None:
    """A word per token id, `t7`; stop strings need text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(models.VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


@pytest.fixture(scope="module")
def pair(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Judge]]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    directory = tmp_path_factory.mktemp("llama") / "model"
    shutil.copytree(path, directory)
    add_tokenizer(directory)
    llm = make_llm(
        directory,
        enable_steering=True,
        capture_consumers=["inline"],
        enable_prefix_caching=False,
        skip_tokenizer_init=False,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


@pytest.fixture
def llm(pair: tuple[LLM, Judge]) -> LLM:
    return pair[0]


@pytest.fixture
def judge(pair: tuple[LLM, Judge]) -> Judge:
    return pair[1]


def inline(completion: Any) -> Any:
    return completion.capture_results["inline"]


SELECTORS = [
    "last_prompt",
    "all_prompt",
    "all_generated",
    "last_generated",
    "predicting",
    "all",
    [0, 16, 17, 21],
    [-1, -17],
    {"start": 2, "stop": 20, "step": 5},
    ["last_prompt", "last_generated"],
    [{"start": 0, "stop": 3}, "last_generated", 19],
]


@pytest.mark.parametrize("fields", [{}, STEERED], ids=["plain", "steered"])
def test_selectors(llm: LLM, judge: Judge, fields: dict[str, Any]) -> None:
    """All in one batch, over sites that overlap, are equal, or are disjoint."""
    sites: list[tuple[tuple[str, ...], Any]] = [
        (STREAM_POINTS, "all"),
        (("post_block",), [1, 3]),
        (("pre_attn", "post_attn"), [0]),
    ]
    asks = [
        Ask(PROMPT, {**fields, **capture(selector, *sites[i % len(sites)])})
        for i, selector in enumerate(SELECTORS)
    ]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        judge.check(ask, output)


SEARCHES: list[tuple[Any, list[int]]] = [
    ({"text": "t9"}, [3, 5]),
    ({"text": "t9", "which": "first"}, [3]),
    ({"text": "t8 t9", "which": "last"}, [4, 5]),
    ({"token_ids": [3, 1, 2]}, [6, 7, 8]),
    ([{"text": "t12", "which": "last"}, {"token_ids": [7]}, 0], [0, 2, 9]),
]
"""For the chat below: t1 t2 t7 t9 t8 t9 t3 t1 t2 t12 t3."""


@pytest.mark.parametrize(("positions", "expected"), SEARCHES)
def test_texts_and_token_ids_of_a_chat(
    llm: LLM, judge: Judge, positions: Any, expected: list[int]
) -> None:
    """They are looked for in what the chat template made."""
    messages: list[Any] = [
        {"role": "user", "content": "t7 t9 t8 t9"},
        {"role": "user", "content": "t12"},
    ]
    template = "{% for m in messages %}t1 t2 {{ m.content }} t3 {% endfor %}"
    params = Ask([], capture(positions)).params()
    (output,) = llm.chat(messages, params, chat_template=template, use_tqdm=False)
    assert output.prompt_token_ids == [1, 2, 7, 9, 8, 9, 3, 1, 2, 12, 3]
    reference = judge.reference.run(output.prompt_token_ids).rows
    for site, rows in inline(output.outputs[0]).payload.items():
        assert rows.positions.tolist() == expected
        assert serving.worst_row(rows.values, reference[site][expected]) <= READ_TOLERANCE


TURNS = (
    "{% for m in messages %}{{ 't2' if m.role == 'user' else 't4' }} {{ m.content | trim }} t3 "
    "{% endfor %}{% if add_generation_prompt %}t4{% endif %}"
)
CHAT: list[Any] = [
    {"role": "user", "content": "t7 t9"},
    {"role": "assistant", "content": "t9 t9 t8 "},
    {"role": "user", "content": [{"type": "text", "text": "t9"}]},
    {"role": "assistant", "content": "t9"},
]
ONE = {"max_tokens": 1}
CHAT_IDS = [2, 7, 9, 3, 4, 9, 9, 8, 3, 2, 9, 3, 4, 9, 3, 4]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ({"role": "assistant", "turn": -1}, [13]),
        ({"role": "assistant", "turn": 0}, [5, 6, 7]),
        ({"role": "user"}, [1, 2, 10]),
        ([{"role": "user", "turn": 1}, -1], [10, 15]),
        (["all_prompt", {"except": [{"role": "assistant"}]}], [*range(5), *range(8, 13), 14, 15]),
    ],
)  # fmt: skip
def test_turns_of_a_chat(llm: LLM, judge: Judge, positions: Any, expected: list[int]) -> None:
    """Those of the content, which may be in other turns too; captured, and steered in a sum."""
    fields = ONE | capture(positions)
    params = Ask([], fields).params()
    (output,) = llm.chat(CHAT, params, chat_template=TURNS, use_tqdm=False)
    assert output.prompt_token_ids == CHAT_IDS
    rows = inline(output.outputs[0]).payload
    assert {tuple(site.positions.tolist()) for site in rows.values()} == {tuple(expected)}
    asked, said = (
        ONE
        | {"steering_vectors": {"post_block": {1: {"vector": vector(9), "positions": at}}}}
        | capture("all_prompt")
        for at in (positions, expected)
    )
    (output,) = llm.chat(CHAT, Ask([], asked).params(), chat_template=TURNS, use_tqdm=False)
    same, plain = serve(llm, [Ask(CHAT_IDS, said), Ask(CHAT_IDS, ONE | capture("all_prompt"))])
    steered = inline(output.outputs[0]).payload["post_block", 1].values
    assert worst(steered, inline(same.outputs[0])) <= READ_TOLERANCE
    assert worst(steered, inline(plain.outputs[0])) > 0.1


def worst(rows: torch.Tensor, of: Any) -> float:
    return serving.worst_row(rows, of.payload["post_block", 1].values)


LISTS = (
    "{% for m in messages %}t2 {% for part in m.content %}t5 {{ part.text | trim }} {% endfor %}t3 "
    "{% endfor %}"
)
"""As some templates do: given a list, they write something before each of its texts."""
PARTS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": t} for t in ("t7 t9 ", "t9", "", " t8")]},
    {"role": "assistant", "content": "t9 t9"},
    {"role": "tool", "content": ["t9", {"type": "refusal", "refusal": "t7"}]},
]
PARTS_IDS = [2, 7, 9, 9, 8, 3, 4, 9, 9, 3, 4, 9, 7, 3]
LISTS_IDS = [2, 5, 7, 9, 5, 9, 5, 5, 8, 3, 2, 5, 9, 9, 3]


@pytest.mark.parametrize(
    ("template", "chat", "positions", "expected"),
    [
        (TURNS, PARTS, {"role": "user"}, [1, 2, 3, 4]),
        (TURNS, PARTS, {"role": "assistant"}, [7, 8]),
        (TURNS, PARTS, {"role": "tool"}, [11, 12]),
        (LISTS, PARTS[:2], {"role": "user"}, [2, 3, 5, 8]),
        (LISTS, PARTS[:2], {"role": "assistant"}, [12, 13]),
    ],
)
def test_turns_of_several_texts(
    llm: LLM, template: str, chat: Any, positions: Any, expected: list[int]
) -> None:
    """A template that takes a list may write between them, which is no part of the turn."""
    params = Ask([], ONE | capture(positions)).params()
    (output,) = llm.chat(
        chat, params, chat_template=template, add_generation_prompt=False, use_tqdm=False
    )
    assert output.prompt_token_ids == (PARTS_IDS if template is TURNS else LISTS_IDS)
    rows = inline(output.outputs[0]).payload["post_block", 1]
    assert rows.positions.tolist() == expected


@pytest.mark.parametrize(
    ("side", "positions", "expected"),
    [
        ("left", {"role": "assistant", "turn": -1}, [4]),
        ("left", {"role": "user", "turn": -1}, [1]),
        ("left", {"role": "assistant", "turn": 0}, "has not all of this turn: truncate"),
        ("left", {"text": "t9", "which": "first"}, [1]),
        ("left", {"text": "t8 t3"}, "is not wholly in the truncated prompt"),
        ("right", {"role": "user", "turn": 0}, [1, 2]),
        ("right", {"role": "assistant", "turn": 0}, "has not all of this turn: truncate"),
        ("right", {"role": "user"}, "has not all of this turn: truncate"),
    ],
)
def test_turns_of_a_truncated_chat(
    llm: LLM, side: str, positions: Any, expected: list[int] | str
) -> None:
    """Those that are wholly there are as always, although the same texts were elsewhere."""
    params = Ask([], ONE | capture(positions)).params()

    def run() -> Any:
        cut = {"truncate_prompt_tokens": 7, "truncation_side": side}
        (output,) = llm.chat(
            CHAT, params, chat_template=TURNS, use_tqdm=False, tokenization_kwargs=cut
        )
        assert output.prompt_token_ids == (CHAT_IDS[-7:] if side == "left" else CHAT_IDS[:7])
        return inline(output.outputs[0]).payload["post_block", 1].positions.tolist()

    if isinstance(expected, list):
        assert run() == expected
        return
    with pytest.raises(ValueError, match=expected):
        run()


UNSURE = [
    (TURNS, CHAT, {"role": "tool"}, "role: no turn is of 'tool'; roles are user, assistant"),
    (TURNS, CHAT, {"role": "user", "turn": 2}, "turn: 2 is out of reach: 'user' has 2 turns"),
    (TURNS, CHAT, {"role": 3}, "role: must be a string"),
    (TURNS, [*CHAT, {"role": "user", "content": " "}], {"role": "user", "turn": 2}, "as it is"),
    (TURNS, [{"role": "user", "content": ""}], {"role": "user"}, "must have text"),
    # The template leaves something out, says it twice, or decides by what is in it.
    ("t1 {% for m in messages %}{{ m.content.split('t9')[0] }}{% endfor %}", CHAT[:1],
     {"role": "user"}, None),
    ("{% for m in messages %}{{ m.content[3:] }} {% endfor %}t1", CHAT[:1], {"role": "user"},
     "does not write this turn as it is"),
    ("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", CHAT[:1],
     {"role": "user"}, "does not write this turn as it is"),
    ("{% for m in messages %}{{ 't5 ' if 't9' in m.content else 't6 ' }}{{ m.content }}"
     "{% endfor %}", CHAT[:1], {"role": "user"}, "does not write this turn as it is"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "positions", "error"), UNSURE)
def test_turns_that_are_not_certain(
    llm: LLM, template: str, messages: Any, positions: Any, error: str | None
) -> None:
    params = Ask([], ONE | capture(positions)).params()
    if error is None:
        (output,) = llm.chat(messages, params, chat_template=template, use_tqdm=False)
        assert output.prompt_token_ids == [1, 7]
        rows = inline(output.outputs[0]).payload["post_block", 1]
        assert rows.positions.tolist() == [1], "of a turn that is cut short, what there is"
        return
    with pytest.raises(ValueError, match=rf"^capture\.inline\.positions.*{error}"):
        llm.chat(messages, params, chat_template=template, use_tqdm=False)
    with pytest.raises(ValueError, match="is for chats"):
        serve(llm, [Ask(PROMPT, capture(positions))])


def test_rows_are_copies(llm: LLM) -> None:
    """A result keeps its rows while the engine reuses the memory they came from."""
    ask = Ask(PROMPT, capture("all"))
    (output,) = serve(llm, [ask])
    before = {s: rows.clone() for s, rows in serving.row_tensors(output.outputs[0]).items()}
    serve(llm, [Ask(PROMPT, {**STEERED, **capture("all")})] * 3)
    after = serving.row_tensors(output.outputs[0])
    assert all(torch.equal(before[site], after[site]) for site in before)


def test_stack_and_at(llm: LLM, judge: Judge) -> None:
    asks = [Ask(p, capture("predicting", ("post_block",), [0, 2])) for p in (PROMPT, SHORT)]
    outputs = serve(llm, asks)
    for position in (-1, -GENERATED):
        stacked = stack(outputs, "post_block", [2, 0], position=position)
        assert stacked.shape == (2, 2, models.HIDDEN)
        for index, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
            sequence = [*ask.prompt, *output.outputs[0].token_ids][:-1]
            rows = judge.reference.run(sequence).rows
            at = len(sequence) + position
            want = torch.stack([rows["post_block", 2][at], rows["post_block", 0][at]])
            assert serving.worst_row(stacked[index], want) <= READ_TOLERANCE
            got = inline(output.outputs[0]).payload["post_block", 2].at(at)
            assert torch.equal(got, stacked[index, 0])
    with pytest.raises(KeyError, match="position 3 was not captured"):
        inline(outputs[0].outputs[0]).payload["post_block", 2].at(3)


def test_several_samples(llm: LLM, judge: Judge) -> None:
    """Each completion has the rows of its own tokens."""
    sampling = {"n": 3, "temperature": 1.0, "logprobs": None}
    asks = [
        Ask(PROMPT, {**sampling, **STEERED, **capture("all")}),
        Ask(PROMPT, {**sampling, **capture(["last_prompt", "last_generated"])}),
    ]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        for completion in output.outputs:
            judge.check_rows(ask, completion)
        assert len({tuple(c.token_ids) for c in output.outputs}) == 3, "samples are alike"
        with pytest.raises(ValueError, match=r"3 completions.*\.outputs\[i\]"):
            _ = output.capture_results
    (single,) = serve(llm, [Ask(PROMPT, capture("all"))])
    assert single.capture_results is single.outputs[0].capture_results


def test_max_tokens_one(llm: LLM, judge: Judge) -> None:
    """The one generated token is never fed back: the prompt's rows, and no generated one."""
    positions = ["last_prompt", "all_prompt", "predicting", "all"]
    asks = [Ask(PROMPT, {"max_tokens": 1, **capture(p)}) for p in positions]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        judge.check(ask, output)
    for selector in ("all_generated", "last_generated", [len(PROMPT)]):
        with pytest.raises(ValueError, match=r"max_tokens=1|out of reach"):
            serve(llm, [Ask(PROMPT, {"max_tokens": 1, **capture(selector)})])


def third_token(llm: LLM, fields: dict[str, Any]) -> int:
    """A token at which to stop: the third of this request, if it is not among the first two."""
    (output,) = serve(llm, [Ask(PROMPT, fields)])
    tokens = list(output.outputs[0].token_ids)
    assert tokens[2] not in tokens[:2], "choose another prompt: the stop would come earlier"
    return int(tokens[2])


@pytest.mark.parametrize("fields", [{}, STEERED], ids=["plain", "steered"])
@pytest.mark.parametrize("how", ["token", "string"])
def test_stopping_early(llm: LLM, judge: Judge, how: str, fields: dict[str, Any]) -> None:
    """Rows end before the last token, whoever found the stop; the twin runs to the end."""
    token = third_token(llm, fields)
    stop: dict[str, Any] = {"detokenize": True}
    stop |= {"stop_token_ids": [token]} if how == "token" else {"stop": [f"t{token}"]}
    selectors: list[Any] = ["all", "all_generated", "last_generated", "predicting"]
    asks = [Ask(PROMPT, {**fields, **stop, **capture(s)}) for s in selectors]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert len(output.outputs[0].token_ids) == 3
        judge.check(ask, output)
    (twin,) = serve(llm, [Ask(PROMPT, {**fields, **capture("all_generated")})])
    assert len(inline(twin.outputs[0]).payload["post_block", 0]) == GENERATED - 1


@pytest.mark.parametrize("how", ["token", "string"])
def test_named_position_not_reached(llm: LLM, judge: Judge, how: str) -> None:
    """An outright named position past the end is reported; what was reached is there."""
    token = third_token(llm, {})
    stop = {"stop_token_ids": [token]} if how == "token" else {"stop": [f"t{token}"]}
    last = len(PROMPT) + GENERATED - 2
    ask = Ask(PROMPT, {**stop, "detokenize": True, **capture([2, len(PROMPT), last])})
    (output,) = serve(llm, [ask])
    result = inline(output.outputs[0])
    assert result.status == "partial_error"
    assert f"position {last}" in result.error
    assert result.payload["pre_attn", 1].positions.tolist() == [2, len(PROMPT)]
    sequence = [*PROMPT, *output.outputs[0].token_ids][:-1]
    rows = judge.reference.run(sequence).rows["pre_attn", 1][[2, len(PROMPT)]]
    assert serving.worst_row(result.payload["pre_attn", 1].values, rows) <= READ_TOLERANCE
    (twin,) = serve(llm, [Ask(PROMPT, capture([2, len(PROMPT), last]))])
    assert inline(twin.outputs[0]).status == "ok"
    assert inline(twin.outputs[0]).payload["pre_attn", 1].positions.tolist()[-1] == last
