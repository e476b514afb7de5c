# SPDX-License-Identifier: Apache-2.0
"""Peer: upstream vLLM as it is, from the tree --stock. What the others' rates are compared with.

PYTHONPATH=STOCK:. python -m benchmarks.peers.plain_vllm --model DIR --stock STOCK
"""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks.peers.engine import Asks, describe, need_stock, prepare, start, stop
from benchmarks.peers.workloads import PLAIN, Answer, Timer, arguments, ready


def measure(args: argparse.Namespace, answer: Answer) -> None:
    prepare()
    need_stock(args.stock)
    asks, timer = Asks(args), Timer(args, answer)
    llm = start(args)
    describe(answer, llm)
    ready(args)
    for load in args.extract:
        work = partial(asks.extract, llm, load)
        work()
        timer.extract(load, PLAIN, work, facts={"delivered": "nothing"})
    timer.generate(PLAIN, partial(asks.generate, llm))
    stop(llm)


def main() -> None:
    args = arguments(__doc__).parse_args()
    answer = Answer("plain_vllm")
    measure(args, answer)
    answer.print()


if __name__ == "__main__":
    main()
