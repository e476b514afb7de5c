# SPDX-License-Identifier: Apache-2.0
"""Probes: trained on labelled texts, calibrated and judged, as rules take them.

    from vllm.pilot.probes import LabelledData, train_probe

    data = LabelledData.read_file("texts.jsonl")
    trained = train_probe(llm, data, [("post_block", 6), ("post_block", 9)])
    rule = {"name": "lies", "probe": trained.probe, "over": "generated"}

labelled.py      labelled texts, from files
reading.py       their tokens, and rows a few texts at a time
linear_heads.py  regression on rows
learned_heads.py what gradient descent finds: MLPs, several heads
training.py      from texts to a probe that was judged
judging.py       scores of texts, as rules make them, and what they say
calibration.py   thresholds, and probes that are there
statistics.py    areas and rates, with intervals
pages.py         the folder of a result
"""

from vllm.pilot.probes.calibration import Calibration, calibrate_probe, evaluate_probe
from vllm.pilot.probes.judging import Evaluation
from vllm.pilot.probes.labelled import Labelled, LabelledData
from vllm.pilot.probes.training import TrainedProbe, train_probe

__all__ = [
    "Calibration",
    "Evaluation",
    "Labelled",
    "LabelledData",
    "TrainedProbe",
    "calibrate_probe",
    "evaluate_probe",
    "train_probe",
]
