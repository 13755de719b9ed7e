#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, on one: builds, checks, measures. Under 10 minutes.
#
#     tests/gpu/run.sh [OUT]     # results as JSON and a log in OUT (default build/gpu)
#
# Needs nvcc 13, cmake, a C++ compiler and a Python with jax[cuda13], pybind11 and
# scikit-build-core. No step stops the next; the exit code tells whether all passed. Shaped links
# need root and tc, memory checks compute-sanitizer: without them those steps say so and are left out.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "${1:-$root/build/gpu}" && cd "${1:-$root/build/gpu}" && pwd)
python=${PYTHON:-python3}
work=$out/build
failed=0

step() {
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
  tail -n 12 "$out/$name.log"
  printf '=== %s: %s (%d s)\n' "$name" "$([ $code = 0 ] && echo passed || echo "FAILED, code $code")" \
    $((SECONDS - start))
  [ $code = 0 ] || failed=1
}

leave_out() {
  printf '=== %s: left out, %s\n' "$1" "$2"
}

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  nvcc --version | tail -n 2
  "$python" -m pip list 2>/dev/null | grep -iE '^(jax|jaxlib|jax-cuda|nvidia-nccl)'
} >"$out/machine.txt" 2>&1
cat "$out/machine.txt"

architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
rm -rf "$work"
step build 240 "$python" -m pip install --no-build-isolation --no-deps --target "$work/site" \
  -C cgx.native=on -C cmake.define.CGX_CUDA=ON \
  -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$architecture" "$root"
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
cd "$out" || exit 1

step codec 150 "$python" "$root/tests/gpu/codec.py" "$out/codec.json"

step virtual_build 90 bash -c "cmake -S '$root' -B '$work/cmake' -DCGX_BUILD_MODULE=OFF \
  -DCGX_BUILD_GPU_TESTS=ON -DCMAKE_CUDA_ARCHITECTURES=$architecture && cmake --build '$work/cmake' -j"
virtual=$work/cmake/virtual_ranks
for world in 2 4 8; do
  step "virtual_${world}_odd" 30 "$virtual" $world 1000003 65536 3
  step "virtual_$world" 40 "$virtual" $world 25000000 1048576 20
done
if command -v compute-sanitizer >/dev/null; then
  step memcheck 60 compute-sanitizer --error-exitcode 9 "$virtual" 3 20011 4096
  step racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 9 "$virtual" 3 20011 4096
else
  leave_out "memcheck, racecheck" "there is no compute-sanitizer"
fi

rm -f "$out/ranks.json"
for world in 2 4; do
  step "nccl_$world" 90 "$python" "$root/tests/gpu/ranks.py" "$out/ranks.json" --world $world
done
if command -v tc >/dev/null && tc qdisc show dev lo >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  # Two ranks share the loopback, so each has half of it.
  for rate in 20gbit 50gbit; do
    step "nccl_2_$rate" 90 "$python" "$root/tests/gpu/ranks.py" "$out/ranks.json" --world 2 \
      --rate $rate
  done
else
  leave_out "NCCL on shaped links" "tc or root is missing"
fi
step training 90 "$python" "$root/tests/gpu/training.py" "$out/training.json"

cat "$out"/virtual_*.log | grep '^{' >"$out/virtual.jsonl"
printf '=== %s in %d s; results in %s\n' "$([ $failed = 0 ] && echo "all passed" || echo FAILED)" \
  "$SECONDS" "$out"
exit $failed
