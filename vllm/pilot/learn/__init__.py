# SPDX-License-Identifier: Apache-2.0
"""Edits of the stream that gradients find, in transformers on the checkpoint that is served.

    learned = learn("/path/to/model", Pairs.read_file("pairs.jsonl"), method="bipo", layers=[15])
    llm.steering.register_module("glad", learned.module())

model.py        a checkpoint, whose stream is read and changed with gradients
edits.py        what is learned: a vector, LoReFT, ReFT-r1
losses.py       by what: likelihood, BiPO's preference, divergence
training.py     `learn`: from pairs to an edit that was tested
pages.py        the folder of a result
"""

from vllm.pilot.learn.model import TorchModel
from vllm.pilot.learn.pages import save_learned
from vllm.pilot.learn.training import Learned, LearnSettings, learn

__all__ = ["LearnSettings", "Learned", "TorchModel", "learn", "save_learned"]
