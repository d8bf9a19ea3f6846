"""What `import meshweave` brings in: torch and our own modules, nothing that takes long and few programs ask for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshweave

HEAVY = (
    "networkx",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers",
)
ROOT = Path(meshweave.__file__).parents[2]
ASKED = "import json, sys, torch\nbefore = set(sys.modules)\n{}\nprint(json.dumps(sorted(set(sys.modules) - before)))"


def imported(statement: str) -> set[str]:
    """The modules that a statement brings in, on top of torch."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", ASKED.format(statement)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.slow_rows("from meshweave.cli import app")
@pytest.mark.parametrize("statement", ["import meshweave", "from meshweave.cli import app"])
def test_importing_brings_in_nothing_heavy(statement: str) -> None:
    found = imported(statement)
    assert "meshweave.compile" in found
    assert not [name for name in found if name.startswith(HEAVY)]


def test_what_needs_dtensor_is_there_when_asked_for() -> None:
    assert "torch.distributed.tensor" in imported("import meshweave; meshweave.shard_in_graph")
    for name in meshweave.__all__:
        assert getattr(meshweave, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'compiel'"):
        meshweave.compiel  # noqa: B018
