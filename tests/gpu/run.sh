#!/usr/bin/env bash
# Runs everything that needs an NVIDIA GPU on one GPU: checks and measurements, in under 10 minutes.
#
#     tests/gpu/run.sh [OUT]     # results in OUT (default build/gpu)
#     PREBUILT=DIR DEADLINE=300 tests/gpu/run.sh
#     STEPS='nccl|tuned' tests/gpu/run.sh     # only the steps whose names match
#     STEPS='model_|pretrain' CORPUS=corpus.xz tests/gpu/run.sh     # the models; see corpus.py
#     STEPS=transport NEW_NCCL=DIR tests/gpu/run.sh     # ranks that share a GPU without sockets
#     make gpu-rehearsal             # without a GPU, so that no step fails there for a typo
#
# Needs a Python with jax[cuda13] and optax. Builds the rest with nvcc 13, cmake, a C++ compiler,
# pybind11 and scikit-build-core. On a machine without those, or with little time, PREBUILT names a
# folder that tests/gpu/prebuild.sh made elsewhere. What matters most comes first. A step that might
# not end before DEADLINE seconds does not start. A failed step does not stop the next. Results are
# JSON lines, as benchmarks/measure.py reads them; logs.tgz holds what every step printed. The exit
# code says whether every step that ran has passed. NEW_NCCL names a folder with a libnccl.so.2 of
# NCCL 2.30 or newer and the metadata of its package; steps that need no newer NCCL do not load it.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "${1:-$root/build/gpu}" && cd "${1:-$root/build/gpu}" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
failed=0
trap 'rm -rf "$work"' EXIT

. "$root/tests/gpu/steps.sh"

# A rehearsal has no GPU: it uses little data, one repeat, and Python on the CPU. It gives every
# step more time, because a machine that runs tests does other work too.
scale=1
patience=1
once=()
platform=()
little=()
if [ -n "${REHEARSAL:-}" ]; then
  scale=16384
  patience=4
  once=(--repeats 1)
  platform=(--platform cpu)
  little=(--ways "exact;4 bits, recommended;DiLoCo, 4 bits" --every 2)
fi
deadline=$((${DEADLINE:-580} * patience))

machine=$({
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  nvcc --version | tail -n 2 | head -n 1
  "$python" -m pip list --format=freeze 2>/dev/null | grep -E '^(jax|jaxlib|nvidia-nccl-.*)=='
} 2>&1)
echo "$machine"
# The lines of JSON in some logs, as one run.
rows() {
  printf '{"run": {"command": "tests/gpu/run.sh", "machine": "%s"}}\n' \
    "$(tr '"\\\n' "'/;" <<<"$machine" | sed 's/;$//; s/;/; /g')"
  grep -h '^{' "$@"
}

programs=${PREBUILT:-$work/prebuilt}
[ -n "${PREBUILT:-}" ] || step build 240 "$root/tests/gpu/prebuild.sh" "$programs" \
  "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)"
export PYTHONPATH=$programs/site${PYTHONPATH:+:$PYTHONPATH}
cd "$work" || exit 1

step kernels 60 "$programs/kernel_bench" --seconds $((50 * patience)) \
  --values $((134217728 / scale)) "${once[@]}"
for world in 2 4 8; do
  step "virtual_${world}_odd" 20 "$programs/virtual_ranks" $world $((1000003 / scale)) \
    $((65536 / scale)) 3
  step "virtual_$world" 30 "$programs/virtual_ranks" $world $((25000000 / scale)) \
    $((8388608 / scale)) 20
  step "virtual_${world}_streams" 20 "$programs/virtual_ranks" $world $((25000000 / scale)) \
    $((1048576 / scale)) 20 4
  step "virtual_${world}_one_phase" 20 "$programs/virtual_ranks" $world $((1000003 / scale)) \
    $((65536 / scale)) 20 2 gather_sum
  step "virtual_peers_${world}_odd" 20 "$programs/virtual_peers" $world $((1000003 / scale)) 3
  step "virtual_peers_$world" 30 "$programs/virtual_peers" $world $((25000000 / scale)) 20
  step "virtual_peers_${world}_host" 30 "$programs/virtual_peers" $world $((1000000 / scale)) 20 host
done

# Processes that share a GPU take turns on it unless the multi-process service runs them together.
ranks() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" "$root/tests/gpu/ranks.py" "$out/ranks.jsonl" "$@" \
    "${platform[@]}" "${once[@]}"
}
rm -f "$out/ranks.jsonl" "$out/tuned.jsonl" "$out/checks.jsonl"
if command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d
fi
for world in 2 4; do
  ranks nccl_$world 40 --world $world
  ranks nccl_${world}_sizes 80 --world $world --calls psum --megabytes 0.1,0.4,1,4,25 --repeats 31
done
ranks nccl_2_segments 60 --world 2 --calls psum --segment-bytes 262144,1048576,67108864
ranks nccl_2_streams 60 --world 2 --calls psum --streams 1,2,4,8
# What clouds allow one connection; and NCCL's own way to more of them.
for gigabits in 1 5; do
  ranks nccl_2_${gigabits}_paced 90 --world 2 --calls psum --streams 1,2,4,8 \
    --connection-rate $gigabits
done
ranks nccl_4_5_paced 60 --world 4 --calls psum --streams 1,2,4,8 --connection-rate 5
ranks nccl_2_5_paced_sockets 60 --world 2 --calls psum --streams 1,4 --connection-rate 5 --sockets 4
ranks nccl_2_one_shot 60 --world 2 --calls psum --megabytes 0.1,1 --repeats 31 \
  --reductions scatter_gather,gather_sum
if command -v tc >/dev/null && tc qdisc show dev lo >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  # Two ranks share the loopback, so each has half of it.
  for rate in 20gbit 50gbit; do
    ranks nccl_2_$rate 60 --world 2 --calls psum --rate $rate --streams 1,2,4
  done
else
  leave_out "NCCL on shaped links" "tc or root is missing"
fi
for gigabits in 5 25; do
  step beside_$gigabits 60 "$python" "$root/tests/gpu/beside.py" "$out/checks.jsonl" --world 2 \
    --connection-rate $gigabits --sockets 4 "${platform[@]}"
done
step reductions 120 "$python" "$root/tests/gpu/reductions.py" "$out/checks.jsonl" "${platform[@]}"
step codec 120 "$python" "$root/tests/gpu/codec.py" "$out/checks.jsonl" "${platform[@]}"
for gigabits in 5 1000; do
  step tuned_$gigabits 120 "$python" "$root/tests/gpu/tuned.py" "$out/tuned.jsonl" \
    --connection-rate $gigabits "${platform[@]}"
done
rm -f "$out"/{models,pretrain}.jsonl
for model in gpt2 resnet50; do
  for world in 2 4; do
    [ -n "${REHEARSAL:-}" ] && [ $world = 4 ] && continue
    step model_${model}_$world 150 "$python" "$root/tests/gpu/model_steps.py" "$out/models.jsonl" \
      --model $model --world $world --rates unlimited,50,25,10 --sockets 4 --seconds "${TURNS:-10}" \
      "${platform[@]}"
  done
done
for sockets in 1 4 8; do
  ranks nccl_2_${sockets}_sockets 40 --world 2 --calls psum --streams 1,2 --sockets $sockets
done
# Ranks of one host: NCCL 2.30 and later let them share a GPU.
transport() {
  local name=$1
  shift
  LD_PRELOAD=${NEW_NCCL:-}${NEW_NCCL:+/libnccl.so.2} PYTHONPATH=${NEW_NCCL:-}:$PYTHONPATH \
    step transport_$name 80 "$python" "$root/tests/gpu/ranks.py" "$out/models.jsonl" \
    --calls psum "$@" "${platform[@]}" "${once[@]}"
}
if [ -n "${NEW_NCCL:-}${REHEARSAL:-}" ]; then
  for world in 2 4; do
    transport p2p_$world --world $world --transport p2p --exchanges xla,nccl,peer \
      --megabytes 0.1,1,4,25,100
  done
  transport host --world 2 --transport host --exchanges xla,nccl,host --megabytes 0.1,1,4,25,100
  transport host_segments --world 2 --transport host --exchanges nccl --megabytes 25,100 \
    --segment-bytes 262144,1048576,8388608
else
  leave_out "transports" "NEW_NCCL names no NCCL"
fi
if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then
  echo quit | nvidia-cuda-mps-control >/dev/null
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi

export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
if [ -n "${CORPUS:-}${REHEARSAL:-}" ]; then
  step pretrain $((${PRETRAIN:-300} + 120)) "$python" "$root/tests/gpu/pretrain.py" \
    "$out/pretrain.jsonl" ${CORPUS:+"$CORPUS"} --seconds "${PRETRAIN:-300}" "${little[@]}" \
    "${platform[@]}"
else
  leave_out "pretrain" "CORPUS names no corpus"
fi
step training 60 "$python" "$root/tests/gpu/training.py" "$out/checks.jsonl" "${platform[@]}"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    step $tool 60 compute-sanitizer --tool $tool --error-exitcode 9 \
      "$programs/virtual_ranks" 3 20011 4096
  done
  step memcheck_one_phase 60 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$programs/virtual_ranks" 3 20011 4096 1 2 gather_sum
  for tool in memcheck racecheck synccheck; do
    step ${tool}_peers 60 compute-sanitizer --tool $tool --error-exitcode 9 \
      "$programs/virtual_peers" 3 20011
    step ${tool}_peers_host 60 compute-sanitizer --tool $tool --error-exitcode 9 \
      "$programs/virtual_peers" 3 20011 1 host
  done
else
  leave_out "memcheck, racecheck, initcheck, synccheck" "there is no compute-sanitizer"
fi
if command -v ncu >/dev/null; then
  step ncu 60 ncu --clock-control none --section SpeedOfLight --section WarpStateStats \
    --section SchedulerStats --section InstructionStats --section Occupancy \
    --kernel-name 'regex:(encode|reduce|decode|accumulate)_kernel' --launch-count 40 \
    "$programs/kernel_bench" --repeats 1 --only "4 f32" --values $((33554432 / scale))
else
  leave_out "ncu" "there is no ncu"
fi

if [ -f kernels.log ]; then rows kernels.log >"$out/kernels.jsonl"; fi
if compgen -G 'virtual_*.log' >/dev/null; then rows virtual_*.log >"$out/virtual.jsonl"; fi
tar czf "$out/logs.tgz" ./*.log
printf '=== %s in %d s; results in %s\n' "$([ $failed = 0 ] && echo "all passed" || echo FAILED)" \
  "$SECONDS" "$out"
exit $failed
