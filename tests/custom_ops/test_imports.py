"""Importing the packages needs neither a GPU nor FlashInfer, and loads neither."""

from __future__ import annotations

import subprocess
import sys

HIDE = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"hidden: {{name}}", name=name)
sys.meta_path.insert(0, Hide())
"""

CHECK = """
import sys, torch, custom_ops, fusion_passes
assert torch.ops.custom_ops.call_trtllm_fused_allreduce_norm.default is not None
assert torch.ops.custom_ops.flashinfer_all_reduce.default is not None
loaded = {"flashinfer", "transformers", "rich", "typer", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
assert not torch.cuda.is_initialized()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True)


def test_fresh_interpreter() -> None:
    done = run(CHECK)
    assert done.returncode == 0, done.stderr


def test_without_flashinfer_and_the_extras() -> None:
    hidden = {"flashinfer", "triton", "transformers", "rich", "typer", "matplotlib"}
    done = run(HIDE.format(hidden=hidden) + CHECK)
    assert done.returncode == 0, done.stderr


def test_runtime_side_does_not_import_the_compiler_side() -> None:
    done = run("import sys, custom_ops; assert 'fusion_passes' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_command_line_without_its_extra_says_what_to_install() -> None:
    code = (
        HIDE.format(hidden={"typer", "rich"}) + "import runpy; runpy.run_module('fusion_passes', run_name='__main__')"
    )
    done = run(code)
    assert done.returncode == 1
    assert "pip install 'fusion-passes[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
