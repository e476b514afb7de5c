# SPDX-License-Identifier: Apache-2.0
"""Contrasting prompts in ordinary English, for `make demo MODEL=/path`."""

from __future__ import annotations

_SCENES = (
    (
        "I got the job I had dreamed of, and everyone at home cheered.",
        "I lost the job I had depended on, and nobody at home spoke.",
    ),
    (
        "The sun was out, the children laughed, and lunch was delicious.",
        "The rain kept falling, the children cried, and lunch was ruined.",
    ),
    (
        "My oldest friend came to visit and we danced until midnight.",
        "My oldest friend stopped writing and I sat alone until midnight.",
    ),
    (
        "The doctor smiled and told us that the tests were all clear.",
        "The doctor sighed and told us that the illness had come back.",
    ),
    (
        "They won the final, and the whole town sang in the streets.",
        "They lost the final, and the whole town walked home in silence.",
    ),
    (
        "The letter brought wonderful news, and she hugged her brother.",
        "The letter brought terrible news, and she turned from her brother.",
    ),
    (
        "The garden was full of flowers and the smell of fresh bread.",
        "The garden was full of weeds and the smell of something rotten.",
    ),
    (
        "The concert was a triumph, and the applause went on and on.",
        "The concert was a disaster, and the booing went on and on.",
    ),
)
_BRIDGES = (" That evening I felt", " Looking back, the day was", " All in all, it made me")

CHEERFUL = tuple(good + bridge for good, _ in _SCENES for bridge in _BRIDGES)
GLOOMY = tuple(bad + bridge for _, bad in _SCENES for bridge in _BRIDGES)

SWEEP = (
    "When she opened the door, she was",
    "The weather report said that tomorrow would be",
    "He put down the phone and felt",
    "The new neighbours turned out to be",
)
HELD_OUT = (
    "After the meeting, my mood was",
    "We walked down to the harbour, and the town looked",
    "The teacher read the essay and seemed",
    "I thought about the coming year and it seemed",
    "On the train home, the passengers were",
    "The film we saw last night was",
)
CHEERFUL_ENDINGS = (" happy and full of joy", " wonderful and bright")
GLOOMY_ENDINGS = (" sad and full of pain", " terrible and dark")
