# SPDX-License-Identifier: Apache-2.0
"""Edits of the stream that gradients find, in transformers on the checkpoint that is served.

    learned = learn("/path/to/model", Pairs.read_file("pairs.jsonl"), method="bipo", layers=[15])
    llm.steering.register_module("glad", learned.module())

model.py        a checkpoint, whose stream is read and changed with gradients
edits.py        what is learned: a vector, LoReFT, ReFT-r1
losses.py       by what: likelihood, BiPO's preference, divergence
training.py     `learn`: from pairs to an edit that was tested
pages.py        the folder of a result
attribution.py  what patches would do, estimated by gradients
highlighting.py which tokens of a prompt make a model say yes
"""

from vllm.pilot.learn.attribution import Attribution, attribute
from vllm.pilot.learn.highlighting import Highlights, highlight
from vllm.pilot.learn.model import TorchModel
from vllm.pilot.learn.pages import save_learned
from vllm.pilot.learn.training import Learned, LearnSettings, learn

__all__ = [
    "Attribution",
    "Highlights",
    "LearnSettings",
    "Learned",
    "TorchModel",
    "attribute",
    "highlight",
    "learn",
    "save_learned",
]
