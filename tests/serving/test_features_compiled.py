# SPDX-License-Identifier: Apache-2.0
"""Compiled code reconstructs by autoencoders that get a name while the engine serves, in an engine
that captures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.serving.test_features import TOP, K, rebuilt
from tests.support.autoencoders import FEATURES, made_up, save_autoencoder
from tests.support.serving import Ask, Judge, prompt_of, serve

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

SITE = "post_block", 2


def test_compiled_code_reconstructs_by_what_comes_later(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "compiled"))
    files = {
        "start": save_autoencoder(tmp_path / "start", made_up(1)),
        "small": save_autoencoder(tmp_path / "small", made_up(8, features=FEATURES - 31)),
        "top": save_autoencoder(
            tmp_path / "top", TOP, architecture="topk", k=K, apply_b_dec_to_input=True
        ),
        "normed": save_autoencoder(
            tmp_path / "normed", made_up(9), normalize_activations="constant_norm_rescale"
        ),
    }
    place = f"{SITE[0]}.{SITE[1]}={FEATURES},k={K}"
    llm = make_llm(
        path,
        enforce_eager=False,
        enable_steering=True,
        steering_families=["feature", "reconstruct"],
        features=[f"start={files['start']}@post_block.2"],
        features_root=str(tmp_path),
        features_reconstruct=[place, place, place],
        max_num_batched_tokens=24,
    )
    try:
        judge = Judge(Reference(row, models.load(row, path)))
        by_name = {f"late-{name}": name for name in ("small", "top", "normed")}
        for late, name in by_name.items():
            llm.steering.register_features(late, name, *SITE, reconstruct=True)
        own = files | {late: files[name] for late, name in by_name.items()}
        asks = [
            Ask(prompt_of(30, 50 + i), {"steering": [{"op": "reconstruct", "features": name}]})
            for i, name in enumerate(["start", *by_name])
        ]
        for ask, output in zip(asks, serve(llm, [*asks, Ask(prompt_of(9, 60))]), strict=False):
            judge.check(rebuilt(judge, own, ask, output, "post_block.2"), output)
            # The twin: another file's.
            wrong = own | {ask.fields["steering"][0]["features"]: files["start"]}
            if wrong != own:
                with pytest.raises(AssertionError, match="off by"):
                    judge.check(rebuilt(judge, wrong, ask, output, "post_block.2"), output)
    finally:
        shut_down(llm)
