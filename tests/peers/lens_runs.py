# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM-Lens's own tests, as its wheel ships them, in a pytest of their own with the plug-in
`tests/peers/lens_suite.py`, and says how each ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

import vllm
from tests import ROOT

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""Their model's name: a folder of the working directory, with a random model of as many layers."""
LAYERS = 24
HOOKS = "extra_args.apply_hooks: is for vLLM-Lens"
OFFLINE = {
    "test_steering_offline": (4, {
        "test_hook_values_and_request_cleanup[generate]": HOOKS,
        "test_hook_values_and_request_cleanup[chat]": HOOKS,
    }),
    "test_activations_offline": (5, {}),
}  # fmt: skip
"""Module -> how many of its tests pass on one device, and those that do not, with our words."""
LONGER: dict[str, tuple[int, dict[str, str]]] = {
    "test_steering": (6, {}),
    "test_activations_match": (3, {}),
    "test_activations_chunked_prefill": (3, {}),
}
"""The same of those that take longer: most start engines in processes."""
QK: dict[str, tuple[int, dict[str, str]]] = {
    "test_qk_match": (7, {"test_no_leaked_state": "'_debug_captured_qk_count' is not implemented"}),
    "test_qk_chunked_prefill": (2, {}),
}
"""The same of queries and keys, with a model of `HEADS` and engines that have `QK_POINTS`."""
CROSS: dict[str, tuple[int, dict[str, str]]] = {"test_activations_cross_api": (5, {})}
"""The same of their provider for Inspect AI, with a model of `HEADS`: a server that it starts gives
the rows that engines in Python give."""
HEADS = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
"""What they know of their model."""
QK_POINTS = {"capture_points": ["post_block", "q", "k", "z"]}
NEEDS = ("requires at least 2 GPUs", "snapshot was recorded on")
"""What their own tests skip for."""

Cases = dict[str, list[ElementTree.Element]]


def run(
    working: Path,
    theirs: Path,
    modules: Sequence[str],
    settings: Mapping[str, str],
    timeout: float = 1800,
    chosen: str = "",
    beside: Sequence[Path] = (),
) -> Cases:
    """The cases of modules of theirs, by module.

    Args:
        working: a folder in which `MODEL` is a folder with a model.
        theirs: the folder with their package, as `requirements/lens.txt` pins it.
        settings: of the environment, beside those that a run on a CPU needs.
        timeout: seconds, after which a `RuntimeError` has the last that they said.
        chosen: an expression of pytest's `-k`.
        beside: folders with other packages that they import.
    """
    report = working / "report.xml"
    options = [
        "asyncio_mode=auto",
        "asyncio_default_fixture_loop_scope=module",
        "asyncio_default_test_loop_scope=module",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={theirs}"]
    for plugin in ("tests.peers.lens_suite", "pytest_asyncio", "syrupy", "no:cacheprovider"):
        command += ["-p", plugin]
    command += [f"-o={option}" for option in options]
    command += [f"--junitxml={report}", "-k", chosen]
    command += [str(theirs / "vllm_lens" / "tests" / f"{module}.py") for module in modules]
    paths = [str(Path(vllm.__file__).parents[1]), str(theirs), str(ROOT), *map(str, beside)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = {**os.environ, "LENS_DEVICE": device, "VLLM_LENS_DISABLE": "1", **settings}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", **env, "PYTHONPATH": os.pathsep.join(paths)}
    log = working / "pytest.log"
    # Their last act is `os._exit`, which leaves engines' workers alive: these would hold a pipe
    # open for ever, so what is said goes to a file, and what is left is ended with its session.
    with log.open("wb") as out:
        tests = subprocess.Popen(
            command, cwd=working, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            tests.wait(timeout)
        except subprocess.TimeoutExpired:
            said = log.read_text(errors="replace")[-20000:]
            raise RuntimeError(f"no end in {timeout:g} s\n{said}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
    if not report.exists():
        raise RuntimeError(log.read_text(errors="replace")[-4000:])
    found: Cases = {module: [] for module in modules}
    for case in ElementTree.parse(report).iter("testcase"):
        names = {*case.attrib["classname"].split("."), *case.attrib["name"].split(".")}
        found[next(module for module in modules if module in names)].append(case)
    return found


def judged(cases: Sequence[ElementTree.Element]) -> tuple[int, dict[str, str]]:
    """How many passed, and why the others did not; what they skip themselves is left out."""
    passed, failed = 0, {}
    for case in cases:
        bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
        why = " ".join(f"{part.attrib.get('message', '')} {part.text}" for part in bad)
        if not bad:
            passed += 1
        elif bad[0].tag != "skipped" or not any(said in why for said in NEEDS):
            failed[case.attrib["name"]] = why
    return passed, failed
