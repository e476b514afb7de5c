# SPDX-License-Identifier: Apache-2.0
"""Steering and capture together with LoRA, structured output, several samples, priorities, stop
strings and reloaded weights, in one engine that has a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.models import HIDDEN, LAYERS, VOCAB
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, deltas_of, prompt_of, serve, vector
from tests.support.timeline import Timeline
from vllm import LLM
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = prompt_of(41, 700)
TEXT = list(b"It was a bright cold day in April, and the clocks were striking")
"""As tokens: of ASCII the token is the byte."""
ROWS = capture("all")
RANK, ALPHA = 4, 8

BASE = {"steering_vectors": {"post_block": {1: vector(700)}}}
DECODE = {"decode_steering_vectors": {"post_attn": {2: vector(701)}}}
GLOBAL = {"pre_attn": {1: vector(702)}}


def save_tokenizer(folder: Path) -> None:
    """A token for nearly every byte, and one for the end."""
    unused = {0xC0, 0xC1, 0xFA, 0xFB, 0xFC, 0xFD}  # of no UTF-8 text
    letters = [letter for byte, letter in sorted(bytes_to_unicode().items()) if byte not in unused]
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)


def save_lora(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """A random adapter as peft saves it. Returns what it adds to each weight."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj": (128, HIDDEN), "self_attn.v_proj": (64, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, 128), "mlp.down_proj": (HIDDEN, 160)}
    tensors, deltas = {}, {}
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            module = f"model.layers.{layer}.{name}"
            down = torch.randn(RANK, columns, generator=generator) * 0.2
            up = torch.randn(rows, RANK, generator=generator) * 0.2
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
            deltas[f"{module}.weight"] = ALPHA / RANK * up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.split(".")[1] for name in shapes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worded") / "model"
    shutil.copytree(tiny_models.path("llama"), folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def loras(folder: Path) -> list[tuple[LoRARequest, dict[str, torch.Tensor]]]:
    return [
        (LoRARequest(f"lora-{i}", i, str(path)), save_lora(path, i))
        for i in (1, 2)
        for path in [folder.parent / f"lora-{i}"]
    ]


@pytest.fixture(scope="module")
def pair(folder: Path, tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    row = tiny_models.row("llama")
    llm = make_llm(
        folder,
        skip_tokenizer_init=False,
        enable_steering=True,
        capture_consumers=["inline"],
        capture_keep_bytes=1 << 24,
        enable_lora=True,
        # Upstream's CPU kernels take -1, no adapter, for an index: the last place must be empty.
        max_loras=3,
        max_lora_rank=8,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        num_gpu_blocks_override=10,
        max_model_len=models.MAX_LENGTH,
    )
    yield llm, Judge(Reference(row, models.load(row, tiny_models.path("llama"))))
    shut_down(llm)


@pytest.fixture
def line(pair: tuple[LLM, Judge]) -> Iterator[Timeline]:
    llm, judge = pair
    assert llm.reset_prefix_cache()
    line = Timeline(llm, judge)
    yield line
    line.close()


def adapted(judge: Judge, deltas: dict[str, torch.Tensor]) -> Judge:
    """The reference with an adapter merged into its weights."""
    row = judge.reference.row
    model: Any = judge.reference.model
    merged = type(model)(model.config)
    merged.load_state_dict({k: v + deltas.get(k, 0) for k, v in model.state_dict().items()})
    merged.set_attn_implementation("eager")
    merged.train(False)
    return Judge(Reference(row, merged))


def test_lora(line: Timeline, loras: list[tuple[LoRARequest, dict[str, torch.Tensor]]]) -> None:
    """Two adapters and none, steered and not, in one batch under global tiers; the prefix cache
    keeps all of them apart."""
    line.set("prefill", GLOBAL)
    plain = line.judge
    judges = [plain, *(adapted(plain, deltas) for _, deltas in loras)]
    for warm in (False, True):
        names = []
        for fields in ({}, BASE, DECODE):
            for number in range(3):
                lora = loras[number - 1][0] if number else None
                positions = capture("predicting")
                names.append(line.add(PROMPT, {**fields, **positions}, lora_request=lora))
        line.finish()
        for i, name in enumerate(names):
            line.judge = judges[i % 3]
            line.check(name)
            line.judge = judges[(i + 1) % 3]
            with pytest.raises(AssertionError, match="off by"):
                line.check(name)
        # DECODE finds the prompt blocks of {}; for all of them there is no room.
        hits = [line.cached(name) for name in names[:6]]
        assert any(hits) == warm


def test_kept_rows_are_of_one_adapter(
    line: Timeline, loras: list[tuple[LoRARequest, dict[str, torch.Tensor]]]
) -> None:
    """Each adapter finds its own rows, and no other's."""
    plain = line.judge
    judges = [plain, *(adapted(plain, deltas) for _, deltas in loras)]
    for cached in (0, 32):
        names = [
            line.add(PROMPT, capture("all"), lora_request=lora)
            for lora in (None, *(lora for lora, _ in loras))
        ]
        line.finish()
        for i, name in enumerate(names):
            line.judge = judges[i]
            line.check(name)
            line.judge = judges[(i + 1) % 3]
            with pytest.raises(AssertionError, match="off by"):
                line.check(name)
        assert [line.cached(name) for name in names] == [cached] * 3


def test_ends_and_branches_under_lora(
    pair: tuple[LLM, Judge], loras: list[tuple[LoRARequest, dict[str, torch.Tensor]]]
) -> None:
    """embed, final and branches of two adapters and none, in one batch; final is not another's."""
    llm, plain = pair
    ask = Ask(prompt_of(17, 730), capture("all", ("embed", "attn_out", "mlp_out", "final")))
    judges = [plain, *(adapted(plain, deltas) for _, deltas in loras)]
    prompts = [TokensPrompt(prompt_token_ids=ask.prompt)] * 3
    adapters: Any = [None, *(lora for lora, _ in loras)]
    outputs: list[Any] = llm.generate(prompts, ask.params(), use_tqdm=False, lora_request=adapters)
    for i, output in enumerate(outputs):
        judges[i].check(ask, output)
        ids = [*ask.prompt, *output.outputs[0].token_ids][:-1]
        other = judges[(i + 1) % 3].reference.run(ids).others["final", LAYERS - 1]
        final = output.capture_results["inline"].payload["final", LAYERS - 1].values
        assert serving.worst_row(final, other) > LEAST_MOVE


def test_priorities(line: Timeline) -> None:
    """An urgent request throws out running ones, which come back steered as before."""
    limit = {"max_tokens": 60, **ROWS}
    fields: list[dict[str, Any]] = [{}, BASE, DECODE, {**BASE, "steering_inherit_global": False}]
    idle = [
        line.add(prompt_of(20, 710 + i), {**limit, **f}, priority=5) for i, f in enumerate(fields)
    ]
    line.step(5)
    urgent = [line.add(prompt_of(20, 720 + i), {**DECODE, **limit}, priority=0) for i in range(2)]
    line.step(20)
    line.set("base", GLOBAL)
    line.finish()
    assert line.preempted
    assert {name.split("-ask")[0] for name in line.preempted} <= {n.split("-ask")[0] for n in idle}
    for name in (*idle, *urgent):
        line.check(name)


def test_samples(line: Timeline) -> None:
    """Each of several samples has rows of its own, and is steered at its own tokens."""
    fields = {"n": 3, "temperature": 1.0, **DECODE, **ROWS}
    ask = Ask(PROMPT, fields)
    (output,) = serve(line.llm, [ask])
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    for i in range(3):
        line.judge.check(ask, output, sample=i)
    with pytest.raises(ValueError, match=r"outputs\[i\]"):
        _ = output.capture_results


@pytest.mark.parametrize(
    "grammar",
    [{"regex": "[a-f]{40}"}, {"json": {"type": "array", "items": {"type": "integer"}}}],
    ids=["regex", "json"],
)
def test_structured_output(line: Timeline, grammar: dict[str, Any]) -> None:
    """The grammar chooses among the steered model's tokens; the rows are those of its choice."""
    line.set("decode", GLOBAL)
    fields = {
        "max_tokens": 12,
        "structured_outputs": StructuredOutputsParams(**grammar),
        "detokenize": True,
    }
    outputs = {}
    for label, steering in (("plain", {"steering_inherit_global": False}), ("steered", BASE)):
        ask = Ask(TEXT, {**fields, **steering, **ROWS})
        (output,) = serve(line.llm, [ask])
        completion = output.outputs[0]
        allowed = "abcdef" if "regex" in grammar else "[]-0123456789, \n\t"
        assert completion.text and set(completion.text) <= set(allowed), completion.text
        length = len(TEXT) + len(completion.token_ids) - 1
        inherits = label == "steered"
        states = [len(line.globals.states) - 1 if inherits else 0] * length
        theirs = line.globals.deltas(states, len(TEXT))
        line_deltas = {**theirs, **deltas_of(ask, length)}
        want = line.judge.reference.run([*TEXT, *completion.token_ids][:-1], line_deltas)
        rows = serving.row_tensors(completion)
        assert max(serving.worst_row(rows[s], want.rows[s]) for s in rows) <= READ_TOLERANCE
        # The choice is the best of what the grammar allowed.
        first = want.logits[len(TEXT) - 1]
        tokenizer = line.llm.get_tokenizer()
        starts = [
            i for i in range(VOCAB) if "regex" in grammar and tokenizer.decode([i]) in "abcdef"
        ]
        if starts:
            assert completion.token_ids[0] == max(starts, key=lambda i: float(first[i]))
        outputs[label] = completion
    assert not torch.equal(
        serving.row_tensors(outputs["plain"])["post_block", 3],
        serving.row_tensors(outputs["steered"])["post_block", 3],
    )


def test_stop_string(line: Timeline) -> None:
    """The string is found in the frontend, when the engine has gone on."""
    long = {**BASE, "max_tokens": 40, "detokenize": True}
    (free,) = serve(line.llm, [Ask(TEXT, long)])
    tokens = list(free.outputs[0].token_ids)
    stop = next(t for i, t in enumerate(tokens) if i > 4 and 32 < t < 127 and t not in tokens[:i])
    for positions in ("all", "last_generated"):
        ask = Ask(TEXT, {**long, "stop": [chr(stop)], **capture(positions)})
        (output,) = serve(line.llm, [ask])
        assert output.outputs[0].finish_reason == "stop"
        assert list(output.outputs[0].token_ids) == tokens[: tokens.index(stop) + 1]
        line.judge.check(ask, output)


def test_text_selector(line: Timeline) -> None:
    """A text names the tokens that spell it, in the engine as in `Selector`."""
    prompt = line.llm.get_tokenizer().encode("the tower of Paris, in Paris")
    assert len(prompt) == 28
    entry = {"vector": vector(703), "positions": {"text": "Paris", "which": "last"}}
    fields = {"steering_vectors": {"post_block": {1: entry}}, **capture({"text": "of Paris"})}
    (output,) = serve(line.llm, [Ask(prompt, fields)])
    (plain,) = serve(line.llm, [Ask(prompt, capture("all"))])
    rows = output.outputs[0].capture_results["inline"].payload["post_block", 1]
    assert rows.positions.tolist() == list(range(10, 18))
    (output,) = serve(line.llm, [Ask(prompt, {**fields, **capture("all_prompt")})])
    moved = serving.row_tensors(output.outputs[0])["post_block", 1]
    moved -= serving.row_tensors(plain.outputs[0])["post_block", 1][:28]
    assert moved.norm(dim=-1).gt(1).nonzero().flatten().tolist() == list(range(23, 28))


def test_reloaded_weights(line: Timeline) -> None:
    """In place, so the taps stay where they are and the global tiers are kept."""
    line.set("base", GLOBAL)
    core = serving.core_of(line.llm)
    before = line.serve(PROMPT, {**BASE, **ROWS})
    line.check(before)

    def spoil(worker: Any) -> None:
        model = worker.get_model()
        for parameter in model.parameters():
            parameter.data.mul_(1.1)

    core.model_executor.collective_rpc(spoil)
    assert line.llm.reset_prefix_cache()
    spoiled = line.serve(PROMPT, {**BASE, **ROWS})
    with pytest.raises(AssertionError, match="off by"):
        line.check(spoiled)
    core.model_executor.collective_rpc("reload_weights")
    assert line.llm.reset_prefix_cache()
    after = line.serve(PROMPT, {**BASE, **ROWS})
    line.check(after)
    one, other = (line.outputs[name].outputs[0] for name in (before, after))
    assert serving.same_completion(one, other)


def test_beam_search_is_refused(line: Timeline) -> None:
    """A beam is a new request at each token: what it generated would count as prompt."""
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(ValueError, match=r"beam_search: is not supported by an engine with"):
        line.llm.beam_search([{"prompt_token_ids": PROMPT}], params)
    line.check(line.serve(PROMPT, {**BASE, **ROWS}))
