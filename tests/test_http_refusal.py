# SPDX-License-Identifier: Apache-2.0
"""Bodies that ask for what HTTP does not serve yet are refused, not answered unsteered."""

from typing import Any

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.unserved_fields import UNSERVED

BODIES = [
    (CompletionRequest, {"model": "m", "prompt": "x"}),
    (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
]


@pytest.mark.parametrize("field", sorted(UNSERVED))
@pytest.mark.parametrize(("request_type", "body"), BODIES)
def test_unserved_field_is_refused_by_name(
    request_type: type, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=f"{field}: steering and capture are not served"):
        request_type(**body, **{field: {}})


@pytest.mark.parametrize(("request_type", "body"), BODIES)
def test_other_unknown_fields_are_ignored_as_upstream_does(
    request_type: type, body: dict[str, Any]
) -> None:
    assert request_type(**body, some_other_field=1).model == "m"
