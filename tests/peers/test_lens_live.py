# SPDX-License-Identifier: Apache-2.0
"""vLLM-Lens's own tests of a live server, of its sources, against `vllm serve --compat lens`.

They take a server that runs already, of a model with 32 layers and rows of 4096: here a thin random
one. Those that do without hooks pass, the others fail by our 400s and 501s.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers

from tests.http.server import save_tokenizer, serve
from tests.peers.lens_runs import judged
from tests.peers.packages import folder_of, source_of

pytestmark = pytest.mark.long  # in make test-full: test_lens_suite, test_lens_server, test_lens_qk

NAME = "tiny-Llama"
"""They want the name of a Llama."""
OPTIONS = (
    "--compat=lens", "--dtype=float32", "--enforce-eager", "--max-model-len=512",
    "--max-num-seqs=8", "--block-size=32", "--kv-cache-memory-bytes=268435456", "--seed=0",
    f"--served-model-name={NAME}", "--generation-config=vllm",
)  # fmt: skip
PASS = {
    "test_activation_extraction", "test_steering_changes_output",
    "test_steering_scale_zero_matches_baseline", "test_layer_filtering_respects_list",
    "test_generate_returns_text", "test_generate_with_logprobs", "test_model_auto_detected",
    "test_chat_returns_text", "test_capture_layers", "test_steering_via_client",
}  # fmt: skip
REFUSED = ("apply_hooks: is for vLLM-Lens", "/v1/hooks: is not served")
UNSAID = ("KeyError: 'status'", "KeyError: 'results'", "KeyError: 'hook_results'")
"""Where a test looks for hooks' results in a refusal, without a look at its status."""
UNCHANGED = "test_persistent_modification_changes_output"
"""Does not look at the 501 at all: text without the hook is what it fails by."""


def save_thin_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(transformers.AutoTokenizer.from_pretrained(folder)),
        hidden_size=4096,
        intermediate_size=32,
        num_hidden_layers=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    model.save_pretrained(folder)


def test_theirs(tmp_path: Path) -> None:
    theirs, report = source_of("lens-source"), tmp_path / "report.xml"
    (tests,) = theirs.glob("*/tests")
    save_tokenizer(tmp_path / "model")
    save_thin_model(tmp_path / "model")
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={tests.parent}"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [
        str(tests / f"{name}.py")
        for name in ("test_server", "test_client", "test_persistent_hooks")
    ]
    plain = {"TORCHDYNAMO_DISABLE": "1"}  # one function compiles at the first log-probabilities
    with serve(tmp_path / "model", tmp_path / "log", base=OPTIONS, env=plain) as server:
        settings = {
            "VLLM_LENS_DISABLE": "1",
            "VLLM_TEST_PORT": server.url.rpartition(":")[2],
            "VLLM_TEST_MODEL": NAME,
            "PYTHONPATH": str(folder_of("lens")),
        }
        done = subprocess.run(
            command, env={**os.environ, **settings}, cwd=tmp_path,
            capture_output=True, text=True, check=False, timeout=1800,
        )  # fmt: skip
        log = (tmp_path / "log").read_text()  # before it is told to end, which upstream logs
    assert report.exists(), (done.stdout + done.stderr)[-4000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    passed, failed = judged(cases)
    assert (len(cases), passed) == (34, len(PASS)), json.dumps(failed)[:4000]
    assert not PASS & failed.keys()
    for name, why in failed.items():
        is_ours = any(said in why for said in (*REFUSED, *UNSAID))
        assert is_ours or name == UNCHANGED, f"{name}: {why}"
    assert set(re.findall(r'HTTP/1\.1" (\d+)', log)) == {"200", "400", "501"}
    assert "Traceback" not in log
