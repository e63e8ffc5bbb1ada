"""scripts/peers libraries: NVIDIA's libraries in several versions, opened without a GPU as Knap opens them.

Python's packages bring them: each is installed into a folder of its own, then a build's tests/gpu/nvidia_libraries opens
it by its real name, takes every function, and says whether Knap takes that version; cuDNN makes its plans for four GPUs
where it is one that Knap takes (tests/cli/cuda_plans.sh)."""
import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = [
    ("nccl", "nvidia-nccl-cu12", "nccl/lib/libnccl.so.2", ["2.16.5", "2.18.3", "2.23.4", ""]),
    ("cudnn", "nvidia-cudnn-cu12", "cudnn/lib/libcudnn.so.9", ["9.1.0.70", "9.8.0.87"]),
    ("cudnn", "nvidia-cudnn-cu13", "cudnn/lib/libcudnn.so.9", [""]),
    ("cublaslt", "nvidia-cublas-cu12", "cublas/lib/libcublasLt.so.12", ["12.4.5.8"]),
    ("cublaslt", "nvidia-cublas", "cu13/lib/libcublasLt.so.13", ["13.0.0.19", ""]),
]


def installed(folder, package, version):
    """The folder of that package, installed there once; of the newest where version is empty."""
    at = folder / f"{package}-{version or 'newest'}"
    if not (at / "nvidia").is_dir():
        wanted = f"{package}=={version}" if version else package
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", at, wanted], check=True)
    return at / "nvidia"


def plans(build, library):
    """What cuDNN's plans came to. cuDNN compiles some with libnvrtc, which must be where it looks."""
    path = f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    said = subprocess.run(["bash", ROOT / "tests/cli/cuda_plans.sh"], capture_output=True, text=True,
                          env=dict(os.environ, KNAP_BUILD=str(build), LD_LIBRARY_PATH=path)).stdout.splitlines()
    cases = [line.lstrip("# ") for line in said if re.match(r"# +(not )?ok ", line)]
    devices = [line for line in said if re.match(r"(not )?ok ", line)]
    bad = [n for n, line in enumerate(said) if re.match(r"# +not ok ", line)]
    good = sum(line.startswith("ok ") for line in devices)
    print(f"    plans without a GPU: all of {good} of {len(devices)} devices; of the others {len(cases)} cases, "
          f"{len(bad)} without a plan")
    if bad:
        print(f"    the first: {said[bad[0]].lstrip('# ')}: {said[bad[0] + 1].lstrip('# ')}")
    return bool(devices) and good == len(devices)


def main(words):
    parser = argparse.ArgumentParser(prog="scripts/peers libraries", description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="a build folder with CUDA (default: build)")
    parser.add_argument("--folder", type=Path, required=True, help="where the packages are installed; some GB")
    options = parser.parse_args(words)
    build = options.build.resolve()
    subprocess.run(["ninja", "-C", build, "tests/gpu/nvidia_libraries", "tests/gpu/cuda_plans"], check=True,
                   stdout=subprocess.DEVNULL)
    failed = False
    for name, package, file, versions in LIBRARIES:
        for version in versions:
            library = installed(options.folder.resolve(), package, version) / file
            said = subprocess.run([build / "tests/gpu/nvidia_libraries", name, library], capture_output=True,
                                  text=True)
            print(f"{package} {version or '(newest)'}: {said.stdout.strip().replace(str(library.parent) + '/', '')}"
                  f"{said.stderr.strip()}")
            if name == "cudnn" and said.returncode == 0:
                failed |= not plans(build, library)
            failed |= said.returncode not in (0, 1)
    return int(failed)
