"""Modules that an engine on a CPU has no use for are not imported, and are there for others all the same."""

import subprocess
import sys

from tests.small_model import gguf_path

PROGRAM = """
import sys
from batchinfer import Engine, SamplingParams

with Engine(sys.argv[1], dtype="bfloat16", device="cpu", max_model_len=64, num_kv_blocks=8) as engine:
    (row,) = engine.generate(["The capital of France is"], SamplingParams(max_tokens=1))
assert row.text == " Paris", row.text
heavy = {"triton", "torch._dynamo.eval_frame", "scipy.linalg"} & sys.modules.keys()
assert not heavy, heavy

import torch
import torch._dynamo.eval_frame, torch._dynamo.config
assert torch._dynamo.config.__spec__.origin.endswith("config.py")
assert torch._dynamo.eval_frame is sys.modules["torch._dynamo.eval_frame"]
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(2)).tolist() == [2, 2]
assert "torch._dynamo.eval_frame" in sys.modules
from transformers.masking_utils import TransformGetItemToIndex
import torch._dynamo._trace_wrapped_higher_order_op as wrapped
assert isinstance(TransformGetItemToIndex(), wrapped.TransformGetItemToIndex)
try:
    import scipy
except ImportError:
    pass
else:
    from transformers.loss.loss_for_object_detection import linear_sum_assignment
    assert linear_sum_assignment([[4, 1], [2, 9]])[1].tolist() == [1, 0]
    assert scipy.optimize.minimize_scalar(lambda x: (x - 2) ** 2).x - 2 < 1e-6
"""


def test_the_compiler_is_imported_by_those_who_compile_and_by_no_one_else():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(gguf_path())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
