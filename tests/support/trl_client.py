# SPDX-License-Identifier: Apache-2.0
"""TRL's client, as it was published, asks a server for completions: `URL PROMPT FIELDS`, where
PROMPT is a JSON list of token ids and FIELDS an object of ours. Prints the tokens that it got
without FIELDS, with them, and with them by `/inference/v1/generate`, as it asks about images: there
without log-probabilities, which TRL 1.16 expects in the form of vLLM 0.31."""

from __future__ import annotations

import json
import sys


def main(url: str, prompt: str, fields: str) -> None:
    from trl.generation.vllm_client import VLLMClient

    client, prompts = VLLMClient(base_url=url), [json.loads(prompt)]
    common = {"ignore_eos": True}
    steered = {**common, **json.loads(fields)}
    asked = {"temperature": 0.0, "max_tokens": 6, "logprobs": None}
    answers = [
        client.generate(prompts, generation_kwargs=common, **asked),
        client.generate(prompts, generation_kwargs=steered, **asked),
        client.generate(prompts, features=[None], generation_kwargs=steered, **asked),
    ]
    print(json.dumps([answer["completion_ids"][0] for answer in answers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
