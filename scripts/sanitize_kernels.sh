#!/usr/bin/env bash
# The kernel tests of small sizes under compute-sanitizer, on the GPU that is here.
#
#   scripts/sanitize_kernels.sh [TOOL...]       memcheck racecheck, unless named
#
# This package's kernels are checked, not the vendor's libraries: these have reports of their own (cuBLAS reads memory that its other
# kernels have not written, and its pipelines look like races), and are slow to check. torch gives every tensor memory of its own, so that
# a byte behind its end is seen. First the tests run without compute-sanitizer, so that everything is compiled (PLAIN=0: that was
# done). LIMIT=SECONDS for each tool (300). SELECT: names of tests as pytest's -k has them. PYTHON: the interpreter (python3).
# initcheck finds nothing useful here: what kernels that are not checked have written counts as never written.
# A line for each tool, at the end, says what it found; the exit status is 1 if one found anything, or did not come to its end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
select=${SELECT:-small}
limit=${LIMIT:-300}
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck)

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
[ -n "$sanitizer" ] || { echo "error: compute-sanitizer is not here; it comes with the CUDA toolkit" >&2; exit 2; }

# how the names of our kernels begin: Triton's functions, and what is extern "C" in the .cu files (## joins names in macros);
# those of the vendor's libraries are mangled
names=$({
  grep -rhA1 --include='*.py' '^@triton.jit' glm5ray/kernels/triton | sed -n 's/^def \([a-z0-9_]*\)(.*/\1/p'
  grep -hA1 'extern "C" __global__' glm5ray/kernels/csrc/*.cu | grep -oE '[a-z0-9_]+(##NAME)?\(' | sed 's/##NAME//; s/($//' | grep -v launch_bounds
} | sort -u)
filter="regex=^($(paste -sd'|' <<<"$names"))"

tests=("$python" -m pytest -o addopts= --import-mode=importlib -p no:cacheprovider -o filterwarnings=default -q -m gpu -k "$select"
  tests/kernels/test_gpu.py)
logs=$(mktemp -d)
if [ "${PLAIN:-1}" != 0 ]; then
  "${tests[@]}" || { echo "error: the tests fail without compute-sanitizer, too" >&2; exit 1; }
fi
status=0
summaries=()
for tool in "${tools[@]}"; do
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
    --kernel-name "$filter" "${tests[@]}" >"$logs/$tool" 2>&1
  found=$?
  summary=$(grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$logs/$tool" | tail -1)
  summaries+=("$tool: exit $found; ${summary:-no summary}; $(grep -E "passed|failed" "$logs/$tool" | tail -1)")
  if [ "$found" -ne 0 ]; then
    status=1
    grep -E "=========" "$logs/$tool" | grep -v "Host Frame" | head -60
  fi
done
printf '%s\n' "${summaries[@]}"
exit $status
