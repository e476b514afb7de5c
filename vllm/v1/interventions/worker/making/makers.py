# SPDX-License-Identifier: Apache-2.0
"""Makers of all kinds of values."""

from vllm.v1.interventions.makings import Making, Mean, Scores
from vllm.v1.interventions.worker.making.maker import Maker
from vllm.v1.interventions.worker.making.means import SumMaker
from vllm.v1.interventions.worker.making.scores import ScoreMaker

MAKERS: dict[type[Making], type[Maker]] = {Scores: ScoreMaker, Mean: SumMaker}
"""Making -> its maker. A worker has one of each."""
