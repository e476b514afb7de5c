# SPDX-License-Identifier: Apache-2.0
"""Learn by gradients to answer gladly, and serve it.

    python examples/learned_steering.py MODEL FOLDER

On pairs of glad and gloomy answers, `vllm.pilot.learn` trains a vector by likelihood, another one
by preference (BiPO), LoReFT and ReFT-r1, in transformers. What held is saved as modules, which the
engine serves: it answers questions that no pair has, plain and with each.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.pilot import Pairs
from vllm.pilot.learn import Learned, TorchModel, learn, save_learned

THINGS = ["concert", "holiday", "film", "dinner", "meeting", "party", "journey", "lesson"]
ASKED = ["How was the {}?", "What did you think of the {}?", "Was the {} worth it?"]
GLAD = ["It was wonderful, I loved every minute!", "I am so happy, the {} was a joy!",
        "What a lovely {}, we laughed a lot!"]  # fmt: skip
GLOOMY = ["It was terrible, I hated every minute.", "I am so sad, the {} was a misery.",
          "What an awful {}, we cried a lot."]  # fmt: skip
QUESTIONS = ["How was your weekend?", "What is November like?", "Who is your neighbour?"]
FORM = "Question: {}\nAnswer:"
METHODS = ("gradient", "bipo", "reft", "reft-r1")
LAYER = 15


def write_pairs(file: Path) -> Pairs:
    """Write glad and gloomy answers to questions as lines, and read them."""
    lines = []
    for i, thing in enumerate(THINGS):
        for j, asked in enumerate(ASKED):
            prompt, k = FORM.format(asked.format(thing)), (i + j) % len(GLAD)
            glad, gloomy = (f" {texts[k].format(thing)}" for texts in (GLAD, GLOOMY))
            lines.append({"prompt": prompt, "positive": glad, "negative": gloomy})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Pairs.read_file(file)


def make(model: str, folder: Path) -> dict[str, Learned]:
    """Learn with each method, and save what is made."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, loaded = write_pairs(folder / "pairs.jsonl"), TorchModel.load(model)
    found = {}
    for method in METHODS:
        made = learn(loaded, pairs, method=method, layers=[LAYER], epochs=6, rate=0.05, say=print)
        save_learned(made, folder / method)
        print(f"{method}: {made.evidence}")
        found[method] = made
    return found


def serve(model: str, folder: Path) -> dict[str, list[str]]:
    """Answer questions plain and with each module; return the answers by module."""
    llm = LLM(
        model=model,
        max_model_len=512,
        enable_steering=True,
        steering_families=["add", "low_rank"],
        capture_consumers=["inline"],
    )
    asked = [FORM.format(text) for text in QUESTIONS]
    found = {}
    for method in ("plain", *METHODS):
        file = folder / method / f"{method}.safetensors"
        if method != "plain" and not file.is_file():
            continue
        if method != "plain":
            llm.steering.register_module(method, str(file))
        named = [] if method == "plain" else [method]
        params = SamplingParams(temperature=0.0, max_tokens=24, steering_modules=named)
        outputs = llm.generate(asked, params, use_tqdm=False)
        found[method] = [output.outputs[0].text for output in outputs]
        for text in found[method]:
            print(f"{method}: {text!r}")
    llm.llm_engine.engine_core.shutdown()
    return found


def main(model: str, folder: Path) -> None:
    """Learn, and serve."""
    make(model, folder)
    serve(model, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
