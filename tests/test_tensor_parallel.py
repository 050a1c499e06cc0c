"""Two processes that share a model: both take the same decisions, and the tokens of plain `generate`."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tiny_models import build

pytestmark = pytest.mark.slow

SCRIPT = """
    import torch
    from conftest import plain_run, run
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from hf_ssr import SSRConfig

    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, distributed_config=plan)
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        plain = plain_run(model, {"max_new_tokens": 60, **sampling})
        prediction = plain.answer[:8] + [5] + plain.answer[9:]
        markers = {"thinking_start": [], "thinking_end": [plain.marker], "draft_budgets": [3]}
        settings = {"prediction_ids": prediction, "num_draft_tokens": 6, "return_dict_in_generate": True}
        output = run(model, plain.ids, {}, generation_config=SSRConfig(**markers, **settings, **plain.settings))
        assert torch.equal(output.sequences, plain.sequences)
        assert output.metrics.stages and output.metrics.accepted_tokens > 20
        assert type(model.model.layers[0].self_attn.q_proj.weight).__name__ == "DTensor"
    print("same tokens on this rank")
"""


def test_two_ranks(tmp_path):
    build("llama", dtype=torch.float32).save_pretrained(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("FOLDER", repr(str(tmp_path))))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("same tokens on this rank") == 2
