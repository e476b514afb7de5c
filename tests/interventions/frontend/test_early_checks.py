# SPDX-License-Identifier: Apache-2.0
"""Places that cannot work are refused before the model is loaded, and those that can are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.plans import config_of
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.control.early_checks import check_early

pytestmark = pytest.mark.quick


class Picky(CaptureConsumer):
    """Checks its options early, and is never made."""

    def __init__(self, place: str) -> None:
        raise AssertionError("made")

    @classmethod
    def check_options(cls, options: Any) -> None:
        if options["place"] != "good":
            raise LookupError("no such place")

    def open(self, request: Any) -> Any:
        raise AssertionError("opened")


def check(local_engines: int = 1, **options: Any) -> None:
    config = config_of(None, **options)
    config.parallel_config.data_parallel_size_local = local_engines
    check_early(config)


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = [f"filesystem:root={tmp_path}/file/acts"]
    with pytest.raises(ValueError, match=r"^capture_consumers: 'filesystem' cannot be made: "):
        check(capture_consumers=bad)
    for place in (f"{tmp_path}/file", f"{tmp_path}/file/acts"):
        with pytest.raises(ValueError, match=f"file where a folder must be: '{tmp_path}/file'"):
            check(capture_consumers=[f"filesystem:root={place}"])
    check(capture_consumers=bad, local_engines=0)  # written elsewhere
    check(capture_consumers=[f"filesystem:root={tmp_path}/acts"])
    assert list((tmp_path / "acts").iterdir()) == []


def test_a_consumer_checks_its_options() -> None:
    with pytest.raises(ValueError, match="'Picky' cannot be made: LookupError: no such place"):
        check(capture_consumers=[{"consumer": Picky, "place": "bad"}])
    check(capture_consumers=["inline", {"consumer": Picky, "place": "good"}])


def test_the_file_of_a_module(tmp_path: Path) -> None:
    """Whether it is a module of this model is seen later."""
    (tmp_path / "m.npz").write_text("")
    check(steering_modules=[f"calm={tmp_path}/m.npz"])
    with pytest.raises(InterventionError, match=r"^steering_modules\.calm: cannot be opened: "):
        check(steering_modules=[f"calm={tmp_path}/n.npz"])
    with pytest.raises(InterventionError, match="is not a module"):
        check(steering_modules=[f"calm={tmp_path}/m.bin"])
    with pytest.raises(InterventionError, match="has no path: give name=path"):
        check(steering_modules=[f"{tmp_path}/m.npz"])
    # A folder stands for the file in it that has the module's name.
    (tmp_path / "calm.safetensors").write_text("")
    check(steering_modules=[f"calm={tmp_path}"])
    with pytest.raises(InterventionError, match=r"opened: .*warm\.safetensors"):
        check(steering_modules=[f"warm={tmp_path}"])
