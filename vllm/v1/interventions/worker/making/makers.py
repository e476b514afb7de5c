# SPDX-License-Identifier: Apache-2.0
"""Makers of all kinds of values."""

from vllm.v1.interventions.makings import (
    AsIs,
    Attention,
    Dose,
    Features,
    Lens,
    Making,
    Mean,
    Norms,
    Scores,
)
from vllm.v1.interventions.worker.making.attention import AttentionMaker
from vllm.v1.interventions.worker.making.doses import DoseMaker
from vllm.v1.interventions.worker.making.features import FeatureMaker
from vllm.v1.interventions.worker.making.lens import LensMaker
from vllm.v1.interventions.worker.making.maker import Maker
from vllm.v1.interventions.worker.making.means import SumMaker
from vllm.v1.interventions.worker.making.norms import NormMaker
from vllm.v1.interventions.worker.making.rows import RowMaker
from vllm.v1.interventions.worker.making.scores import ScoreMaker

MAKERS: dict[type[Making], type[Maker]] = {
    AsIs: RowMaker,
    Scores: ScoreMaker,
    Norms: NormMaker,
    Dose: DoseMaker,
    Mean: SumMaker,
    Attention: AttentionMaker,
    Lens: LensMaker,
    Features: FeatureMaker,
}
"""Making -> its maker. A worker has one of each."""
