# SPDX-License-Identifier: Apache-2.0
"""What the tests ask, and the answers that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE
from tests.support.serving import relative, vector
from vllm.entrypoints.serve.steering.client import Choice, SteeringClient, joined

PROMPT = "Today I went"
SAID = [{"role": "user", "content": PROMPT}]
LAYER = 1
VECTOR = vector(1).numpy()
READ = {"inline": {"hooks": {"post_block": [LAYER, 3]}, "positions": "all"}}
STEER = {"post_block": {LAYER: VECTOR}}


class Reference:
    """transformers, with vectors added to outputs of blocks."""

    def __init__(self, model: Path) -> None:
        self.model = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def rows(self, token_ids: list[int], deltas: dict[int, np.ndarray]) -> dict[int, torch.Tensor]:
        """layer -> [n, hidden] of the output of that block, `deltas` added at all positions."""
        found: dict[int, torch.Tensor] = {}

        def hook(layer: int) -> Any:
            def add(module: Any, inputs: Any, output: Any) -> Any:
                hidden = output[0] if isinstance(output, tuple) else output
                if layer in deltas:
                    hidden = hidden + torch.from_numpy(deltas[layer])
                found[layer] = hidden[0]
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            return add

        blocks = self.model.model.layers
        handles = [block.register_forward_hook(hook(n)) for n, block in enumerate(blocks)]
        with torch.no_grad():
            self.model(torch.tensor([token_ids]))
        for handle in handles:
            handle.remove()
        return found


def answered(client: SteeringClient, prompt: Any, fields: dict[str, Any], stream: bool) -> Choice:
    """The whole answer, in one piece or joined from a stream."""
    if stream:
        return joined(list(client.stream(prompt, **fields)))
    return client.complete(prompt, **fields).choices[0]


def check_rows(choice: Choice, reference: Reference, deltas: dict[int, np.ndarray]) -> list[int]:
    """Every row is the reference's, and would not be without `deltas`; the tokens read."""
    rows = choice.rows["post_block", 3]
    read = rows.token_ids.tolist()
    assert rows.positions.tolist() == list(range(len(read)))
    assert choice.capture_status == {"inline": "ok"}
    want, plain = reference.rows(read, deltas), reference.rows(read, {})
    for layer in (LAYER, 3):
        values = torch.from_numpy(choice.rows["post_block", layer].values.copy())
        assert relative(values, want[layer]) <= READ_TOLERANCE + WRITE_TOLERANCE
        if deltas:
            assert relative(values, plain[layer]) >= LEAST_MOVE
    return read
