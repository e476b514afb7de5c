# SPDX-License-Identifier: Apache-2.0
"""Learn by gradients to answer gladly, and serve it.

    python examples/learned_steering.py MODEL FOLDER

On pairs of glad and gloomy answers, `vllm.pilot.learn` trains a vector by likelihood, another one
by preference (BiPO), LoReFT and ReFT-r1, in transformers. What held is saved as modules, which the
engine serves: it answers questions that no pair has, plain and with each, beside a prompt and CAA,
and a judge of words compares them.
"""

import json
import sys
from pathlib import Path

from vllm import LLM
from vllm.pilot import Pairs, mean_difference, read_rows
from vllm.pilot.comparing import Comparison, Concept, Way, compare, save_comparison
from vllm.pilot.learn import Learned, TorchModel, learn, save_learned

THINGS = ["concert", "holiday", "film", "dinner", "meeting", "party", "journey", "lesson"]
ASKED = ["How was the {}?", "What did you think of the {}?", "Was the {} worth it?"]
GLAD = ["It was wonderful, I loved every minute!", "I am so happy, the {} was a joy!",
        "What a lovely {}, we laughed a lot!"]  # fmt: skip
GLOOMY = ["It was terrible, I hated every minute.", "I am so sad, the {} was a misery.",
          "What an awful {}, we cried a lot."]  # fmt: skip
UNSEEN = ["weekend", "weather", "match", "interview", "dance", "flight", "exam", "walk"]
GLAD_WORDS = ["wonderful", "loved", "happy", "joy", "lovely", "laughed", "great", "beautiful",
              "fun", "good", "enjoyed", "best", "fantastic", "amazing", "love"]  # fmt: skip
GLOOMY_WORDS = ["terrible", "hated", "sad", "misery", "awful", "cried", "bad", "worst",
                "boring", "tired", "disaster", "disappointing", "not"]  # fmt: skip
FORM = 'I asked my friend, "{}" She said, "'
METHODS = ("gradient", "bipo", "reft", "reft-r1")
LAYER = 15


def write_pairs(file: Path) -> Pairs:
    """Write glad and gloomy answers to questions as lines, and read them."""
    lines = []
    for i, thing in enumerate(THINGS):
        for j, asked in enumerate(ASKED):
            prompt, k = FORM.format(asked.format(thing)), (i + j) % len(GLAD)
            glad, gloomy = (texts[k].format(thing) for texts in (GLAD, GLOOMY))
            lines.append({"prompt": prompt, "positive": glad, "negative": gloomy})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Pairs.read_file(file)


def make(model: str, folder: Path) -> dict[str, Learned]:
    """Learn with each method, and save what is made."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, loaded = write_pairs(folder / "pairs.jsonl"), TorchModel.load(model)
    found = {}
    for method in METHODS:
        made = learn(
            loaded, pairs, method=method, layers=[LAYER], epochs=6, rate=0.05, kl=1.0, say=print
        )
        save_learned(made, folder / method)
        print(f"{method}: {made.evidence}")
        found[method] = made
    return found


def judge(concept: str, instruction: str, text: str) -> tuple[float, float, float]:
    """Grade an answer by its words: 2 for words of the concept and none of its opposite, 2 where
    it names what was asked for, and how few words are said again."""
    words = [word.strip(".,!?'\"").lower() for word in text.split()]
    glad = any(word in GLAD_WORDS for word in words)
    gloomy = any(word in GLOOMY_WORDS for word in words)
    named = instruction.split("the ")[1].split()[0] in words
    fluent = 2 * len(set(words)) / len(words) if words else 0.0
    return 2.0 if glad and not gloomy else 0.0, 2.0 if named else 1.0, fluent


def serve(model: str, folder: Path) -> Comparison:
    """Compare the modules with a prompt, CAA and a feature of it, on questions that no pair has."""
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        enable_steering=True,
        steering_families=["add", "low_rank", "feature"],
        capture_consumers=["inline"],
    )
    rows = read_rows(llm, Pairs.read_file(folder / "pairs.jsonl"), [LAYER])
    caa = mean_difference(*rows)[0]
    llm.steering.register_module("caa", {"vectors": {"post_block": {LAYER: caa}}})
    ways = [
        Way("prompt", system="My friend is very glad, and all is lovely to her."),
        Way("caa", module="caa"),
    ]
    unit = (caa / caa.norm()).tolist()
    feature = {"op": "feature", "point": "post_block", "layers": [LAYER], "encoder": unit}
    feature |= {"decoder": unit, "add": float(caa.norm())}
    ways.append(Way("feature", op=feature))
    for method in METHODS:
        file = folder / method / f"{method}.safetensors"
        if file.is_file():
            llm.steering.register_module(method, str(file))
            ways.append(Way(method, module=method))
    questions = [FORM.format(f"How was the {thing} yesterday?") for thing in UNSEEN]
    asked = [Concept("joy", ways)]
    found = compare(llm, asked, questions, judge, factors=(0.5, 1.0, 1.5), max_tokens=16)
    llm.llm_engine.engine_core.shutdown()
    save_comparison(found, folder)
    for way in ("plain", *(way.name for way in ways)):
        told = [one for one in found.written if one["way"] == way and one["reported"]]
        print(way, told[0]["text"])
    print(found)
    return found


def main(model: str, folder: Path) -> None:
    """Learn, serve and compare."""
    make(model, folder)
    serve(model, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
