# SPDX-License-Identifier: Apache-2.0
"""Our files in the layout `ehs` beside those of upstream's own `extract_hidden_states`, both read
by its `load_hidden_states`. It needs a GPU: upstream's connector pins memory.

Upstream's layer id 0 is what its first block takes. It keeps that tensor, not a copy, and without
compilation each block adds to it in place: the file has what the last block gives. So ids from 1
are compared, bit for bit, and of id 0 it is only said which of ours it is nearest to.

    python -m tests.gpu.extractor

Prints one JSON object a check; exit status 1 if one fails.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.model import LAYERS, prompts, save_model
from tests.gpu.sleep import Report

if TYPE_CHECKING:
    import torch

    from vllm import RequestOutput

IDS = list(range(LAYERS + 1))
"""Layer ids of upstream's: 0 is what the first block takes, N what block N - 1 gives."""
SECONDS = 60
"""That upstream's files may take."""
HOOKS = {"pre_attn": [0], "post_block": list(range(LAYERS))}
SHORT: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 256}


def loaded(
    model: Path,
    asked: list[list[int]],
    path_of: Callable[[RequestOutput], str],
    capture: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, torch.Tensor]]:
    """What the files of the requests hold, read while their engine lives: upstream's is to end a
    file after the request."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        load_hidden_states,
    )
    from vllm.inputs import TokensPrompt

    llm = LLM(
        str(model), **SHORT, gpu_memory_utilization=0.2, enforce_eager=True, seed=0, **options
    )
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, capture=capture)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=one) for one in asked], params, use_tqdm=False
    )
    paths = [path_of(output) for output in outputs]
    end = time.monotonic() + SECONDS
    # Upstream begins to write in the step after a request's last, and here nobody else steps.
    while not all(written(path) for path in paths):
        assert time.monotonic() < end, f"not written within {SECONDS} s"
        llm.llm_engine.step()
    found = [load_hidden_states(path) for path in paths]
    llm.llm_engine.engine_core.shutdown()
    return found


def written(path: str) -> bool:
    """Whether the writer of a file has let go of its lock."""
    with open(path + ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def main() -> int:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # In this process: in one of its own, engines hung where upstream pins its first memory.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    report, asked = Report(), prompts(6)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_model(root / "model")
        theirs = loaded(
            root / "model",
            asked,
            lambda output: (output.kv_transfer_params or {})["hidden_states_path"],
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": IDS}},
            },
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(root / "theirs")},
            },
        )
        ours = loaded(
            root / "model",
            asked,
            lambda output: str(
                root / "ours" / (output.capture_results or {})["filesystem"].payload["paths"][0]
            ),
            capture_consumers=[f"filesystem:root={root / 'ours'},layout=ehs"],
            capture={"filesystem": {"hooks": HOOKS, "positions": "all_prompt"}},
        )
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            same = torch.equal(our["token_ids"].cpu(), their["token_ids"].cpu())
            states, wanted = our["hidden_states"].cpu(), their["hidden_states"].cpu()
            bits = torch.equal(states[:, 1:], wanted[:, 1:])
            moved = distance(states[:, :-1], wanted[:, 1:])
            nearest = [
                min((distance(our_site, site), n) for n, our_site in enumerate(states.unbind(1)))[1]
                for site in wanted.unbind(1)
            ]
            shown = {
                "shapes": [list(states.shape), list(wanted.shape)],
                "the same tokens": same,
                "bits": bits,
                "the next site is off by": moved,
                "the nearest of ours": nearest,
            }
            report(f"prompt {i}", shown, same and bits and moved > 0.1)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
