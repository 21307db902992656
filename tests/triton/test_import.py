"""A machine without Triton loads the engine and the CPU's kernels all the same."""

import subprocess
import sys

WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError(name)

sys.meta_path.insert(0, NoTriton())
import batchinfer.engine.engine, batchinfer_kernels.cpu, batchinfer_kernels.attention_plan, batchinfer_kernels.paged_kv
assert "triton" not in sys.modules
"""


def test_the_engine_loads_without_triton():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
