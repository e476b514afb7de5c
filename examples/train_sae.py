# SPDX-License-Identifier: Apache-2.0
"""Trains a sparse autoencoder on rows that `vllm capture run` wrote, in plain torch.

    python -m examples.train_sae topics.jsonl    # writes prompts, each with its topic as a label
    vllm capture run MODEL --data topics.jsonl --out acts --hooks post_block:14 \\
        --positions all_generated --max-tokens 128
    python -m examples.train_sae acts post_block 14 sae
    vllm serve MODEL --features topics=sae@post_block.14 ...

It is trained with BatchTopK (Bussmann et al. 2024, arXiv 2412.06410): of the activations of a batch
the `k` largest per row stay. What is saved is the JumpReLU that this amounts to, in SAELens's
format, which `--features`, `vllm.pilot.Autoencoder` and SAELens read.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from vllm.pilot import Autoencoder
from vllm.pilot.dataset import Activations, Rows

TOPICS = ["cooking", "football", "the sea", "music", "dogs", "computers", "space", "gardens",
          "money", "medicine", "war", "trains"]  # fmt: skip
KINDS = ["a short story", "a letter to a friend", "a list of facts", "a news report", "some advice",
         "a review", "a diary entry", "a speech", "an explanation for children",
         "a conversation between two friends"]  # fmt: skip


def write_topics(file: str | Path) -> None:
    """Write prompts about topics, as lines for `vllm capture run`."""
    lines = [
        {"id": f"{topic}/{kind}", "label": topic,
         "messages": [{"role": "user", "content": f"Write {kind} about {topic}."}]}
        for topic in TOPICS for kind in KINDS
    ]  # fmt: skip
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))


def ordinary(rows: torch.Tensor) -> torch.Tensor:
    """Tell which rows [n, hidden] are not of a token that all others look at, whose row is a
    hundred times as long as others: bool [n]."""
    norms = rows.norm(dim=1)
    return norms < 4 * norms.median()


def train(
    rows: torch.Tensor, features: int = 1024, k: int = 16, steps: int = 800, batch: int = 256
) -> dict[str, torch.Tensor]:
    """Return the tensors of an autoencoder of rows, float32 [n, hidden], by SAELens's names."""
    seeded = torch.Generator().manual_seed(0)
    rows = rows[ordinary(rows)]
    scale = rows.shape[1] ** 0.5 / rows.norm(dim=1).mean()
    rows = rows * scale
    b_dec = rows.mean(0)
    chosen = torch.randint(len(rows), (features,), generator=seeded)
    w_dec = normalize(rows[chosen] - b_dec, dim=1)
    w_enc, b_enc = w_dec.T.clone(), torch.zeros(features)
    parameters = [w_enc, b_enc, w_dec, b_dec]
    adam = torch.optim.Adam([p.requires_grad_() for p in parameters], lr=1e-3)
    threshold = 0.0
    for step in range(steps):
        x = rows[torch.randint(len(rows), (batch,), generator=seeded)]
        z = ((x - b_dec) @ w_enc + b_enc).relu()
        least = z.detach().flatten().kthvalue(z.numel() - k * batch).values
        made = z.where(z > least, 0.0) @ w_dec + b_dec
        adam.zero_grad()
        (made - x).pow(2).sum(1).mean().backward()
        adam.step()
        w_dec.data = normalize(w_dec.data, dim=1)
        rate = max(0.01, 1 / (step + 1))
        threshold += rate * (float(least) - threshold)
    w_enc, b_enc, w_dec, b_dec = (p.detach() for p in parameters)
    return {
        "W_enc": (w_enc * scale).contiguous(),
        "b_enc": b_enc,
        "W_dec": w_dec / scale,
        "b_dec": b_dec / scale,
        "threshold": torch.full((features,), threshold),
    }


def save(folder: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the folder of SAELens."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hidden, features = tensors["W_enc"].shape
    config = {"architecture": "jumprelu", "d_in": hidden, "d_sae": features, "dtype": "float32",
              "apply_b_dec_to_input": True, "normalize_activations": "none", "device": "cpu",
              "reshape_activations": "none", "metadata": {}}  # fmt: skip
    (folder / "cfg.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "sae_weights.safetensors")


@dataclass(frozen=True)
class Named:
    """A feature, and the topic that it is about."""

    feature: int
    topic: str
    share: float
    """Of all its activation, what is on texts of the topic."""
    reach: float
    """Share of the topic's texts that it is active in."""
    most: float
    """Its largest activation."""
    words: list[str]
    """The tokens of its forty largest activations, each once."""
    by_topic: dict[str, float]
    """Its mean activation on the texts of each topic."""


def name(sae: Autoencoder, rows: Rows, words: Callable[[int], str]) -> Named:
    """Return the feature that is most about one topic: `share * reach` is the largest.

    Args:
        rows: of the site, with topics as labels.
        words: the text of a token.
    """
    values, topics = rows.tensor().float(), rows.labels()
    active = sae.encode(values) * ordinary(values)[:, None]
    texts, texts_of_row = np.unique(rows.column("example"), return_inverse=True)
    known = sorted(set(topics.tolist()))
    of_text = np.empty(len(texts), dtype=int)
    of_text[texts_of_row] = [known.index(topic) for topic in topics]
    in_text = torch.zeros(len(texts), active.shape[1])
    in_text.index_add_(0, torch.from_numpy(texts_of_row), active)
    by_topic = torch.from_numpy(np.eye(len(known))[of_text].T).float()  # [topics, texts]
    share = by_topic @ in_text / in_text.sum(0).clamp(min=1e-9)
    reach = by_topic @ (in_text > 0).float() / by_topic.sum(1, keepdim=True)
    best = int((share * reach).argmax())
    topic, feature = divmod(best, active.shape[1])
    one = active[:, feature]
    tokens = rows.column("token_id")[one.topk(min(40, len(one))).indices]
    return Named(
        feature=feature,
        topic=known[topic],
        share=float(share[topic, feature]),
        reach=float(reach[topic, feature]),
        most=float(one.max()),
        words=list(dict.fromkeys(words(int(token)) for token in tokens)),
        by_topic={word: float(one[topics == word].mean()) for word in known},
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_topics(sys.argv[1])
    else:
        acts, point, layer, out = sys.argv[1:]
        save(out, train(Activations(acts).rows(point, int(layer)).tensor().float()))
