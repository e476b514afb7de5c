# SPDX-License-Identifier: Apache-2.0
"""Activations of whole data sets: captured into shards, and read from them.

    from vllm import LLM
    from vllm.pilot import dataset

    llm = LLM(model=MODEL, capture_consumers=["inline"])
    data = dataset.DataFile("reviews.jsonl")
    activations = dataset.capture(llm, data, "acts", {"post_block": "all"}, "last_prompt")
    rows = activations.rows("post_block", 12)     # a map-style torch Dataset
    probe.fit(rows.numpy(), rows.labels())

Called again after any interruption, `capture` goes on where the shards end. On a Ray cluster
`capture_on_ray` does the same.

examples.py      a data set's examples, from the formats of files
size.py          what a run will come to
capture_run.py   examples through an engine
writer.py        their rows into shards
shard_store.py   the shards, and which examples lack
capturing.py     all of it, in this process
on_ray.py        all of it, on a cluster
feeding.py       rows for a trainer in another process, which no disk has
trainer/         that trainer's side, which needs no vLLM
activations.py   reads what was written
"""

from vllm.pilot.dataset.activations import Activations, Rows
from vllm.pilot.dataset.capturing import capture
from vllm.pilot.dataset.examples import DataFile, Example
from vllm.pilot.dataset.feeding import feed
from vllm.pilot.dataset.on_ray import capture_on_ray
from vllm.pilot.dataset.size import Estimate
from vllm.pilot.dataset.trainer import (
    Batch,
    Stream,
    StreamError,
    for_dictionary_learning,
    for_sae_lens,
    stream,
)
from vllm.pilot.records import DatasetError

__all__ = [
    "Activations",
    "Batch",
    "DataFile",
    "DatasetError",
    "Estimate",
    "Example",
    "Rows",
    "Stream",
    "StreamError",
    "capture",
    "capture_on_ray",
    "feed",
    "for_dictionary_learning",
    "for_sae_lens",
    "stream",
]
