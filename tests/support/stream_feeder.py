# SPDX-License-Identifier: Apache-2.0
"""An engine that feeds trainers, as a process: `MODEL DATA ADDRESS BATCH BLOCK EPOCHS`; no epochs
are 0."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conformance.engine import engine, prepare_environment


def main(model: str, data: str, address: str, batch: str, block: str, epochs: str) -> None:
    prepare_environment("v1")
    from vllm.pilot import dataset

    options = {"capture_consumers": ["inline"], "capture_stop_after": 1}
    with engine(Path(model), skip_tokenizer_init=False, **options) as llm:
        dataset.feed(
            llm,
            dataset.DataFile(data),
            address,
            "post_block",
            1,
            batch_rows=int(batch),
            buffer_rows=int(block),
            epochs=int(epochs) or None,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
