# SPDX-License-Identifier: Apache-2.0
"""Contrasting prompts in ordinary English, for models that know it."""

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

PROBED_CHEERFUL = (
    "Thank you so much, this is the best present ever!",
    "We are getting married in June.",
    "The baby is healthy and both are doing fine.",
    "I passed the exam with the highest mark.",
    "The vaccine works, and nobody else fell ill.",
    "Our team brought the cup home.",
    "She laughed so hard that she had to sit down.",
    "The puppy wagged its tail and jumped into her arms.",
    "After years of drought the wells are full again.",
    "He paid off the last of his debts today.",
    "The war is over and the soldiers are coming home.",
    "What a lovely surprise to see you here!",
)
PROBED_GLOOMY = (
    "I am so sorry, there is nothing more we can do.",
    "We are getting divorced in June.",
    "The baby was born too early and did not live.",
    "I failed the exam with the lowest mark.",
    "The vaccine failed, and many more fell ill.",
    "Our team lost every match of the season.",
    "She wept so hard that she had to sit down.",
    "The puppy whimpered and died in her arms.",
    "After years of drought the wells are dry.",
    "He lost the last of his savings today.",
    "The war goes on and the soldiers are not coming home.",
    "What a terrible thing to happen to you.",
)
NEUTRAL = (
    "The Danube rises in the Black Forest and flows through ten countries to the Black Sea.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "The company was founded in 1923 and has offices in Berlin and Madrid.",
    "To make bread, mix flour, water, salt and yeast, and let the dough rise for two hours.",
    "The library opens at nine in the morning and closes at six in the evening.",
    "A triangle has three sides, and the sum of its angles is one hundred and eighty degrees.",
    "The committee will publish its report on the second of March.",
    "Copper conducts electricity well, which is why it is used for cables.",
)
LISTED = " table river seven glass north paper window engine yellow doctor market silver"
SENTENCE = (
    "Mrs Ada Lovelace wrote to Mr Charles Babbage about the engine. Many years later, Mrs Ada"
)
