# SPDX-License-Identifier: Apache-2.0
"""Pairs that the model writes itself: the same questions, answered under two system prompts."""

from dataclasses import replace

from vllm.pilot.bench import Bench
from vllm.pilot.metrics import write
from vllm.pilot.pairs import Example, Message, Pairs


def written_pairs(bench: Bench, pairs: Pairs, max_tokens: int = 64) -> Pairs:
    """Have the questions answered under both system prompts.

    Rows are read from the answers, after the system prompt that made the model write them; how
    likely an answer is, is asked without it. Questions with an empty answer, or twice the same, are
    left out.

    Args:
        pairs: with a persona.

    Raises:
        ValueError: no question is left.
    """
    persona = pairs.persona
    assert persona is not None
    found: list[list[Example]] = []
    for system in (persona.positive, persona.negative):
        chats = [(*_message("system", system), *_message("user", q)) for q in persona.questions]
        (answers,) = write(bench, chats, [None], max_tokens)
        found.append(
            [
                Example(answer.text, chat, None, f"{pairs.source}: questions[{i}]", _user(question))
                for i, (answer, chat, question) in enumerate(
                    zip(answers, chats, persona.questions, strict=True)
                )
            ]
        )
    kept = [
        (ours, others)
        for ours, others in zip(*found, strict=True)
        if str(ours.text).strip() and str(others.text).strip() and ours.text != others.text
    ]
    if not kept:
        raise ValueError(f"{pairs.source}: no question was answered differently by the two")
    return replace(
        pairs, positive=[p for p, _ in kept], negative=[n for _, n in kept], persona=None
    )


def _message(role: str, content: str) -> tuple[Message]:
    return ((("role", role), ("content", content)),)


def _user(question: str) -> tuple[Message]:
    return _message("user", question)
