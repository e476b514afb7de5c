# SPDX-License-Identifier: Apache-2.0
"""Tells false answers from true ones by a few channels of the stream, and flags them by a rule.

    python -m examples.hallucination_probe MODEL FOLDER

After H-Node (Yocam, Vaidyan and Wang 2026, arXiv 2603.26045): a logistic regression on the row of
an answer's last token, of which the channels with the largest weights are kept, the *nodes*. Here
they are compared with all channels, with as many that are drawn, and with the answer's
log-probability, on facts that nothing was fitted on. Each word is as often a true answer as a false
one.

The folder gets `nodes.safetensors` and `rules.json`, by which `vllm serve MODEL
--capture-consumers inline --rules FOLDER/rules.json` flags answers.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm import LLM, SamplingParams
from vllm.pilot import fit_probe, rows_of
from vllm.pilot.probes import LabelledData, calibrate_probe, evaluate_probe
from vllm.pilot.probes.statistics import roc_area
from vllm.v1.probes.files import made_probe, save_probe
from vllm.v1.probes.probe import ServedProbe

LAYERS = [9, 12, 15]
FACTS = {
    "The capital of {} is": """France Paris, Italy Rome, Germany Berlin, Spain Madrid, Japan Tokyo,
        China Beijing, Russia Moscow, Egypt Cairo, Greece Athens, Portugal Lisbon, Austria Vienna,
        Poland Warsaw, Hungary Budapest, Ireland Dublin, England London, Norway Oslo, Peru Lima,
        Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Iran Tehran, Iraq Baghdad,
        Syria Damascus, India Delhi, Cuba Havana, Kenya Nairobi, Ukraine Kiev, Belgium Brussels,
        Canada Ottawa, Australia Canberra, Chile Santiago, Scotland Edinburgh, Afghanistan Kabul,
        Bulgaria Sofia, Israel Jerusalem""",
    "The opposite of {} is": """hot cold, big small, up down, left right, good bad, old new,
        fast slow, high low, day night, light dark, happy sad, rich poor, hard soft, wet dry,
        open closed, black white, strong weak, early late, full empty, clean dirty, long short,
        true false, love hate, war peace, north south, east west, first last, more less, alive dead,
        loud quiet, thick thin, wide narrow, deep shallow, begin end, win lose""",
    "The past tense of {} is": """go went, see saw, take took, give gave, come came, eat ate,
        run ran, write wrote, speak spoke, break broke, drive drove, fly flew, grow grew, know knew,
        begin began, drink drank, sing sang, swim swam, fall fell, hold held, keep kept, leave left,
        make made, meet met, pay paid, say said, sell sold, send sent, sit sat, stand stood,
        teach taught, tell told, think thought, buy bought, bring brought""",
}
"""Question -> its subjects and answers, each answer one token of SmolLM2."""
FOLDS, NODES, DRAWS = 5, 8, 20
PENALTY = 100.0
"""Of the regression's weights, of channels that vary by 1."""


@dataclass(frozen=True)
class Statement:
    """A question, an answer, and whether it is true."""

    relation: str
    prompt: str
    answer: str
    false: bool
    fold: int
    """False answers are true ones of the same fold and relation."""


def statements() -> list[Statement]:
    """Return each fact with its answer and with another's."""
    made = []
    for relation, listed in FACTS.items():
        facts = [fact.split() for fact in listed.split(",")]
        for fold in range(FOLDS):
            of_fold = facts[fold::FOLDS]
            for (subject, answer), (_, other) in zip(
                of_fold, of_fold[1:] + of_fold[:1], strict=True
            ):
                prompt = relation.format(subject)
                made.append(Statement(relation, prompt, answer, False, fold))
                made.append(Statement(relation, prompt, other, True, fold))
    return made


def labelled(file: Path, chosen: list[Statement]) -> LabelledData:
    """Write statements as labelled texts, false ones positive, and read them."""
    lines = [
        {"prompt": one.prompt, "completion": f" {one.answer}", "label": int(one.false)}
        for one in chosen
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return LabelledData.read_file(str(file))


def unlikely(llm: LLM, said: list[Statement]) -> np.ndarray:
    """float64 [statements]: -log P of each answer, which needs no probe."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([f"{one.prompt} {one.answer}" for one in said], params, use_tqdm=False)
    tables = [output.prompt_logprobs[-1] for output in outputs if output.prompt_logprobs]
    return np.array([-next(iter(table.values())).logprob for table in tables if table])


def engine(model: str, rules: str | None = None) -> LLM:
    """Start an engine on a model, with an operator's rules."""
    return LLM(
        model=model,
        capture_consumers=["inline"],
        max_model_len=128,
        kv_cache_memory_bytes=1 << 28,
        rules=rules,
        enforce_eager=True,
        disable_log_stats=True,
    )


Channels = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Which channels are kept, given rows [n, channels] that vary by 1 and which of them are false."""


def nodes(even: torch.Tensor, false: torch.Tensor) -> torch.Tensor:
    """int64 [NODES]: the channels with the largest weights of a regression on all of them."""
    return fit_probe(even[false], even[~false], PENALTY).weight.abs().topk(NODES).indices


def every(even: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """int64 [channels]: all of them."""
    return torch.arange(even.shape[1])


def fit(rows: torch.Tensor, false: torch.Tensor, channels: Channels) -> tuple[torch.Tensor, float]:
    """Fit a regression on some channels of rows [n, channels]; the others' weights are 0.

    Returns:
        float32 [channels], and the bias; above 0 is false.
    """
    middle, spread = rows.mean(0), rows.std(0).clamp_min(1e-6)
    even = (rows - middle) / spread
    kept = channels(even, false)
    found = fit_probe(even[false][:, kept], even[~false][:, kept], PENALTY)
    weight = torch.zeros(rows.shape[1])
    weight[kept] = found.weight / spread[kept]
    return weight, found.bias - float(weight @ middle)


def areas(
    rows: torch.Tensor, false: torch.Tensor, groups: np.ndarray, channels: Channels
) -> np.ndarray:
    """AUROC on each group of what was fitted on the others, float64 [groups]."""
    made = []
    for group in np.unique(groups):
        held = torch.from_numpy(groups == group)
        weight, bias = fit(rows[~held], false[~held], channels)
        scores = (rows[held] @ weight + bias).double().numpy()
        made.append(roc_area(scores, false[held].numpy()).value)
    return np.array(made)


def measure(llm: LLM, said: list[Statement]) -> dict[str, np.ndarray]:
    """Return what tells false from true -> AUROC of each fold, or of each relation."""
    rows = rows_of(llm, [f"{one.prompt} {one.answer}" for one in said])
    false = torch.tensor([one.false for one in said])
    folds = np.array([one.fold for one in said])
    relations = np.array([one.relation for one in said])
    chosen = rows[:, LAYERS].flatten(1)
    drawn = torch.Generator().manual_seed(0)

    def draw(even: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.randperm(even.shape[1], generator=drawn)[:NODES]

    by_odds, labels = unlikely(llm, said), false.numpy()
    return {
        "all channels": areas(chosen, false, folds, every),
        "nodes": areas(chosen, false, folds, nodes),
        "as many drawn": np.mean([areas(chosen, false, folds, draw) for _ in range(DRAWS)], 0),
        "all of layer 0": areas(rows[:, 0], false, folds, every),
        "log-probability": np.array(
            [roc_area(by_odds[folds == f], labels[folds == f]).value for f in range(FOLDS)]
        ),
        "all, other relations": areas(chosen, false, relations, every),
        "nodes, other relations": areas(chosen, false, relations, nodes),
    }


def make(model: str, folder: Path) -> dict[str, np.ndarray]:
    """Measure, and write the nodes' probe; its last fold is of facts that it was not fitted on."""
    folder.mkdir(parents=True, exist_ok=True)
    llm = engine(model)
    said = statements()
    found = measure(llm, said)
    parts = [[one for one in said if one.fold in f] for f in ((0, 1, 2), (3,), (4,))]
    texts = [f"{one.prompt} {one.answer}" for one in parts[0]]
    rows = rows_of(llm, texts, layers=LAYERS).flatten(1)
    weight, bias = fit(rows, torch.tensor([one.false for one in parts[0]]), nodes)
    sites = [("post_block", layer) for layer in LAYERS]
    probe: ServedProbe = made_probe(sites, weight.numpy()[None], np.array([bias]))
    made = calibrate_probe(llm, probe, labelled(folder / "choose.jsonl", parts[1]), 0.1)
    judged = evaluate_probe(llm, made.probe, labelled(folder / "report.jsonl", parts[2]))
    named = [divmod(n, rows.shape[1] // len(LAYERS)) for n in weight.nonzero()[:, 0].tolist()]
    print("nodes", [(LAYERS[at], channel) for at, channel in named])
    print(made)
    print("served", judged.area, "flags", judged.true_rate, "and of true ones", judged.false_rate)
    save_probe(made.probe, folder / "nodes.safetensors")
    llm.llm_engine.engine_core.shutdown()
    return found


def rules() -> dict[str, Any]:
    """Return what `--rules` takes: an answer is flagged where the nodes say that it is false."""
    rule = {"name": "false", "probe": {"file": "nodes.safetensors"}, "over": "generated"}
    return {"rules": [rule]}


def serve(model: str, folder: Path) -> list[tuple[bool, bool]]:
    """Ask an engine with the rule about the last fold; return (right, flagged) of each answer."""
    file = folder / "rules.json"
    file.write_text(json.dumps(rules()))
    llm = engine(model, str(file))
    asked = [one for one in statements() if one.fold == 4 and not one.false]
    # The answer's row is there when the token after it is.
    params = SamplingParams(max_tokens=2, temperature=0.0)
    judged = []
    for one, output in zip(asked, llm.generate([o.prompt for o in asked], params), strict=True):
        answer = output.outputs[0]
        (first, *_) = answer.token_ids
        said = llm.get_tokenizer().decode([first]).strip()
        judged.append((said == one.answer, answer.rules is not None))
        print(
            f"{one.prompt} {said}", "right" if judged[-1][0] else "other", answer.rules is not None
        )
    llm.llm_engine.engine_core.shutdown()
    return judged


def main(model: str, folder: Path) -> None:
    """Measure, make the probe, and serve it."""
    for by, found in make(model, folder).items():
        print(f"{by}: AUROC {found.mean():.3f}, from {found.min():.3f} to {found.max():.3f}")
    judged = serve(model, folder)
    for right in (True, False):
        of_these = [flagged for was, flagged in judged if was is right]
        print("right" if right else "other", len(of_these), "answers, flagged", sum(of_these))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
