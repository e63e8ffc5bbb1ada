"""scripts/peers libraries: NVIDIA's libraries in several versions, opened without a GPU as Knap opens them.

Python's packages bring them: each is installed into a folder of its own, then a build's tests/gpu/nvidia_libraries opens
it by its real name, takes every function, and says whether Knap takes that version. Where it does, cuDNN makes its plans
for four GPUs (tests/cli/cuda_plans.sh), and cuBLASLt takes the descriptions of all kinds of products
(tests/gpu/cuda_gemm_test.c); which algorithms it has for them, it tells on a GPU only."""
import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NVRTC_12 = ("nvidia-cuda-nvrtc-cu12", "cuda_nvrtc/lib", "12.8.93")
NVRTC_13 = ("nvidia-cuda-nvrtc", "cu13/lib", "")
CUBLAS_12 = ("nvidia-cublas-cu12", "cublas/lib", "12.4.5.8")
CUBLAS_13 = ("nvidia-cublas", "cu13/lib", "")
# (library, package, file, versions, what it opens by itself)
LIBRARIES = [
    ("nccl", "nvidia-nccl-cu12", "nccl/lib/libnccl.so.2", ["2.16.5", "2.18.3", "2.23.4", ""], []),
    ("cudnn", "nvidia-cudnn-cu12", "cudnn/lib/libcudnn.so.9", ["9.1.0.70", "9.8.0.87"], [NVRTC_12, CUBLAS_12]),
    ("cudnn", "nvidia-cudnn-cu13", "cudnn/lib/libcudnn.so.9", [""], [NVRTC_13, CUBLAS_13]),
    ("cublaslt", "nvidia-cublas-cu12", "cublas/lib/libcublasLt.so.12", ["12.4.5.8"], []),
    ("cublaslt", "nvidia-cublas", "cu13/lib/libcublasLt.so.13", ["13.0.0.19", ""], [NVRTC_13]),
]


def installed(folder, package, version):
    """The folder of that package, installed there once; of the newest where version is empty."""
    at = folder / f"{package}-{version or 'newest'}"
    if not (at / "nvidia").is_dir():
        wanted = f"{package}=={version}" if version else package
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", at, wanted], check=True)
    return at / "nvidia"


def before(folders):
    """The environment with these folders of libraries before all others."""
    path = ":".join([str(f) for f in folders] + [os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")
    return dict(os.environ, LD_LIBRARY_PATH=path)


def plans(build, env):
    """What cuDNN's plans came to: a line for each GPU, from its description."""
    said = subprocess.run(["bash", ROOT / "tests/cli/cuda_plans.sh"], capture_output=True, text=True,
                          env=dict(env, KNAP_BUILD=str(build))).stdout
    devices = re.findall(r"^((?:not )?)ok \d+ - (plans for \w+)(.*?)(?=^(?:not )?ok |^1\.\.|\Z)", said, flags=re.M | re.S)
    for bad, device, output in devices:
        cases = re.findall(r"^# +((?:not )?)ok \d+ - (.*)", output, flags=re.M)
        wrong = [case for no, case in cases if no]
        print(f"    {device}: " + ("all as expected" if not bad else
                                   f"{len(wrong)} of {len(cases)} cases not as expected, first {wrong[0]}" if wrong else
                                   f"ended after {len(cases)} cases, all as expected, the last {cases[-1][1]}" if cases else
                                   f"ended at once: {output.strip()}"))
    return bool(devices) and not any(bad for bad, _, _ in devices)


def products(build, library):
    """Whether cuBLASLt takes what Knap says of its products. A build opens it by the number of its own CUDA: here the
    library stands under that name."""
    own = subprocess.run([build / "tests/gpu/nvidia_libraries", "soname", "cublaslt"], capture_output=True, text=True,
                         check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / own).symlink_to(library)
        run = subprocess.run([build / "tests/test_gpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env=before([folder, library.parent]))
    print(f"    descriptions of products: {'taken' if run.returncode == 0 else 'REFUSED: ' + run.stdout.strip()}")
    return run.returncode == 0


def main(words):
    parser = argparse.ArgumentParser(prog="scripts/peers libraries", description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="a build folder with CUDA (default: build)")
    parser.add_argument("--folder", type=Path, required=True, help="where the packages are installed; some GB")
    parser.add_argument("--only", default="", choices=sorted({row[0] for row in LIBRARIES}), help="one library alone")
    options = parser.parse_args(words)
    build = options.build.resolve()
    subprocess.run(["ninja", "-C", build, "tests/gpu/nvidia_libraries", "tests/gpu/cuda_plans", "tests/test_gpu"], check=True,
                   stdout=subprocess.DEVNULL)
    failed = False
    folder = options.folder.resolve()
    for name, package, file, versions, needs in LIBRARIES:
        if options.only not in ("", name):
            continue
        for version in versions:
            library = installed(folder, package, version) / file
            env = before([library.parent] + [installed(folder, p, v) / f for p, f, v in needs])
            said = subprocess.run([build / "tests/gpu/nvidia_libraries", name, library], capture_output=True, text=True, env=env)
            print(f"{package} {version or '(newest)'}: {said.stdout.strip().replace(str(library.parent) + '/', '')}"
                  f"{said.stderr.strip()}")
            if name == "cudnn" and said.returncode == 0:
                failed |= not plans(build, env)
            if name == "cublaslt" and said.returncode == 0:
                failed |= not products(build, library)
            failed |= said.returncode not in (0, 1)
    return int(failed)
