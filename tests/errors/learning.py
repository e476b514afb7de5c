# SPDX-License-Identifier: Apache-2.0
"""What is refused of learning by gradients."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from tests.errors.case import Case, path
from vllm.entrypoints.cli.steering.learn import need_options_of_method
from vllm.pilot.comparing import Concept, compare, read_concepts
from vllm.pilot.learn import (
    Attribution,
    LearnSettings,
    TorchModel,
    attribute,
    highlight,
    learn,
)
from vllm.pilot.learn.model import need_differentiable
from vllm.pilot.metrics import named_function
from vllm.pilot.pairs import Example, Pairs
from vllm.pilot.patching import PatchSweep

POSITIVE, NEGATIVE = ([Example(t, str(i), where=t) for i in range(20)] for t in "pn")
PROMPTED = Pairs(POSITIVE, NEGATIVE)


class Tiny(nn.Module):
    """A model of one block that adds nothing, and of three tokens."""

    def __init__(self, blocks: int = 1, reads: int = 9, weight: float = 1.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_hidden_layers=1, hidden_size=3, max_position_embeddings=reads
        )
        self.config.get_text_config = lambda: self.config
        self.layers = nn.ModuleList(nn.Identity() for _ in range(blocks))
        self.weight = nn.Parameter(torch.eye(3) * weight)

    def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.layers[0](self.weight[ids % 3]))


def model(prompt: int = 1, text: int = 1, **options: Any) -> TorchModel:
    """The tiny model, of which a prompt and a text have so many tokens."""
    made: Any = TorchModel(Tiny(**options), None, "tiny")

    def encode(given: Any, special: bool = True, answer: bool = False) -> list[int]:
        return [1] * (prompt if special else text) if given else []

    made.encode = encode
    found: TorchModel = made
    return found


def learning(**options: Any) -> Callable[[], object]:
    return lambda: learn(model(**options), PROMPTED)


def settings(**given: Any) -> Callable[[], object]:
    return lambda: LearnSettings(**given)


def with_little_memory() -> object:
    """Load a model where no byte is free."""
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=1)
    free = SimpleNamespace(available=0)
    with (
        mock.patch("transformers.AutoConfig.from_pretrained", return_value=config),
        mock.patch("psutil.virtual_memory", return_value=free),
        mock.patch("torch.cuda.is_available", return_value=False),
    ):
        return TorchModel.load("large")


def options(**given: Any) -> Callable[[], object]:
    names = [*("rank", "kl_weight", "rate", "epochs", "patience", "batch")]
    names += ("url", "read", "scales", "cases", "score", "prompts", "background")
    return lambda: need_options_of_method(Namespace(**{**dict.fromkeys(names), **given}))


def attributing(**asked: Any) -> Callable[[], object]:
    fields = {"prompt": [1, 2], "clean": [1, 1], "answer": 1, **asked}
    return lambda: attribute(model(text=2), **fields)


def read_by(is_fast: bool) -> TorchModel:
    """The tiny model with a tokenizer whose texts are one token each."""
    made = model()

    def call(*_: Any, **__: Any) -> Any:
        return {"input_ids": [1], "offset_mapping": [(0, 1)]}

    made.tokenizer = type("Tokenizer", (), {"is_fast": is_fast, "__call__": call})()
    return made


ESTIMATE = Attribution("diff", ["post_block"], [0], ["a"], np.zeros((1, 1, 1)), 0.0, 0.0, None)
OTHER = PatchSweep(
    "diff", ["post_block"], [1], [0], None, None, None, np.ones((1, 1, 1)), None, 0.0, None
)
QUANTISED = SimpleNamespace(quantization_config={"quant_method": "gptq"})


def concepts(text: str) -> Callable[[], object]:
    """Read a file of that content, which is gone afterwards."""

    def do() -> object:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "a.jsonl").write_text(text)
            return read_concepts(Path(folder) / "a.jsonl")

    return do


def way(given: str) -> Callable[[], object]:
    return concepts(f'{{"concept": "joy", "ways": {{"a": {given}}}}}')


def grading(*grades: float) -> object:
    reply = SimpleNamespace(text="")
    bench: Any = SimpleNamespace(
        encode=lambda text, answer: [1], ask=lambda ids, fields: [reply] * len(ids)
    )
    return compare(bench, [Concept("joy", [])], ["a", "b"], lambda *_: grades)


COMPARING = [
    Case({}, do=concepts('{"concept": 1}')),
    Case({"allowed": "system, module, op"}, do=way('{"file": "a"}')),
    Case({"allowed": "str"}, do=way('{"module": 1}')),
    Case({"given": "'add'"}, do=way('{"op": {"op": "feature"}}')),
    Case({}, do=concepts("")),
    Case({"given": "1"}, do=lambda: compare("none", [], ["a"], lambda *_: ())),
    Case({"given": "[3.0]"}, do=lambda: grading(3)),
    Case({"path": "judge"}, do=lambda: named_function("none", "judge")),
]
LEARNING = [
    *COMPARING,
    Case(
        {"given": "'mean'", "allowed": "gradient, reft, reft-r1, bipo"}, do=settings(method="mean")
    ),
    Case({"path": "--url", "given": "'bipo'"}, do=options(method="bipo", url="there")),
    Case({"path": "--rank", "given": "'mean'"}, do=options(method="mean", rank=2)),
    Case({"given": "'bipo'"}, do=settings(method="bipo", rank=2)),
    Case({}, do=settings(rate=0.0)),
    Case({}, do=settings(kl=-1.0)),
    Case({"given": "0"}, do=settings(epochs=0)),
    Case({"given": "'z'", "allowed": "pre_attn or post_block"}, do=settings(point="z")),
    Case({"where": "pairs"}, do=lambda: learn("none", Pairs.of(["p"], ["n"]))),
    Case({"where": "p"}, do=learning(prompt=0)),
    Case({"where": "p"}, do=learning(text=0)),
    Case({"given": "10", "allowed": "9"}, do=learning(text=9)),
    Case({"index": "0"}, do=lambda: learn(model(), PROMPTED, neutral=[""])),
    Case({}, do=learning(weight=float("nan"))),
    Case({}, do=lambda: TorchModel.load("/no/model")),
    Case({"given": "gptq"}, do=lambda: need_differentiable(QUANTISED)),
    Case({"free": "0.0"}, do=with_little_memory),
    Case({"given": "Tiny", "count": "1"}, do=lambda: model(blocks=2)),
    Case(
        {"given": "'post_attn'", "layer": "0", "last": "0"},
        do=lambda: model().log_probs([[1]], {("post_attn", 0): lambda stream, real: stream}),
    ),
    Case({"given": "'z'", "allowed": "pre_attn or post_block"}, do=attributing(points=["z"])),
    Case({"given": "1", "allowed": "2"}, do=attributing(clean=[1])),
    Case({"given": "0"}, do=attributing(steps=0)),
    Case(path("answer", "'no'", count="2"), do=attributing(answer="no")),
    Case({"points": "['post_block']", "layers": "[0]"}, do=lambda: ESTIMATE.correlation(OTHER)),
    Case({}, do=lambda: ESTIMATE.correlation(replace(OTHER, layers=[0]))),
    Case({"given": "2, 0.5"}, do=lambda: highlight(model(), "?", share=2)),
    Case({}, do=lambda: highlight(read_by(is_fast=False), "?")),
    Case(path("affirmation"), do=lambda: highlight(read_by(is_fast=True), "?", affirmation="")),
]
