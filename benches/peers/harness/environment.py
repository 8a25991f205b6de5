"""What a run needs besides this repository: a virtual environment of pinned packages, built runners, variables."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]

# jax is there for whoever names it: it is far from the best in all that we looked at.
PEERS = ("ours", "torch", "onnxruntime", "openvino", "numpy", "candle", "rten", "jax")
DEFAULT_PEERS = PEERS[:7]
RUST_PEERS = ("candle", "rten")

PINS = {
    "numpy": "2.4.6",
    "torch": "2.15.0",
    "onnx": "1.23.2",
    "onnxruntime": "1.32.0",
    "openvino": "2026.4.1",
    "jax": "0.10.2",
    "matplotlib": "3.11.2",
}
# numpy makes the reference, so everyone needs it; rten reads models that onnx writes.
PACKAGES = {
    "torch": ["torch"],
    "onnxruntime": ["onnx", "onnxruntime"],
    "openvino": ["openvino"],
    "rten": ["onnx"],
    "jax": ["jax"],
}


class SetupError(Exception):
    """Why a run cannot start, in a line."""


def directory() -> Path:
    return Path(os.environ.get("POLYHEAD_PEERS_DIR") or ROOT / "target/peers").absolute()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def packages(peers: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(["numpy", *(package for peer in peers for package in PACKAGES.get(peer, []))]))


def ensure_venv(names: Iterable[str]) -> Path:
    """The Python of a virtual environment that holds these packages.

    A stamp is written after each step, so that what an interrupt left unfinished is done again.
    """
    if sys.version_info < (3, 11):
        raise SetupError(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    venv = directory() / "venv"
    python, stamps = venv / "bin/python", venv / "installed"
    log = directory() / "install.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if not stamps.is_dir() or not python.exists():
            run_step([sys.executable, "-m", "venv", "--clear", str(venv)], log, "cannot make a virtual environment")
            stamps.mkdir()
        for name in names:
            pin = f"{name}=={PINS[name]}"
            if (stamps / pin).exists():
                continue
            say(f"installing {pin}" + (" (gigabytes, minutes)" if name == "torch" else ""))
            pip = [str(python), "-m", "pip", "install", "--retries", "1", "--only-binary", ":all:"]
            run_step([*pip, "--disable-pip-version-check", pin], log, f"cannot install {pin}")
            (stamps / pin).touch()
    except OSError as error:
        raise SetupError(f"cannot write {error.filename}: {error.strerror}") from None
    return python


def enter_venv(python: Path) -> None:
    """Goes on as the same command under `python`, unless it already runs there."""
    if Path(sys.prefix) != python.parents[1]:
        # One thread: those that wait for work would take time from the workers.
        variables = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        os.execve(python, [str(python), *sys.argv], os.environ | variables)


def build_runners(peers: Iterable[str]) -> dict[str, Path]:
    """Builds what the chosen peers need of `rust`: peer to binary.

    Ours is built as any user gets it; the others for this processor, since some choose their instructions only then.
    """
    binaries = {}
    if "ours" in peers:
        binaries["ours"] = _cargo("ours", [], {})
    others = [peer for peer in RUST_PEERS if peer in peers]
    if others:
        cpu = "x86-64-v3" if _held_to_avx2() else "native"
        binary = _cargo("others", others, {"RUSTFLAGS": f"-C target-cpu={cpu}"})
        binaries |= dict.fromkeys(others, binary)
    return binaries


def _cargo(name: str, features: list[str], variables: dict[str, str]) -> Path:
    target = directory() / f"cargo-{name}"
    say(f"building the runner of {', '.join(features) or name}")
    manifest = HERE / "rust/Cargo.toml"
    command = ["cargo", "build", "--release", "--locked", "--manifest-path", str(manifest), "--target-dir", str(target)]
    command += ["--no-default-features", "--features", ",".join(features or ["ours"])]
    run_step(command, directory() / f"cargo-{name}.log", "cannot build the Rust runner", os.environ | variables)
    return target / "release/attend"


def run_step(command: list[str], log: Path, failure: str, env: dict[str, str] | None = None) -> None:
    """Runs a command, its output in a file; an error names the first line there that says why."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("w") as out:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
    except FileNotFoundError:
        raise SetupError(f"{failure}: there is no {command[0]}") from None
    if status.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:] or ["no message"]
        raise SetupError(f"{failure}: {errors[0]} (all of it: {log})")


def _held_to_avx2() -> bool:
    return os.environ.get("POLYHEAD_MAX_LEVEL", "").strip().lower() == "avx2"


def revision() -> str:
    """What is checked out."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def worker_env(threads: int) -> dict[str, str]:
    """Variables of a worker: its threads under every name, and the level that ours is held to where others can be."""
    env = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    for prefix in ("OMP", "MKL", "OPENBLAS", "RAYON", "RTEN", "NUMEXPR"):
        env[f"{prefix}_NUM_THREADS"] = str(threads)
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "OPENVINO_TELEMETRY_OPT_OUT": "1", "CUDA_VISIBLE_DEVICES": ""}
    if _held_to_avx2():
        env |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        env |= {"OPENBLAS_CORETYPE": "Haswell"}
    return env
