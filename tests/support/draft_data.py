# SPDX-License-Identifier: Apache-2.0
"""Run speculators, as it was published, against a server: its offline data, then its training set.

    python tests/support/draft_data.py URL FOLDER

FOLDER gets `hidden_states/hs_0.safetensors` and so on of its command `generate-offline-data`, and
`live.pt`, the items of its data set whose rows the server makes when they are read. It runs in a
Python that finds nothing of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROMPTS = [[5, 6, 7, 8, 9], [30, 2, 2, 17], [1, 9]]
"""Token ids of the tiny model."""


def save_prompts(folder: Path) -> None:
    """Save the prompts as its command `prepare-data` does: token ids, a mask and their number."""
    from datasets import Dataset

    rows = [{"input_ids": ids, "loss_mask": [1] * len(ids), "seq_len": len(ids)} for ids in PROMPTS]
    data = Dataset.from_list(rows)
    data.set_format("torch")
    data.save_to_disk(str(folder))


def main(url: str, folder: Path) -> None:
    """Make the data in both ways."""
    import torch
    from speculators.cli.generate_offline_data import generate_offline_data
    from speculators.train.data import ArrowDataset

    save_prompts(folder / "prompts")
    generate_offline_data(
        endpoint=url,
        preprocessed_data=str(folder / "prompts"),
        output=str(folder / "hidden_states"),
        concurrency=2,
        validate_outputs=True,
        fail_on_error=True,
    )
    live = ArrowDataset(
        max_len=64, datapath=folder / "prompts", vllm_endpoint=url, on_missing="generate"
    )
    torch.save([live[i] for i in range(len(live))], folder / "live.pt")
    print("items", len(live))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
