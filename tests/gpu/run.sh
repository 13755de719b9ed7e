#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, on one: checks, measures. Under 10 minutes.
#
#     tests/gpu/run.sh [OUT]     # results in OUT (default build/gpu)
#     PREBUILT=DIR DEADLINE=300 tests/gpu/run.sh
#
# Builds what it needs with nvcc 13, cmake, a C++ compiler and a Python with jax[cuda13], pybind11
# and scikit-build-core. On a machine without those, or with little time, PREBUILT names a folder
# made elsewhere by tests/gpu/prebuild.sh. What matters most comes first, and no step starts that
# would not end before DEADLINE seconds; no step stops the next. Results are JSON; machine.txt says
# where they are from, and logs.tgz holds what every step printed. The exit code tells whether all
# that ran has passed.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "${1:-$root/build/gpu}" && cd "${1:-$root/build/gpu}" && pwd)
python=${PYTHON:-python3}
deadline=${DEADLINE:-580}
work=$(mktemp -d)
failed=0
trap 'rm -rf "$work"' EXIT

# step NAME LIMIT COMMAND...: at most LIMIT seconds.
step() {
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  if [ $((SECONDS + limit)) -gt "$deadline" ]; then
    leave_out "$name" "it may take $limit s, and $((deadline - SECONDS)) s are left"
    return
  fi
  timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>&1 || code=$?
  tail -n 12 "$work/$name.log"
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

programs=${PREBUILT:-$work/prebuilt}
[ -n "${PREBUILT:-}" ] || step build 240 "$root/tests/gpu/prebuild.sh" "$programs" \
  "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)"
export PYTHONPATH=$programs/site${PYTHONPATH:+:$PYTHONPATH}
cd "$work" || exit 1

step kernels 60 "$programs/kernel_bench" --seconds 50
for world in 2 4 8; do
  step "virtual_${world}_odd" 20 "$programs/virtual_ranks" $world 1000003 65536 3
  step "virtual_$world" 30 "$programs/virtual_ranks" $world 25000000 8388608 20
done

# Processes that share a GPU take turns on it, unless its multi-process service runs them together.
ranks() {
  local name=$1
  shift
  step "$name" 40 "$python" "$root/tests/gpu/ranks.py" "$out/ranks.json" "$@"
}
rm -f "$out/ranks.json"
if command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d
fi
for world in 2 4; do
  ranks nccl_$world --world $world
  for megabytes in 0.1 0.4 1 4 25; do
    ranks nccl_${world}_${megabytes}MB --world $world --calls psum --megabytes $megabytes --repeats 31
  done
done
step reductions 120 "$python" "$root/tests/gpu/reductions.py" "$out/reductions.json"
for bytes in 262144 1048576 67108864; do
  ranks nccl_2_$bytes --world 2 --calls psum --segment-bytes $bytes
done
if command -v tc >/dev/null && tc qdisc show dev lo >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  # Two ranks share the loopback, so each has half of it.
  for rate in 20gbit 50gbit; do ranks nccl_2_$rate --world 2 --calls psum --rate $rate; done
else
  leave_out "NCCL on shaped links" "tc or root is missing"
fi
if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then
  echo quit | nvidia-cuda-mps-control >/dev/null
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi

step training 60 "$python" "$root/tests/gpu/training.py" "$out/training.json"
step codec 120 "$python" "$root/tests/gpu/codec.py" "$out/codec.json"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    step $tool 60 compute-sanitizer --tool $tool --error-exitcode 9 \
      "$programs/virtual_ranks" 3 20011 4096
  done
else
  leave_out "memcheck, racecheck, initcheck, synccheck" "there is no compute-sanitizer"
fi
if command -v ncu >/dev/null; then
  step ncu 60 ncu --clock-control none --section SpeedOfLight --section WarpStateStats \
    --section SchedulerStats --section InstructionStats --section Occupancy \
    --kernel-name 'regex:(encode|reduce|decode|accumulate)_kernel' --launch-count 40 \
    "$programs/kernel_bench" --repeats 1 --only "4 f32" --values 33554432
else
  leave_out "ncu" "there is no ncu"
fi

cat kernels.log | grep '^{' >"$out/kernels.jsonl"
cat virtual_*.log | grep '^{' >"$out/virtual.jsonl"
tar czf "$out/logs.tgz" ./*.log
printf '=== %s in %d s; results in %s\n' "$([ $failed = 0 ] && echo "all passed" || echo FAILED)" \
  "$SECONDS" "$out"
exit $failed
