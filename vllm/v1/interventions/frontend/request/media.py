# SPDX-License-Identifier: Apache-2.0
"""Places of the images, videos and sounds of a prompt, for selectors that say one of them; and a
context that has those of a refused request sent again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from vllm.v1.interventions.given import Given
from vllm.v1.interventions.positions import Positions, Run

if TYPE_CHECKING:
    from vllm.multimodal.inputs import PlaceholderRange
    from vllm.renderers.base import BaseRenderer

Method = TypeVar("Method", bound=Callable[..., Any])

NOWHERE = Positions()
TEXT = "text"
"""The modality of all that is none of the others."""


_NUMBERS = "must be a number, a list of numbers or 'all', got {given}"
EMBEDDINGS = "prompt_embeds"
"""The modality of what was given as embeddings, as upstream calls it."""


class Item(NamedTuple):
    """An image, or another thing that is no token."""

    modality: str
    """Upstream's name of the kind of item: image, video, audio or prompt_embeds."""
    runs: list[Run]
    """The positions that get a row of the encoder. Tokens around and between them, which say where
    the image or a line of it begins and ends, are text."""
    span: Run
    """All of them, these tokens included: what upstream's scheduler takes as one."""


class Media:
    """The items of one prompt, in the order in which they stand in it.

    Args:
        placeholders: by modality, as upstream's processor found them in the prompt.
        embedded: the positions of which an embedding was given, and no token.
    """

    def __init__(
        self,
        placeholders: "Mapping[str, Sequence[PlaceholderRange]]",
        embedded: Positions = NOWHERE,
    ) -> None:
        items = [
            Item(
                modality,
                [(a, b + 1) for a, b in place.extract_embeds_range()],
                (place.offset, place.offset + place.length),
            )
            for modality, places in placeholders.items()
            for place in places
        ]
        # No encoder makes these: a step may begin and end anywhere in them.
        items += [Item(EMBEDDINGS, [run], (run[0], run[0])) for run in embedded.runs()]
        self.items = sorted(items, key=lambda item: item.span)

    @property
    def positions(self) -> Positions:
        """All that are not text."""
        return Positions(run for item in self.items for run in item.runs)

    def of(self, modality: str) -> list[Item]:
        """The items of a modality."""
        return [item for item in self.items if item.modality == modality]

    def images(self, asked: Given, entries: Sequence[Any] | None) -> list[Run]:
        """The positions of some images. Negative numbers count from the last.

        Args:
            asked: a number, or "all".
            entries: in its place a list of numbers.

        Raises:
            ValueError: none of these, or the prompt has no such image.
        """
        images = self.of("image")
        if not images:
            asked.refuse("asks for an image, and the prompt is without")
        if entries is None:
            entries = range(len(images)) if asked.says("all") else [asked.value]
        runs: list[Run] = []
        for entry in entries:
            given = Given(entry, asked.path)
            index = given.int(message=_NUMBERS)
            if not -len(images) <= index < len(images):
                given.refuse(f"{{given}} is out of reach: the prompt has {len(images)} images")
            runs += images[index].runs
        return runs

    def modality(self, asked: Given, length: int) -> list[Run]:
        """The positions of all items of a modality; for "text", of the prompt's tokens that are of
        none.

        Args:
            length: of the prompt.

        Raises:
            ValueError: nothing in the prompt is of it.
        """
        if asked.says(TEXT):
            return (Positions([(0, length)]) - self.positions).runs()
        there = [TEXT, *dict.fromkeys(item.modality for item in self.items)]
        name = asked.choice(there, f"nothing of the prompt is {{given}}; it has {', '.join(there)}")
        return [run for item in self.of(name) for run in item.runs]


@contextmanager
def sent_again(prompt: object, renderer: "BaseRenderer[Any]") -> Iterator[None]:
    """Make the next request send an item that a request brought which is refused in this context.

    A frontend's cache holds an item as known to the engine as soon as a prompt with it is rendered.
    Where that prompt never comes to the engine, the next one with the same item would fail there.

    Args:
        prompt: an engine input, or what is not rendered yet.
    """
    try:
        yield
    except BaseException:
        cache = renderer.mm_processor_cache
        if cache is not None and isinstance(prompt, Mapping):
            # Those without data are with the engine.
            for modality, hashes in prompt.get("mm_hashes", {}).items():
                items = prompt["mm_kwargs"][modality]
                for item, mm_hash in zip(items, hashes, strict=True):
                    if item is not None:
                        cache.invalidate(mm_hash)
        raise


def sends_again(process_inputs: Method) -> Method:
    """Wrap `InputProcessor.process_inputs` in `sent_again`."""

    @wraps(process_inputs)
    def process(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        with sent_again(prompt, self.renderer):
            return process_inputs(self, request_id, prompt, *args, **kwargs)

    return cast(Method, process)
