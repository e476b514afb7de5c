# SPDX-License-Identifier: Apache-2.0
"""An engine that feeds trainers, as a process of `warm`: `MODEL DATA ADDRESS BATCH BLOCK EPOCHS`; 0
epochs are those that never end."""

from __future__ import annotations

import sys


def main(model: str, data: str, address: str, batch: str, block: str, epochs: str) -> None:
    from vllm import LLM
    from vllm.pilot import dataset

    llm = LLM(
        model=model,
        capture_consumers=["inline"],
        capture_stop_after=1,
        capture_buffer_bytes=16 << 20,
        enforce_eager=True,
        dtype="float32",
        max_model_len=96,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=16 << 20,
        block_size=32,
    )
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
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
