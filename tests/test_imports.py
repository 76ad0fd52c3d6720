"""What starts must start quickly: which modules a fresh interpreter has after an import or a command."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "transformers", "numpy", "triton", "flashinfer"}


def modules_after(code: str) -> set[str]:
    """Top-level modules that ``code`` brings into a fresh interpreter."""
    report = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def command(*arguments: str) -> str:
    return f"""
from glm5ray.cli.app import app
try:
    app({list(arguments)!r})
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize(
    "code",
    [
        "import glm5ray",
        "from glm5ray import SamplingParams",
        "import glm5ray.openai_api.requests, glm5ray.openai_api.responses",
        "import glm5ray.tokenizer",
        "import glm5ray.jobs.batch_file",
        "import glm5ray.scheduler.scheduler",
        command("--help"),
        command("run-batch", "--help"),
        "import glm5ray.server.app",
        command("serve", "--help"),
        command("bench", "offline", "--help"),
        command("weights", "inspect", "--help"),
        command("version"),
    ],
)
def test_starts_without_torch_and_ray(code: str) -> None:
    assert not modules_after(code) & HEAVY


def test_help_needs_no_tokenizer_either() -> None:
    assert not modules_after(command("--help")) & {"tokenizers", "jinja2", "msgpack"}


def test_the_package_exports_its_front_door() -> None:
    import glm5ray
    from glm5ray.engine.llm import LLM
    from glm5ray.protocol import SamplingParams

    assert glm5ray.LLM is LLM
    assert glm5ray.SamplingParams is SamplingParams
    assert {"LLM", "SamplingParams"} <= set(dir(glm5ray))
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        glm5ray.LMM  # noqa: B018
