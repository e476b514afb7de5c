# SPDX-License-Identifier: Apache-2.0
"""`examples/medical_probe.py` on SmolLM2: the probe is right about answers that it was not fitted
on, and as an operator's rule it flags one of two new answers that the model writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import medical_probe
from tests.support.real import model_folder
from vllm.pilot.checkpoints import SMOLLM2

pytestmark = pytest.mark.long


def test_a_probe_of_answers(tmp_path: Path) -> None:
    model = str(model_folder(SMOLLM2))
    assert medical_probe.make(model, tmp_path) > 0.9
    assert medical_probe.serve(model, tmp_path) == [True, False]
    (rule,) = json.loads((tmp_path / "rules.json").read_text())["rules"]
    assert (tmp_path / rule["probe"]["file"]).is_file()
