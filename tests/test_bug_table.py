"""Every fault on the list has a test, and every marker a fault."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_known_fault_has_a_test() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bug_table"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
