#!/usr/bin/env bash
# The kernel tests of small sizes under compute-sanitizer, on the GPU that is here.
#
#   scripts/sanitize_kernels.sh [TOOL...]       memcheck racecheck initcheck, unless named
#
# First once without it, so that everything is compiled (PLAIN=0: that was done). torch gives every tensor memory of its own, so that a byte behind its
# end is seen. LIMIT=SECONDS for each tool (300). SELECT: names of tests as pytest's -k has them. PYTHON: the interpreter (python3).
# The last lines say what each tool found; the exit status is 1 if one of them found anything, or did not come to its end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
select=${SELECT:-small}
limit=${LIMIT:-300}
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck)

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
[ -n "$sanitizer" ] || { echo "error: compute-sanitizer is not here; it comes with the CUDA toolkit" >&2; exit 2; }
tests=("$python" -m pytest -q -p no:cacheprovider -o filterwarnings=default -m gpu -k "$select" tests/kernels/test_gpu.py)
logs=$(mktemp -d)

[ "${PLAIN:-1}" = 0 ] || "${tests[@]}" || { echo "error: the tests fail without compute-sanitizer, too" >&2; exit 1; }
status=0
for tool in "${tools[@]}"; do
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
    "${tests[@]}" >"$logs/$tool" 2>&1
  found=$?
  summary=$(grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$logs/$tool" | tail -1)
  echo "$tool: exit $found; ${summary:-no summary}; $(grep -E "passed|failed" "$logs/$tool" | tail -1)"
  if [ "$found" -ne 0 ]; then
    status=1
    grep -E "=========" "$logs/$tool" | grep -vE "Host Frame|in .*\.py:" | head -60
  fi
done
exit $status
