"""Runs a command on the null device."""

import os
import sys
from pathlib import Path

from tests.null_cuda.build import LOADED, NoNullDeviceError, built, libraries

NONE = 77  # exit status where there can be no null device


def main(command: list[str]) -> int:
    """Becomes the command."""
    absent = command[:1] == ["--no-device"]
    command = command[absent:] or [sys.executable]
    try:
        folder = built(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lowtide-tests")
    except NoNullDeviceError as why:
        print(f"no null device: {why}", file=sys.stderr)
        return NONE
    environment = {
        **os.environ,
        "LD_PRELOAD": os.pathsep.join(str(folder / name) for name in LOADED),
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), str(libraries()), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        "NULL_CUDA": "0" if absent else "1",
        "NULL_CUDA_DEVICES": "0" if absent else "1",
    }
    if command[:1] == ["pytest"]:
        command = [sys.executable, "-m", *command]
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
