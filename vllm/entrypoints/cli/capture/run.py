# SPDX-License-Identifier: Apache-2.0
"""Reads the options of `vllm capture run`, starts the engine, and asks before it fills a disk."""

import argparse
import json
import sys
from typing import Any

from vllm import LLM
from vllm.config.points import READ_POINTS
from vllm.entrypoints.cli.capture.early_stop import with_stop
from vllm.entrypoints.cli.steering.start import start_engine, with_inline
from vllm.pilot import dataset
from vllm.pilot.dataset.shard_store import ShardStore
from vllm.v1.interventions.frontend.request.selectors import NAMED_SELECTORS


def capture_dataset(args: argparse.Namespace) -> int:
    """Capture a data set; returns the exit status.

    What can be known without the engine is checked first: loading a model takes minutes.

    Args:
        args: the options of `vllm serve`, and those of `vllm.entrypoints.cli.capture.main`.
    """
    llm: LLM | None = None
    try:
        hooks = parse_hooks(args.hooks)
        positions = parse_json("--positions", args.positions, name_too=True)
        more = parse_json("--capture-more", args.capture_more or "{}")
        need_names(hooks, positions)
        ShardStore(args.out)
        data = dataset.DataFile(
            args.data, args.prompt_column, args.id_column, args.label_column, args.split
        )
        contents = data.contents()
        print(f"{args.data}: {contents.num_examples:,} examples", flush=True)
        engine_args = with_inline(args)
        if not args.whole_model:
            engine_args = with_stop(engine_args, hooks, more, args.max_tokens)
        llm = start_engine(engine_args)
        activations = dataset.capture(
            llm,
            data,
            args.out,
            hooks,
            positions,
            more=more,
            max_tokens=args.max_tokens,
            dtype=args.store_dtype,
            skip_refused=args.skip_refused,
            shard_bytes=args.shard_bytes,
            confirm=lambda told: confirm(told, args.yes),
            contents=contents,
        )
    except KeyboardInterrupt as error:
        said = str(error) or "interrupted before anything was written"
        print(f"{said}; the same command goes on from there", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
    print(activations, flush=True)
    return 0


def confirm(told: dataset.Estimate, yes: bool) -> bool:
    """Say what it will come to, and ask whether to start.

    Args:
        yes: the answer was given beforehand. Without it and without a terminal the answer is
            whether it fits.
    """
    print(told, flush=True)
    if yes:
        return True
    if not sys.stdin.isatty():
        return told.fits
    doubt = "" if told.fits else "It does not fit. "
    return input(f"{doubt}Start? [y/N] ").strip().lower() in ("y", "yes")


def parse_hooks(values: list[str]) -> dict[str, Any]:
    """Read `post_block:4-11,15`, several of these, or one JSON object.

    Raises:
        ValueError: it is neither.
    """
    if len(values) == 1 and values[0].lstrip().startswith("{"):
        made: dict[str, Any] = parse_json("--hooks", values[0])
        return made
    hooks: dict[str, Any] = {}
    for value in values:
        point, colon, layers = value.partition(":")
        if not colon or not layers:
            raise ValueError(f"--hooks: {value!r} is not POINT:LAYERS, such as post_block:4-11,15")
        if point in hooks:
            raise ValueError(f"--hooks: {point} is there twice; join its layers with commas")
        hooks[point] = layers.split(",") if "," in layers else layers
    return hooks


def need_names(hooks: dict[str, Any], positions: Any) -> None:
    """Check points and the name of a selector; the engine, which knows the model, checks the rest.

    Raises:
        ValueError: there is no such point or selector anywhere.
    """
    for point in hooks:
        if point not in READ_POINTS:
            raise ValueError(
                f"--hooks: unknown point {point!r}; points are {', '.join(READ_POINTS)}"
            )
    if isinstance(positions, str) and positions not in NAMED_SELECTORS:
        names = ", ".join(NAMED_SELECTORS)
        raise ValueError(f"--positions: {positions!r} is none of {names}, nor JSON")


def parse_json(option: str, text: str, name_too: bool = False) -> Any:
    """Read JSON; with `name_too` a word stands for itself.

    Raises:
        ValueError: it is no JSON.
    """
    if name_too and text.isidentifier():
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: {text!r} is no JSON: {error}") from error
