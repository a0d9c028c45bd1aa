# Setup. Installs samkit in Colab (which keeps its own torch and numpy), changes nothing anywhere else,
# and prints the versions and the device that this notebook runs with.
import importlib.util
import platform
import subprocess
import sys

ADDRESS = "https://github.com/OWNER/REPO"

if importlib.util.find_spec("samkit") is None:
    try:
        import google.colab  # noqa: F401
    except ImportError:
        raise ImportError(f"samkit is not installed here: pip install 'samkit @ git+{ADDRESS}'") from None
    if ADDRESS.split("/")[-2:] == ["OWNER", "REPO"]:
        raise ImportError(
            "This copy of the course does not know its public address yet, so it cannot fetch samkit. "
            "Its owner sets repository.url in _config.yml and runs `make address`. Until then, upload a "
            "samkit wheel to this runtime and run `%pip install samkit-*.whl`."
        )
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"samkit @ git+{ADDRESS}"], check=True)

import torch

import samkit

print(
    f"samkit {samkit.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
    f"device: {samkit.device()}"
)
