# SPDX-License-Identifier: Apache-2.0
"""Asks a model in words for what a row of its stream means.

    python -m examples.activation_oracle [TEXT ...] [--model DIR] [--adapter DIR]

The row of each text's last token is added at the placeholder " ?" of a question, which is then
answered: `h + scale * |h| * row / |row|`, as activation oracles do (Karvonen et al. 2025, arXiv
2512.15674). An oracle is a LoRA adapter that was trained for it, `--adapter`. Without one, the
question is the identity prompt of Patchscopes (Ghandeharioun et al. 2024, arXiv 2401.06102).
"""

import argparse
from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.pilot.checkpoints import checkpoint
from vllm.v1.capture import stack

QUESTION = "cat -> cat; 1135 -> 1135; hello -> hello; ? ->"
TEXTS = ["I saw a picture of the elephant", "She can play the guitar", "It is cold in winter"]


def read(llm: LLM, texts: list[str], layer: int = 11) -> torch.Tensor:
    """float32 [texts, hidden]: the stream after a layer, at the last token of each text."""
    asked = {"inline": {"hooks": {"post_block": [layer]}, "positions": "last_prompt"}}
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, capture=asked), use_tqdm=False)
    return stack(outputs, "post_block", [layer])[:, 0].float()


def inject(llm: LLM, rows: torch.Tensor, layer: int = 1, scale: float = 2.0) -> dict[str, Any]:
    """Fields of a request that adds rows [n, hidden] at the n placeholders of its prompt."""
    at = {"token_ids": llm.get_tokenizer().encode(" ?", add_special_tokens=False)}
    put = {"op": "norm_match", "point": "post_block", "layers": [layer], "scale": scale}
    return {"steering": [{**put, "positions": at, "values": rows}]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.activation_oracle", description=__doc__)
    parser.add_argument("texts", nargs="*", default=TEXTS)
    parser.add_argument("--model", help="a directory; without it SmolLM2-135M-Instruct, 93 MB")
    parser.add_argument("--adapter", help="a LoRA adapter that answers")
    given = parser.parse_args()
    llm = LLM(given.model or str(checkpoint()), enable_steering=True,
              steering_families=["norm_match"], capture_consumers=["inline"], enforce_eager=True,
              enable_lora=given.adapter is not None, max_lora_rank=64)  # fmt: skip
    oracle = LoRARequest("oracle", 1, given.adapter) if given.adapter else None
    params = [
        SamplingParams(temperature=0, max_tokens=2, **inject(llm, row[None]))
        for row in read(llm, given.texts)
    ]
    outputs = llm.generate([QUESTION] * len(params), params, use_tqdm=False, lora_request=oracle)
    for text, output in zip(given.texts, outputs, strict=True):
        print(f"{text} ->{output.outputs[0].text}")


if __name__ == "__main__":
    main()
