# SPDX-License-Identifier: Apache-2.0
"""What is refused of lenses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from tests.errors.case import Case, path
from tests.support.plans import HEADS, HIDDEN, SHAPE, VECTOR, config_of
from vllm.config.capture import CaptureConfig
from vllm.entrypoints.cli.steering.convert import convert_lens
from vllm.v1.capture.lens import LensRows
from vllm.v1.interventions.makings import Lens
from vllm.v1.interventions.worker.check.lens import prove_lenses
from vllm.v1.interventions.worker.making.lens import FileLens

STREAM = [("pre_attn", 0), ("post_block", 0), ("post_block", 1)]
OFFERED = msgspec.structs.replace(
    HEADS, lenses={"logit": STREAM, "big": STREAM[1:]}, vocab_size=100, lens_rows=2
)
HOOKS = {"post_block": [1]}
LOGIT = {"name": "logit", "top_k": 3}


class Words:
    """A tokenizer with a token for each word."""

    all_special_ids: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def lens(value: Any, tokenizer: Any = None, hooks: Any = HOOKS, **more: Any) -> dict[str, Any]:
    config = config_of(OFFERED, capture_points=["pre_attn", "post_block", "q"])
    asked = {"hooks": hooks, "lens": value, **more}
    return {"capture": {"inline": asked}, "config": config, "tokenizer": tokenizer}


def token(value: Any, tokenizer: Any = None) -> dict[str, Any]:
    return lens({**LOGIT, "tokens": [5, value]}, tokenizer)


def prove(captures: bool, times: int = 2) -> None:
    """A model without any norm, whose head gets `times` what its last layer returns."""
    arena, model = torch.ones(2, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))
    interventions = SimpleNamespace(
        shape=SHAPE,
        capture=SimpleNamespace(arena=arena, lenses={}),
        captures=lambda site: captures,
        layers={3: model[0]},
        probing=lambda site, vector: nullcontext(),
    )
    prove_lenses(cast("Any", interventions), CaptureConfig(), model, lambda draw: times * arena)


CPU = torch.device("cpu")
SQUARE = torch.ones(HIDDEN, HIDDEN)
NAMES = [
    ["tuned"],
    ["logit=f"],
    ["a b=f"],
    ["=f"],
    ["x" * 65 + "=f"],
    ["x="],
    ["logit", "x=f", "x=g"],
]


def lenses(*entries: str) -> object:
    return CaptureConfig(capture_consumers=["inline"], capture_lens=list(entries))


def lens_file(tensors: dict[str, torch.Tensor], kind: str) -> object:
    """A file of this kind for `SHAPE`."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/lens.safetensors"
        save_file(tensors, path, metadata={"kind": kind})
        return FileLens("big", path, SHAPE, CPU)


def published(out: str = "lens.safetensors", **changed: Any) -> object:
    """`vllm steering convert` of such a file; a key given as None is left out."""
    given = {"J": torch.ones(2, 4, 4), "source_layers": [0, 2], "d_model": 4, **changed}
    given = {key: value for key, value in given.items() if value is not None}
    return converted(lambda path: torch.save(changed.get("whole", given), path), out)


def converted(write: Callable[[Path], object], out: str = "lens.safetensors") -> object:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "there.safetensors").touch()
        write(Path(folder) / "lens.pt")
        return convert_lens(Path(folder) / "lens.pt", Path(folder) / out)


def read(name: str) -> object:
    none = np.empty(0)
    rows = LensRows(none, none, torch.empty(0, 2), none, Lens("logit", 1, (), False))
    return getattr(rows, name)


AT = "capture.inline.lens"
LENSES = [
    Case(path(AT, "['k']", "name, top_k, tokens, entropy"), lens({**LOGIT, "k": 5})),
    Case(path(AT, "5"), lens(5)),
    Case(path(AT), {**lens(LOGIT), "config": config_of()}),
    Case(path(f"{AT}.name", "'small'", "logit, big"), lens({"name": "small"})),
    Case(path(f"{AT}.name", "None", "logit, big"), lens({"top_k": 1})),
    Case(path(f"{AT}.name", "list", "logit, big"), lens({"name": [1]})),
    Case(
        path(f"{AT}.name", name="big", point="pre_attn", layer="0"),
        lens({**LOGIT, "name": "big"}, hooks={"pre_attn": [0], "post_block": "0-1"}),
    ),
    Case(path(f"{AT}.top_k", "-1", "0 to 100"), lens({**LOGIT, "top_k": -1})),
    Case(path(f"{AT}.top_k", "101", "0 to 100"), lens({**LOGIT, "top_k": 101})),
    Case(path(f"{AT}.top_k", "True", "0 to 100"), lens({**LOGIT, "top_k": True})),
    Case(path(f"{AT}.top_k", "2.0", "0 to 100"), lens({**LOGIT, "top_k": 2.0})),
    Case(path(f"{AT}.top_k", str(10**30), "0 to 100"), lens({**LOGIT, "top_k": 10**30})),
    Case(path(f"{AT}.entropy", "1"), lens({**LOGIT, "entropy": 1})),
    Case(path(f"{AT}.tokens", allowed="32"), lens({**LOGIT, "tokens": [1] * 33})),
    Case(path(f"{AT}.tokens", allowed="32"), lens({**LOGIT, "tokens": range(10**30)})),
    Case(path(f"{AT}.tokens", allowed="32"), lens({**LOGIT, "tokens": "Paris"})),
    Case(path(f"{AT}.tokens[1]", "100", "0-99"), token(100)),
    Case(path(f"{AT}.tokens[1]", "-1", "0-99"), token(-1)),
    Case(path(f"{AT}.tokens[1]", "1.5", "256"), token(1.5)),
    Case(path(f"{AT}.tokens[1]", "'" + "a" * 56 + "...", "256"), token("a" * 257, Words())),
    Case(path(f"{AT}.tokens[1]", "'\\ud800'", "256"), token("\ud800", Words())),
    Case(path(f"{AT}.tokens[1]"), token("Paris")),
    Case(path(f"{AT}.tokens[1]", "'a b'", number="2"), token("a b", Words())),
    Case(path(f"{AT}.tokens[1]", "''", number="0"), token("", Words())),
    Case(path(AT), lens({"name": "logit"})),
    Case(path("capture.inline.project", "'lens'"), lens(LOGIT, project=[VECTOR])),
    Case(path(AT, "'reduce'"), lens(LOGIT, reduce="mean", positions="all_prompt")),
    Case(path(AT), lens(LOGIT, hooks={"q": "all"})),
    Case(
        path("capture.logging.lens"),
        {
            "capture": {"logging": {"hooks": HOOKS, "lens": LOGIT}},
            "config": config_of(OFFERED, capture_consumers=["logging"]),
        },
    ),
    Case({"given": "'entropy'", "allowed": "top_ids, top_logprobs"}, do=lambda: read("entropy")),
    *[Case({"given": repr(entries[-1])}, do=partial(lenses, *entries)) for entries in NAMES],
    Case({}, do=lambda: published(whole={1: type})),  # a pickle that names a class
    Case({}, do=lambda: converted(lambda path: path.write_bytes(b"no zip at all"))),
    Case({}, do=lambda: published("there.safetensors")),
    Case({}, do=lambda: published("lens.pt2")),
    Case({}, do=lambda: published(whole=[1])),
    Case({"given": "'d_model'"}, do=lambda: published(d_model=None)),
    Case({"given": "True"}, do=lambda: published(d_model=True)),
    Case({"allowed": "1-1024"}, do=lambda: published(source_layers=[])),
    Case({}, do=lambda: published(source_layers=[0, 0])),
    Case({}, do=lambda: published(source_layers=[0, -1])),
    Case({}, do=lambda: published(source_layers=[0])),
    Case({}, do=lambda: published(J={0: torch.ones(4, 4), 1: torch.ones(4, 4)})),
    Case(
        {"layer": "2", "given": "[3, 4]"},
        do=lambda: published(J=[torch.ones(4, 4), torch.ones(3, 4)]),
    ),
    Case({"layer": "0", "given": "'x'"}, do=lambda: published(J=["x", torch.ones(4, 4)])),
    Case(
        {"layer": "0", "given": "torch.int64"},
        do=lambda: published(J=torch.ones(2, 4, 4, dtype=torch.int64)),
    ),
    Case(
        {"layer": "0"},
        do=lambda: published(J=torch.ones(1, 1, 1).expand(2, 4096, 4096), d_model=4096),
    ),
    Case(
        {"layer": "2"}, do=lambda: published(J=[torch.ones(4, 4), torch.full((4, 4), float("nan"))])
    ),
    Case({"name": "big", "path": "/no/such"}, do=lambda: FileLens("big", "/no/such", SHAPE, CPU)),
    Case({"given": "''"}, do=lambda: lens_file({"0.weight": SQUARE}, "")),
    Case(
        {"given": "'lora'", "allowed": "['tuned', 'jacobian']"},
        do=lambda: lens_file({"0.weight": SQUARE}, "lora"),
    ),
    *[
        Case({"given": repr(key)}, do=partial(lens_file, {key: SQUARE}, "jacobian"))
        for key in ("4.weight", "-1.weight", "0.bias", "J", "0.weight.more", "99999999999.weight")
    ],
    Case(
        {"given": "0.weight", "dtype": "torch.float32 [4, 3]", "allowed": "[4, 4]"},
        do=lambda: lens_file({"0.weight": torch.ones(4, 3)}, "jacobian"),
    ),
    Case(
        {"given": "0.weight", "dtype": "torch.int64 [4, 4]", "allowed": "[4, 4]"},
        do=lambda: lens_file({"0.weight": SQUARE.long()}, "jacobian"),
    ),
    Case(
        {"given": "0.bias", "dtype": "torch.float32 [5]", "allowed": "[4]"},
        do=lambda: lens_file({"0.weight": SQUARE, "0.bias": torch.ones(5)}, "tuned"),
    ),
    Case(
        {"given": "1.weight", "dtype": "float32"},
        do=lambda: lens_file({"1.weight": SQUARE / 0}, "jacobian"),
    ),
    Case({"given": "2.bias"}, do=lambda: lens_file({"2.weight": SQUARE}, "tuned")),
    Case({"given": "2.weight"}, do=lambda: lens_file({"2.bias": torch.ones(4)}, "tuned")),
    Case({}, do=lambda: lens_file({}, "tuned")),
    Case({}, do=lambda: CaptureConfig(capture_consumers=["logging"], capture_lens=["logit"])),
    Case({"layer": "3"}, do=lambda: prove(captures=False)),
    Case({"given": "Sequential", "allowed": "0.0001"}, do=lambda: prove(captures=True)),
    Case({"given": "Sequential", "number": "16"}, do=lambda: prove(captures=True, times=0)),
]
