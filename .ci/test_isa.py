"""Run the tests of numbers once for each instruction set that this processor can be limited to."""

import os
import subprocess
import sys
import time

from choreograph.attention.cpp_backend import INSTRUCTION_SETS, ISA_VARIABLE, cpu_flags

# Values for our kernels are keys; those for PyTorch, oneDNN and MKL.
LIBRARY_LIMITS = {
    "sse4": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
}
LIBRARY_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

TESTS = (
    *("tests/attention/test_attend.py", "tests/models/test_int4_linear.py", "tests/models/test_hf_parity.py"),
    *("tests/features/test_guard.py", "tests/execution/test_batch_invariance.py"),
)


def main() -> None:
    """Test each set that hides instructions of this processor; the others are printed with the reason."""
    flags, failed = cpu_flags().split(), []
    for name, isa in INSTRUCTION_SETS.items():
        if not any(flag.startswith(isa.hidden) for flag in flags):
            print(f"{name}: skipped, this processor has no instructions beyond it; make test runs without a limit")
            continue
        limits = dict(zip(LIBRARY_VARIABLES, LIBRARY_LIMITS[name], strict=True)) | {ISA_VARIABLE: name}
        print(f"{name}: " + " ".join(f"{variable}={value}" for variable, value in limits.items()), flush=True)
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *TESTS, *sys.argv[1:]]
        start = time.monotonic()
        if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **limits}).returncode:
            failed.append(name)
        print(f"{name}: {'failed' if name in failed else 'passed'} after {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        sys.exit(f"tests failed with instructions limited to {', '.join(failed)}")


if __name__ == "__main__":
    main()
