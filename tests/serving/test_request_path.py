# SPDX-License-Identifier: Apache-2.0
"""The way of a capture request through the frontend: the files that it passes, and how often it
turns back to one that it has left.

`vllm/v1/interventions/*.py`, the words that all rooms share (the reader `Given`, positions, shape),
are not rooms: each field is read through them.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

import vllm
from tests.conformance.engine import engine
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

ROOT = Path(vllm.__file__).parent
WORDS = ROOT / "v1" / "interventions"
ROOMS = [WORDS / "frontend", ROOT / "v1" / "capture", ROOT / "v1" / "steering"]
ENTRY = ROOT / "entrypoints"
MOST_TURNS = 15


class Way(list[Path]):
    """Files of ours that were called, in their order."""

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; made for `sys.setprofile`."""
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            file = Path(code.co_filename)
            if file.is_relative_to(WORDS) or any(map(file.is_relative_to, (*ROOMS, ENTRY))):
                self.append(file)

    def turns(self, words: bool) -> int:
        """Number of times that a file is entered which was left before; `words`: the shared ones
        are rooms, too."""
        rooms = [file for file in self if words or file.parent != WORDS]
        entered = [file for file, _ in groupby(rooms)]
        return len(entered) - len({*entered})


def test_capture_request_turns_back_seldom(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"hooks": {"post_block": [1], "pre_attn": [0, 1]}, "positions": "all"}
    way = Way()
    with engine(
        tiny_models.path("llama"), enable_steering=True, capture_consumers=["inline"]
    ) as llm:
        processor = llm.llm_engine.input_processor
        process_inputs = processor.process_inputs

        def noted(*args: Any, **kwargs: Any) -> Any:
            sys.setprofile(way.note)
            try:
                return process_inputs(*args, **kwargs)
            finally:
                sys.setprofile(None)

        monkeypatch.setattr(processor, "process_inputs", noted)
        params = SamplingParams(max_tokens=2, capture={"inline": asked})
        (output,) = llm.generate(
            [TokensPrompt(prompt_token_ids=[5, 6, 7, 8])], params, use_tqdm=False
        )
    assert output.outputs[0].capture_results is not None
    assert not [file for file in way if file.is_relative_to(ENTRY)]
    assert way.turns(words=False) <= MOST_TURNS
    assert way.turns(words=True) > 2 * MOST_TURNS, "nothing was noted"
