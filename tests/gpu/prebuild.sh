#!/usr/bin/env bash
# Builds what tests/gpu/run.sh runs, for a GPU of one architecture. Building needs no GPU.
#
#     tests/gpu/prebuild.sh DIR [ARCHITECTURE]     # 90 by default
#
# The Python on the GPU's machine must have the same version as this one ($PYTHON, else python3).
# This one needs jaxlib 0.11.2 or newer, pybind11, scikit-build-core, cmake and a compiler. Its
# jaxlib must not be newer than that machine's: XLA refuses modules with newer headers than its own.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
to=$(mkdir -p "$1" && cd "$1" && pwd)
architecture=${2:-90}-real
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
rm -rf "$to/site"
"${PYTHON:-python3}" -m pip install --quiet --no-build-isolation --no-deps --target "$to/site" \
  -C cgx.native=cuda -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$architecture" "$root"
cmake -S "$root" -B "$build" -DCGX_BUILD_MODULE=OFF -DCGX_BUILD_GPU_TESTS=ON \
  -DCMAKE_CUDA_ARCHITECTURES="$architecture"
cmake --build "$build" --parallel --target kernel_bench virtual_ranks virtual_peers
for program in kernel_bench virtual_ranks virtual_peers; do
  cp "$build/$program" "$to/"
  strip "$to/$program"
done
