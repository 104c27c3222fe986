import sys
from pathlib import Path

import pytest
from cli_support import Run

from thinpoint.cli.main import app

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a folder of its own; gives exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run_command(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run_command
