"""Facts about this machine that decide how thinpoint runs. No host name, no user name, no paths."""

from __future__ import annotations

import getpass
import os
import platform
import secrets
import shutil
import time
from importlib import metadata
from typing import Any

import numpy as np

from thinpoint.codec.backend import BACKENDS, HostBackend, availability, get_backend
from thinpoint.codec.contract import EncodedPart, PartSpec
from thinpoint.device.contract import EncodeItem
from thinpoint.engine.backends import HOST_CODECS, NAMES, choose_backends, triton_device, why_not_triton
from thinpoint.engine.workers import default_threads
from thinpoint.errors import ThinpointError
from thinpoint.version import __version__

_PACKAGES = ("torch", "triton", "numpy", "numba", "zstandard", "safetensors", "rich", "typer")
_TEST_ELEMS = 20_000
_TEST_DTYPES = ("float32", "bfloat16")
_FSYNC_BYTES = 1_000_000
PASSED = "works, self-test passed"


def diagnose() -> dict[str, Any]:
    """Everything `thinpoint doctor` shows, a JSON object described in docs/cli.md."""
    return {
        "format": "thinpoint-doctor",
        "version": 1,
        "versions": _versions(),
        "machine": _machine(),
        "backends": _backends(),
        "chosen": _chosen(),
        "environment": _environment(),
        "folder": _folder(),
    }


def failed_backends(report: dict[str, Any]) -> list[str]:
    """The backends that run here and gave wrong bytes."""
    return [
        name for name, b in report["backends"].items() if b["reason"] is None and b["self_test"] != PASSED
    ]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"thinpoint": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": _gpus(),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(found, platform.processor() or "unknown")
    except OSError:
        return platform.processor() or "unknown"


def _gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _backends() -> dict[str, dict[str, str | None]]:
    reasons = availability()
    results: dict[str, dict[str, str | None]] = {}
    expected: list[bytes] | None = None
    # The reference comes first: the others must give its bytes.
    for name in sorted(BACKENDS, key=lambda name: name != "reference"):
        reason = reasons[name]
        if reason is not None:
            results[name] = {"reason": scrub(reason), "self_test": None}
            continue
        try:
            encoded = [_encode_decode(get_backend(name), dtype) for dtype in _TEST_DTYPES]
        except ThinpointError as error:
            results[name] = {"reason": None, "self_test": f"FAILED: {scrub(str(error))}"}
            continue
        expected = encoded if expected is None else expected
        results[name] = {"reason": None, "self_test": _verdict(encoded, expected)}
    results["triton"] = _triton(expected)
    return results


def _verdict(encoded: list[bytes], expected: list[bytes] | None) -> str:
    return PASSED if encoded == expected else "FAILED: other bytes than the reference"


def _triton(expected: list[bytes] | None) -> dict[str, str | None]:
    """As for the others, and the device that it runs on."""
    reason = why_not_triton()
    if reason is not None:
        return {"reason": scrub(reason), "self_test": None, "device": None}
    import torch

    device = triton_device()
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "the CPU (kernels are interpreted)"
    try:
        backend = choose_backends("triton", prove=True).devices.get(device)
        if backend is None:
            return {"reason": f"it does not code on {device}", "self_test": None, "device": name}
        parts = backend.encode_batch(
            [
                EncodeItem(
                    words=torch.from_numpy(words.view(np.uint8)).to(device),
                    word_bytes=words.itemsize,
                    spec=PartSpec(dtype=dtype, role="weight"),
                )
                for dtype, words in ((dtype, _test_words(dtype)) for dtype in _TEST_DTYPES)
            ]
        )
    except Exception as error:  # noqa: BLE001  (a compiler or driver that fails is what this command is for)
        return {"reason": None, "self_test": f"FAILED: {scrub(str(error))}", "device": name}
    verdict = _verdict([_stored(part) for part in parts], expected)
    return {"reason": None, "self_test": verdict, "device": name}


def _chosen() -> dict[str, str | None]:
    """What codes tensors on the CPU and on a GPU unless the call says otherwise; `problem` if nothing does."""
    try:
        backends = choose_backends()
        gpu = None
        if _gpus():
            import torch

            on_device = backends.devices.get(torch.device("cuda", torch.cuda.current_device()))
            gpu = (on_device or backends.host).name
    except ThinpointError as error:
        return {"cpu": None, "gpu": None, "problem": scrub(str(error))}
    return {"cpu": backends.host.name, "gpu": gpu, "problem": None}


def _encode_decode(backend: HostBackend, dtype: str) -> bytes:
    """A small bell curve encoded and decoded; what it was encoded to.

    Raises:
        ThinpointError: the backend refuses, or the bits differ (EncodeProofError).
    """
    proving = HostBackend(backend.kernels, backend.codec, prove=True)
    return _stored(proving.encode(_test_words(dtype), PartSpec(dtype=dtype, role="weight")))


def _test_words(dtype: str) -> np.ndarray:
    values = np.random.default_rng(1).standard_normal(_TEST_ELEMS).astype(np.float32)
    words = values.view(np.uint32)
    return (words >> np.uint32(16)).astype(np.uint16) if dtype == "bfloat16" else words


def _stored(part: EncodedPart) -> bytes:
    return part.prefix + b"".join(block.tobytes() for plane in part.blocks for block in plane)


def _environment() -> dict[str, dict[str, str | None]]:
    codec = os.environ.get("THINPOINT_CODEC")
    threads = os.environ.get("THINPOINT_THREADS")
    backend = os.environ.get("THINPOINT_BACKEND")
    codec_problem = threads_problem = backend_problem = None
    if codec and codec not in (*HOST_CODECS, "auto"):
        codec_problem = f"expected {' or '.join(HOST_CODECS)} or auto"
    if backend and backend not in NAMES:
        backend_problem = f"expected {' or '.join(NAMES)}"
    try:
        default_threads()
    except ThinpointError as error:
        threads_problem = f"expected {error.expected}"
    return {
        "THINPOINT_CODEC": {"value": codec, "problem": codec_problem},
        "THINPOINT_BACKEND": {"value": backend, "problem": backend_problem},
        "THINPOINT_THREADS": {"value": threads, "problem": threads_problem},
    }


def _folder() -> dict[str, Any]:
    result: dict[str, Any] = {"free_bytes": shutil.disk_usage(".").free, "fsync_ms": None, "problem": None}
    name = f".thinpoint-doctor-{secrets.token_hex(8)}.tmp"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(_FSYNC_BYTES))
            begin = time.perf_counter()
            os.fsync(fd)
            result["fsync_ms"] = round(1000 * (time.perf_counter() - begin), 3)
        finally:
            os.close(fd)
            os.unlink(name)
    except OSError as error:
        result["problem"] = f"cannot be written: {error.strerror}"
    return result


def scrub(text: str) -> str:
    """The text without the names of this machine, its user and their home folder."""
    secrets_here = {os.path.expanduser("~"): "~", platform.node(): "HOST"}
    try:
        secrets_here[getpass.getuser()] = "USER"
    except (KeyError, OSError):
        pass
    for secret, word in secrets_here.items():
        if len(secret) > 2:
            text = text.replace(secret, word)
    return text
