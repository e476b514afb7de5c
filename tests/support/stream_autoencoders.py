# SPDX-License-Identifier: Apache-2.0
"""SAELens's and dictionary_learning's own trainers, as shipped, on rows of an engine: `FOLDER
ADDRESS OUT`, where FOLDER has `trainer`. Prints for each how much of the rows is left unexplained
before and after."""

from __future__ import annotations

import json
import sys
from typing import Any

STEPS, BATCH, FEATURES, K = 150, 64, 256, 16


def main(folder: str, address: str, out: str) -> None:
    sys.path.insert(0, folder)
    import torch
    import trainer
    from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer
    from dictionary_learning.training import trainSAE
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    torch.manual_seed(0)
    torch.set_num_threads(1)
    first = trainer.stream(address)
    rows: torch.Tensor = next(trainer.for_sae_lens(first))
    width = rows.shape[1]

    def left(decoded: Any) -> float:
        with torch.no_grad():
            return float((decoded - rows).pow(2).sum() / (rows - rows.mean(0)).pow(2).sum())

    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=width, d_sae=FEATURES, k=K))
    before = left(sae(rows))
    asked = SAETrainerConfig(
        total_training_samples=STEPS * BATCH, train_batch_size_samples=BATCH, lr=3e-3, lr_end=3e-4,
        logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip
    trained = SAETrainer(cfg=asked, sae=sae, data_provider=trainer.for_sae_lens(first)).fit()
    told = {"sae_lens": [before, left(trained(rows))]}
    buffer = trainer.for_dictionary_learning(first)
    config = {
        "trainer": TopKTrainer, "dict_class": AutoEncoderTopK, "activation_dim": width,
        "dict_size": FEATURES, "k": K, "lr": 3e-3, "steps": STEPS, "layer": 1, "lm_name": "m",
        "device": "cpu", "warmup_steps": 5, "seed": 0,
    }  # fmt: skip
    trainSAE(data=buffer, trainer_configs=[config], steps=STEPS, save_dir=out, device="cpu")
    saved = AutoEncoderTopK.from_pretrained(f"{out}/trainer_0/ae.pt", k=K)
    fresh = AutoEncoderTopK(width, FEATURES, K)
    told["dictionary_learning"] = [left(fresh(rows)), left(saved(rows))]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
