# SPDX-License-Identifier: Apache-2.0
"""How much memory directions of many pairs take, measured in a process of its own: what is bounded,
and what holds all rows and must not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests import ROOT
from vllm.pilot import Pairs, mean_difference, pca, read_rows
from vllm.pilot.bench import Fields, Reply
from vllm.pilot.directions import Method, lat
from vllm.pilot.fitting import find_directions, separate
from vllm.pilot.pairs import Text

# Not in full: what an allocator keeps on other machines is not known.
pytestmark = pytest.mark.long

MIB = 1 << 20
READ_MIB = 5 * 32
"""What wide rows may take while they are read: pieces of 32 MiB, some five times."""
MEMORY_MIB = 64


class MadeUp:
    """Each row is a copy, as of an engine or server; what is in it does not matter here."""

    name = "made up"

    def __init__(self, layers: int, hidden: int) -> None:
        self.hidden = hidden
        self.layers: dict[int, tuple[str, ...]] = dict.fromkeys(range(layers), ("post_block",))
        self._base = torch.randn(2, layers, 1, hidden, generator=torch.Generator().manual_seed(0))

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        return [int(str(text).rpartition(" ")[2]), 0]

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        return [self._reply(ids, each) for ids, each in zip(prompts, fields, strict=True)]

    def _reply(self, ids: Sequence[int], fields: Fields) -> Reply:
        base = self._base[ids[0] % 2]
        rows = {
            ("post_block", layer): base[layer].roll(ids[0] % self.hidden, -1)
            for layer in fields["capture"]["inline"]["hooks"]["post_block"]
        }
        return Reply(tuple(ids), (0,), "", False, [], rows)


def grown(work: Callable[[], object]) -> float:
    """How many MiB the process grows at most, above what it has now."""
    # Else the peak is that of what ran before.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(
    method: Method,
    held: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    count: int,
    layers: int,
    hidden: int,
) -> dict[str, float]:
    """MiB of rows, of ours and of a twin that has all rows at once."""
    pairs = Pairs.of([str(2 * i) for i in range(count)], [str(2 * i + 1) for i in range(count)])
    bench = MadeUp(layers, hidden)

    def ours() -> None:
        every, memory = list(bench.layers), MEMORY_MIB * MIB
        find_directions(bench, pairs, every, method, "last", "post_block", memory=memory)

    # What is made once in a process, such as threads and their stacks.
    find_directions(MadeUp(1, 8), pairs, [0], "pca", "last", "post_block")
    return {
        "rows": 2 * count * layers * hidden * 4 / MIB,
        "ours": grown(ours),
        "held": grown(lambda: held(*read_rows(bench, pairs))),
    }


def measure_many(count: int, layers: int, hidden: int) -> dict[str, float]:
    """The same of the method `mean` and of very many pairs, which are themselves what takes most:
    all that `train` does with them, from their file on."""
    bench = MadeUp(layers, hidden)

    def ours(path: Path) -> None:
        parts = Pairs.read_file(path).split()
        every = list(bench.layers)
        found = find_directions(bench, parts["train"], every, "mean", "last", "post_block")
        separate(bench, parts["choose"], found, "last", "post_block")

    def held(path: Path) -> None:
        mean_difference(*read_rows(bench, Pairs.read_file(path).split()["train"]))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        with path.open("w") as file:
            for i in range(count):
                good, bad = (f"All of it was {word}, as ever. {2 * i}" for word in ("warm", "cold"))
                print(json.dumps({"positive": good, "negative": f"{bad}1"}), file=file)
        rows = 2 * 0.6 * count * layers * hidden * 4 / MIB
        return {"rows": rows, "ours": grown(lambda: ours(path)), "held": grown(lambda: held(path))}


def main() -> None:
    found = {
        "mean of 100,000": measure_many(100_000, 4, 256),
        # A pair is a MiB of rows, so that pieces are cut by their bytes.
        "mean": measure("mean", mean_difference, 240, 32, 4096),
        # More pairs than `hidden`: sums, of three of twelve layers at a time.
        "pca": measure("pca", pca, 1200, 12, 1024),
        # Fewer: all rows, of some layers at a time.
        "pca of few": measure("pca", pca, 400, 16, 2048),
        "lat": measure("lat", lat, 400, 16, 2048),
    }
    print(json.dumps(found))


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "tests.pilot.test_fitting_memory"]
    # What is freed goes back at once: else the allocator keeps up to 32 MiB of each size, by luck.
    # Each thread has buffers of its own, and machines have few cores or many.
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env = {**os.environ, **single, **at_once}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return made


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("mean of 100,000", 200_000_000 // MIB),
        ("mean", READ_MIB),
        # What the allocator keeps for later comes on top.
        ("pca", MEMORY_MIB + 32),
        ("pca of few", MEMORY_MIB + 32),
        ("lat", MEMORY_MIB + 32),
    ],
)
def test_memory_is_bounded(measured: dict[str, dict[str, float]], name: str, allowed: int) -> None:
    """What holds all rows needs more than twice of what is allowed."""
    of = measured[name]
    assert of["ours"] < allowed < 2 * allowed < of["held"], of


if __name__ == "__main__":
    main()
