# SPDX-License-Identifier: Apache-2.0
"""Tools for the daily work of researchers, as functions on the public interface of the engine.

    llm = LLM(MODEL, enable_steering=True, capture_consumers=["inline"])
    pairs = Pairs.read_file("pairs.jsonl")
    vectors = mean_difference(*read_rows(llm, pairs))
    sweep(llm, vectors, "all", [-2, -1, 1, 2], Odds(pairs)).draw("sweep.png")

bench.py        an engine of this process or a running server, asked alike
pairs.py        contrasting examples, from the forms in which people have them
rows.py         the rows of examples
directions.py   a function for each method; how well a direction separates
linear_probe.py logistic regression
row_checks.py   what rows must be before numbers are made of them
metrics.py      what steering changes, as a number
sweeps.py       layers x scales
patching.py     points x layers x positions: activation patching, causal tracing
head_sweeps.py  layers x heads: ablation, activation patching
attention.py    captured attention, for analyzers: docs/analyzers.md
tracker.py      does the last token look at the instruction, or elsewhere?
reranker.py     which document does a query look at?
linking.py      which items does a head look at?
training.py     all of it: from pairs to a checked vector
fitting.py, choice.py, evidence.py, persona.py, report.py, picture.py    its steps
captures.py     straight from captures: a vector as a file, rows as one array
records.py      lines of data files
checkpoints.py  a small model with real weights, from the package registry
dataset/        activations of whole data sets, on disk
learn/          vectors and LoReFT learned by gradients, attribution: docs/learning.md
comparing.py    ways to steer towards concepts, judged
probes/         probes trained, calibrated and judged: docs/probes.md

Nothing of the engine imports this, and it imports nothing of the engine that users do not have:
`LLM`, `SamplingParams`, `vllm.v1.capture`, `vllm.v1.steering.files`, `vllm.v1.features`,
`vllm.v1.probes`, the HTTP client.
"""

from vllm.pilot.bench import EngineBench, ServerBench, Steering
from vllm.pilot.directions import (
    auroc,
    d_prime,
    lat,
    logistic,
    mean_centred,
    mean_difference,
    pca,
)
from vllm.pilot.head_sweeps import HeadSweep, head_sweep
from vllm.pilot.linear_probe import Probe, fit_probe
from vllm.pilot.metrics import Odds, Score
from vllm.pilot.pairs import Pairs
from vllm.pilot.patching import PatchSweep, patch_sweep
from vllm.pilot.report import save_trained
from vllm.pilot.rows import read_rows, rows_of
from vllm.pilot.sweeps import Sweep, sweep
from vllm.pilot.training import Trained, train
from vllm.v1.features.autoencoder import Autoencoder

__all__ = [
    "Autoencoder",
    "EngineBench",
    "HeadSweep",
    "Odds",
    "Pairs",
    "PatchSweep",
    "Probe",
    "Score",
    "ServerBench",
    "Steering",
    "Sweep",
    "Trained",
    "auroc",
    "d_prime",
    "fit_probe",
    "head_sweep",
    "lat",
    "logistic",
    "mean_centred",
    "mean_difference",
    "patch_sweep",
    "pca",
    "read_rows",
    "rows_of",
    "save_trained",
    "sweep",
    "train",
]
