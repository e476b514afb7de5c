# SPDX-License-Identifier: Apache-2.0
"""Trains a probe of medical answers, calibrates it, and serves it as an operator's rule.

    python -m examples.medical_probe MODEL FOLDER

writes the probe and `rules.json` to the folder, and then asks an engine that judges every answer by
it. `vllm serve MODEL --capture-consumers inline --rules FOLDER/rules.json` is the same as a server;
`examples/grafana-rules.json` draws its metrics.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.pilot.probes import LabelledData, calibrate_probe, train_probe
from vllm.renderers.chat_utils import ChatCompletionMessageParam
from vllm.v1.probes.files import save_probe
from vllm.v1.probes.pools import RollingMax

AILMENTS = ["a headache", "a fever", "a sore throat", "chest pain", "a rash", "a broken arm",
            "high blood pressure", "a cough", "an ear infection", "a swollen knee", "asthma",
            "a burn", "insomnia", "food poisoning", "a migraine", "back pain"]  # fmt: skip
OTHERS = ["a flat tyre", "a slow computer", "a dry cake", "a barking dog", "an unpaid bill",
          "a noisy neighbour", "a lost passport", "a broken lamp", "a late train", "a leaking tap",
          "a boring novel", "a muddy garden", "a tight shoe", "an empty fridge", "a long meeting",
          "a difficult chord"]  # fmt: skip
QUESTION = "What can I do about {}?"
ANSWERS = ["Many people have {} now and then. Here is what usually helps with {}.",
           "First find out what causes {}, and then ask somebody who knows about {}.",
           "With {} it is best to wait a little, to stay calm, and to ask for help."]  # fmt: skip
SITES = [("post_block", 8), ("post_block", 12), ("post_block", 16)]
SPLITS = ["train", "train", "train", "choose", "report"]
"""Splits of things, in turns: the probe is judged on answers about others than it was fitted on."""
UNSEEN = ["What helps against a stomach ache?", "What helps against a rusty gate?"]


def texts(file: Path, things: dict[int, list[str]]) -> LabelledData:
    """Write answers as lines with their labels, and read them."""
    lines = [
        {
            "messages": [{"role": "user", "content": QUESTION.format(thing)}],
            "completion": answer.format(thing, thing),
            "label": label,
            "split": SPLITS[i % len(SPLITS)],
        }
        for label, of_label in things.items()
        for i, thing in enumerate(of_label)
        for answer in ANSWERS
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return LabelledData.read_file(str(file))


def make(model: str, folder: Path) -> float:
    """Train the probe on most of the things and calibrate it on the others; return its AUROC on
    answers that it was not fitted on."""
    llm = LLM(
        model=model,
        capture_consumers=["inline"],
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
    )
    data = texts(folder / "train.jsonl", {1: AILMENTS, 0: OTHERS[:10]})
    trained = train_probe(llm, data, SITES, pool=RollingMax(8), over="generated")
    negatives = texts(folder / "negatives.jsonl", {0: OTHERS[10:]})
    made = calibrate_probe(llm, trained.probe, negatives, 0.1)
    print(made)
    save_probe(made.probe, folder / "medical.safetensors")
    llm.llm_engine.engine_core.shutdown()
    return trained.found.area.value


def serve(model: str, folder: Path) -> list[bool]:
    """Ask an engine with the rule; return which answers it flags."""
    rule = {"name": "medical", "probe": {"file": "medical.safetensors"}, "over": "generated"}
    (folder / "rules.json").write_text(json.dumps({"rules": [rule]}))
    llm = LLM(
        model=model,
        capture_consumers=["inline"],
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        rules=str(folder / "rules.json"),
    )
    flagged, params = [], SamplingParams(max_tokens=40, temperature=0.0)
    for text in UNSEEN:
        said: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        (output,) = llm.chat(said, params)
        answer = output.outputs[0]
        flagged.append(answer.rules is not None)
        print(text, answer.text, answer.rules)
    llm.llm_engine.engine_core.shutdown()
    return flagged


def main(model: str, folder: Path) -> None:
    """Make the probe, and serve it."""
    folder.mkdir(parents=True, exist_ok=True)
    print("AUROC", make(model, folder))
    print("flagged", serve(model, folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
