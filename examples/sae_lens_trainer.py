# SPDX-License-Identifier: Apache-2.0
"""Feeds SAELens's own trainer with rows that `vllm capture run` wrote, and checks that the engine
reads what it made.

    python -m venv apart && apart/bin/pip install sae-lens==6.54.12
    apart/bin/python examples/sae_lens_trainer.py train acts post_block.14 sae
    python -m examples.sae_lens_trainer check sae

The first step needs SAELens alone, as shards are safetensors; it leaves some rows, and what SAELens
makes of them, in the folder. The second one needs vLLM Pilot alone. No test runs this.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BATCH, STEPS, FEATURES, K = 256, 300, 1024, 16
CHECK = "check.safetensors"
LEAST = 1e-5
"""What activations may differ by, relative to the largest."""


def batches(folder: Path, site: str) -> Iterator[torch.Tensor]:
    """Yield rows of all shards, float32 [BATCH, hidden], shuffled, again and again."""
    rows = torch.cat([load_file(path)[site] for path in sorted(folder.glob("*.safetensors"))])
    norms = rows.float().norm(dim=1)
    rows = rows[norms < 4 * norms.median()].float()  # without attention sinks
    seeded = torch.Generator().manual_seed(0)
    while True:
        for some in torch.randperm(len(rows), generator=seeded).split(BATCH):
            if len(some) == BATCH:
                yield rows[some]


def train(acts: Path, site: str, out: Path) -> None:
    """Train for some steps, and save as SAELens does for inference."""
    from sae_lens import SAE, BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig, SAETrainer
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    torch.manual_seed(0)
    rows = batches(acts, site)
    first = next(rows)
    config = BatchTopKTrainingSAEConfig(
        d_in=first.shape[1], d_sae=FEATURES, k=K, normalize_activations="expected_average_only_in"
    )
    asked = SAETrainerConfig(
        total_training_samples=STEPS * BATCH, train_batch_size_samples=BATCH, lr=1e-3, lr_end=1e-4,
        n_batches_for_norm_estimate=20, logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip
    trained = SAETrainer(cfg=asked, sae=BatchTopKTrainingSAE(config), data_provider=rows).fit()
    trained.save_inference_model(out)
    theirs = SAE.load_from_disk(out)
    with torch.no_grad():
        active = theirs.encode(first)
        left = (theirs.decode(active) - first).pow(2).sum() / (first - first.mean(0)).pow(2).sum()
    save_file({"rows": first, "activations": active}, out / CHECK)
    print(f"{type(theirs).__name__}: {float((active > 0).sum(1).float().mean()):.1f} active a row, "
          f"{1 - float(left):.2f} of the variance explained")  # fmt: skip


def check(out: Path) -> None:
    """Compare activations by `Autoencoder` with SAELens's own."""
    from vllm.pilot import Autoencoder

    stored = load_file(out / CHECK)
    want = stored["activations"]
    off = float((Autoencoder.load(out).encode(stored["rows"]) - want).abs().max() / want.max())
    print(f"activations of {len(want)} rows differ by {off:.1e} of the largest at most")
    if not off < LEAST:
        raise SystemExit(f"more than {LEAST}")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    else:
        check(Path(sys.argv[2]))
